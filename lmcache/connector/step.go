// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"slices"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// NewRequest is a request that a step schedules for the first time.
type NewRequest struct {
	ID       string
	Computed int // tokens computed or loaded before the step
}

// CachedRequest is a request that a step schedules again.
type CachedRequest struct {
	ID        string
	NewBlocks [][]int // ids of the blocks that it got for the step, by group; nil for none
	Resumed   bool    // it was preempted: Allocated was called with all its blocks
	Computed  int     // tokens computed or loaded before the step
}

// Step is what a scheduler decided for one step of its engine.
type Step struct {
	New       []NewRequest
	Cached    []CachedRequest
	Scheduled map[string]int // tokens that the step computes, by request
}

// Step returns the operations for the workers in one step of the engine: first the Retrieves of requests that wait for one, then the Stores
// of chunks that the step completes. The operations share the token lists of their requests, and own their block lists. After an error the
// caller must not use any of the operations.
//
// vLLM: build_connector_meta.
func (t *Scheduler) Step(s *Step) ([]lmcache.LoadStore, error) {
	var ops []lmcache.LoadStore
	slices.SortFunc(t.waiting, func(a, b *entry) int {
		if a.seq < b.seq {
			return -1
		}
		return 1
	})
	for len(t.waiting) > 0 {
		if err := t.retrieve(t.waiting[0], &ops); err != nil {
			return nil, err
		}
		t.waiting = slices.Delete(t.waiting, 0, 1)
	}
	var records []lmcache.BlockAllocation
	for i := range s.New {
		in := &s.New[i]
		e := t.live[in.ID]
		if e == nil {
			return nil, unknown(in.ID)
		}
		e.Scheduled += s.Scheduled[in.ID]
		e.before, e.computed = in.Computed, in.Computed+s.Scheduled[in.ID]
		t.store(e, &ops)
		records = t.record(records, e, e.known(), true)
	}
	for i := range s.Cached {
		in := &s.Cached[i]
		e := t.live[in.ID]
		if e == nil {
			return nil, unknown(in.ID)
		}
		if err := t.checkGroups(in.NewBlocks); err != nil {
			return nil, err
		}
		if !in.Resumed {
			t.extend(e, in.NewBlocks)
		}
		if t.follows(sumsTotals) {
			e.Scheduled += in.Computed
		} else {
			e.Scheduled += s.Scheduled[in.ID]
		}
		e.before, e.computed = in.Computed, in.Computed+s.Scheduled[in.ID]
		t.store(e, &ops)
		n := 0
		if len(in.NewBlocks) > 0 {
			n = len(in.NewBlocks[0])
		}
		records = t.record(records, e, n, false)
	}
	if len(records) > 0 {
		t.cache.ReportBlockAllocations(records)
	}
	return ops, nil
}

// retrieve appends the Retrieve that e waits for to ops.
func (t *Scheduler) retrieve(e *entry, ops *[]lmcache.LoadStore) error {
	if e.CacheHitBlocks > e.VLLMHitBlocks {
		from, to := t.loadStart(e), e.CacheHitBlocks
		if e.req.Hashes < to && t.follows(takesAnyHit) {
			return ErrHashes
		}
		op := t.op(e, lmcache.Retrieve, from, to)
		op.SkipFirst = (e.VLLMHitBlocks - from) * t.o.BlockTokens
		*ops = append(*ops, op)
		e.loading = true
		t.n.retrieves.Add(1)
		t.n.retrieveTokens.Add(uint64(op.End - op.Start))
	}
	e.State = Ready
	return nil
}

// store appends a Store of the chunks that e has completed and not stored to ops.
func (t *Scheduler) store(e *entry, ops *[]lmcache.LoadStore) {
	e.loading = false
	available := min(e.req.Hashes, e.known(), t.computedBlocks(e))
	chunks := (available - e.StoredBlocks) / t.perChunk
	if chunks < 1 {
		return
	}
	for g := range t.o.Groups { // blocks that the engine has freed may have another request's KV by now
		list := e.blocks[g]
		clear(list[:min(t.o.Groups[g].left(e.before, t.o.BlockTokens), len(list))])
	}
	op := t.op(e, lmcache.Store, e.StoredBlocks, e.StoredBlocks+chunks*t.perChunk)
	*ops = append(*ops, op)
	e.StoredBlocks += chunks * t.perChunk
	t.n.stores.Add(1)
	t.n.storeTokens.Add(uint64(op.End - op.Start))
}

// computedBlocks returns how many of e's blocks are computed by the end of the step. Under the rules of a release it returns the number
// that the release uses instead.
func (t *Scheduler) computedBlocks(e *entry) int {
	switch {
	case t.follows(sumsTotals):
		return e.Scheduled / t.o.BlockTokens
	case t.follows(hitsCountAsComputed):
		return e.Scheduled/t.o.BlockTokens + max(e.VLLMHitBlocks, e.CacheHitBlocks)
	}
	return min(e.computed, len(e.req.Tokens)) / t.o.BlockTokens
}

// op returns an operation on e's blocks [from, to). A group with fewer blocks has those that there are.
func (t *Scheduler) op(e *entry, d lmcache.Direction, from, to int) lmcache.LoadStore {
	return lmcache.LoadStore{
		Direction: d, RequestID: e.req.ID, Salt: t.saltOf(e.req), Tokens: e.req.Tokens[:len(e.req.Tokens):len(e.req.Tokens)],
		Blocks: cutBlocks(e.blocks, from, to),
		Start:  from * t.o.BlockTokens, End: to * t.o.BlockTokens,
	}
}

// record appends a record with the last n blocks of e's first group to the allocation report. For n = 0 it does so only with `always`.
func (t *Scheduler) record(records []lmcache.BlockAllocation, e *entry, n int, always bool) []lmcache.BlockAllocation {
	if t.follows(reportsNothing) || n == 0 && !always {
		return records
	}
	var blocks []int
	if len(e.blocks) > 0 {
		blocks = e.blocks[0]
	}
	n = min(n, len(blocks))
	bs, end := t.o.BlockTokens, len(e.req.Tokens)
	from, to := min((len(blocks)-n)*bs, end), min(len(blocks)*bs, end)
	r := lmcache.BlockAllocation{RequestID: e.req.ID, NewBlocks: slices.Clone(blocks[len(blocks)-n:]), NewTokens: make([]int, to-from)}
	for i, token := range e.req.Tokens[from:to] {
		r.NewTokens[i] = int(token)
	}
	return append(records, r)
}
