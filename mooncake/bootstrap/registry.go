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

// refusedError refuses a registration that conflicts with another one. Its text is vLLM's.
type refusedError string

func (e refusedError) Error() string { return string(e) }

// errFull means that the registry is full and that the origin of the new worker itself holds the most of it.
var errFull = errors.New("bootstrap: registry is full")

const (
	// maxDirectoryBytes bounds the answer to GET /query and the sum of all weights. A Client accepts an answer of that size, and the
	// state file of such a registry stays below its own limit.
	maxDirectoryBytes = 16 << 20
	// workerBytes is the weight of a worker without its texts.
	workerBytes = 256
)

// Registry holds the side-channel addresses of P's workers and is the http.Handler that answers the queries for them. Its methods are
// safe for concurrent use.
//
// The directory shows one incarnation of an engine, never two, and shows it complete as far as the Registry can know. It shows an
// engine that states its sizes once all workers are registered. It shows an engine that replaced another one once it has all ranks of
// that one, or Options.Settle has passed since its last registration. It shows an engine that lost a worker (lease ended, or
// unregistered) once that rank has registered again.
//
// Origins share the room for workers. In a full registry, a new worker evicts an engine of the origin with the most weight: the engine
// whose last registration is oldest.
type Registry struct {
	o       Options
	log     *slog.Logger
	delete  http.Handler // DELETE /register, guarded from web pages
	metrics http.Handler // GET /metrics
	guard   httpserver.Guard
	gate    *auth.Gate
	web     http.Handler // serveHTTP, behind the gate
	prober  *prober
	last    atomic.Pointer[directory] // the directory that was encoded last
	n       counters

	changed chan struct{} // capacity 1; a value means that notifyWaiters has work
	save    chan struct{} // capacity 1; a value means that the state file is out of date
	closing chan struct{}
	once    sync.Once

	draining chan struct{} // closed when Serve stops or the registry closes; then waiting requests end
	drained  sync.Once

	wg      sync.WaitGroup
	file    *statefile.File // nil without Options.StateFile; owned by the saving goroutine
	waiters peercred.OriginShares

	readTimeout, idleTimeout time.Duration // tests shorten them

	mu struct {
		sync.Mutex
		engines []*engine // in the order in which DP ranks registered
		byDP    map[int]*engine
		workers int
		held    map[peercred.Origin]int // weight of workers and of vacant places, by origin
		weight  int                     // sum of held
		next    time.Time               // when the timer due fires; zero if never
		due     *time.Timer             // calls sweep
		closed  bool
	}
	version atomic.Uint64 // version of all that mu guards; each change under mu increments it
}

// Open loads the state file, if Options name one, and starts the registry. Errors about the file name it.
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
	// Generations begin with the current time, so that they grow over restarts, too.
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

// Close ends the waiting requests, writes the state file a last time, and waits for the registry's goroutines.
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

// wake puts a value into c, a channel of capacity 1, unless it has one. The goroutine that reads c then wakes.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// changedLocked must be called after each change of the registry: it wakes the goroutines that notify waiters and save the state.
func (r *Registry) changedLocked() {
	r.version.Add(1)
	wake(r.changed)
	wake(r.save)
}

// scheduleLocked makes sweep run at the time t or before.
func (r *Registry) scheduleLocked(t time.Time) {
	if r.mu.next.IsZero() || t.Before(r.mu.next) {
		r.mu.next = t
		r.mu.due.Reset(max(0, time.Until(t)))
	}
}

// conflict is a registration that the Registry accepts only if the engine registered before is dead.
type conflict struct {
	old     *engine
	detail  string   // text of vLLM's refusal
	workers int      // of the old engine
	changes int      // of the old engine when the probe began
	suspect []worker // workers of the old engine to probe
	reused  bool     // the new worker has an address of the old engine
}

// register adds a worker, or renews its registration. The error is a refusedError if the registration conflicts with another one, and
// errFull if the registry is full.
//
// If a side channel of the engine with which the new worker conflicts refuses connections, or the new worker has the address of one, the
// worker replaces that whole engine, unless Options.Strict is set. The probe takes up to Options.ProbeTimeout and holds no lock.
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
		// Another worker of the new engine has registered meanwhile: try again with the new state.
		if ctx.Err() != nil {
			return r.refuse(in, from, again, "the request ended")
		}
	}
}

// dropDead probes some engines of the origin `from`, removes the first one that is dead, and reports whether it removed one.
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

// tryRegister registers `in`, which the origin `from` sent, or returns its conflict with another engine. A non-nil dead is a conflict whose
// old engine was found dead; why is a text that says how, for the log. Then `in` replaces that engine.
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
	added    bool // false for a repeated and for a refused registration
	replaced bool // the new worker's engine replaced another one
	shown    int  // number of workers of the engine, if the directory shows the engine now
	gaveWay  []gone
}

// gone is an engine that lost workers to make room: all of them, or only those of the origin `most`, which held the most weight.
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
		if w := e.byRank[at]; w != nil && c == nil { // a repeated registration
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

// leaseLocked starts the worker's lease anew, if the worker has one.
func (r *Registry) leaseLocked(w *worker) {
	if w.lease > 0 {
		w.expires = w.seen.Add(w.lease)
		r.scheduleLocked(w.expires)
	}
}

// weight returns how much of maxDirectoryBytes a worker takes.
func (r *Registry) weight(id, addr string) int {
	return max(workerBytes+len(appendPythonString(nil, id))+len(appendPythonString(nil, addr)), maxDirectoryBytes/r.o.MaxWorkers)
}

// releaseLocked subtracts a worker's charge from the sums.
func (r *Registry) releaseLocked(p charge) {
	r.mu.weight -= p.weight
	if r.mu.held[p.from] -= p.weight; r.mu.held[p.from] <= 0 {
		delete(r.mu.held, p.from)
	}
}

// makeRoomLocked evicts engines until a worker of the origin `from` with that weight fits. It returns the evicted engines. It fails
// with errFull when `from` itself holds the most.
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

// giveWayLocked evicts the engine founded by o whose last registration is oldest. If o founded none, it evicts o's workers in one
// engine of another origin. It returns that engine.
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

// removeLocked removes an engine with all its workers and charges.
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

// adoptSizesLocked records in e the sizes that the worker `in` states. Workers of one engine must state equal sizes.
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

// conflict returns the reason for which vLLM's server would refuse the registration `in` of a worker with the ranks `at`, or nil. It
// compares the engine id before the address. If `repeats` is true, a repeated registration is a conflict too, as in vLLM's first releases.
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
		c.suspect = append(c.suspect, *w) // first, the worker of the same rank
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

// replaceLocked replaces e with a new engine of that id, which the origin `from` registered, and returns the new engine. All workers of e
// are removed.
func (r *Registry) replaceLocked(e *engine, id string, from peercred.Origin, now time.Time) *engine {
	next := e.successor(id, from, now.Add(r.o.Settle))
	r.scheduleLocked(next.settled)
	r.mu.workers -= len(e.byRank)
	r.mu.byDP[e.dp] = next
	r.mu.engines[slices.Index(r.mu.engines, e)] = next
	r.changedLocked()
	return next
}

// dropLocked removes the worker with the ranks `at`, and with the last worker its engine. Unless `forget` is true, the directory hides the
// engine until that rank has registered again.
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

// unregisterMatching removes the matching workers of an engine and returns their number; a nil rank matches all. The directory hides
// the rest of the engine until the removed workers have registered again.
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
		r.log.Info("workers unregistered", "engine", engineID, "workers", gone)
	}
	return gone
}

// sweep removes workers whose lease has ended, and settles engines whose settle time has passed.
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
