// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// SchedulerOptions configures a Scheduler.
type SchedulerOptions struct {
	BlockTokens int // tokens per engine block
	ChunkTokens int // tokens per cache chunk, a multiple of BlockTokens

	// Groups are the engine's KV cache groups; default one of full attention. A hybrid engine needs workers that lend their memory, or
	// several groups with a server of lmcache 0.5.7.
	Groups []Group

	// Release makes the Scheduler repeat the decisions of a published version, its defects included. Zero decides without these defects.
	// docs/how/lmcache-connector.md lists the differences.
	Release Release

	Log *slog.Logger // debug lines, in the words of vLLM's connector; nil discards
}

// Cache is a cache as a Scheduler uses it. No method waits.
type Cache interface {
	// SubmitLookup begins a lookup of tokens. The caller must not change the tokens afterwards, but may append. The call is ignored while
	// the request has a lookup.
	SubmitLookup(id string, tokens []uint32, salt string)
	// LookupResult returns the hit in tokens; its chunks are pinned for the request. ok is false while the lookup has no result.
	LookupResult(id string) (hitTokens int, ok bool)
	// CleanupLookup forgets the request's lookup. It releases the pins of a hit
	// that was never reported.
	CleanupLookup(id string)
	// FreeLookupLocks releases the pins of the chunks of tokens [start, end). A chunk that the range covers only in part, at its end, stays
	// pinned.
	FreeLookupLocks(id string, tokens []uint32, start, end int, salt string)
	// EndSession informs the cache that the request has ended.
	EndSession(id string)
	// ReportBlockAllocations reports which blocks the requests got. The callee keeps the slice records.
	ReportBlockAllocations(records []lmcache.BlockAllocation)
}

// Request is the scheduler's record of one request. The engine's scheduler owns it and changes it between calls. The Scheduler reads it
// only in calls, from the request's first Match to its Finish.
type Request struct {
	ID        string
	Tokens    []uint32 // all tokens so far, computed or not; the scheduler only appends
	Hashes    int      // number of full blocks that have a hash, which means that their tokens are final
	Salt      string   // tenant; "" for none
	Preempted bool     // it lost its blocks and waits to be scheduled again

	// CountExtraCached makes Finish return ExtraCachedTokens.
	CountExtraCached bool
}

// State is the state of a request.
type State uint8

// The states. In state Bypass the request's load has failed, and the request is computed without the cache until its next allocation.
const (
	Prefetching State = iota
	WaitingForLoad
	Ready
	Bypass
)

var stateNames = [...]string{"PREFETCHING", "WAITING_FOR_LOAD", "READY", "BYPASS_LMCACHE"}

func (s State) String() string { return stateNames[s] }

// RequestInfo is what a Scheduler knows of a request.
type RequestInfo struct {
	State          State
	Scheduled      int // tokens that steps have scheduled, counted as the release counts them
	StoredBlocks   int // blocks that were stored, or found in the cache
	VLLMHitBlocks  int // blocks of the hit in the engine's own prefix cache
	CacheHitBlocks int // blocks of the hit in the cache
	Blocks         int // blocks that the request has in every group
}

type entry struct {
	RequestInfo
	req      *Request
	seq      uint64  // order of creation
	blocks   [][]int // by group
	before   int     // tokens computed before the last step
	computed int     // tokens computed by the end of the last step
	loading  bool    // a Retrieve was emitted and the request has not run since
}

// known returns how many blocks the request has in every group.
func (e *entry) known() int {
	if len(e.blocks) == 0 {
		return 0
	}
	n := len(e.blocks[0])
	for _, list := range e.blocks[1:] {
		n = min(n, len(list))
	}
	return n
}

func (e *entry) needsRetrieve() bool {
	return e.CacheHitBlocks > e.VLLMHitBlocks && e.State != Ready
}

// Scheduler tracks the requests of one engine scheduler. All methods must be called on that scheduler's goroutine, except Stats.
type Scheduler struct {
	o        SchedulerOptions // immutable
	perChunk int              // blocks
	rules    rule
	cache    Cache
	states   bool // a group is recurrent: the engine always computes the last prompt token

	live    map[string]*entry
	seq     uint64
	waiting []*entry // requests that are, or were, in state WaitingForLoad
	n       schedulerCounters
}

// NewScheduler returns a Scheduler over cache.
func NewScheduler(cache Cache, o SchedulerOptions) (*Scheduler, error) {
	const limit = 1 << 24
	if o.BlockTokens < 1 || o.BlockTokens > limit || o.ChunkTokens < 1 || o.ChunkTokens > limit {
		return nil, optionsf("block of %d tokens, chunk of %d: both must be 1 to %d", o.BlockTokens, o.ChunkTokens, limit)
	}
	if o.ChunkTokens%o.BlockTokens != 0 {
		return nil, optionsf("chunk of %d tokens is no multiple of the block of %d", o.ChunkTokens, o.BlockTokens)
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	t := &Scheduler{o: o, rules: rulesOf(o.Release), perChunk: o.ChunkTokens / o.BlockTokens, cache: cache, live: make(map[string]*entry)}
	if len(o.Groups) > maxGroups {
		return nil, optionsf("%d KV cache groups, %d at most", len(o.Groups), maxGroups)
	}
	for i := range o.Groups {
		if err := o.Groups[i].check(); err != nil {
			return nil, optionsf("KV cache group %d: %v", i, err)
		}
		t.states = t.states || o.Groups[i].State
	}
	if hybrid(o.Groups) && t.follows(oneGroup) {
		return nil, ErrGroups
	}
	t.o.Groups = defaultGroups(o.Groups)
	return t, nil
}

// Info returns what the Scheduler knows of a request. ok is false for an unknown request.
func (t *Scheduler) Info(id string) (_ RequestInfo, ok bool) {
	e := t.live[id]
	if e == nil {
		return RequestInfo{}, false
	}
	e.Blocks = e.known()
	return e.RequestInfo, true
}

// Len returns the number of tracked requests.
func (t *Scheduler) Len() int { return len(t.live) }

// Matched is the result of Match.
type Matched struct {
	Tokens  int  // tokens to load beyond the engine's own prefix hit
	Pending bool // the lookup has no result yet: call Match again at a later step
	Async   bool // Tokens are loaded in the background, so the request must wait
}

// Match begins to track r and looks its tokens up. It returns how many tokens the cache has beyond the `computed` ones, which the engine's
// own prefix cache has. The engine calls it again until it is not Pending, and again when it could not allocate blocks.
//
// vLLM: get_num_new_matched_tokens.
func (t *Scheduler) Match(r *Request, computed int) (Matched, error) {
	e := t.live[r.ID]
	switch {
	case e == nil || e.State == Prefetching:
	case !t.follows(failedLoadWaits) && (e.State == Bypass || e.loading && e.State == Ready):
		t.bypass(e)
		return Matched{}, nil
	case !t.follows(preemptedIsNotLookedUp) || r.Preempted:
		if r.Preempted {
			t.n.preempted.Add(1)
		}
		t.giveUp(e)
		t.drop(e)
		e = nil
	}
	if e == nil {
		t.seq++
		e = &entry{req: r, seq: t.seq}
		t.live[r.ID] = e
		t.n.live.Add(1)
		t.n.requests.Add(1)
	}
	if r.Preempted && t.follows(preemptedIsNotLookedUp) {
		return Matched{}, nil
	}
	t.n.polls.Add(1)
	tokens := r.Tokens
	if t.states && len(tokens) > 0 { // the state after the last token is of no use, because the engine computes that token
		tokens = tokens[:len(tokens)-1]
	}
	t.cache.SubmitLookup(r.ID, tokens, t.saltOf(r))
	hit, ok := t.cache.LookupResult(r.ID)
	if !ok {
		return Matched{Pending: true, Async: true}, nil
	}
	return t.matched(e, hit, computed)
}

func (t *Scheduler) matched(e *entry, hit, computed int) (Matched, error) {
	computed = max(0, computed)
	if !t.follows(takesAnyHit) {
		hit = min(max(hit, 0), len(e.req.Tokens)) / t.o.ChunkTokens * t.o.ChunkTokens
	}
	if !t.follows(forgetsOwnHit) {
		e.VLLMHitBlocks = computed / t.o.BlockTokens
	}
	if hit == 0 {
		return Matched{}, nil
	}
	if hit < 0 || hit%t.o.ChunkTokens != 0 {
		return Matched{}, ErrHit
	}
	if !t.follows(hitsAddUp) {
		e.StoredBlocks = 0
	}
	if e.CacheHitBlocks == 0 {
		t.n.hits.Add(1)
		t.n.hitTokens.Add(uint64(hit))
	}
	e.StoredBlocks += hit / t.o.BlockTokens
	e.VLLMHitBlocks = computed / t.o.BlockTokens
	e.CacheHitBlocks = hit / t.o.BlockTokens
	// With blocks of one token, the last token would have no block to load into.
	if !t.follows(matchesWholePrompt) && t.o.BlockTokens > 1 {
		hit = min(hit, len(e.req.Tokens)-1)
	}
	n := max(0, hit-computed)
	t.o.Log.Debug("vLLM hit is", "request", e.req.ID, "tokens", computed, "to_load", n)
	return Matched{Tokens: n, Async: n > 0}, nil
}

// bypass forgets the lookup, blocks and counts of a request whose load failed.
func (t *Scheduler) bypass(e *entry) {
	if e.State != Bypass {
		t.n.failedLoads.Add(1)
	}
	e.RequestInfo = RequestInfo{State: Bypass}
	e.blocks, e.before, e.computed, e.loading = nil, 0, 0, false
}

// giveUp releases the pins of e's lookup that no Retrieve will use. Under the rule keepsPins it does nothing.
func (t *Scheduler) giveUp(e *entry) {
	if t.follows(keepsPins) {
		return
	}
	bs := t.o.BlockTokens
	switch e.State {
	case Prefetching:
		t.cache.CleanupLookup(e.req.ID)
		t.free(e, 0, e.CacheHitBlocks*bs)
	case WaitingForLoad: // the allocation released the pins of the chunks before
		t.free(e, t.loadStart(e)*bs, e.CacheHitBlocks*bs)
	}
}

func (t *Scheduler) free(e *entry, start, end int) {
	if start < end {
		t.n.freedTokens.Add(uint64(end/t.o.ChunkTokens*t.o.ChunkTokens - start))
		salt := e.req.Salt
		if t.follows(freesWithoutSalt) {
			salt = ""
		}
		t.cache.FreeLookupLocks(e.req.ID, e.req.Tokens, start, end, salt)
	}
}

func (t *Scheduler) drop(e *entry) {
	delete(t.live, e.req.ID)
	if i := slices.Index(t.waiting, e); i >= 0 {
		t.waiting = slices.Delete(t.waiting, i, i+1)
	}
	t.n.live.Add(-1)
}

// saltOf returns the salt for lookups and operations of r.
func (t *Scheduler) saltOf(r *Request) string {
	if t.follows(noSalts) {
		return ""
	}
	return r.Salt
}

// loadStart returns the first block of e's Retrieve: the first block of the chunk in which the engine's own hit ends.
func (t *Scheduler) loadStart(e *entry) int { return e.VLLMHitBlocks / t.perChunk * t.perChunk }

// Allocated informs the Scheduler that r got blocks: all its block ids so far, by KV cache group. external is how many tokens the engine
// wants loaded: Matched.Tokens, or 0 if the engine decided not to load or calls again after the load.
//
// vLLM: update_state_after_alloc.
func (t *Scheduler) Allocated(r *Request, blocks [][]int, external int) error {
	e := t.live[r.ID]
	if e == nil {
		return unknown(r.ID)
	}
	if err := t.checkGroups(blocks); err != nil {
		return err
	}
	given := entry{blocks: blocks}
	load := e.needsRetrieve() && (external > 0 || t.follows(loadsUnasked))
	if !t.follows(loadsIntoNothing) && load && e.State == Prefetching && given.known() < e.CacheHitBlocks {
		return &Error{CodeBlocks, valueError, "request " + r.ID + ": fewer blocks than are to be loaded"}
	}
	if !t.follows(oldBlocksStay) {
		e.blocks = nil
	}
	if have := e.known(); given.known() > have || have == 0 {
		t.extend(e, cutBlocks(blocks, have, maxLimit))
	}
	switch e.State {
	case Bypass:
		e.State = Ready
	case Prefetching:
		t.settlePins(e, load)
	}
	return nil
}

// checkGroups returns an error if blocks has not one list for each group of the engine. An empty blocks is accepted.
func (t *Scheduler) checkGroups(blocks [][]int) error {
	switch {
	case len(blocks) == 0 || len(blocks) == len(t.o.Groups):
		return nil
	case len(t.o.Groups) == 1:
		return ErrGroups
	}
	return &Error{CodeGroups, valueError, fmt.Sprintf("block ids of %d KV cache groups, the engine has %d", len(blocks), len(t.o.Groups))}
}

// extend appends block ids to those of e, by group.
func (t *Scheduler) extend(e *entry, blocks [][]int) {
	if e.blocks == nil {
		e.blocks = make([][]int, len(t.o.Groups))
	}
	for g, list := range blocks {
		e.blocks[g] = append(e.blocks[g], list...)
	}
}

// settlePins releases, at the first allocation, the pins of a lookup that no load needs: with `load` those of the chunks that the engine's
// own hit covers, else all. With `load` the request then waits for its load.
func (t *Scheduler) settlePins(e *entry, load bool) {
	e.State = Ready
	if load {
		e.State = WaitingForLoad
		t.waiting = append(t.waiting, e)
	}
	t.cache.CleanupLookup(e.req.ID)
	end := e.CacheHitBlocks * t.o.BlockTokens
	if load {
		end = e.VLLMHitBlocks * t.o.BlockTokens
	}
	if end > 0 {
		t.o.Log.Debug("Free locks of tokens since vLLM has them", "request", e.req.ID, "from", 0, "to", end)
	}
	t.free(e, 0, end)
}

// FinishResult is the result of Finish.
type FinishResult struct {
	// KeepBlocks asks the engine to keep the request's blocks until every
	// worker has reported its stores as ended. Always true.
	KeepBlocks bool
	// ExtraCachedTokens is how many tokens the cache's hit had beyond the engine's own hit. It is set only with Request.CountExtraCached.
	ExtraCachedTokens int
}

// Finish ends the tracking of r. An unknown request is no error, unless CountExtraCached is set.
//
// vLLM: request_finished.
func (t *Scheduler) Finish(r *Request) (FinishResult, error) {
	out := FinishResult{KeepBlocks: true}
	e := t.live[r.ID]
	if r.CountExtraCached && !t.follows(reportsNothing) {
		if e == nil {
			return out, unknown(r.ID)
		}
		out.ExtraCachedTokens = max(0, e.CacheHitBlocks-e.VLLMHitBlocks) * t.o.BlockTokens
	}
	if e != nil {
		t.giveUp(e)
		t.drop(e)
		t.o.Log.Debug("Cleaned up request_tracker", "request", r.ID)
	}
	t.cache.EndSession(r.ID)
	return out, nil
}

// LoadFailed informs the Scheduler that a worker could not load the request's blocks. Unless the request has run since, the Scheduler forgets
// its blocks: the engine computes them, and they are stored again, without another lookup.
func (t *Scheduler) LoadFailed(id string) {
	e := t.live[id]
	switch {
	case e == nil || e.State != Ready:
	case !t.follows(failedLoadWaits) && e.loading:
		t.bypass(e)
	default:
		t.n.failedLoads.Add(1)
	}
}
