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

	// Groups are the engine's KV cache groups; default one of full attention. A hybrid engine needs
	// workers that lend their memory, or several groups and a server of lmcache 0.5.7.
	Groups []Group

	// Release repeats the decisions of a published version, its defects included;
	// zero decides as it should be. docs/how/lmcache-connector.md lists the differences.
	Release Release

	Log *slog.Logger // debug lines, in the words of vLLM's connector; nil discards
}

// Cache is what a Scheduler asks of a cache. No method waits.
type Cache interface {
	// SubmitLookup begins to look up tokens, which stay unchanged up to their
	// length; it is ignored while a lookup of the request is known.
	SubmitLookup(id string, tokens []uint32, salt string)
	// LookupResult returns the hit in tokens, whose chunks are pinned for the
	// request; ok is false while it is not known.
	LookupResult(id string) (hitTokens int, ok bool)
	// CleanupLookup forgets the request's lookup. It releases the pins of a hit
	// that was never reported.
	CleanupLookup(id string)
	// FreeLookupLocks gives back the pins of the chunks of tokens [start, end);
	// a chunk that is only begun stays pinned.
	FreeLookupLocks(id string, tokens []uint32, start, end int, salt string)
	// EndSession says that the request is over.
	EndSession(id string)
	// ReportBlockAllocations reports which blocks requests got. The callee keeps
	// records.
	ReportBlockAllocations(records []lmcache.BlockAllocation)
}

// Request is a scheduler's view of one request. The scheduler owns it and changes
// it between calls; the Scheduler reads it in calls, from the request's first Match
// to its Finish.
type Request struct {
	ID        string
	Tokens    []uint32 // all so far, computed or not; only ever appended to
	Hashes    int      // full blocks that have a hash, that is, whose tokens are final
	Salt      string   // tenant; "" for none
	Preempted bool     // lost its blocks and waits to be scheduled again

	// CountExtraCached asks Finish for ExtraCachedTokens.
	CountExtraCached bool
}

// State of a request.
type State uint8

// The states. Bypass: the request's load failed and it is computed without the cache,
// until its next allocation.
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
	Scheduled      int // tokens, as the release counts them
	StoredBlocks   int // stored, or found in the cache
	VLLMHitBlocks  int // hit in the engine's own prefix cache
	CacheHitBlocks int // hit in the cache
	Blocks         int // allocated
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

// Scheduler tracks the requests of one scheduler, on whose goroutine its methods are called; only
// Stats may be called from other goroutines.
type Scheduler struct {
	o        SchedulerOptions // immutable
	perChunk int              // blocks
	rules    rule
	cache    Cache
	states   bool // a group is recurrent: the last prompt token is always computed

	live    map[string]*entry
	seq     uint64
	waiting []*entry // in state WaitingForLoad, or were
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

// Info returns the state of a request; ok is false for an unknown one.
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

// Matched is the answer to Match.
type Matched struct {
	Tokens  int  // to load beyond the engine's own prefix hit
	Pending bool // the lookup still runs: ask again at a later step
	Async   bool // Tokens are loaded in the background; the request must wait
}

// Match begins to track r, looks its tokens up, and says how many of them the
// cache has beyond the computed ones that the engine's own prefix cache has. It
// is asked again until it is not Pending, and when blocks could not be allocated.
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
	if t.states && len(tokens) > 0 { // the state after the last token is of no use: that token is computed
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

// bypass forgets all that is known of a request whose load failed.
func (t *Scheduler) bypass(e *entry) {
	if e.State != Bypass {
		t.n.failedLoads.Add(1)
	}
	e.RequestInfo = RequestInfo{State: Bypass}
	e.blocks, e.before, e.computed, e.loading = nil, 0, 0, false
}

// giveUp gives back the pins of e's lookup that no Retrieve will use.
func (t *Scheduler) giveUp(e *entry) {
	if t.follows(keepsPins) {
		return
	}
	bs := t.o.BlockTokens
	switch e.State {
	case Prefetching:
		t.cache.CleanupLookup(e.req.ID)
		t.free(e, 0, e.CacheHitBlocks*bs)
	case WaitingForLoad: // the allocation freed the pins of the chunks before that
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

// saltOf is the salt that lookups and operations carry.
func (t *Scheduler) saltOf(r *Request) string {
	if t.follows(noSalts) {
		return ""
	}
	return r.Salt
}

// loadStart is the first block of e's Retrieve: the beginning of the chunk in which the engine's
// own hit ends.
func (t *Scheduler) loadStart(e *entry) int { return e.VLLMHitBlocks / t.perChunk * t.perChunk }

// Allocated says that r owns blocks: all its block ids so far, by KV cache group. external is how
// many tokens the engine wants loaded: Matched.Tokens, or 0 when the engine decided not to load, or
// calls again after the load.
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

// checkGroups refuses block ids whose number of groups is not the engine's. It accepts an empty
// list.
func (t *Scheduler) checkGroups(blocks [][]int) error {
	switch {
	case len(blocks) == 0 || len(blocks) == len(t.o.Groups):
		return nil
	case len(t.o.Groups) == 1:
		return ErrGroups
	}
	return &Error{CodeGroups, valueError, fmt.Sprintf("block ids of %d KV cache groups, the engine has %d", len(blocks), len(t.o.Groups))}
}

// extend appends block ids by group.
func (t *Scheduler) extend(e *entry, blocks [][]int) {
	if e.blocks == nil {
		e.blocks = make([][]int, len(t.o.Groups))
	}
	for g, list := range blocks {
		e.blocks[g] = append(e.blocks[g], list...)
	}
}

// settlePins decides what becomes of a lookup's pins at the first allocation.
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

// FinishResult is the answer to Finish.
type FinishResult struct {
	// KeepBlocks asks the engine to keep the request's blocks until every
	// worker has reported its stores as ended. Always true.
	KeepBlocks bool
	// ExtraCachedTokens were hit in the cache beyond the engine's own hit; only
	// with Request.CountExtraCached.
	ExtraCachedTokens int
}

// Finish ends r's tracking; an unknown request is fine, unless its extra tokens
// are asked for.
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

// LoadFailed says that a worker could not load the request's blocks. They are
// forgotten, unless the request has run since: it is computed, and stored again,
// without another lookup.
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
