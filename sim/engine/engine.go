// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// Options configures an Engine. A zero field means its default.
type Options struct {
	Model string // name of the model; default "simulated"

	// KV is the layout of the memory. BlockTokens, Blocks and TPSize also configure the scheduler.
	KV kvmem.Geometry

	// Groups are the KV cache groups of a hybrid model, each with KV.Layers layers; default one group of full attention.
	Groups []sched.Group

	MaxSeqs     int // most sequences at a time; default 256
	MaxTokens   int // most tokens in a step; default 8192
	MaxModel    int // longest sequence, in tokens; default 32768, or less if the KV memory holds less
	NoCache     bool
	LongPrefill int

	// The time of a step is the sum of three: what Clock computes for its rows, StepTime, and its prompt tokens divided by PrefillRate
	// (tokens per second).
	Clock       *costmodel.Profile // nil: no time
	StepTime    time.Duration      // default 0
	PrefillRate float64            // default unlimited

	Connectors []*kvconfig.Config
	// Networks are the networks from which other engines may reach side channels, transfer ports and the registry; nil: any.
	Networks *auth.Networks
	// Secrets are the secrets of which both ends of a transfer must prove one; nil: no proof is demanded.
	Secrets *auth.PeerSecrets
	// Registry has Token and TLS for a registry that is not P's own. D uses only its certificate: a request names the registry that D
	// asks, and a registry that is not the operator's must not learn the token.
	Registry bootstrap.ClientOptions
	// Cache says how an LMCacheMPConnector proves to its servers who it is.
	Cache lmcache.ClientOptions
	// Getenv returns the environment variables for the connectors; by default there is only VLLM_HOST_IP=127.0.0.1.
	Getenv func(string) (string, bool)
	// First makes a MooncakeConnector use the protocol of vLLM 0.13: no transfer ids, no registry.
	First bool
	// StoreRelease is the vLLM release whose decisions and keys a MooncakeStoreConnector uses; by default our decisions, with the keys
	// of vLLM 0.24 and later.
	StoreRelease coordinator.Release
	// PPSize is the number of pipeline stages over which the layers are distributed, each with its own ranks; default 1. An
	// LMCacheMPConnector registers a worker for each stage; other connectors support only one stage.
	PPSize int
	// DPRank is the data-parallel rank of the engine, among DPSize engines; default 0 of 1. A MooncakeConnector registers it.
	DPRank, DPSize int
	// Retention limits what a MooncakeStoreConnector stores of window groups: one tail per that many tokens, and the tail of the
	// prompt; 0: only the tail of the prompt; nil: everything.
	Retention *int
	// Unnegotiated makes an LMCacheMPConnector use the protocol of lmcache 0.5.6 even with a server of a later release: it accepts the
	// server's chunk size without negotiation.
	Unnegotiated bool
	// ShmDir is the folder in which cache servers on this host have their pools; default shm.Dir.
	ShmDir string

	// OnEvents gets the KV events of each step that has any, as vLLM publishes them. It runs on the loop's goroutine and must not wait.
	// nil: it is not called.
	OnEvents func([]event.Event)

	Log *slog.Logger // nil: nothing is logged
}

// Request is one request to an engine.
type Request struct {
	ID        string // the engine's own id; no two requests may have the same at a time
	Tokens    []uint32
	MaxTokens int
	Priority  int
	Salt      string   // cache_salt
	SkipCache bool     // it does not read the prefix cache
	Stop      []uint32 // tokens that end the answer
	Params    *wire.KVTransferParams
	// Released is called when the request has ended and no connector needs its blocks any more. It runs on the loop's goroutine and
	// must not wait. nil: it is not called.
	Released func()
}

// The errors of a request.
var (
	// ErrTooLong means that prompt and output together are longer than the model allows.
	ErrTooLong = errors.New("engine: the request does not fit")
	// ErrEmpty means a request without a prompt or without a token to generate.
	ErrEmpty = errors.New("engine: the request needs at least one prompt token and one token to generate")
	// ErrInUse means that a request with this id is running, or has blocks that a connector still needs.
	ErrInUse = errors.New("engine: a request of this id is already running")
	// ErrClosed means that the engine is closed.
	ErrClosed = errors.New("engine: closed")
	// ErrWrongBytes means that the request got KV that does not belong to its tokens.
	ErrWrongBytes = errors.New("engine: wrong KV bytes")
	// ErrLoad means that KV could not be loaded, and that the connector's policy is to fail the request then.
	ErrLoad = errors.New("engine: KV could not be loaded")
)

// Engine is one simulated engine. Its methods are safe for concurrent use.
type Engine struct {
	o     Options
	log   *slog.Logger
	mem   *kvmem.Memory
	sched *sched.Scheduler // owned by the loop
	conns []kvConnector    // owned by the loop

	segments [][]string   // names of the memory's segments, by rank and layer; nil: the memory is not lent
	free     func() error // frees the memory

	wake chan struct{}
	done chan struct{} // closed when run has returned
	stop context.CancelFunc
	ctx  context.Context

	mu struct {
		sync.Mutex
		commands []func()
		closed   bool
	}
	by    map[string]*request // owned by the loop: requests that have not ended
	keeps map[string]*request // owned by the loop: ended requests whose blocks a connector still uses
	n     counters
}

// Open creates an engine and its memory, registers it where its connectors demand it, and starts its steps. ctx matters only until Open
// returns: if it ends before, Open fails.
func Open(ctx context.Context, o Options) (*Engine, error) {
	o.Model = cmp.Or(o.Model, "simulated")
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	if o.Getenv == nil {
		o.Getenv = func(name string) (string, bool) { return "127.0.0.1", name == "VLLM_HOST_IP" }
	}
	o.KV.TPSize, o.PPSize, o.DPSize = max(o.KV.TPSize, 1), max(o.PPSize, 1), max(o.DPSize, 1)
	if err := o.checkRanks(); err != nil {
		return nil, err
	}
	if len(o.Groups) == 0 {
		o.Groups = []sched.Group{{}}
	}
	o.KV.Groups = make([]kvmem.Group, len(o.Groups))
	for i, g := range o.Groups {
		o.KV.Groups[i].State = g.State
	}
	if o.Clock != nil {
		if err := o.Clock.Validate(); err != nil {
			return nil, fmt.Errorf("engine: %w", err)
		}
	}
	if o.StepTime < 0 || o.PrefillRate < 0 {
		return nil, fmt.Errorf("engine: steps of %v or %v prompt tokens per second are negative", o.StepTime, o.PrefillRate)
	}
	e := &Engine{o: o, log: o.Log, wake: make(chan struct{}, 1), done: make(chan struct{}), by: make(map[string]*request), keeps: make(map[string]*request)}
	e.n.open()
	c := sched.Config{
		BlockTokens: o.KV.BlockTokens, Blocks: o.KV.Blocks, MaxSeqs: o.MaxSeqs, MaxTokens: o.MaxTokens, MaxModel: o.MaxModel,
		NoPrefixCache: o.NoCache, LongPrefill: o.LongPrefill, Groups: o.Groups, Events: o.OnEvents != nil,
	}
	err := checkMemory(&o, &c)
	if err != nil {
		return nil, err
	}
	e.o.MaxModel = c.MaxModel
	if e.mem, e.segments, e.free, err = newMemory(&o); err != nil {
		return nil, err
	}
	e.ctx, e.stop = context.WithCancel(context.Background())
	interrupted := context.AfterFunc(ctx, e.stop)
	err = e.connect()
	if !interrupted() {
		err = context.Cause(ctx)
	}
	if err != nil {
		e.stop()
		return nil, errors.Join(err, e.closeConnectors(), e.free())
	}
	if len(e.conns) > 0 {
		c.Connector = connectors{e}
		for _, k := range o.Connectors {
			c.Sends = c.Sends || k.Role != wire.Consumer
			c.Receives = c.Receives || k.Role != wire.Producer || k.Connector == kvconfig.MooncakeStoreConnector
			c.Recompute = c.Recompute || k.LoadFailurePolicy == kvconfig.Recompute
		}
	}
	if e.sched, err = sched.New(c); err != nil {
		e.stop()
		return nil, errors.Join(err, e.closeConnectors(), e.free())
	}
	go e.run()
	return e, nil
}

// checkRanks returns an error for ranks that are not possible.
func (o *Options) checkRanks() error {
	if o.DPRank < 0 || o.DPRank >= o.DPSize || o.DPSize > maxRanks {
		return fmt.Errorf("engine: data-parallel rank %d of %d: the rank must be below the size, and the size at most %d", o.DPRank, o.DPSize, maxRanks)
	}
	if o.PPSize > maxRanks || o.KV.Layers%o.PPSize != 0 {
		return fmt.Errorf("engine: %d layers on %d pipeline stages: the stages, at most %d, must divide the layers", o.KV.Layers, o.PPSize, maxRanks)
	}
	if o.PPSize == 1 {
		return nil
	}
	for _, c := range o.Connectors {
		if c.Connector != kvconfig.LMCacheMPConnector {
			return fmt.Errorf("engine: %s with %d pipeline stages is not supported: LMCacheMPConnector alone is", c.Connector, o.PPSize)
		}
	}
	if len(o.Groups) > 1 {
		return fmt.Errorf("engine: a model of %d KV cache groups with %d pipeline stages is not supported", len(o.Groups), o.PPSize)
	}
	return nil
}

// maxRanks is the largest number of data-parallel ranks, and of pipeline stages. Options with more are an error.
const maxRanks = 1024

// Model returns the model's name.
func (e *Engine) Model() string { return e.o.Model }

// MaxModel returns the longest sequence, in tokens.
func (e *Engine) MaxModel() int { return e.o.MaxModel }

// endTimeout limits the wait for stores in progress when an engine is closed.
const endTimeout = 5 * time.Second

// Close aborts the running requests, waits for stores in progress, stops the connectors and frees the memory.
func (e *Engine) Close() error {
	e.stop()
	<-e.done
	return errors.Join(e.closeConnectors(), e.free())
}

func (e *Engine) closeConnectors() error {
	var errs []error
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, c := range e.conns {
		errs = append(errs, c.close(ctx))
	}
	e.conns = nil
	return errors.Join(errs...)
}

// do runs f on the loop's goroutine, without waiting. It returns false if the engine has ended.
func (e *Engine) do(f func()) bool {
	e.mu.Lock()
	if e.mu.closed {
		e.mu.Unlock()
		return false
	}
	e.mu.commands = append(e.mu.commands, f)
	e.mu.Unlock()
	e.poke()
	return true
}

func (e *Engine) poke() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// call runs f on the loop's goroutine and waits until f has returned.
func (e *Engine) call(f func()) error {
	ended := make(chan struct{})
	if !e.do(func() { f(); close(ended) }) {
		return ErrClosed
	}
	select {
	case <-ended:
		return nil
	case <-e.done:
		return ErrClosed
	}
}

// Submit starts a request. The returned Stream delivers its tokens and its end. When ctx ends, the request ends.
func (e *Engine) Submit(ctx context.Context, r Request) (*Stream, error) {
	if err := e.check(&r); err != nil {
		return nil, err
	}
	q := newRequest(e, r)
	var err error
	closed := e.call(func() {
		if err = e.add(q); err == nil {
			q.stop = context.AfterFunc(ctx, func() { e.do(func() { e.abort(q) }) })
		}
	})
	if closed != nil || err != nil {
		return nil, errors.Join(closed, err)
	}
	return &q.stream, nil
}

func (e *Engine) check(r *Request) error {
	switch n := len(r.Tokens); {
	case n == 0 || r.MaxTokens < 1:
		return fmt.Errorf("%w: it has %d and %d", ErrEmpty, n, r.MaxTokens)
	case r.MaxTokens > e.o.MaxModel-n:
		return fmt.Errorf("%w: %d prompt tokens and %d to generate, the longest sequence has %d", ErrTooLong, n, r.MaxTokens, e.o.MaxModel)
	}
	return nil
}

func (e *Engine) add(q *request) error {
	if e.sched.Known(q.r.ID) { // checked before the connectors get the request
		return fmt.Errorf("%w: %.128q", ErrInUse, q.r.ID)
	}
	for _, c := range e.conns {
		c.begin(q)
	}
	if err := e.sched.Add(&q.s); err != nil {
		return err
	}
	e.by[q.r.ID] = q
	return nil
}

// Abort ends the request with that id, if it has not ended yet.
func (e *Engine) Abort(id string) {
	e.do(func() {
		if q := e.by[id]; q != nil {
			e.abort(q)
		}
	})
}

// AbortAll ends all requests.
func (e *Engine) AbortAll() {
	_ = e.call(func() { // an engine that has ended has no requests
		for _, q := range e.by {
			e.abort(q)
		}
	})
}

func (e *Engine) abort(q *request) {
	if e.by[q.r.ID] == q {
		e.sched.Abort(q.r.ID)
		e.finish(q, sched.Abort, nil)
	}
}

// ResetPrefixCache empties the prefix cache. It returns false if requests have blocks, unless running is true: then it preempts all of
// them.
func (e *Engine) ResetPrefixCache(running bool) (ok bool) {
	_ = e.call(func() { _, ok = e.sched.Reset(running) }) // ok stays false after the engine's end
	return ok
}

// run is the loop of the engine's goroutine. It executes commands and steps until the engine ends.
func (e *Engine) run() {
	defer close(e.done)
	for e.ctx.Err() == nil {
		e.mu.Lock()
		commands := e.mu.commands
		e.mu.commands = nil
		e.mu.Unlock()
		for _, f := range commands {
			f()
		}
		if !e.sched.Busy() {
			e.wait(0)
			continue
		}
		e.turn()
	}
	e.mu.Lock()
	e.mu.closed = true
	e.mu.Unlock()
	for _, q := range e.by {
		e.finish(q, sched.Abort, ErrClosed)
	}
}

// wait waits until there is something to do, at most d; 0 means without limit.
func (e *Engine) wait(d time.Duration) {
	var after <-chan time.Time
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		after = t.C
	}
	select {
	case <-e.wake:
	case <-after:
	case <-e.ctx.Done():
	}
}

// How often the outcome of transfers is checked while no request runs.
const (
	loadPoll = time.Millisecond
	keptPoll = 10 * time.Millisecond
)

// turn is one step of the engine: it decides the step, computes it, and handles the outcome of transfers.
func (e *Engine) turn() {
	step := e.sched.Schedule()
	for _, h := range step.Hits {
		q := of(h.Request)
		if q.first.IsZero() {
			q.cached = h.Tokens
		}
		if h.Request.Preemptions() > 0 {
			continue // it was counted when it began
		}
		e.n.queries.Add(int64(len(q.r.Tokens)))
		e.n.hits.Add(int64(h.Tokens))
		if len(e.conns) > 0 {
			e.n.asked.Add(int64(len(q.r.Tokens) - h.Tokens))
		}
	}
	e.n.preemptions.Add(int64(len(step.Preempted) + len(step.Reset)))
	var ended []string
	for _, r := range step.Ended {
		ended = append(ended, r.ID)
	}
	for _, c := range e.conns {
		if err := c.settle(step); err != nil && e.ctx.Err() == nil {
			e.log.Error("blocks are still being read", "err", err)
		}
	}
	for _, c := range e.conns {
		if err := c.build(step); err != nil {
			e.log.Error("the connector's step failed", "err", err)
		}
	}
	if len(step.Rows) > 0 {
		e.compute(step)
	} else if all, _ := e.sched.Waits(); all > 0 {
		e.wait(loadPoll)
	} else if len(ended) == 0 {
		e.wait(keptPoll)
	}
	for _, c := range e.conns {
		c.computed(step)
	}
	out := e.poll(ended)
	result := e.sched.Process(out)
	e.events(result.Events)
	e.n.steps.Add(1)
	for _, r := range result.Tokens {
		q := of(r)
		begins := q.first.IsZero()
		q.append(q.next())
		if begins {
			e.n.began(q)
		}
		e.n.generated.Add(1)
	}
	for _, end := range result.Ended {
		var err error
		if end.Reason == sched.Error {
			err = ErrLoad
		}
		e.finish(of(end.Request), end.Reason, err)
	}
}

// compute writes the KV of a step's tokens. Before that it compares the KV with which requests begin.
func (e *Engine) compute(step *sched.Step) {
	began, prompt := time.Now(), 0
	var work costmodel.Work
	for i := range step.Rows {
		row := &step.Rows[i]
		q := of(row.Request)
		work.Add(row.Before, row.Tokens, row.Samples)
		if row.Before < len(q.r.Tokens) {
			prompt += row.Tokens
		}
		if row.Kind != sched.RowRunning {
			q.begun(time.Now())
		}
		if row.Kind != sched.RowRunning || e.sched.Last(row) { // a request's KV is compared at its begin and at its end
			e.inspect(row)
		}
		e.mem.Write(row.Request.Tables(), q.chain, row.Before, row.Before+row.Tokens)
	}
	d := e.o.StepTime
	if e.o.PrefillRate > 0 {
		d += time.Duration(float64(prompt) / e.o.PrefillRate * float64(time.Second))
	}
	if e.o.Clock != nil {
		d += e.o.Clock.Step(work) - time.Since(began) // the writing of bytes above counts as a part of the step
	}
	if d > 0 {
		t := time.NewTimer(d)
		select {
		case <-t.C:
		case <-e.ctx.Done():
			t.Stop()
		}
	}
	for i := range step.Rows {
		if q := of(step.Rows[i].Request); q.wrong != nil && e.by[q.r.ID] == q {
			e.sched.Abort(q.r.ID)
			e.finish(q, sched.Error, q.wrong)
		}
	}
}

// inspect compares all KV that the request of a row has before the step. If it is wrong, no KV of that request is found, sent or stored
// any more.
func (e *Engine) inspect(row *sched.Row) {
	q := of(row.Request)
	err := e.mem.Check(row.Request.Tables(), q.chain, 0, row.Before)
	if err == nil {
		return
	}
	e.n.wrong.Add(1)
	e.log.Error("wrong KV bytes", "request", q.r.ID, "err", err)
	q.wrong = fmt.Errorf("%w: %w", ErrWrongBytes, err)
	e.sched.Forget(row.Request)
}

// finish ends the client's stream of a request, and counts the end. The stream's End has the reason `why`, and err. It does nothing if the
// request has been finished already.
func (e *Engine) finish(q *request, why sched.Reason, err error) {
	if e.by[q.r.ID] != q {
		return
	}
	delete(e.by, q.r.ID)
	if q.stop != nil {
		q.stop()
	}
	e.n.ended(q, why, err)
	q.stream.end(&End{why.String(), err, q.params, q.notComputed()})
}

// poll asks the connectors for the outcome of their transfers.
func (e *Engine) poll(ended []string) (out sched.Output) {
	for _, c := range e.conns {
		o := c.poll(ended)
		for _, id := range o.Sent {
			if e.release(id) {
				out.Sent = append(out.Sent, id)
			}
		}
		out.Arrived = append(out.Arrived, o.Arrived...)
		for _, id := range o.Arrived {
			if q := e.by[id]; q != nil && !q.loading.IsZero() {
				e.n.load.Took(time.Since(q.loading))
				q.loading = time.Time{}
			}
		}
		out.Failed = append(out.Failed, o.Failed...)
		out.Bad = append(out.Bad, o.Bad...)
	}
	for _, id := range out.Failed {
		if q := e.by[id]; q != nil && q.first.IsZero() {
			q.external = 0
		}
	}
	return out
}
