// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sort"
)

// Config has the settings of a vLLM scheduler. A zero field means its default.
type Config struct {
	BlockTokens int // block_size; default 16
	Blocks      int // num_gpu_blocks: number of blocks of the KV cache, block 0 included

	MaxSeqs   int // max_num_seqs; default 256
	MaxActive int // max_num_active_seqs; default MaxSeqs
	MaxTokens int // max_num_batched_tokens: most tokens in one step; default 8192
	MaxModel  int // max_model_len, in tokens; default 32768

	// Groups are the KV cache groups: sets of layers that share a block table. Default one of full attention.
	Groups []Group

	NoPrefixCache bool
	Priority      bool // scheduling policy "priority" instead of "fcfs"
	NoChunks      bool // enable_chunked_prefill=false: prefills are not divided
	LongPrefill   int  // long_prefill_token_threshold; default none
	Adaptive      bool // LongPrefill is at least an equal share of MaxTokens for each request
	Watermark     float64
	NoReserve     bool // scheduler_reserve_full_isl=false: admission does not consider the whole prompt
	Async         bool // async scheduling: two steps may be in flight

	// Connector is asked for KV that is elsewhere; nil: none.
	Connector Connector
	Sends     bool // the connector's role is producer or both
	Receives  bool // the connector's role is consumer or both
	Recompute bool // kv_load_failure_policy is recompute; default fail

	// Events makes a Result list the blocks that were stored and removed.
	Events bool
}

// Group is one KV cache group. All groups take blocks of the same size from one pool.
type Group struct {
	Window int  // tokens to which a layer attends, 2 or more; 0: all (full attention)
	State  bool // recurrent: a block holds the state after its last token, and earlier blocks are not read
}

// outside returns how many leading blocks (of `block` tokens) the token at position total does not attend to.
func (g Group) outside(total, block int) int {
	switch {
	case g.State:
		return max(0, total-1) / block
	case g.Window > 0:
		return max(0, total-g.Window+1) / block
	}
	return 0
}

// tail returns how many blocks before a position a hit at that position needs; 0 means all of them.
func (g Group) tail(block int) int {
	switch {
	case g.State:
		return 1
	case g.Window > 0:
		return (g.Window - 1 + block - 1) / block
	}
	return 0
}

// Connector is the scheduler's half of a KV connector.
type Connector interface {
	// Match returns how many tokens, beyond the first `local` ones, can be loaded from elsewhere. async means that they are loaded
	// while the request waits. ok is false while that is not known.
	Match(r *Request, local int) (external int, async, ok bool)
	// Allocated informs the connector that r has got its blocks, and that `external` tokens shall be loaded into them.
	Allocated(r *Request, external int)
	// Finish informs the connector that r has ended. If it returns true, r's blocks stay until Output.Sent names r.
	Finish(r *Request, why Reason) (keep bool)
}

// ErrConfig means that settings do not fit each other.
var ErrConfig = errors.New("sched: configuration")

// maxTokens is the largest number of tokens in a setting. Validate refuses more.
const maxTokens = 1 << 40

// Validate returns everything that is wrong with c.
func (c *Config) Validate() error {
	var errs []error
	f := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("%w: %s", ErrConfig, fmt.Sprintf(format, args...)))
		}
	}
	f(c.BlockTokens >= 0 && c.BlockTokens <= 1<<20, "blocks of %d tokens; 0 to 2^20 are possible", c.BlockTokens)
	f(c.Blocks >= 2 && c.Blocks <= 1<<30, "%d blocks; 2 to 2^30 are possible", c.Blocks)
	f(c.MaxSeqs >= 0 && c.MaxActive >= 0, "%d sequences, %d active ones; neither may be below 0", c.MaxSeqs, c.MaxActive)
	f(c.MaxTokens >= 0 && c.MaxTokens <= maxTokens, "%d tokens in a step; 0 to %d are possible", c.MaxTokens, maxTokens)
	f(c.MaxModel >= 0 && c.MaxModel <= maxTokens, "a longest sequence of %d tokens; 0 to %d are possible", c.MaxModel, maxTokens)
	f(len(c.Groups) <= 64, "%d groups; 64 at most are possible", len(c.Groups))
	for i, g := range c.Groups {
		f(g.Window == 0 || g.Window >= 2 && g.Window <= maxTokens && !g.State, "group %d: a window of %d tokens; 2 at least, and not of a state", i, g.Window)
	}
	f(c.LongPrefill >= 0, "long prefills of %d tokens; not below 0", c.LongPrefill)
	f(c.Watermark >= 0 && c.Watermark < 1, "watermark %v; from 0 to below 1 is possible", c.Watermark)
	f(c.Connector != nil || !c.Sends && !c.Receives, "a role without a connector")
	return errors.Join(errs...)
}

// Longest returns the longest sequence, in tokens and at most limit, that fits into the KV cache while nothing else runs. Blocks that
// leave a window meanwhile count as free.
func (c *Config) Longest(limit int) int {
	s := Scheduler{c: *c}
	s.c.setDefaults()
	return sort.Search(limit, func(n int) bool {
		need := 0
		for _, g := range s.c.Groups {
			need += s.groupNeed(nil, g, n+1, 0, nil, true)
		}
		return need > c.Blocks-1
	})
}

// Scheduler is the scheduler of one engine. Only one goroutine may call its methods.
type Scheduler struct {
	c    Config
	pool *pool

	running           []*Request
	waiting, holding  queue // holding has those that wait and have blocks
	prefills          map[*Request]struct{}
	requests          map[string]*Request // requests that have not ended, or still have blocks
	arrivals          int64
	ended             []*Request // requests that have ended since the last step
	events            []Event
	flight            []*Step // steps that are not processed yet
	newest, processed int64   // numbers of the newest and of the last processed step with tokens
	late              []lateFree
	resets            []*Request  // requests that a reset has preempted since the last step
	hits              [][]BlockID // by group; reused between lookups
}

// lateFree holds blocks to which a step in flight may still write.
type lateFree struct {
	step   int64
	blocks []BlockID
}

func (c *Config) setDefaults() {
	c.BlockTokens = cmp.Or(c.BlockTokens, 16)
	c.MaxSeqs = cmp.Or(c.MaxSeqs, 256)
	c.MaxActive = cmp.Or(c.MaxActive, c.MaxSeqs)
	c.MaxTokens = cmp.Or(c.MaxTokens, 8192)
	c.MaxModel = cmp.Or(c.MaxModel, 32768)
	if len(c.Groups) == 0 {
		c.Groups = []Group{{}}
	}
}

// New returns a Scheduler without requests.
func New(c Config) (*Scheduler, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c.setDefaults()
	s := &Scheduler{c: c, hits: make([][]BlockID, len(c.Groups)), prefills: make(map[*Request]struct{}), requests: make(map[string]*Request)}
	s.waiting.priority, s.holding.priority = c.Priority, c.Priority
	s.pool = newPool(c.Blocks, !c.NoPrefixCache, func(h Hash) {
		if c.Events {
			s.events = append(s.events, Event{Kind: Removed, Hashes: []Hash{h}})
		}
	})
	return s, nil
}

// Add adds a request, which then waits. Its prompt must be shorter than the model's longest sequence.
func (s *Scheduler) Add(r *Request) error {
	switch {
	case r.Prompt < 1 || r.Prompt >= s.c.MaxModel || r.MaxTokens < 1:
		return fmt.Errorf("sched: request %q: %d prompt tokens and %d to generate: at least 1 each, and a prompt below %d", r.ID, r.Prompt, r.MaxTokens, s.c.MaxModel)
	case s.requests[r.ID] != nil:
		return fmt.Errorf("sched: request id %q is in use", r.ID)
	}
	s.arrivals++
	r.arrival, r.status, r.tokens = s.arrivals, Waiting, r.Prompt
	r.tables, r.cached = make([][]BlockID, len(s.c.Groups)), make([]int, len(s.c.Groups))
	s.requests[r.ID] = r
	s.waiting.pushBack(r)
	return nil
}

// Known reports whether a request with that id has not ended, or still has blocks; Add refuses another request with that id.
func (s *Scheduler) Known(id string) bool { return s.requests[id] != nil }

// Abort ends a request. It does nothing for a request that has ended or is unknown.
func (s *Scheduler) Abort(id string) {
	if r := s.requests[id]; r != nil && r.status != Ended {
		s.end(r, Abort)
	}
}

// end ends r for the reason `why`, and frees its blocks, unless a load or the connector still uses them.
func (s *Scheduler) end(r *Request, why Reason) {
	r.written = r.status == Loading && !r.arrived
	switch {
	case r.queued != nil:
		r.queued.remove(r)
	case r.status == Running:
		s.running = slices.DeleteFunc(s.running, func(o *Request) bool { return o == r })
	}
	delete(s.prefills, r)
	r.status, r.prefill = Ended, false
	s.ended = append(s.ended, r)
	r.held = s.c.Connector != nil && s.c.Connector.Finish(r, why)
	s.drop(r)
}

// drop forgets an ended request once neither a load nor the connector uses its blocks any more.
func (s *Scheduler) drop(r *Request) {
	if r.written || r.held {
		return
	}
	s.free(r)
	delete(s.requests, r.ID)
}

// mustWait reports whether a step in flight may still write to r's blocks, so that it could overwrite KV that is loaded into them if
// they were allocated again.
func (s *Scheduler) mustWait(r *Request) bool {
	return s.c.Async && s.c.Receives && r.lastStep > s.processed
}

// free frees r's blocks, the last one first, so that the tail of a prefix is evicted before its head.
func (s *Scheduler) free(r *Request) {
	for g, table := range r.tables {
		list := slices.Clone(table)
		slices.Reverse(list)
		r.tables[g], r.cached[g] = table[:0], 0
		if s.mustWait(r) {
			s.late = append(s.late, lateFree{s.newest, list})
		} else {
			s.pool.release(list)
		}
	}
}

// preempt frees all blocks of a running request, which the caller has removed from s.running, and puts it at the front of the waiting
// ones. `reset` means that Reset does it: with Async, the tokens of r's steps in flight are then dropped.
func (s *Scheduler) preempt(r *Request, reset bool) {
	s.free(r)
	delete(s.prefills, r)
	r.prefill = false
	if s.c.Async {
		r.dropStale = s.c.Sends || reset || r.stale > 0 && r.dropStale
		r.stale = r.inFlight
	}
	r.done, r.placeholders, r.status = 0, 0, Preempted
	r.preemptions++
	s.waiting.pushFront(r)
}

// Reset empties the prefix cache. That works only while no block is in use. With running, it first preempts all running requests, and
// returns them.
func (s *Scheduler) Reset(running bool) (preempted []*Request, ok bool) {
	if running {
		for i := len(s.running) - 1; i >= 0; i-- {
			r := s.running[i]
			s.running = s.running[:i]
			s.preempt(r, true)
			preempted = append(preempted, r)
		}
		s.resets = append(s.resets, preempted...)
	}
	if s.pool.free != s.c.Blocks-1 {
		return preempted, false
	}
	s.pool.clear()
	if s.c.Events {
		s.events = append(s.events, Event{Kind: Cleared})
	}
	return preempted, true
}

// Forget makes all blocks unfindable that have the same content as a block of r, r's own and others, because their KV is wrong. No
// block of r becomes findable later.
func (s *Scheduler) Forget(r *Request) {
	for g, table := range r.tables {
		for i := range r.tokens / s.c.BlockTokens {
			h := groupHash(r.Hash(i), g)
			for b, ok := s.pool.find(h); ok; b, ok = s.pool.find(h) {
				s.pool.forget(b)
			}
		}
		r.cached[g] = max(r.cached[g], len(table))
	}
}

// Last reports whether a row of a scheduled step produces its request's last token.
func (s *Scheduler) Last(row *Row) bool {
	r := row.Request
	return row.Samples && (r.tokens+1 >= s.c.MaxModel || r.tokens+1-r.Prompt >= r.MaxTokens)
}

// FreeBlocks returns how many blocks have no users.
func (s *Scheduler) FreeBlocks() int { return s.pool.free }

// Running returns the running requests in their order. The caller must not keep the slice.
func (s *Scheduler) Running() []*Request { return s.running }

// Waits returns how many requests wait, and how many of them have blocks.
func (s *Scheduler) Waits() (all, holding int) { return s.waiting.n + s.holding.n, s.holding.n }

// InFlight returns how many steps are not processed yet.
func (s *Scheduler) InFlight() int { return len(s.flight) }

// Busy reports whether the engine must call Schedule again: a request has not ended or has blocks, or the worker does not know yet that
// a request has ended.
func (s *Scheduler) Busy() bool { return len(s.requests) > 0 || len(s.ended) > 0 || len(s.flight) > 0 }
