// SPDX-License-Identifier: Apache-2.0

// Package replay counts which blocks of a trace's prompts a prefix cache of a given size would have had. It has no engine and no time,
// only names of blocks. ComparePolicies does that for eviction policies.
package replay

import (
	"container/list"
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// Cache is a set of block names that evicts the least recently used one. Capacity zero means unlimited.
type Cache[K comparable] struct {
	capacity int
	at       map[K]*list.Element // the elements are nil if the capacity is unlimited
	order    list.List           // the front is evicted next
	evicted  int
}

// NewCache returns an empty cache for capacity blocks; 0 means unlimited.
func NewCache[K comparable](capacity int) *Cache[K] {
	return &Cache[K]{capacity: capacity, at: make(map[K]*list.Element)}
}

// Has reports whether a block is in the cache.
func (c *Cache[K]) Has(k K) bool {
	_, ok := c.at[k]
	return ok
}

// PutRun makes the n blocks of a prompt the most recently used ones, its first block the most of all, so that a prompt's end is evicted
// before its start. It does not evict blocks of the prompt to make room for other blocks of the prompt.
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

// Len returns how many blocks are in the cache.
func (c *Cache[K]) Len() int { return len(c.at) }

// Evicted returns how many blocks were evicted.
func (c *Cache[K]) Evicted() int { return c.evicted }

// Result says how many blocks of a trace's prompts a cache had.
type Result struct {
	Requests  int   `json:"requests"`
	Blocks    int   `json:"blocks"`     // blocks of the prompts
	HitBlocks int   `json:"hit_blocks"` // leading blocks of prompts that were in the cache
	Tokens    int64 `json:"tokens"`     // tokens of the prompts
	HitTokens int64 `json:"hit_tokens"`

	Capacity int           `json:"capacity_blocks"` // 0: unlimited
	Kept     int           `json:"kept_blocks"`     // blocks in the cache at the end
	Evicted  int           `json:"evicted_blocks"`
	Span     time.Duration `json:"-"` // time from the first to the last arrival

	Parts []Part `json:"-"` // parts of the trace, MostParts of equal length in time
}

// Part is the result for a part of a trace.
type Part struct {
	To                time.Duration // end of the part
	Blocks, HitBlocks int
}

// MostParts is the number of parts into which a trace is divided.
const MostParts = 60

// Run looks up every prompt in a cache of capacity blocks, and then puts all blocks of the prompt there. When ctx ends first, it
// returns the result so far with ctx's error.
func Run(ctx context.Context, requests []workload.Request, capacity int) (Result, error) {
	return Stream(ctx, workload.Each(requests), capacity)
}

// maxNames is the largest number of names in an unlimited cache; each takes some 40 bytes. With more, the replay ends with
// workload.ErrTrace.
const maxNames = 1 << 26

// Stream does what Run does, for requests that come one after another. It keeps none of them: it takes only the memory of the cache.
// The error is one of the requests, workload.ErrTrace if an unlimited cache would need more than 2^26 blocks, or ctx's, with the result
// so far.
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

// history records the blocks and hits of a trace over time: one Part per request, for up to 65,536 requests. For more requests, each
// Part is the sum over as many consecutive requests as necessary.
type history struct {
	list  []Part
	each  int // requests that one Part sums up
	added int // requests added to the last Part
}

// maxHistory is the largest number of Parts of a history. When it has so many, each two of them become one, and later Parts have twice
// as many requests.
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

// parts divides the history into MostParts parts of equal length in time; nil if there are no requests.
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
