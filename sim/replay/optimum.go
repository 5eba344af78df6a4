// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"container/heap"
	"context"
	"math"
)

// optimum counts the hits of the best policy there is, which knows all requests to come: after each,
// of what was there and what the request has, it keeps what is used again the soonest. A block is
// never used later than what continues it, and of equals the deeper goes, so what goes is a leaf of
// the prefix tree. It may refuse blocks at once, as no server does that stores before it knows: an
// upper bound for all.
func optimum(ctx context.Context, p prompts, capacity int) (hits int64, err error) {
	next := make([][]uint32, len(p.of)) // by request and block: the request, from 1, that uses it next
	later := make([]uint32, p.blocks+1)
	for i := len(p.of) - 1; i >= 0; i-- {
		next[i] = make([]uint32, len(p.of[i]))
		for k, b := range p.of[i] {
			next[i][k] = later[b]
			if later[b] == 0 {
				next[i][k] = math.MaxUint32
			}
			later[b] = uint32(i + 1)
		}
	}
	kept := make([]future, p.blocks+1) // zero: not there
	var order futures
	size := 0
	for i, blocks := range p.of {
		if i%256 == 0 && ctx.Err() != nil {
			return 0, ctx.Err()
		}
		there := 0
		for there < len(blocks) && kept[blocks[there]] != (future{}) {
			there++
		}
		hits += int64(there)
		for k, b := range blocks {
			if kept[b] == (future{}) {
				size++
			}
			kept[b] = future{next[i][k], uint32(k), b}
			heap.Push(&order, kept[b])
		}
		for size > capacity {
			f := heap.Pop(&order).(future)
			if kept[f.block] == f {
				kept[f.block] = future{}
				size--
			}
		}
	}
	return hits, nil
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
