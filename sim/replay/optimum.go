// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"container/heap"
	"context"
	"slices"
)

// optimum counts the hits of the best possible policy, which knows all requests to come. After each request
// it keeps those blocks, of the cache and of the request, that are used again soonest. A block is never used
// later than the blocks that continue it, and of equals the deeper goes first, so an evicted block is always
// a leaf of the prefix tree. The optimum may refuse new blocks at once, which a server that must store them
// first cannot do: so it is an upper bound for all policies.
//
// next has the next use of each block of the tape. A heap has the blocks that are there and stale entries; it is made anew before the stale
// entries are more than half.
func optimum(ctx context.Context, p *prompts, next *words, capacity int) (hits int64, err error) {
	kept := make([]future, p.blocks+1) // zero: not there
	var order futures
	size := 0
	err = p.play(ctx, next, func(_ int, blocks, uses []uint32) bool {
		there := 0
		for there < len(blocks) && kept[blocks[there]] != (future{}) {
			there++
		}
		hits += int64(there)
		for k, b := range blocks {
			if kept[b] == (future{}) {
				size++
			}
			kept[b] = future{uses[k], uint32(k), b}
			heap.Push(&order, kept[b])
		}
		for size > capacity {
			f := heap.Pop(&order).(future)
			if kept[f.block] == f {
				kept[f.block] = future{}
				size--
			}
		}
		if len(order) > 2*size+pageWords {
			order = slices.DeleteFunc(order, func(f future) bool { return kept[f.block] != f })
			heap.Init(&order)
		}
		return true
	})
	return hits, err
}

// future says when a block is used next.
type future struct {
	next  uint32 // request, from 1
	depth uint32
	block uint32
}

// futures is a heap: the block whose next use is the latest is on top.
type futures []future

func (f futures) Len() int { return len(f) }

func (f futures) Less(a, b int) bool {
	return f[a].next > f[b].next || f[a].next == f[b].next && f[a].depth > f[b].depth
}

func (f futures) Swap(a, b int) { f[a], f[b] = f[b], f[a] }

func (f *futures) Push(x any) { *f = append(*f, x.(future)) }

func (f *futures) Pop() any {
	last := len(*f) - 1
	x := (*f)[last]
	*f = (*f)[:last]
	return x
}
