package mooncake

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvasir-kv/kvasir/coordinator"
)

// CacheGroup is one KV cache group of the model.
type CacheGroup struct {
	coordinator.Group      // Kind, Block and Window are looked at
	NoTransfer        bool // stays in its engine: vLLM's enable_kv_transfer=false
}

// SchedulerOptions configures a Scheduler. The zero value is a kv_both engine of
// vLLM 0.25 to 0.33 with one full-attention group and one worker.
type SchedulerOptions struct {
	Dialect Dialect
	Role    Role

	// Groups are the model's, in the engine's order; none means one of full
	// attention. V1 knows one only.
	Groups   []CacheGroup
	NoHybrid bool // the engine's hybrid cache manager is off: windows are not clipped; in V1 they never are

	// The last prompt token of models with Mamba layers, and of those that
	// replay a bounded window (DeepSeek V4.1), is left to D: P computes one token
	// less, D loads one less. Releases up to 0.24 did not: NoTruncation.
	BoundedReplay bool
	NoTruncation  bool

	Host string // V1, where this engine sends: its address, told to D
	Port int    // V1: SidePortV1 of TP rank 0

	Workers      int // that report to Update; default 1
	MaxTransfers int // pulls, and sends, at once; default 65,536

	// Faithful repeats the original's decisions call by call, defects included.
	// Without it a Scheduler departs where the original hangs, leaks, or frees
	// what is still written to:
	//
	//   - unusable params or a role that cannot are refused once, with the
	//     flag cleared; the original raises at each call, or lets the request
	//     wait for a load that nobody starts;
	//   - Build never fails: the original raises at every step after an aborted
	//     request without remote_engine_id;
	//   - a request that ends before its pull was handed out pulls nothing, only
	//     frees P's blocks; one that ends during its pull keeps its blocks;
	//   - a prefill that has nothing to send, or ends in another way than at its
	//     length, is always told to the workers, in V1 too, and its
	//     announcement withdrawn, so that D need not wait for its deadline;
	//   - a transfer id that another request uses is refused;
	//   - what is pending or in transfer is bounded by MaxTransfers.
	Faithful bool
}

const defaultMaxTransfers = 1 << 16

// Request is a scheduler's view of one request. The engine owns it; a Scheduler
// changes what its methods say, and keeps a pointer until the next Build. An ID
// names one request until it has ended and its blocks are free.
type Request struct {
	ID              string
	PromptTokens    int               // given as token ids: 0 for embeddings
	MaxTokens       int               // to generate
	Params          *KVTransferParams // nil for none
	SkipPrefixCache bool              // does not read the engine's prefix cache
}

// RequestStatus is how a request ended.
type RequestStatus uint8

// The ends of a request. A prefill for a D ends LengthCapped, after one token.
const (
	LengthCapped RequestStatus = iota
	Stopped
	Aborted // in any other way
)

// Scheduler is the scheduler's half of vLLM's MooncakeConnector: which prefixes D
// pulls, which blocks P keeps for it, and what the workers are told at each step.
// It does no I/O. One goroutine calls its methods; only Stats and the Collector's
// may be called from others.
//
// On any error but Build's of a Faithful one, the request goes on without a
// transfer.
//
// Source: MooncakeConnectorScheduler of vLLM 0.13.0 and 0.33.0; vectors in
// internal/vectors/testdata/mooncake-connector.
type Scheduler struct {
	o         SchedulerOptions // immutable
	moving    []int            // groups that are transferred
	keep      []int            // by entry of moving: blocks at the end of the list; 0 is all
	lastToken bool             // is left to D

	recv, send queue            // for the next Build
	aborted    []string         // pulls, likewise
	dropped    map[string]bool  // not processed, likewise
	owners     map[string]owner // by transfer id: what is to be sent; not in a Faithful one
	receiving  map[string]*transferState
	sending    map[string]*transferState
	n          schedulerCounters
}

// transferState is a transfer in the hands of the workers.
type transferState struct {
	blocks   [][]int
	transfer string   // id
	told     []uint64 // bit set of workers
	left     int      // workers that have not reported
	failed   bool
	finished bool // the request has ended; its blocks wait
}

// owner is the request that a transfer id belongs to.
type owner struct {
	request string
	told    bool // workers have heard of the transfer
}

// NewScheduler returns a Scheduler without requests.
func NewScheduler(o SchedulerOptions) (*Scheduler, error) {
	o.Workers = cmp.Or(o.Workers, 1)
	o.MaxTransfers = cmp.Or(o.MaxTransfers, defaultMaxTransfers)
	o.Groups = slices.Clone(o.Groups)
	if len(o.Groups) == 0 {
		o.Groups = []CacheGroup{{Group: coordinator.Group{Kind: coordinator.Full, Block: 1}}}
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	s := &Scheduler{o: o, dropped: map[string]bool{}, owners: map[string]owner{}, receiving: map[string]*transferState{}, sending: map[string]*transferState{}}
	replays := o.BoundedReplay
	for i, g := range o.Groups {
		replays = replays || g.Kind == coordinator.Mamba
		if g.NoTransfer {
			continue
		}
		keep := 0
		if window := g.Kind == coordinator.SlidingWindow || g.Kind == coordinator.SlidingWindowMLA; window && o.Dialect == V2 && g.Window > 0 && !g.Uniform && !o.NoHybrid {
			keep = (g.Window+g.Block-1)/g.Block + 1 // the window may begin inside a block
		}
		s.moving, s.keep = append(s.moving, i), append(s.keep, keep)
	}
	s.lastToken = replays && o.Dialect == V2 && !o.NoTruncation
	return s, nil
}

func (o *SchedulerOptions) check() error {
	const limit = 1 << 31
	if o.Dialect > V1 || o.Role > Consumer {
		return refusef(CodeOptions, "%v of dialect %d", o.Role, o.Dialect)
	}
	if o.Dialect == V1 && len(o.Groups) > 1 {
		return refusef(CodeOptions, "%d KV cache groups: V1 transfers one", len(o.Groups))
	}
	if len(o.Groups) > 1024 {
		return refusef(CodeOptions, "%d KV cache groups; 1024 at most", len(o.Groups))
	}
	for i, g := range o.Groups {
		if g.Block < 1 || g.Block > limit || g.Window < 0 || g.Window > limit {
			return refusef(CodeOptions, "group %d: block of %d tokens, window of %d", i, g.Block, g.Window)
		}
	}
	if o.Workers < 1 || o.Workers > 1<<16 || o.MaxTransfers < 1 {
		return refusef(CodeOptions, "%d workers, %d transfers", o.Workers, o.MaxTransfers)
	}
	if o.Dialect == V1 && o.Role != Consumer && (o.Host == "" || o.Port < 1 || o.Port > 65535) {
		return refusef(CodeOptions, "V1 sends from host %q, port %d: D must be told both", o.Host, o.Port)
	}
	return nil
}

// SidePortV1 is the side-channel port of a V1 worker, for the base port
// VLLM_MOONCAKE_BOOTSTRAP_PORT (8998 by default).
func SidePortV1(base, dpRank, tpSize, tpRank int) int { return base + dpRank*tpSize + tpRank }

// NewRequest admits r, before anything else is asked about it. True means that P
// leaves the last prompt token to D: r.PromptTokens is one less, r.MaxTokens is 1,
// its params say so, and the engine must drop that token too.
//
// vLLM: on_new_request, from 0.25.
func (s *Scheduler) NewRequest(r *Request) (truncated bool) {
	if !s.lastToken || !r.Params.DoRemoteDecode() || r.Params.Truthy(keyTruncated) || r.PromptTokens <= 1 || r.SkipPrefixCache {
		return false
	}
	r.PromptTokens--
	r.MaxTokens = 1
	r.Params.Set(keyTruncated, true)
	s.n.truncated.Add(1)
	return true
}

// Matched is the answer to Match.
type Matched struct {
	Tokens int  // that P has beyond the computed ones
	Async  bool // they are pulled in the background; the request must wait
}

// Match says how many tokens of r can be pulled from P, beyond the computed ones
// that the engine's own prefix cache has.
//
// vLLM: get_num_new_matched_tokens.
func (s *Scheduler) Match(r *Request, computed int) (Matched, error) {
	if !r.Params.DoRemotePrefill() {
		return Matched{}, nil
	}
	if !s.o.Faithful || s.o.Dialect == V2 {
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

// mayPull refuses a pull that cannot be.
func (s *Scheduler) mayPull(r *Request) error {
	if s.o.Role == Producer {
		return s.refuse(r, keyPrefill, asserted(CodeRole, "request %q asks for a remote prefill on a %v", r.ID, s.o.Role))
	}
	if s.o.Faithful {
		return nil
	}
	if err := r.Params.checkSource(s.o.Dialect); err != nil {
		return s.refuse(r, keyPrefill, invalid(r, err))
	}
	if s.receiving[r.ID] != nil {
		return s.refuse(r, keyPrefill, refusef(CodeBusy, "request id %q is still in a pull", r.ID))
	}
	if _, waits := s.recv.by[r.ID]; !waits && len(s.recv.list)+len(s.receiving) >= s.o.MaxTransfers {
		return s.refuse(r, keyPrefill, refusef(CodeFull, "%d pulls at once, no room for request %q", s.o.MaxTransfers, r.ID))
	}
	return nil
}

func invalid(r *Request, err error) *Error {
	text, _ := r.Params.MarshalJSON()
	return &Error{
		Code: CodeInvalid, Class: valueError,
		Text:   fmt.Sprintf("Got invalid KVTransferParams: %s. This request will not utilize KVTransfer", text[:min(len(text), 1024)]),
		Detail: fmt.Sprintf("request %q: %v", r.ID, err),
	}
}

// refuse makes sure, but in a Faithful Scheduler, that r is refused once.
func (s *Scheduler) refuse(r *Request, flag string, err *Error) error {
	s.n.refused.Add(1)
	if !s.o.Faithful {
		r.Params.Set(flag, false)
	}
	return err
}

// Allocated says that r got blocks. unhashed are the ids of those to be filled,
// one list per KV cache group, and external how many tokens the engine wants
// pulled: Matched.Tokens, or 0. With none, D only tells P to free its blocks. It
// keeps neither slice.
//
// On D it clears do_remote_prefill: a request pulls once.
//
// vLLM: update_state_after_alloc.
func (s *Scheduler) Allocated(r *Request, unhashed [][]int, external int) error {
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
	if s.o.Faithful && r.Params.missing(s.o.Dialect) != "" {
		s.n.refused.Add(1) // the original logs it
		r.Params.Set(keyPrefill, false)
		return nil
	}
	var blocks [][]int
	var err error
	if external > 0 {
		blocks, err = s.clip(unhashed)
	}
	if !s.o.Faithful && external > 0 && err == nil && !anyBlock(blocks) {
		err = refusef(CodeShape, "request %q: no blocks for %d tokens", r.ID, external)
	}
	if err != nil {
		s.n.refused.Add(1)
		if s.o.Faithful {
			return err
		}
		blocks = nil // P is to free its own
	}
	s.pull(r, blocks)
	return err
}

// pull queues r's pull of blocks; without any, P only frees its own.
func (s *Scheduler) pull(r *Request, blocks [][]int) {
	p := s.recv.put(r, blocks)
	if !s.o.Faithful {
		p.from, _ = s.source(r) // checked by mayPull; the engine may change params later
	}
	r.Params.Set(keyPrefill, false)
}

// announce tells the workers that D may ask for r.
func (s *Scheduler) announce(r *Request) error {
	if s.o.Role == Consumer && !(s.o.Faithful && s.o.Dialect == V1) {
		return s.refuse(r, keyDecode, asserted(CodeRole, "request %q prefills for a D on a %v", r.ID, s.o.Role))
	}
	if s.o.Faithful {
		if s.o.Dialect == V2 && !r.Params.Truthy(keyTransfer) {
			s.n.refused.Add(1) // the original logs it
			return nil
		}
		s.send.put(r, nil)
		s.n.announced.Add(1)
		return nil
	}
	id, ok := s.transferOf(r)
	if !ok {
		return s.refuse(r, keyDecode, &Error{CodeTransfer, valueError, "Missing transfer_id in kv_transfer_params from router!", fmt.Sprintf("request %q", r.ID)})
	}
	if err := s.maySend(r, id); err != nil {
		return err
	}
	s.own(id, r)
	s.send.put(r, nil).from.TransferID = id
	s.n.announced.Add(1)
	return nil
}

// transferOf is the id under which D asks for r.
func (s *Scheduler) transferOf(r *Request) (string, bool) {
	if s.o.Dialect == V1 {
		return r.ID, true
	}
	return r.Params.TransferID()
}

// maySend refuses a transfer id, or a request, that is in use. D is told, unless
// the id is another request's.
func (s *Scheduler) maySend(r *Request, id string) error {
	o, owned := s.owners[id]
	switch {
	case owned && o.request != r.ID:
		return s.refuse(r, keyDecode, refusef(CodeBusy, "request %q: transfer %q of request %q has not ended", r.ID, id, o.request))
	case s.delays(r):
		return s.refuse(r, keyDecode, refusef(CodeBusy, "request id %q is still in a send", r.ID))
	case !owned && len(s.owners) >= s.o.MaxTransfers:
		s.drop(id)
		return s.refuse(r, keyDecode, refusef(CodeFull, "%d sends at once, no room for request %q", s.o.MaxTransfers, r.ID))
	}
	return nil
}

// own makes r the owner of transfer id, which is to be sent after all.
func (s *Scheduler) own(id string, r *Request) {
	o := s.owners[id]
	o.request = r.ID
	s.owners[id] = o
	delete(s.dropped, id)
}

// delays reports whether r's blocks wait for D.
func (s *Scheduler) delays(r *Request) bool {
	p := s.send.by[r.ID]
	return s.sending[r.ID] != nil || p != nil && p.blocks != nil
}

// clip returns the ids of groups that are transferred, of windows only the last
// blocks. ids has a list per group, or per transferred group.
func (s *Scheduler) clip(ids [][]int) ([][]int, error) {
	if len(ids) == 0 && (s.o.Dialect == V2 || !s.o.Faithful) {
		return nil, nil
	}
	if s.o.Dialect == V1 && len(ids) != 1 {
		return nil, asserted(CodeGroups, "%d lists of block ids, V1 has one group", len(ids))
	}
	if len(ids) != len(s.moving) && len(ids) != len(s.o.Groups) {
		return nil, &Error{Code: CodeGroups, Class: valueError, Text: fmt.Sprintf("Expected %d KV cache groups, got %d.", len(s.o.Groups), len(ids))}
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
