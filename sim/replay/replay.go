// SPDX-License-Identifier: Apache-2.0

// Package replay counts what a prefix cache of a given size would have had of a trace: no
// engine, no time, only names of blocks. ComparePolicies does it for eviction policies.
package replay

import (
	"container/list"
	"context"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// Cache is a least-recently-used set of block names. The zero capacity is unlimited.
type Cache[K comparable] struct {
	capacity int
	at       map[K]*list.Element // nil elements when unlimited
	order    list.List           // front: next to go
	evicted  int
}

// NewCache returns an empty cache of capacity blocks; 0 is unlimited.
func NewCache[K comparable](capacity int) *Cache[K] {
	return &Cache[K]{capacity: capacity, at: make(map[K]*list.Element)}
}

// Has reports whether a block is there.
func (c *Cache[K]) Has(k K) bool {
	_, ok := c.at[k]
	return ok
}

// PutRun makes the n blocks of a prompt the most recently used ones, the first of them most of
// all, so that a prompt's end goes before its start. Those that are there do not give way to
// those that are not.
func (c *Cache[K]) PutRun(n int, name func(i int) K) {
	if c.capacity > 0 {
		for i := range n {
			if e, ok := c.at[name(i)]; ok {
				c.order.MoveToBack(e)
			}
		}
	}
	for i := n - 1; i >= 0; i-- {
		c.put(name(i))
	}
}

func (c *Cache[K]) put(k K) {
	e, ok := c.at[k]
	switch {
	case c.capacity == 0:
		c.at[k] = nil
	case ok:
		c.order.MoveToBack(e)
	default:
		if len(c.at) == c.capacity {
			delete(c.at, c.order.Remove(c.order.Front()).(K))
			c.evicted++
		}
		c.at[k] = c.order.PushBack(k)
	}
}

// Len returns how many blocks are there.
func (c *Cache[K]) Len() int { return len(c.at) }

// Evicted returns how many blocks had to go.
func (c *Cache[K]) Evicted() int { return c.evicted }

// Result is what a cache had of a trace.
type Result struct {
	Requests  int   `json:"requests"`
	Blocks    int   `json:"blocks"`     // that the prompts have
	HitBlocks int   `json:"hit_blocks"` // in a row from a prompt's start, that were there
	Tokens    int64 `json:"tokens"`     // of the prompts
	HitTokens int64 `json:"hit_tokens"`

	Capacity int           `json:"capacity_blocks"` // 0: unlimited
	Kept     int           `json:"kept_blocks"`     // at the end
	Evicted  int           `json:"evicted_blocks"`
	Span     time.Duration `json:"-"` // of the arrivals

	Parts []Part `json:"-"` // of the trace, MostParts of equal length in time
}

// Part is a part of a trace.
type Part struct {
	To                time.Duration // its end
	Blocks, HitBlocks int
}

// MostParts is into how many parts a trace is divided.
const MostParts = 60

// part returns where in Parts an arrival is. It makes them at the first.
func (r *Result) part(at time.Duration) *Part {
	if r.Parts == nil {
		r.Parts = make([]Part, MostParts)
		for i := range r.Parts {
			r.Parts[i].To = time.Duration(float64(r.Span) * float64(i+1) / MostParts)
		}
	}
	if r.Span == 0 {
		return &r.Parts[0]
	}
	return &r.Parts[min(int(float64(at)/float64(r.Span)*MostParts), MostParts-1)]
}

// Run looks every prompt up in a cache of capacity blocks and puts all its blocks there. When
// ctx ends, the result so far is returned with its error.
func Run(ctx context.Context, requests []workload.Request, capacity int) (Result, error) {
	r := Result{Capacity: capacity}
	c := NewCache[int64](capacity)
	for i := range requests {
		r.Span = max(r.Span, requests[i].Arrival)
	}
	for i := range requests {
		if i%1024 == 0 && ctx.Err() != nil {
			return r, ctx.Err()
		}
		q := &requests[i]
		hits := 0
		for hits < len(q.Blocks) && c.Has(q.Blocks[hits]) {
			hits++
		}
		r.Requests++
		r.Blocks += len(q.Blocks)
		r.HitBlocks += hits
		r.Tokens += int64(q.Input)
		r.HitTokens += int64(min(hits*q.BlockTokens, q.Input))
		part := r.part(q.Arrival)
		part.Blocks, part.HitBlocks = part.Blocks+len(q.Blocks), part.HitBlocks+hits
		c.PutRun(len(q.Blocks), func(i int) int64 { return q.Blocks[i] })
		r.Kept, r.Evicted = c.Len(), c.Evicted()
	}
	return r, nil
}
