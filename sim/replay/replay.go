// SPDX-License-Identifier: Apache-2.0

// Package replay counts what a prefix cache of a given size would have had of a trace: no
// engine, no time, only names of blocks. ComparePolicies does it for eviction policies.
package replay

import (
	"container/list"
	"context"
	"fmt"
	"iter"
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
// all, so that a prompt's end goes before its start. It does not evict blocks of the prompt
// to make room for others of it.
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

// Run looks every prompt up in a cache of capacity blocks and puts all its blocks there. When
// ctx ends, the result so far is returned with its error.
func Run(ctx context.Context, requests []workload.Request, capacity int) (Result, error) {
	return Stream(ctx, workload.Each(requests), capacity)
}

// maxNames bounds the names of an unlimited cache, of which each takes some 40 bytes.
const maxNames = 1 << 26

// Stream is Run for requests that come one after another. It keeps none of them: its memory is that of the cache.
// Errors: that of the requests, workload.ErrTrace where an unlimited cache would have to hold more than 2^26 blocks, and that of ctx with the
// result so far.
func Stream(ctx context.Context, requests iter.Seq2[workload.Request, error], capacity int) (r Result, err error) {
	r.Capacity = capacity
	c := NewCache[int64](capacity)
	var over history
	defer func() { r.Parts = over.parts(r.Span) }()
	for q, err := range requests {
		if err != nil {
			return r, err
		}
		if r.Requests%1024 == 0 && ctx.Err() != nil {
			return r, ctx.Err()
		}
		hits := 0
		for hits < len(q.Blocks) && c.Has(q.Blocks[hits]) {
			hits++
		}
		r.Requests++
		r.Blocks += len(q.Blocks)
		r.HitBlocks += hits
		r.Tokens += int64(q.Input)
		r.HitTokens += int64(min(hits*q.BlockTokens, q.Input))
		r.Span = max(r.Span, q.Arrival)
		over.add(Part{q.Arrival, len(q.Blocks), hits})
		c.PutRun(len(q.Blocks), func(i int) int64 { return q.Blocks[i] })
		if r.Kept, r.Evicted = c.Len(), c.Evicted(); r.Kept > maxNames {
			return r, fmt.Errorf("%w: it has more than %d different blocks: set a capacity, or play fewer requests", workload.ErrTrace, maxNames)
		}
	}
	return r, nil
}

// history has the blocks and hits of a trace over time: one Part for each request, up to 65,536. For more requests, each Part is the sum of
// as many consecutive requests as necessary.
type history struct {
	list  []Part
	each  int // requests of one sum
	added int // to the last
}

// maxHistory bounds a history.
const maxHistory = 1 << 16

func (h *history) add(p Part) {
	if h.each = max(h.each, 1); h.added%h.each > 0 {
		last := &h.list[len(h.list)-1]
		*last = Part{max(last.To, p.To), last.Blocks + p.Blocks, last.HitBlocks + p.HitBlocks}
		h.added++
		return
	}
	if len(h.list) == maxHistory {
		for i := range maxHistory / 2 {
			a, b := h.list[2*i], h.list[2*i+1]
			h.list[i] = Part{max(a.To, b.To), a.Blocks + b.Blocks, a.HitBlocks + b.HitBlocks}
		}
		h.list, h.each = h.list[:maxHistory/2], 2*h.each
	}
	h.list, h.added = append(h.list, p), 1
}

// parts divides the history into MostParts parts of equal length in time; nil without requests.
func (h *history) parts(span time.Duration) []Part {
	if len(h.list) == 0 {
		return nil
	}
	out := make([]Part, MostParts)
	for i := range out {
		out[i].To = time.Duration(float64(span) * float64(i+1) / MostParts)
	}
	for _, p := range h.list {
		i := 0
		if span > 0 {
			i = min(int(float64(p.To)/float64(span)*MostParts), MostParts-1)
		}
		out[i].Blocks, out[i].HitBlocks = out[i].Blocks+p.Blocks, out[i].HitBlocks+p.HitBlocks
	}
	return out
}
