// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/internal/statefile"
)

// refusedError is a registration that conflicts with another: vLLM's text.
type refusedError string

func (e refusedError) Error() string { return string(e) }

// errFull means that the registry is full and the worker's own origin has most of it.
var errFull = errors.New("bootstrap: registry is full")

const (
	// maxDirectoryBytes bounds the answer to GET /query and the sum of all weights. A
	// Client takes as much, and the state file of such a registry is under its limit.
	maxDirectoryBytes = 16 << 20
	// workerBytes is the weight of a worker apart from its texts.
	workerBytes = 256
)

// Registry holds the side channels of P's workers and answers for them: it is an
// http.Handler. Methods are safe for concurrent use.
//
// The directory always shows one incarnation of an engine, and shows it whole as far as
// the Registry can know. It shows an engine that states its sizes when all workers are
// registered; an engine that replaced another when it has all ranks of the other or
// Options.Settle has passed since its last registration; an engine that lost a worker
// (lease ended, unregistered) when that rank registers again.
//
// Origins share the room for workers. In a full registry, a new worker evicts an engine of
// the origin with most weight: the one that has been silent longest.
type Registry struct {
	o       Options
	log     *slog.Logger
	delete  http.Handler // DELETE /register, guarded from web pages
	metrics http.Handler // GET /metrics
	guard   httpserver.Guard
	gate    *auth.Gate
	web     http.Handler // serveHTTP behind the gate
	prober  *prober
	last    atomic.Pointer[directory] // last one encoded
	n       counters

	changed chan struct{} // capacity 1: notifyWaiters has work
	save    chan struct{} // capacity 1: the state file is out of date
	closing chan struct{}
	once    sync.Once

	draining chan struct{} // closed when Serve stops or the registry closes: waiting requests end
	drained  sync.Once

	wg      sync.WaitGroup
	file    *statefile.File // nil without Options.StateFile; owned by the saving goroutine
	waiters peercred.OriginShares

	readTimeout, idleTimeout time.Duration // tests shorten them

	mu struct {
		sync.Mutex
		engines []*engine // in the order in which DP ranks came
		byDP    map[int]*engine
		workers int
		held    map[peercred.Origin]int // weights of workers and of vacant places
		weight  int                     // sum of held
		next    time.Time               // when due fires; zero if never
		due     *time.Timer             // calls sweep
		closed  bool
	}
	version atomic.Uint64 // of all that mu guards; grows with each change, under it
}

// Open loads the state file, if one is named, and starts the registry. Errors
// name the file.
func Open(o Options) (*Registry, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Settle = cmp.Or(o.Settle, 10*time.Second)
	o.ProbeTimeout = cmp.Or(o.ProbeTimeout, 250*time.Millisecond)
	o.MaxProbes = cmp.Or(o.MaxProbes, 64)
	o.MaxWorkers = cmp.Or(o.MaxWorkers, 16384)
	o.MaxWait = cmp.Or(o.MaxWait, time.Minute)
	o.MaxWaiters = cmp.Or(o.MaxWaiters, 1024)
	o.MaxConns = cmp.Or(o.MaxConns, 4096)
	o.Guard = cmp.Or(o.Guard, GuardDelete)
	r := &Registry{
		o: o, log: safelog.New(cmp.Or(o.Log, slog.New(slog.DiscardHandler))), prober: newProber(o.ProbeTimeout, o.MaxProbes, o.ProbeNetworks),
		guard: httpserver.Guard{AllowHosts: o.AllowHosts}, waiters: peercred.OriginShares{Max: o.MaxWaiters},
		readTimeout: readTimeout, idleTimeout: idleTimeout,
		changed: make(chan struct{}, 1), save: make(chan struct{}, 1), closing: make(chan struct{}), draining: make(chan struct{}),
	}
	r.gate = r.newGate()
	r.web = r.gate.Handler(http.HandlerFunc(r.serveHTTP))
	r.delete = r.guard.Handler(http.HandlerFunc(r.unregister))
	if r.metrics = metrics.Of(r.figures); o.Version != "" {
		reg := metrics.New(o.Version)
		metrics.Add(reg, r.figures)
		r.metrics = reg.Handler()
	}
	r.mu.byDP, r.mu.held = map[int]*engine{}, map[peercred.Origin]int{}
	// Generations begin with the time, so that they grow over restarts too.
	gen := uint64(time.Now().UnixMicro())
	var engines []savedEngine
	if o.StateFile != "" {
		file, doc, err := statefile.Open(o.StateFile, stateMagic, maxStateBytes)
		if err != nil {
			return nil, err
		}
		var st savedState
		if err := st.decode(doc); err != nil {
			return nil, errors.Join(&statefile.Error{Path: o.StateFile, Reason: "damaged: " + err.Error()}, file.Close())
		}
		r.file, gen = file, max(gen, st.Generation+1)
		engines = st.Engines
	}
	r.mu.due = time.AfterFunc(time.Hour, r.sweep)
	r.restore(engines)
	r.last.Store(&directory{gen: gen, stale: true, changed: make(chan struct{})})
	r.wg.Go(r.notifyWaiters)
	if r.file != nil {
		r.wg.Go(r.saveLoop)
	}
	return r, nil
}

// Close ends waiting requests, writes the state file a last time and waits for the
// registry's goroutines.
func (r *Registry) Close() error {
	r.drain()
	r.once.Do(func() { close(r.closing) })
	r.mu.Lock()
	r.mu.closed = true
	r.mu.due.Stop()
	r.mu.Unlock()
	r.wg.Wait()
	r.prober.wg.Wait()
	if r.file == nil {
		return nil
	}
	return r.file.Close()
}

func (r *Registry) drain() { r.drained.Do(func() { close(r.draining) }) }

// wake wakes the owner of a channel of capacity 1.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// changedLocked records a change of the registry.
func (r *Registry) changedLocked() {
	r.version.Add(1)
	wake(r.changed)
	wake(r.save)
}

// scheduleLocked makes sweep run at t or before.
func (r *Registry) scheduleLocked(t time.Time) {
	if r.mu.next.IsZero() || t.Before(r.mu.next) {
		r.mu.next = t
		r.mu.due.Reset(max(0, time.Until(t)))
	}
}

// conflict is a registration that the Registry admits only if the old engine is dead.
type conflict struct {
	old     *engine
	detail  string   // vLLM's answer
	workers int      // of the old engine
	changes int      // of the old engine when the probe began
	suspect []worker // workers of it to probe
	reused  bool     // the newcomer has an address of the old engine
}

// register adds or renews a worker. A refusal is a refusedError; errFull means a
// limit.
//
// A worker that conflicts with an engine replaces the whole engine if a side channel of
// it refuses connections. The probe takes up to Options.ProbeTimeout and holds no lock.
func (r *Registry) register(ctx context.Context, in Registration, from peercred.Origin) error {
	for {
		c, err := r.tryRegister(in, from, nil, "")
		if errors.Is(err, errFull) && r.dropDead(ctx, from) {
			continue
		}
		if err != nil || c == nil {
			return err
		}
		if r.o.Strict {
			return r.refuse(in, from, c, "strict")
		}
		gone, why := c.reused, "its address is the newcomer's"
		if !gone {
			gone, why = r.prober.anyDead(ctx, from, c.suspect)
		}
		if !gone {
			return r.refuse(in, from, c, why)
		}
		again, err := r.tryRegister(in, from, c, why)
		if err != nil || again == nil {
			return err
		}
		// Another worker of the new engine registered meanwhile: try with the new state.
		if ctx.Err() != nil {
			return r.refuse(in, from, again, "the request ended")
		}
	}
}

// dropDead probes some engines of from, takes out the first dead one, and reports
// whether there was one.
func (r *Registry) dropDead(ctx context.Context, from peercred.Origin) bool {
	var tried []*conflict
	r.mu.Lock()
	for i, first := 0, mathrand.IntN(max(1, len(r.mu.engines))); i < len(r.mu.engines) && len(tried) < 8; i++ {
		if e := r.mu.engines[(first+i)%len(r.mu.engines)]; e.founder == from {
			tried = append(tried, &conflict{old: e, changes: e.changes, suspect: e.anyWorkers(maxProbesPerEngine)})
		}
	}
	r.mu.Unlock()
	for _, c := range tried {
		gone, why := r.prober.anyDead(ctx, from, c.suspect)
		r.mu.Lock()
		gone = gone && r.mu.byDP[c.old.dp] == c.old && c.old.changes == c.changes
		if gone {
			r.removeLocked(c.old)
		}
		r.mu.Unlock()
		if gone {
			r.n.gaveWay.Add(1)
			r.log.Info("engine gave way: the registry is full", "engine", c.old.id, "dp_rank", c.old.dp, "found", why)
			return true
		}
	}
	return false
}

func (r *Registry) refuse(in Registration, from peercred.Origin, c *conflict, why string) error {
	r.n.refused.Add(1)
	r.log.Warn("registration refused: the old engine stays", "detail", c.detail, "engine", in.EngineID, "addr", in.Addr, "from", from.Addr, "found", why)
	return refusedError(c.detail)
}

// tryRegister registers in, or returns its conflict. dead is a conflict with an engine
// that is dead for the reason why, or nil: in replaces that engine.
func (r *Registry) tryRegister(in Registration, from peercred.Origin, dead *conflict, why string) (*conflict, error) {
	r.mu.Lock()
	out, c, err := r.registerLocked(in, from, dead)
	r.mu.Unlock()
	for _, g := range out.gaveWay {
		r.n.gaveWay.Add(1)
		r.log.Warn("workers gave way: the registry is full and their host has the most", "engine", g.id, "dp_rank", g.dp, "host", g.most.Addr)
	}
	if out.replaced {
		r.n.replaced.Add(1)
		r.log.Info("engine replaced", "engine", dead.old.id, "dp_rank", in.DPRank, "workers", dead.workers, "by", in.EngineID, "found", why)
	}
	switch {
	case out.added:
		r.n.registered.Add(1)
		r.log.Debug("Registered worker: "+fmt.Sprintf("engine_id=%s, dp_rank=%d, tp_rank=%d, pp_rank=%d at %s", in.EngineID, in.DPRank, in.TPRank, in.PPRank, in.Addr), "from", from.Addr)
		if out.shown > 0 {
			r.log.Info("engine registered", "engine", in.EngineID, "dp_rank", in.DPRank, "workers", out.shown, "last_addr", in.Addr)
		}
	case err != nil:
		r.n.refused.Add(1)
		r.log.Warn("registration refused", "err", err, "engine", in.EngineID, "addr", in.Addr, "from", from.Addr)
	case c == nil:
		r.n.repeated.Add(1)
	}
	return c, err
}

// outcome describes what a registration changed.
type outcome struct {
	added    bool // false for a repeat and a refusal
	replaced bool // it replaced an engine
	shown    int  // workers of the engine, if the directory shows it now
	gaveWay  []gone
}

// gone is an engine that lost the workers of one origin, or all of them.
type gone struct {
	*engine
	most peercred.Origin
}

func (r *Registry) registerLocked(in Registration, from peercred.Origin, dead *conflict) (out outcome, _ *conflict, _ error) {
	at := ranks{in.TPRank, in.PPRank}
	now := time.Now()
	e := r.mu.byDP[in.DPRank]
	var c *conflict
	if e != nil {
		if c = e.conflict(in, at, r.o.Strict); c != nil && (dead == nil || e != dead.old || e.changes != dead.changes) {
			return out, c, nil
		}
		if w := e.byRank[at]; w != nil && c == nil { // a repeat
			w.seen, w.lease = now, in.Lease
			r.leaseLocked(w)
			return out, nil, e.adoptSizesLocked(r, in)
		}
		if c == nil {
			if err := e.adoptSizesLocked(r, in); err != nil {
				return out, nil, err
			}
		}
	}
	weight := r.weight(in.EngineID, in.Addr)
	var err error
	if out.gaveWay, err = r.makeRoomLocked(from, weight); err != nil {
		return out, nil, err
	}
	e = r.mu.byDP[in.DPRank] // makeRoomLocked may have evicted it
	switch {
	case e == nil:
		e = newEngine(in.EngineID, in.DPRank, from)
		r.mu.engines = append(r.mu.engines, e)
		r.mu.byDP[in.DPRank] = e
	case c != nil:
		e, out.replaced = r.replaceLocked(e, in.EngineID, from, now), true
	}
	if err := e.adoptSizesLocked(r, in); err != nil { // a new engine takes any sizes
		return out, nil, err
	}
	w := &worker{ranks: at, charge: charge{from, weight}, addr: in.Addr, seen: now, lease: in.Lease}
	r.leaseLocked(w)
	r.releaseLocked(e.missing[at].charge)
	e.add(w)
	if len(e.missing) > 0 && !e.settled.IsZero() {
		e.settled = now.Add(r.o.Settle)
		r.scheduleLocked(e.settled)
	}
	r.mu.held[from] += weight
	r.mu.weight += weight
	r.mu.workers++
	r.changedLocked()
	if ok, _ := e.shown(now, r.o.TP, r.o.PP); ok {
		out.shown = len(e.byRank)
	}
	out.added = true
	return out, nil, nil
}

// leaseLocked starts a worker's lease, if it has one.
func (r *Registry) leaseLocked(w *worker) {
	if w.lease > 0 {
		w.expires = w.seen.Add(w.lease)
		r.scheduleLocked(w.expires)
	}
}

// weight returns a worker's part of maxDirectoryBytes.
func (r *Registry) weight(id, addr string) int {
	return max(workerBytes+len(appendPythonString(nil, id))+len(appendPythonString(nil, addr)), maxDirectoryBytes/r.o.MaxWorkers)
}

// releaseLocked takes back the charge of a worker.
func (r *Registry) releaseLocked(p charge) {
	r.mu.weight -= p.weight
	if r.mu.held[p.from] -= p.weight; r.mu.held[p.from] <= 0 {
		delete(r.mu.held, p.from)
	}
}

// makeRoomLocked evicts engines until a worker of from fits, and returns them. It fails
// when from itself has most.
func (r *Registry) makeRoomLocked(from peercred.Origin, weight int) (list []gone, _ error) {
	for r.mu.weight+weight > maxDirectoryBytes {
		most := peercred.LargestOrigin(r.mu.held, from, weight)
		if most == from {
			return list, fmt.Errorf("%w: %d workers", errFull, r.mu.workers)
		}
		list = append(list, gone{r.giveWayLocked(most), most})
	}
	return list, nil
}

// giveWayLocked evicts the engine of o that has been silent longest. If o has only
// workers in engines of others, it evicts those in one such engine.
func (r *Registry) giveWayLocked(o peercred.Origin) *engine {
	var found *engine
	for _, e := range r.mu.engines {
		if e.founder == o && (found == nil || e.seen().Before(found.seen())) {
			found = e
		}
	}
	if found != nil {
		r.removeLocked(found)
		return found
	}
	for _, e := range r.mu.engines {
		before := r.mu.weight
		for at, v := range e.missing {
			if v.from == o {
				r.releaseLocked(v.charge)
				delete(e.missing, at)
			}
		}
		for at, w := range e.byRank {
			if w.from == o {
				r.dropLocked(e, at, true)
			}
		}
		if r.mu.weight < before {
			r.changedLocked()
			return e
		}
	}
	panic("BUG: bootstrap: places that no engine has")
}

// removeLocked takes an engine out, with all its charges.
func (r *Registry) removeLocked(e *engine) {
	for _, v := range e.missing {
		r.releaseLocked(v.charge)
	}
	for _, w := range e.byRank {
		r.releaseLocked(w.charge)
	}
	r.mu.workers -= len(e.byRank)
	delete(r.mu.byDP, e.dp)
	r.mu.engines = slices.DeleteFunc(r.mu.engines, func(x *engine) bool { return x == e })
	r.changedLocked()
}

// adoptSizesLocked adopts the sizes that a worker states. Workers of one engine must
// agree.
func (e *engine) adoptSizesLocked(r *Registry, in Registration) error {
	clash := func(what string, old, now int) error {
		return refusedError(fmt.Sprintf("%s mismatch for engine %s of dp_rank=%d: expected %d, got %d", what, e.id, e.dp, old, now))
	}
	switch {
	case in.TPSize > 0 && e.tpSize > 0 && in.TPSize != e.tpSize:
		return clash("tp_size", e.tpSize, in.TPSize)
	case in.PPSize > 0 && e.ppSize > 0 && in.PPSize != e.ppSize:
		return clash("pp_size", e.ppSize, in.PPSize)
	}
	if tp, pp := max(e.tpSize, in.TPSize), max(e.ppSize, in.PPSize); tp != e.tpSize || pp != e.ppSize {
		e.tpSize, e.ppSize = tp, pp
		r.changedLocked()
	}
	return nil
}

// conflict returns why vLLM's server would refuse in, or nil. The engine is
// compared before the address. Only the first releases refuse a repeat.
func (e *engine) conflict(in Registration, at ranks, repeats bool) *conflict {
	c := &conflict{old: e, workers: len(e.byRank), changes: e.changes}
	switch w := e.byRank[at]; {
	case e.id != in.EngineID:
		c.detail = fmt.Sprintf("Engine ID mismatch for dp_rank=%d: expected %s, got %s", in.DPRank, e.id, in.EngineID)
	case w != nil && (repeats || w.addr != in.Addr):
		c.detail = fmt.Sprintf("Worker with dp_rank=%d, tp_rank=%d, pp_rank=%d is already registered at %s, but still want to register at %s",
			in.DPRank, in.TPRank, in.PPRank, w.addr, in.Addr)
	default:
		return nil
	}
	if w := e.byRank[at]; w != nil {
		c.suspect = append(c.suspect, *w) // the one of the same rank first
	}
	for _, row := range e.rows {
		for _, w := range row.workers {
			if w.ranks != at && len(c.suspect) < maxProbesPerEngine {
				c.suspect = append(c.suspect, *w)
			}
			c.reused = c.reused || (w.addr == in.Addr && e.id != in.EngineID)
		}
	}
	return c
}

// replaceLocked replaces e with a successor.
func (r *Registry) replaceLocked(e *engine, id string, from peercred.Origin, now time.Time) *engine {
	next := e.successor(id, from, now.Add(r.o.Settle))
	r.scheduleLocked(next.settled)
	r.mu.workers -= len(e.byRank)
	r.mu.byDP[e.dp] = next
	r.mu.engines[slices.Index(r.mu.engines, e)] = next
	r.changedLocked()
	return next
}

// dropLocked takes a worker out, and its engine with the last one. Unless forget is set,
// the directory does not show the engine before that rank registers again.
func (r *Registry) dropLocked(e *engine, at ranks, forget bool) {
	if len(e.byRank) == 1 {
		r.removeLocked(e)
		return
	}
	if forget {
		r.releaseLocked(e.byRank[at].charge)
	}
	e.remove(at, forget)
	r.mu.workers--
	r.changedLocked()
}

// unregisterMatching takes out the matching workers of an engine and returns their
// number; nil ranks match all. The directory does not show the rest of the engine before
// they register again.
func (r *Registry) unregisterMatching(engineID string, dp, tp, pp *int) (gone int) {
	match := func(want *int, have int) bool { return want == nil || *want == have }
	r.mu.Lock()
	for _, e := range slices.Clone(r.mu.engines) {
		if e.id != engineID || !match(dp, e.dp) {
			continue
		}
		for at := range e.byRank {
			if match(tp, at.tp) && match(pp, at.pp) {
				r.dropLocked(e, at, false)
				gone++
			}
		}
	}
	r.mu.Unlock()
	r.n.unregistered.Add(uint64(gone))
	if gone > 0 {
		r.log.Info("unregistered", "engine", engineID, "workers", gone)
	}
	return gone
}

// sweep ends leases that have passed and settles engines whose time has come.
func (r *Registry) sweep() {
	ended, settled := 0, 0
	r.mu.Lock()
	r.mu.next = time.Time{}
	now := time.Now()
	for _, e := range slices.Clone(r.mu.engines) {
		if r.mu.closed {
			break
		}
		for at, w := range e.byRank {
			switch {
			case w.lease == 0:
			case now.Before(w.expires):
				r.scheduleLocked(w.expires)
			default:
				r.dropLocked(e, at, false)
				ended++
			}
		}
		switch {
		case r.mu.byDP[e.dp] != e: // dropLocked removed the engine with its last worker
		case len(e.missing) == 0 || e.settled.IsZero():
		case now.Before(e.settled):
			r.scheduleLocked(e.settled)
		default:
			for at, v := range e.missing {
				if !v.own {
					r.releaseLocked(v.charge)
					delete(e.missing, at)
					settled++
				}
			}
			e.settled = time.Time{}
			r.changedLocked()
		}
	}
	r.mu.Unlock()
	r.n.expired.Add(uint64(ended))
	if ended > 0 {
		r.log.Info("leases ended", "workers", ended)
	}
	if settled > 0 {
		r.log.Info("engines with fewer ranks than those that they replaced are shown", "workers_fewer", settled)
	}
}
