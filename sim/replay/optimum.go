// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"container/heap"
	"context"
	"slices"
)

// optimum counts the hits of the best possible policy, which knows all requests to come. After each request it keeps those blocks, of
// the cache and of the request, whose next use is soonest. A block is never used later than the blocks that continue it, and of blocks
// with the same next use the deeper one is evicted first; so an evicted block is always a leaf of the prefix tree. The optimum may
// refuse to store new blocks, which a server that must store them first cannot: so it is an upper bound for all policies.
//
// next has the next use of each block of the tape. A heap holds the blocks in the cache, and also stale entries; it is rebuilt before
// more than half of its entries are stale.
func optimum(ctx context.Context, p *prompts, next *words, capacity int) (hits int64, err error) {
	kept := make([]future, p.blocks+1) // zero: the block is not in the cache
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
	next  uint32 // number of the request, from 1
	depth uint32
	block uint32
}

// futures is a heap; on top is the block whose next use is the latest.
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
