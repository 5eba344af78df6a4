package tracker

import (
	"slices"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// Dialect selects whose decisions a Tracker repeats.
type Dialect uint8

// The dialects.
const (
	Current  Dialect = iota // vLLM 0.33.0's built-in class
	Original                // the class of vLLM 0.18 to 0.20
)

// String returns the releases whose decisions the dialect repeats.
func (d Dialect) String() string {
	if d == Original {
		return "0.18-0.20"
	}
	return "0.33.0"
}

// Options configures a Tracker.
type Options struct {
	Dialect     Dialect
	BlockTokens int // tokens per engine block
	ChunkTokens int // tokens per cache chunk, a multiple of BlockTokens

	// Corrected departs from the dialect where it stores what is not computed,
	// loads what nobody asked for, never loads, or leaves chunks pinned;
	// docs/lmcache-connector.md lists each departure:
	//
	//   - a hit asked for twice counts once (StoredBlocks is set, not added to);
	//   - a store is bounded by the tokens computed by the end of the step: known
	//     exactly, instead of guessed from sums and hits;
	//   - a preempted request is looked up and loaded like any other;
	//   - a request whose load failed is computed without the cache, instead of
	//     waiting for a load that nobody starts;
	//   - Original: with no external tokens nothing is loaded;
	//   - both dialects look up and free under the request's salt;
	//   - a request that ends, or starts anew, gives back what its lookup pinned;
	//   - the block ids of an allocation replace the known ones;
	//   - a hit of the whole prompt reports one token less;
	//   - a hit that is no whole number of chunks, or longer than the prompt, is
	//     shortened instead of raising.
	Corrected bool
}

// Cache is what a Tracker asks of a cache. No method waits.
type Cache interface {
	// SubmitLookup begins to look up tokens, which stay unchanged up to their
	// length; it is ignored while a lookup of the request is known.
	SubmitLookup(id string, tokens []uint32, salt string)
	// LookupResult returns the hit in tokens, whose chunks are pinned for the
	// request; ok is false while it is not known.
	LookupResult(id string) (hitTokens int, ok bool)
	// CleanupLookup forgets the request's lookup. What a lookup pins whose hit
	// was never told is given back.
	CleanupLookup(id string)
	// FreeLookupLocks gives back the pins of the chunks of tokens [start, end);
	// a chunk that is only begun stays pinned.
	FreeLookupLocks(id string, tokens []uint32, start, end int, salt string)
	// EndSession says that the request is over.
	EndSession(id string)
	// ReportBlockAllocations tells which blocks requests got. The callee keeps
	// records.
	ReportBlockAllocations(records []lmcache.BlockAllocation)
}

// Request is a scheduler's view of one request. The scheduler owns it and changes
// it between calls; the Tracker reads it in calls, from the request's first Match
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

// The states. Bypass exists only in a Corrected Tracker: the request's load
// failed and it is computed without the cache, until its next allocation.
const (
	Prefetching State = iota
	WaitingForLoad
	Ready
	Bypass
)

var stateNames = [...]string{"PREFETCHING", "WAITING_FOR_LOAD", "READY", "BYPASS_LMCACHE"}

func (s State) String() string { return stateNames[s] }

// Info is what a Tracker knows of a request.
type Info struct {
	State          State
	Scheduled      int // tokens, as the dialect counts them
	StoredBlocks   int // stored, or found in the cache
	VLLMHitBlocks  int // hit in the engine's own prefix cache
	CacheHitBlocks int // hit in the cache
	Blocks         int // allocated
}

type entry struct {
	Info
	req      *Request
	seq      uint64 // order of creation
	blocks   []int
	computed int  // Corrected: tokens computed by the end of the last step
	loading  bool // a Retrieve was emitted and the request has not run since
}

func (e *entry) needsRetrieve() bool {
	return e.CacheHitBlocks > e.VLLMHitBlocks && e.State != Ready
}

// Tracker tracks the requests of one scheduler, on whose goroutine its methods
// are called; only Stats and the Collector methods may be called from others.
type Tracker struct {
	o        Options // immutable
	perChunk int     // blocks
	cache    Cache

	live    map[string]*entry
	seq     uint64
	waiting []*entry // in state WaitingForLoad, or were
	n       counters
}

// New returns a Tracker over cache.
func New(cache Cache, o Options) (*Tracker, error) {
	const limit = 1 << 24
	if o.BlockTokens < 1 || o.BlockTokens > limit || o.ChunkTokens < 1 || o.ChunkTokens > limit {
		return nil, optionsf("block of %d tokens, chunk of %d: both must be 1 to %d", o.BlockTokens, o.ChunkTokens, limit)
	}
	if o.ChunkTokens%o.BlockTokens != 0 {
		return nil, optionsf("chunk of %d tokens is no multiple of the block of %d", o.ChunkTokens, o.BlockTokens)
	}
	return &Tracker{o: o, perChunk: o.ChunkTokens / o.BlockTokens, cache: cache, live: make(map[string]*entry)}, nil
}

// Info returns what is known of a request; ok is false for an unknown one.
func (t *Tracker) Info(id string) (_ Info, ok bool) {
	e := t.live[id]
	if e == nil {
		return Info{}, false
	}
	e.Blocks = len(e.blocks)
	return e.Info, true
}

// Len returns the number of tracked requests.
func (t *Tracker) Len() int { return len(t.live) }

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
func (t *Tracker) Match(r *Request, computed int) (Matched, error) {
	e := t.live[r.ID]
	switch {
	case e == nil || e.State == Prefetching:
	case t.o.Corrected && (e.State == Bypass || e.loading && e.State == Ready):
		t.bypass(e)
		return Matched{}, nil
	case t.o.Corrected || r.Preempted:
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
	if r.Preempted && !t.o.Corrected {
		return Matched{}, nil
	}
	t.n.polls.Add(1)
	t.cache.SubmitLookup(r.ID, r.Tokens, t.saltOf(r))
	hit, ok := t.cache.LookupResult(r.ID)
	if !ok {
		return Matched{Pending: true, Async: true}, nil
	}
	return t.matched(e, hit, computed)
}

func (t *Tracker) matched(e *entry, hit, computed int) (Matched, error) {
	computed = max(0, computed)
	if t.o.Corrected {
		hit = min(max(hit, 0), len(e.req.Tokens)) / t.o.ChunkTokens * t.o.ChunkTokens
		e.VLLMHitBlocks = computed / t.o.BlockTokens
	}
	if hit == 0 {
		return Matched{}, nil
	}
	if hit < 0 || hit%t.o.ChunkTokens != 0 {
		return Matched{}, ErrHit
	}
	if t.o.Corrected {
		e.StoredBlocks = 0
	}
	if e.CacheHitBlocks == 0 {
		t.n.hits.Add(1)
		t.n.hitTokens.Add(uint64(hit))
	}
	e.StoredBlocks += hit / t.o.BlockTokens
	e.VLLMHitBlocks = computed / t.o.BlockTokens
	e.CacheHitBlocks = hit / t.o.BlockTokens
	// Blocks of one token would leave the last one without a block to load to.
	if t.o.Corrected && t.o.BlockTokens > 1 {
		hit = min(hit, len(e.req.Tokens)-1)
	}
	n := max(0, hit-computed)
	return Matched{Tokens: n, Async: n > 0}, nil
}

// bypass forgets all that is known of a request whose load failed.
func (t *Tracker) bypass(e *entry) {
	if e.State != Bypass {
		t.n.failedLoads.Add(1)
	}
	e.Info = Info{State: Bypass}
	e.blocks, e.computed, e.loading = nil, 0, false
}

// giveUp gives back the pins of e's lookup that no Retrieve will use.
func (t *Tracker) giveUp(e *entry) {
	if !t.o.Corrected {
		return
	}
	bs := t.o.BlockTokens
	switch e.State {
	case Prefetching:
		t.cache.CleanupLookup(e.req.ID)
		t.free(e, 0, e.CacheHitBlocks*bs)
	case WaitingForLoad: // what lies below was freed by the allocation
		t.free(e, t.loadStart(e)*bs, e.CacheHitBlocks*bs)
	}
}

func (t *Tracker) free(e *entry, start, end int) {
	if start < end {
		t.n.freedTokens.Add(uint64(end/t.o.ChunkTokens*t.o.ChunkTokens - start))
		salt := ""
		if t.o.Corrected {
			salt = e.req.Salt
		}
		t.cache.FreeLookupLocks(e.req.ID, e.req.Tokens, start, end, salt)
	}
}

func (t *Tracker) drop(e *entry) {
	delete(t.live, e.req.ID)
	if i := slices.Index(t.waiting, e); i >= 0 {
		t.waiting = slices.Delete(t.waiting, i, i+1)
	}
	t.n.live.Add(-1)
}

// saltOf is the salt that lookups and operations carry.
func (t *Tracker) saltOf(r *Request) string {
	if t.o.Dialect == Original && !t.o.Corrected {
		return ""
	}
	return r.Salt
}

// loadStart is the first block of e's Retrieve: the chunk that the engine's own
// hit ends in.
func (t *Tracker) loadStart(e *entry) int { return e.VLLMHitBlocks / t.perChunk * t.perChunk }

// Allocated says that r owns blocks: all its block ids so far, by KV cache group.
// external is how many tokens the engine wants loaded: Matched.Tokens, or 0 when
// it decided against it or asks after the load.
//
// vLLM: update_state_after_alloc.
func (t *Tracker) Allocated(r *Request, blocks [][]int, external int) error {
	e := t.live[r.ID]
	if e == nil {
		return unknown(r.ID)
	}
	ids, err := SingleGroup(blocks)
	if err != nil {
		return err
	}
	load := e.needsRetrieve() && (external > 0 || t.o.Dialect == Original && !t.o.Corrected)
	if t.o.Corrected && load && e.State == Prefetching && len(ids) < e.CacheHitBlocks {
		return &Error{CodeBlocks, valueError, "request " + r.ID + ": fewer blocks than are to be loaded"}
	}
	if t.o.Corrected {
		e.blocks = append(e.blocks[:0], ids...)
	} else if len(ids) > len(e.blocks) {
		e.blocks = append(e.blocks, ids[len(e.blocks):]...)
	}
	switch e.State {
	case Bypass:
		e.State = Ready
	case Prefetching:
		t.settle(e, load)
	}
	return nil
}

// settle decides what becomes of a lookup's pins at the first allocation.
func (t *Tracker) settle(e *entry, load bool) {
	e.State = Ready
	if load {
		e.State = WaitingForLoad
		t.waiting = append(t.waiting, e)
	}
	t.cache.CleanupLookup(e.req.ID)
	if load {
		t.free(e, 0, e.VLLMHitBlocks*t.o.BlockTokens)
	} else {
		t.free(e, 0, e.CacheHitBlocks*t.o.BlockTokens)
	}
}

// Finished is the answer to Finish.
type Finished struct {
	// KeepBlocks tells the engine to keep the request's blocks until every
	// worker has reported its stores as ended. Always true.
	KeepBlocks bool
	// ExtraCachedTokens were hit in the cache beyond the engine's own hit; only
	// with Request.CountExtraCached, and not in the Original dialect.
	ExtraCachedTokens int
}

// Finish ends r's tracking; an unknown request is fine, unless its extra tokens
// are asked for.
//
// vLLM: request_finished.
func (t *Tracker) Finish(r *Request) (Finished, error) {
	out := Finished{KeepBlocks: true}
	e := t.live[r.ID]
	if r.CountExtraCached && t.o.Dialect == Current {
		if e == nil {
			return out, unknown(r.ID)
		}
		out.ExtraCachedTokens = max(0, e.CacheHitBlocks-e.VLLMHitBlocks) * t.o.BlockTokens
	}
	if e != nil {
		t.giveUp(e)
		t.drop(e)
	}
	t.cache.EndSession(r.ID)
	return out, nil
}

// LoadFailed says that a worker could not load the request's blocks. A Corrected
// Tracker then forgets them, unless the request has run since: it is computed,
// and stored again, without another lookup. Otherwise it is only counted.
func (t *Tracker) LoadFailed(id string) {
	e := t.live[id]
	switch {
	case e == nil || e.State != Ready:
	case t.o.Corrected && e.loading:
		t.bypass(e)
	default:
		t.n.failedLoads.Add(1)
	}
}
