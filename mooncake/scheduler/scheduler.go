// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// CacheGroup is one KV cache group of the model.
type CacheGroup struct {
	coordinator.Group      // of it, only Kind, Block and Window matter
	NoTransfer        bool // its blocks stay in their engine: vLLM's enable_kv_transfer=false
}

// Options configures a Scheduler. The zero value configures the kv_both engine of vLLM 0.25 to 0.33 with one full-attention group and
// one worker.
type Options struct {
	Role wire.Role

	// Groups are the model's KV cache groups, in the engine's order; default one of full attention.
	Groups   []CacheGroup
	NoHybrid bool // the engine's hybrid cache manager is off: windows are not clipped

	// With Mamba layers, and with BoundedReplay, D computes the last prompt token: P computes one token less and D loads one less.
	// BoundedReplay means that the model replays a bounded window (DeepSeek V4.1). Releases up to 0.24 leave no token to D: set
	// NoTruncation.
	BoundedReplay bool
	NoTruncation  bool

	EngineID string       // for the log only
	Log      *slog.Logger // gets vLLM's log lines, and a debug line for each call; default none

	Workers      int // number of workers that report to Update; default 1
	MaxTransfers int // most pulls, and most sends, at a time; default 65,536

	// Pairing says how P and D name a transfer to each other. The default uses transfer ids and bootstrap servers, as vLLM 0.16 and
	// later do. For 0.13, see RequestIDs.
	Pairing *Pairing

	// Release makes the Scheduler repeat the decisions of a published release call by call, its defects included: 33 for 0.33.0, or 13
	// for 0.13.0 (together with RequestIDs). By default the Scheduler decides as docs/how/mooncake.md says; release.go lists the
	// differences.
	Release wire.Release
}

const defaultMaxTransfers = 1 << 16

// Request is a scheduler's view of one request. The engine owns it. A Scheduler changes only the fields that its methods name, and
// keeps a pointer to it until the next Build. A second request may have the same ID only after the first has ended and its blocks are
// free.
type Request struct {
	ID              string
	PromptTokens    int                    // prompt tokens given as token ids: 0 for embeddings
	MaxTokens       int                    // most tokens to generate
	Params          *wire.KVTransferParams // nil: none
	SkipPrefixCache bool                   // it does not read the engine's prefix cache
}

// RequestStatus says how a request ended.
type RequestStatus uint8

// The ways in which a request ends. A prefill for a D ends LengthCapped, after one token.
const (
	LengthCapped RequestStatus = iota
	Stopped
	Aborted // ended in any other way
)

// String returns vLLM's name of the status.
func (s RequestStatus) String() string {
	switch s {
	case LengthCapped:
		return "FINISHED_LENGTH_CAPPED"
	case Stopped:
		return "FINISHED_STOPPED"
	}
	return "FINISHED_ABORTED"
}

// Scheduler is the scheduler's half of vLLM's MooncakeConnector: it decides which
// prefixes D pulls, which blocks P keeps for D, and what the workers do at each step. It
// does no I/O. One goroutine calls its methods; others may call Stats.
//
// If a method other than Build returns an error, the request goes on without a transfer. Build fails only with a Release.
//
// Source: MooncakeConnectorScheduler of vLLM 0.13.0 and 0.33.0; vectors in
// internal/testkit/testdata/mooncake-connector.
type Scheduler struct {
	o         Options // immutable
	rules     rule    // of o.Release
	moving    []int   // indices of the groups that are transferred
	keep      []int   // for each entry of moving: how many blocks at the end of the list are transferred; 0 means all
	lastToken bool    // D computes the last prompt token

	recv, send queue            // for the next Build
	aborted    []string         // pulls of requests that ended, for the next Build
	dropped    map[string]bool  // transfer ids that will not be sent, for the next Build
	owners     map[string]owner // requests whose blocks are to be sent, by transfer id
	receiving  map[string]*transferState
	sending    map[string]*transferState
	n          schedulerCounters
}

// transferState is a transfer that the workers are carrying out.
type transferState struct {
	blocks   [][]int
	transfer string   // transfer id
	reported []uint64 // bit set of the workers that have reported
	left     int      // workers that have not reported
	failed   bool
	finished bool // the request has ended; its blocks stay until the transfer has ended
}

// owner is the request to which a transfer id belongs.
type owner struct {
	request   string
	announced bool // the workers know the transfer
}

// New returns a Scheduler without requests.
func New(o Options) (*Scheduler, error) {
	o.Workers = cmp.Or(o.Workers, 1)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.MaxTransfers = cmp.Or(o.MaxTransfers, defaultMaxTransfers)
	o.Groups = slices.Clone(o.Groups)
	if len(o.Groups) == 0 {
		o.Groups = []CacheGroup{{Group: coordinator.Group{Kind: coordinator.Full, Block: 1}}}
	}
	if o.Pairing == nil {
		o.Pairing = transferIDs
	}
	o.NoHybrid = o.NoHybrid || o.Pairing.first
	o.NoTruncation = o.NoTruncation || o.Pairing.first
	if err := o.check(); err != nil {
		return nil, err
	}
	s := &Scheduler{o: o, rules: rulesOf(o.Release), dropped: map[string]bool{}, owners: map[string]owner{}, receiving: map[string]*transferState{}, sending: map[string]*transferState{}}
	replays := o.BoundedReplay
	for i, g := range o.Groups {
		replays = replays || g.Kind == coordinator.Mamba
		if g.NoTransfer {
			continue
		}
		keep := 0
		if window := g.Kind == coordinator.SlidingWindow || g.Kind == coordinator.SlidingWindowMLA; window && g.Window > 0 && !g.Uniform && !o.NoHybrid {
			keep = (g.Window+g.Block-1)/g.Block + 1 // a window may begin inside a block
		}
		s.moving, s.keep = append(s.moving, i), append(s.keep, keep)
	}
	s.lastToken = replays && !o.NoTruncation
	o.Log.Info("Initializing Mooncake Transfer Engine Scheduler", "engine", o.EngineID, "role", o.Role.String())
	return s, nil
}

func (o *Options) check() error {
	const limit = 1 << 31
	if o.Role > wire.Consumer {
		return wire.Refusef(wire.CodeOptions, "%v", o.Role)
	}
	if o.Release != 0 && rulesOf(o.Release) == 0 {
		return wire.Refusef(wire.CodeOptions, "decisions of vLLM 0.%d are not known, only those of 0.13 and 0.33", o.Release)
	}
	if o.Pairing.first && len(o.Groups) > 1 {
		return wire.Refusef(wire.CodeOptions, "%d KV cache groups: 0.13 transfers one", len(o.Groups))
	}
	if o.Pairing.first && o.Role != wire.Consumer && !o.Pairing.hasAddress {
		return wire.Refusef(wire.CodeOptions, "a %v of 0.13 without a host and a port: D needs both", o.Role)
	}
	if len(o.Groups) > 1024 {
		return wire.Refusef(wire.CodeOptions, "%d KV cache groups; 1024 at most", len(o.Groups))
	}
	for i, g := range o.Groups {
		if g.Block < 1 || g.Block > limit || g.Window < 0 || g.Window > limit {
			return wire.Refusef(wire.CodeOptions, "group %d: a block of %d tokens is outside 1 to %d, or a window of %d outside 0 to %[3]d", i, g.Block, limit, g.Window)
		}
	}
	if o.Workers < 1 || o.Workers > 1<<16 || o.MaxTransfers < 1 {
		return wire.Refusef(wire.CodeOptions, "%d workers are outside 1 to %d, or %d transfers are below 1", o.Workers, 1<<16, o.MaxTransfers)
	}
	return nil
}

// debug logs a call at debug level.
func (s *Scheduler) debug(call string, r *Request, key string, value any) {
	if s.o.Log.Enabled(context.Background(), slog.LevelDebug) {
		params, _ := r.Params.MarshalJSON()
		s.o.Log.Debug(call, "request", r.ID, key, value, "kv_transfer_params", string(params[:min(len(params), 1024)]))
	}
}

// NewRequest admits r. The engine must call it before any other call for r. truncated means that P leaves the last prompt token to D:
// NewRequest has then reduced r.PromptTokens by one, set r.MaxTokens to 1 and recorded the truncation in the params, and the engine
// must drop that token, too.
//
// vLLM: on_new_request, from 0.25.
func (s *Scheduler) NewRequest(r *Request) (truncated bool) {
	if !s.lastToken || !r.Params.DoRemoteDecode() || r.Params.Truthy(wire.KeyTruncated) || r.PromptTokens <= 1 || r.SkipPrefixCache {
		return false
	}
	r.PromptTokens--
	r.MaxTokens = 1
	r.Params.Set(wire.KeyTruncated, true)
	s.n.truncated.Add(1)
	return true
}

// Matched is the answer to Match.
type Matched struct {
	Tokens int  // tokens that P has beyond the computed ones
	Async  bool // the workers pull these tokens in the background, and the request must wait
}

// Match returns how many tokens of r D can pull from P, beyond the `computed` tokens that the engine's own prefix cache has.
//
// vLLM: get_num_new_matched_tokens.
func (s *Scheduler) Match(r *Request, computed int) (Matched, error) {
	s.debug("MooncakeConnector get_num_new_matched_tokens", r, "num_computed_tokens", computed)
	if !r.Params.DoRemotePrefill() {
		return Matched{}, nil
	}
	if !s.follows(matchIgnoresRole) {
		if err := s.mayPull(r); err != nil {
			return Matched{}, err
		}
	}
	n := r.PromptTokens
	if s.lastToken && n > 1 {
		n--
	}
	if n -= max(computed, 0); n > 0 {
		return Matched{n, true}, nil
	}
	return Matched{}, nil
}

// mayPull refuses a pull whose params cannot be used, and a pull beyond MaxTransfers.
func (s *Scheduler) mayPull(r *Request) error {
	if s.o.Role == wire.Producer {
		return s.refuse(r, wire.KeyPrefill, wire.Asserted(wire.CodeRole, "request %q asks for a remote prefill on a %v", r.ID, s.o.Role))
	}
	if s.follows(trusting) {
		return nil
	}
	if key := s.missing(r); key != "" {
		return s.refuse(r, wire.KeyPrefill, invalid(r, fmt.Errorf("%s is missing", key)))
	}
	if _, err := s.source(r); err != nil {
		return s.refuse(r, wire.KeyPrefill, invalid(r, err))
	}
	if s.receiving[r.ID] != nil {
		return s.refuse(r, wire.KeyPrefill, wire.Refusef(wire.CodeBusy, "request id %q is still in a pull", r.ID))
	}
	if _, waits := s.recv.by[r.ID]; !waits && len(s.recv.list)+len(s.receiving) >= s.o.MaxTransfers {
		return s.refuse(r, wire.KeyPrefill, wire.Refusef(wire.CodeFull, "%d pulls are in progress, the most at once: no room for request %q", s.o.MaxTransfers, r.ID))
	}
	return nil
}

func invalid(r *Request, err error) *wire.Error {
	text, _ := r.Params.MarshalJSON()
	return &wire.Error{
		Code: wire.CodeInvalid, Class: wire.ClassValue,
		Text:   fmt.Sprintf("Got invalid KVTransferParams: %s. This request will not utilize KVTransfer", text[:min(len(text), 1024)]),
		Detail: fmt.Sprintf("request %q: %v", r.ID, err),
	}
}

// refuse counts a refusal of r and clears the given flag, which asks for the transfer, so that r is refused only once. It returns err.
func (s *Scheduler) refuse(r *Request, flag string, err *wire.Error) error {
	s.n.refused.Add(1)
	if !s.follows(keepsFlags) {
		r.Params.Set(flag, false)
	}
	return err
}

// Allocated records that the engine has allocated blocks for r. unhashed has the ids of the blocks to be filled, one list per KV cache
// group. external is how many tokens the engine wants to be pulled: Matched.Tokens, or 0, which only makes P free its blocks. Allocated
// keeps none of the slices.
//
// On D, Allocated clears do_remote_prefill, so that a request pulls only once.
//
// vLLM: update_state_after_alloc.
func (s *Scheduler) Allocated(r *Request, unhashed [][]int, external int) error {
	s.debug("MooncakeConnector update_state_after_alloc", r, "num_external_tokens", external)
	switch {
	case r.Params.DoRemotePrefill():
		return s.allocatedPull(r, unhashed, external)
	case r.Params.DoRemoteDecode():
		return s.announce(r)
	}
	return nil
}

func (s *Scheduler) allocatedPull(r *Request, unhashed [][]int, external int) error {
	if err := s.mayPull(r); err != nil {
		return err
	}
	if s.follows(dropsUnusable) && s.missing(r) != "" {
		s.n.refused.Add(1) // vLLM only logs it
		r.Params.Set(wire.KeyPrefill, false)
		return nil
	}
	var blocks [][]int
	var err error
	if external > 0 {
		blocks, err = s.clip(unhashed)
	}
	if external > 0 && err == nil && !anyBlock(blocks) && !s.follows(pullsNothing) {
		err = wire.Refusef(wire.CodeShape, "request %q has no blocks for the %d tokens to pull", r.ID, external)
	}
	if err != nil {
		s.n.refused.Add(1)
		if s.follows(raisesOnGroups) {
			return err
		}
		blocks = nil // only make P free its blocks
	}
	s.pull(r, blocks)
	return err
}

// pull queues the pull of r's blocks for the next Build. A pull without blocks makes P free its blocks.
func (s *Scheduler) pull(r *Request, blocks [][]int) {
	p := s.recv.put(r, blocks)
	if !s.follows(readsParamsAtBuild) {
		p.from, _ = s.source(r) // mayPull has checked it; the engine may change the params later
	}
	r.Params.Set(wire.KeyPrefill, false)
}

// announce queues, for the next Build, the message to the workers that D may pull r.
func (s *Scheduler) announce(r *Request) error {
	if s.o.Role == wire.Consumer && !s.follows(consumerAnnounces) {
		return s.refuse(r, wire.KeyDecode, wire.Asserted(wire.CodeRole, "request %q prefills for a D on a %v", r.ID, s.o.Role))
	}
	id, ok := s.transferOf(r)
	if !ok && s.follows(takesAnyTransferID) {
		s.n.refused.Add(1) // vLLM only logs it
		return nil
	}
	if !ok {
		return s.refuse(r, wire.KeyDecode, &wire.Error{Code: wire.CodeTransfer, Class: wire.ClassValue, Text: "Missing transfer_id in kv_transfer_params from router!", Detail: fmt.Sprintf("request %q", r.ID)})
	}
	if err := s.maySend(r, id); err != nil {
		return err
	}
	s.claim(id, r)
	s.send.put(r, nil).from.TransferID = id
	s.n.announced.Add(1)
	return nil
}

// transferOf returns the id under which D pulls r.
func (s *Scheduler) transferOf(r *Request) (id string, ok bool) {
	id, ok = s.o.Pairing.transferID(r)
	if s.follows(takesAnyTransferID) {
		ok = r.Params.Truthy(wire.KeyTransfer)
	}
	return id, ok
}

// maySend refuses a transfer id or a request that is in use, and a send beyond MaxTransfers. In the last case it queues a message to
// the workers, from which D learns that the transfer will not be sent.
func (s *Scheduler) maySend(r *Request, id string) error {
	if s.follows(trusting) {
		return nil
	}
	o, owned := s.owners[id]
	switch {
	case owned && o.request != r.ID:
		return s.refuse(r, wire.KeyDecode, wire.Refusef(wire.CodeBusy, "request %q: transfer %q of request %q has not ended", r.ID, id, o.request))
	case s.delays(r):
		return s.refuse(r, wire.KeyDecode, wire.Refusef(wire.CodeBusy, "request id %q is still in a send", r.ID))
	case !owned && len(s.owners) >= s.o.MaxTransfers:
		s.drop(id)
		return s.refuse(r, wire.KeyDecode, wire.Refusef(wire.CodeFull, "%d sends are in progress, the most at once: no room for request %q", s.o.MaxTransfers, r.ID))
	}
	return nil
}

// claim makes r the owner of the transfer id, and cancels a queued drop of that id.
func (s *Scheduler) claim(id string, r *Request) {
	if s.follows(trusting) {
		return
	}
	o := s.owners[id]
	o.request = r.ID
	s.owners[id] = o
	delete(s.dropped, id)
}

// delays reports whether blocks of r must stay because D has not got them yet.
func (s *Scheduler) delays(r *Request) bool {
	p := s.send.by[r.ID]
	return s.sending[r.ID] != nil || p != nil && p.blocks != nil
}

// clip returns the block ids of the groups that are transferred; of a window group only the last blocks. ids has one list per group, or
// one per transferred group.
func (s *Scheduler) clip(ids [][]int) ([][]int, error) {
	if len(ids) != 1 && s.follows(assertsOneGroup) {
		return nil, wire.Asserted(wire.CodeGroups, "%d lists of block ids, 0.13 has one group", len(ids))
	}
	if len(ids) == 0 {
		return nil, nil
	}
	if len(ids) != len(s.moving) && len(ids) != len(s.o.Groups) {
		return nil, &wire.Error{Code: wire.CodeGroups, Class: wire.ClassValue, Text: fmt.Sprintf("Expected %d KV cache groups, got %d.", len(s.o.Groups), len(ids))}
	}
	out := make([][]int, len(s.moving))
	for i, g := range s.moving {
		if len(ids) == len(s.moving) {
			g = i
		}
		list := ids[g]
		if k := s.keep[i]; k > 0 && len(list) > k {
			list = list[len(list)-k:]
		}
		out[i] = append(make([]int, 0, len(list)), list...)
	}
	return out, nil
}

func anyBlock(ids [][]int) bool {
	return slices.ContainsFunc(ids, func(l []int) bool { return len(l) > 0 })
}
