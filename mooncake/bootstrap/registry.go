package bootstrap

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Options configures a Registry. A zero field means its default.
type Options struct {
	Strict       bool          // vLLM's rule: never replace what is registered
	TP, PP       int           // sizes of engines that do not state theirs; default unknown
	Settle       time.Duration // after a replacement, until a narrower engine is shown; default 10 s
	ProbeTimeout time.Duration // default 250 ms, at most 5 s
	MaxProbes    int           // at a time; default 64
	MaxWorkers   int           // registered at a time; default 16,384
	MaxWait      time.Duration // longest ?wait=; default 60 s
	MaxWaiters   int           // requests that wait at a time; default 1,024
	MaxConns     int           // connections of Serve; default 4,096
	StateFile    string        // keeps the registry over restarts; default none
	Token        string        // bearer token; default none
	Guard        Guard         // what the token guards
	Logger       *slog.Logger  // default slog.Default()
}

// RefusedError is a registration that conflicts with another. Its text is vLLM's.
type RefusedError struct{ Detail string }

func (e *RefusedError) Error() string { return e.Detail }

// ErrFull means that Options.MaxWorkers are registered.
var ErrFull = errors.New("bootstrap: registry is full")

// Registry holds the side channels of P's workers and answers for them: it is an
// http.Handler. Methods are safe for concurrent use.
//
// What the directory shows is always one incarnation of an engine, and whole as
// far as that can be known: an engine whose workers state its sizes is shown when
// all are there; one that replaced another when it is as wide as the other or
// Options.Settle has passed since its last registration; one that lost a worker
// (lease ended, unregistered) when that rank is back.
type Registry struct {
	o     Options
	log   *slog.Logger
	ask   *prober
	body  atomic.Pointer[directory] // last one encoded
	ready atomic.Pointer[response]  // the same as a whole answer
	n     counters

	changed chan struct{} // capacity 1: a change that waiters should hear of
	rearm   chan struct{} // capacity 1: the next deadline came nearer
	save    chan struct{} // capacity 1: the state file is out of date
	closing chan struct{}
	once    sync.Once

	draining chan struct{} // closed when Serve stops: nobody waits any more
	drained  sync.Once

	wg      sync.WaitGroup
	file    *stateFile // nil without Options.StateFile; owned by the saving goroutine
	waiters atomic.Int64

	instance string // random, to be told apart from other servers

	readTimeout, idleTimeout time.Duration // tests shorten them

	mu struct {
		sync.Mutex
		engines []*engine // in the order in which DP ranks came
		byDP    map[int]*engine
		workers int
		version uint64    // of everything above; grows with each change
		next    time.Time // deadline that the timer waits for
	}
	version atomic.Uint64 // copy of mu.version, read without the lock
}

// Open loads the state file, if one is named, and starts the registry. Errors
// name the file.
func Open(o Options) (*Registry, error) {
	o.Settle = cmp.Or(o.Settle, 10*time.Second)
	o.ProbeTimeout = min(cmp.Or(o.ProbeTimeout, 250*time.Millisecond), 5*time.Second) // an answer has 10 s
	o.MaxProbes = cmp.Or(o.MaxProbes, 64)
	o.MaxWorkers = cmp.Or(o.MaxWorkers, 16384)
	o.MaxWait = cmp.Or(o.MaxWait, time.Minute)
	o.MaxWaiters = cmp.Or(o.MaxWaiters, 1024)
	o.MaxConns = cmp.Or(o.MaxConns, 4096)
	o.Guard = cmp.Or(o.Guard, GuardDelete)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	r := &Registry{
		o: o, log: o.Logger, ask: newProber(o.ProbeTimeout, o.MaxProbes),
		instance: rand.Text(), readTimeout: readTimeout, idleTimeout: idleTimeout,
		changed: make(chan struct{}, 1), rearm: make(chan struct{}, 1), save: make(chan struct{}, 1), closing: make(chan struct{}), draining: make(chan struct{}),
	}
	r.mu.byDP = map[int]*engine{}
	// Generations begin with the time, so that they grow over restarts too.
	gen := uint64(time.Now().UnixMicro())
	if o.StateFile != "" {
		file, engines, saved, err := openState(o.StateFile, o.MaxWorkers)
		if err != nil {
			return nil, err
		}
		r.file, gen = file, max(gen, saved+1)
		r.restore(engines)
	}
	r.body.Store(&directory{gen: gen, stale: true, changed: make(chan struct{})})
	r.wg.Go(r.tell)
	r.wg.Go(r.expire)
	if r.file != nil {
		r.wg.Go(r.keep)
	}
	return r, nil
}

// Close ends waiting requests, writes the state file a last time and returns
// when nothing of the registry runs any more.
func (r *Registry) Close() error {
	r.once.Do(func() { close(r.closing) })
	r.wg.Wait()
	r.ask.close()
	if r.file == nil {
		return nil
	}
	return r.file.close()
}

// kick wakes the owner of a channel of capacity 1.
func kick(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// touchLocked notes a change of the registry.
func (r *Registry) touchLocked() {
	r.mu.version++
	r.version.Store(r.mu.version)
	kick(r.changed)
	kick(r.save)
}

// dueLocked makes sure that something happens at t.
func (r *Registry) dueLocked(t time.Time) {
	if r.mu.next.IsZero() || t.Before(r.mu.next) {
		r.mu.next = t
		kick(r.rearm)
	}
}

// conflict is a registration that only a proof of death can admit.
type conflict struct {
	old     *engine
	detail  string   // vLLM's answer
	workers int      // of the old engine
	changes int      // of the old engine: what a probe finds holds for this state
	suspect []worker // some of them, whose side channels can be tried
	reused  bool     // the newcomer has an address of the old engine
}

// Register adds or renews a worker. remote says that the request came from
// another host. A refusal is a *RefusedError; ErrFull means a limit.
//
// A worker that conflicts with an engine whose side channel refuses connections
// replaces that engine, all of it. Finding that out takes up to
// Options.ProbeTimeout and holds up nobody else.
func (r *Registry) Register(ctx context.Context, in Registration, remote bool) error {
	for {
		c, err := r.tryRegister(in, remote, nil, "")
		if err != nil || c == nil {
			return err
		}
		if r.o.Strict {
			return r.refuse(in, c, "strict")
		}
		gone, why := c.reused, "its address is the newcomer's"
		if !gone {
			gone, why = r.ask.anyGone(ctx, c.suspect)
		}
		if !gone {
			return r.refuse(in, c, why)
		}
		again, err := r.tryRegister(in, remote, c, why)
		if err != nil || again == nil {
			return err
		}
		// Another worker of the new engine was faster: look at the new state.
		if ctx.Err() != nil {
			return r.refuse(in, again, "the request ended")
		}
	}
}

func (r *Registry) refuse(in Registration, c *conflict, why string) error {
	r.n.refused.Add(1)
	r.log.Warn(fmt.Sprintf("refused: %s (registrant: engine %q at %s; the old one stays: %s)", c.detail, in.EngineID, in.Addr, why))
	return &RefusedError{c.detail}
}

// tryRegister registers in, or says what it conflicts with. When that is dead,
// an engine that was found to be gone for the reason why, it is replaced instead.
func (r *Registry) tryRegister(in Registration, remote bool, dead *conflict, why string) (*conflict, error) {
	r.mu.Lock()
	did, c, err := r.registerLocked(in, remote, dead)
	r.mu.Unlock()
	if did == didReplace {
		r.n.replaced.Add(1)
		r.log.Info(fmt.Sprintf("replaced engine %q of dp_rank %d, %d workers: %s", dead.old.id, in.DPRank, dead.workers, why))
	}
	switch {
	case did != didNothing:
		r.n.registered.Add(1)
		r.log.Info(fmt.Sprintf("registered engine %q dp_rank %d tp_rank %d pp_rank %d at %s", in.EngineID, in.DPRank, in.TPRank, in.PPRank, in.Addr))
	case err != nil:
		r.n.refused.Add(1)
		r.log.Warn(fmt.Sprintf("refused: %v (registrant: engine %q at %s)", err, in.EngineID, in.Addr))
	case c == nil:
		r.n.repeated.Add(1)
	}
	return c, err
}

type deed uint8

const (
	didNothing deed = iota // a repeat, a refusal
	didAdd
	didReplace // and add
)

func (r *Registry) registerLocked(in Registration, remote bool, dead *conflict) (did deed, _ *conflict, _ error) {
	at := ranks{in.TPRank, in.PPRank}
	now := time.Now()
	e := r.mu.byDP[in.DPRank]
	if e != nil {
		c := e.conflict(in, at)
		switch {
		case c != nil && (dead == nil || e != dead.old || e.changes != dead.changes):
			return didNothing, c, nil
		case c != nil:
			e, did = r.replaceLocked(e, in.EngineID, now), didReplace
		}
	}
	if e != nil {
		if w := e.byRank[at]; w != nil { // the same once more
			if w.lease = in.Lease; w.lease > 0 {
				w.expires = now.Add(w.lease)
				r.dueLocked(w.expires)
			}
			return didNothing, nil, e.stateLocked(r, in)
		}
	}
	if r.mu.workers >= r.o.MaxWorkers {
		return didNothing, nil, fmt.Errorf("%w: %d workers", ErrFull, r.mu.workers)
	}
	if e == nil {
		e = newEngine(in.EngineID, in.DPRank)
		r.mu.engines = append(r.mu.engines, e)
		r.mu.byDP[in.DPRank] = e
	}
	if err := e.stateLocked(r, in); err != nil {
		return didNothing, nil, err
	}
	w := &worker{ranks: at, addr: in.Addr, remote: remote, lease: in.Lease}
	if w.lease > 0 {
		w.expires = now.Add(w.lease)
		r.dueLocked(w.expires)
	}
	if len(e.missing) > 0 && !e.settled.IsZero() {
		e.settled = now.Add(r.o.Settle)
		r.dueLocked(e.settled)
	}
	e.add(w)
	r.mu.workers++
	r.touchLocked()
	return max(did, didAdd), nil, nil
}

// stateLocked takes over the sizes that a worker states. Workers of one engine
// must agree.
func (e *engine) stateLocked(r *Registry, in Registration) error {
	clash := func(what string, old, now int) error {
		return &RefusedError{fmt.Sprintf("%s mismatch for engine %s of dp_rank=%d: expected %d, got %d", what, e.id, e.dp, old, now)}
	}
	switch {
	case in.TPSize > 0 && e.tpSize > 0 && in.TPSize != e.tpSize:
		return clash("tp_size", e.tpSize, in.TPSize)
	case in.PPSize > 0 && e.ppSize > 0 && in.PPSize != e.ppSize:
		return clash("pp_size", e.ppSize, in.PPSize)
	}
	if tp, pp := max(e.tpSize, in.TPSize), max(e.ppSize, in.PPSize); tp != e.tpSize || pp != e.ppSize {
		e.tpSize, e.ppSize = tp, pp
		r.touchLocked()
	}
	return nil
}

// conflict returns why vLLM's server would refuse in, or nil. The engine is
// compared before the address.
func (e *engine) conflict(in Registration, at ranks) *conflict {
	c := &conflict{old: e, workers: len(e.byRank), changes: e.changes}
	switch w := e.byRank[at]; {
	case e.id != in.EngineID:
		c.detail = fmt.Sprintf("Engine ID mismatch for dp_rank=%d: expected %s, got %s", in.DPRank, e.id, in.EngineID)
	case w != nil && w.addr != in.Addr:
		c.detail = fmt.Sprintf("Worker with dp_rank=%d, tp_rank=%d, pp_rank=%d is already registered at %s, but still want to register at %s",
			in.DPRank, in.TPRank, in.PPRank, w.addr, in.Addr)
	default:
		return nil
	}
	if w := e.byRank[at]; w != nil {
		c.suspect = append(c.suspect, *w) // the one in the same place first
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

// replaceLocked puts a successor in e's place.
func (r *Registry) replaceLocked(e *engine, id string, now time.Time) *engine {
	next := e.successor(id, now.Add(r.o.Settle))
	r.dueLocked(next.settled)
	r.mu.workers -= len(e.byRank)
	r.mu.byDP[e.dp] = next
	r.mu.engines[slices.Index(r.mu.engines, e)] = next
	r.touchLocked()
	return next
}

// dropLocked takes a worker out, and its engine with the last one.
func (r *Registry) dropLocked(e *engine, at ranks) {
	e.remove(at)
	r.mu.workers--
	if len(e.byRank) == 0 {
		delete(r.mu.byDP, e.dp)
		r.mu.engines = slices.DeleteFunc(r.mu.engines, func(x *engine) bool { return x == e })
	}
	r.touchLocked()
}

// Unregister takes back the workers of an engine that match: nil ranks match
// all. It returns how many there were. Until all of them are back the directory
// does not show what is left of the engine.
func (r *Registry) Unregister(engineID string, dp, tp, pp *int) int {
	match := func(want *int, have int) bool { return want == nil || *want == have }
	var gone []string
	r.mu.Lock()
	for _, e := range slices.Clone(r.mu.engines) {
		if e.id != engineID || !match(dp, e.dp) {
			continue
		}
		for at, w := range e.byRank {
			if match(tp, at.tp) && match(pp, at.pp) {
				gone = append(gone, fmt.Sprintf("dp_rank %d tp_rank %d pp_rank %d at %s", e.dp, at.tp, at.pp, w.addr))
				r.dropLocked(e, at)
			}
		}
	}
	r.mu.Unlock()
	for _, g := range gone {
		r.log.Info(fmt.Sprintf("unregistered engine %q %s", engineID, g))
	}
	r.n.unregistered.Add(uint64(len(gone)))
	return len(gone)
}

// expire ends leases and shows engines that have settled, when their time comes.
func (r *Registry) expire() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-r.closing:
			return
		case <-r.rearm:
		case <-timer.C:
			r.sweep(time.Now())
		}
		r.mu.Lock()
		wait := time.Hour
		if !r.mu.next.IsZero() {
			wait = max(0, time.Until(r.mu.next))
		}
		r.mu.Unlock()
		timer.Reset(wait)
	}
}

// sweep does what is due now and finds the next deadline.
func (r *Registry) sweep(now time.Time) {
	var lines []string
	r.mu.Lock()
	r.mu.next = time.Time{}
	for _, e := range slices.Clone(r.mu.engines) {
		for at, w := range e.byRank {
			switch {
			case w.lease == 0:
			case now.Before(w.expires):
				r.dueLocked(w.expires)
			default:
				lines = append(lines, fmt.Sprintf("lease of %v ended: engine %q dp_rank %d tp_rank %d pp_rank %d at %s", w.lease, e.id, e.dp, at.tp, at.pp, w.addr))
				r.dropLocked(e, at)
				r.n.expired.Add(1)
			}
		}
		switch {
		case len(e.missing) == 0 || e.settled.IsZero():
		case now.Before(e.settled):
			r.dueLocked(e.settled)
		default:
			missing := len(e.missing)
			for at, own := range e.missing {
				if !own {
					delete(e.missing, at)
				}
			}
			if missing != len(e.missing) {
				lines = append(lines, fmt.Sprintf("engine %q of dp_rank %d is shown with %d TP ranks; the engine that it replaced had more", e.id, e.dp, len(e.rows)))
			}
			e.settled = time.Time{}
			r.touchLocked()
		}
	}
	r.mu.Unlock()
	for _, l := range lines {
		r.log.Info(l)
	}
}
