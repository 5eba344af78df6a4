// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// engine is one P engine, as the relay shows it to D. Each of its workers has a side channel of the relay, whose address does not
// change while the relay runs.
type engine struct {
	r     *Relay // immutable, like the ids
	id    string // P's engine id
	shown string // engine id that D sees

	// Guarded by Relay.mu.
	now      bootstrap.Engine // P's workers, as registered
	life     int64            // incremented when P may be another process
	gone     time.Time        // when P left its registry; zero while it is registered
	channels map[workerRank]*channel
	watches  map[string]*watch // by address of P's worker
	closed   bool
}

// watch is a connection to a worker of P. As long as it stands, the process that accepted it lives.
type watch struct {
	dealer *zmtp.Dealer
	up     bool // guarded by Relay.mu
}

// workerRank is a worker's rank.
type workerRank struct{ tp, pp int }

// channel is the side channel of the relay at which D pulls what one worker of P has.
type channel struct {
	e      *engine
	at     workerRank
	router *zmtp.Router
	addr   string
}

const (
	maxGone = 64               // most engines that have left P's registry and keep their side channels; those of others are closed
	goneFor = 10 * time.Minute // how long such engines keep the side channels

	answerWithin = 5 * time.Second // limit for the answer with which a worker proves that its process lives
)

// refreshLoop queries P's registry regularly until the relay closes.
func (r *Relay) refreshLoop() {
	t := time.NewTicker(max(r.o.RefreshEvery, 100*time.Millisecond))
	defer t.Stop()
	for {
		_, _ = r.directory(r.ctx) // directory logs its error
		r.mu.Lock()
		r.forgetRequestsLocked()
		r.mu.Unlock()
		select {
		case <-t.C:
		case <-r.ctx.Done():
			return
		}
	}
}

// directory returns the directory that lists the relay's engines for D. It is at most RefreshEvery older than the call.
func (r *Relay) directory(ctx context.Context) ([]byte, error) {
	called := time.Now()
	ctx, cancel := context.WithTimeout(ctx, r.o.RefreshTimeout)
	defer cancel()
	select {
	case r.refresh <- struct{}{}:
		defer func() { <-r.refresh }()
	case <-ctx.Done():
		return nil, fmt.Errorf("relay: ask %s: %w", r.o.Upstream, ctx.Err())
	}
	r.mu.Lock()
	text, fresh := r.mu.text, called.Sub(r.mu.asked) < r.o.RefreshEvery
	r.mu.Unlock()
	if fresh {
		return text, nil
	}
	asked := time.Now()
	d, err := r.up.Query(ctx)
	if err == nil {
		text, err = r.updateDirectory(d, asked)
	}
	r.mu.Lock()
	changed := r.mu.failing != (err != nil)
	r.mu.failing = err != nil
	r.mu.Unlock()
	switch {
	case r.ctx.Err() != nil:
	case changed && err != nil:
		r.log.Warn("relay: P's bootstrap server does not answer", "upstream", r.o.Upstream, "err", err)
	case changed:
		r.log.Info("relay: P's bootstrap server answers again", "upstream", r.o.Upstream)
	}
	if err != nil {
		return nil, fmt.Errorf("relay: P's bootstrap server: %w", err)
	}
	return text, nil
}

// lastDirectory returns the directory as of the last answer of P's registry. If that directory has no engine, it returns the error
// `failed`.
func (r *Relay) lastDirectory(failed error) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.text) <= len("{}") {
		return nil, failed
	}
	return r.mu.text, nil
}

// updateDirectory takes over what P's registry lists in d, and returns the directory for D. asked is when the registry was asked. The
// caller must hold the refresh token.
func (r *Relay) updateDirectory(d bootstrap.Directory, asked time.Time) ([]byte, error) {
	type entry struct {
		EngineID   string                 `json:"engine_id"`
		WorkerAddr map[int]map[int]string `json:"worker_addr"`
	}
	out := make(map[int]entry, len(d))
	alive := make(map[string]bool, len(d))
	for dp, now := range d {
		e, workers, err := r.showEngine(now)
		if err != nil {
			return nil, err
		}
		alive[now.ID] = true
		out[dp] = entry{e.shown, workers}
	}
	text, err := json.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("relay: encode the directory of engines: %w", err)
	}
	r.mu.Lock()
	r.mu.asked, r.mu.text = asked, text
	var old []*engine
	var logs []func()
	for id, e := range r.mu.engines {
		if alive[id] {
			continue
		}
		if e.gone.IsZero() {
			e.gone = time.Now()
			logs = append(logs, r.endLifeLocked(e, "it left the registry"))
			for addr, w := range e.watches {
				delete(e.watches, addr)
				r.wg.Go(func() { _ = w.dealer.Close() })
			}
		}
		old = append(old, e)
	}
	left := len(old)
	var closing []*engine
	for _, e := range old {
		if left > maxGone || time.Since(e.gone) > goneFor && !r.o.KeepAcrossRestarts {
			left--
			delete(r.mu.engines, e.id)
			closing = append(closing, e)
		}
	}
	r.mu.Unlock()
	for _, log := range logs {
		log()
	}
	for _, e := range closing {
		e.close()
	}
	return text, nil
}

// showEngine finds or creates the relay's engine for the P engine `now`, as P's registry lists it at this moment, and a side channel of the
// relay for each of its workers. It returns the addresses of these side channels by TP and PP rank. If a worker of P has moved or left, a
// new life of P begins.
func (r *Relay) showEngine(now bootstrap.Engine) (*engine, map[int]map[int]string, error) {
	r.mu.Lock()
	e, closed := r.mu.engines[now.ID], r.mu.closed
	if closed {
		r.mu.Unlock()
		return nil, nil, errClosed
	}
	if e == nil {
		e = &engine{r: r, id: now.ID, shown: "relay-" + now.ID, channels: make(map[workerRank]*channel), watches: make(map[string]*watch)}
		r.mu.engines[now.ID] = e
		r.log.Info("relay: an engine of P is served", "engine", e.id, "tp", now.TPSize(), "relayed_as", e.shown)
	}
	e.gone = time.Time{}
	addrs := make(map[string]bool)
	for _, stages := range now.Workers {
		for _, addr := range stages {
			addrs[addr] = true
		}
	}
	if moved(e.now, now) {
		defer r.endLifeLocked(e, "a worker moved or left")()
	}
	e.now = now
	for addr := range addrs {
		if e.watches[addr] == nil {
			e.watches[addr] = r.watchLocked(e, addr)
		}
	}
	for addr, w := range e.watches {
		if !addrs[addr] {
			delete(e.watches, addr)
			r.wg.Go(func() { _ = w.dealer.Close() })
		}
	}
	r.mu.Unlock()

	workers := make(map[int]map[int]string, len(now.Workers))
	for tp, stages := range now.Workers {
		workers[tp] = make(map[int]string, len(stages))
		for pp := range stages {
			c, err := e.channel(workerRank{tp, pp})
			if err != nil {
				return nil, nil, err
			}
			workers[tp][pp] = c.addr
		}
	}
	return e, workers, nil
}

// moved reports whether a worker of `before` is gone in `now`, or has another address.
func moved(before, now bootstrap.Engine) bool {
	for tp, stages := range before.Workers {
		for pp, addr := range stages {
			if now.Workers[tp][pp] != addr {
				return true
			}
		}
	}
	return false
}

// watchLocked opens a connection to the worker of P at addr and keeps it open. When the connection breaks, another process may have the
// worker's address, so a new life of P begins.
func (r *Relay) watchLocked(e *engine, addr string) *watch {
	w := new(watch)
	w.dealer = zmtp.NewDealer(addr, zmtp.DealerOptions{
		HeartbeatInterval: 10 * time.Second, HeartbeatTimeout: 30 * time.Second, Log: r.log,
		OnState: func(connected bool, err error) {
			log := func() {}
			r.mu.Lock()
			if w.up && !connected {
				log = r.endLifeLocked(e, "its side channel broke")
			}
			w.up = connected
			r.mu.Unlock()
			log()
		},
	})
	if err := w.dealer.Start(); err != nil {
		r.log.Warn("relay: P's side channel cannot be watched", "engine", e.id, "addr", addr, "err", err)
	}
	return w
}

// watchedLocked reports whether the relay is connected to each worker of P. KV that the relay pulls without these connections may come
// from a process of another life of P.
func (e *engine) watchedLocked() bool {
	for _, w := range e.watches {
		if !w.up {
			return false
		}
	}
	return len(e.watches) > 0
}

// confirmLife returns nil if all workers of P are still the processes of the given life: each must answer on the connection that the
// relay has kept since that life began. Only such an answer proves it, because the relay may notice a broken connection only after
// bytes of the next process have come.
func (e *engine) confirmLife(ctx context.Context, life int64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, answerWithin, errNotProven)
	defer cancel()
	e.r.mu.Lock()
	watches := slices.Collect(maps.Values(e.watches))
	e.r.mu.Unlock()
	answers := make(chan error, len(watches))
	for _, w := range watches {
		go func() { answers <- w.dealer.Ping(ctx) }() // ends with ctx
	}
	err := error(nil)
	for range watches {
		err = errors.Join(err, <-answers)
	}
	e.r.mu.Lock()
	defer e.r.mu.Unlock()
	switch {
	case e.life != life:
		return errOtherLife
	case err != nil:
		return fmt.Errorf("%w: %w", errNotProven, err)
	case len(watches) == 0 || !e.watchedLocked():
		return errNotProven
	}
	return nil
}

// endLifeLocked begins a new life of P and drops the transfers kept of the engine: P may now compute other KV under the same transfer
// ids. The caller must call log after it has released the lock.
func (r *Relay) endLifeLocked(e *engine, why string) (log func()) {
	e.life++
	n := 0
	for key, k := range r.mu.saved {
		if key.engine != e.id || r.o.KeepAcrossRestarts {
			continue
		}
		n++
		r.dropLocked(k)
	}
	r.stats.dropped.Add(int64(n))
	return func() {
		r.log.Info("relay: an engine of P restarted or changed: its transfers are dropped", "engine", e.id, "why", why, "transfers_dropped", n)
	}
}

// channel returns the relay's side channel for one worker of P, and creates it if there is none. The caller must hold the refresh
// token.
func (e *engine) channel(at workerRank) (*channel, error) {
	r := e.r
	r.mu.Lock()
	c := e.channels[at]
	r.mu.Unlock()
	if c != nil {
		return c, nil
	}
	c = &channel{e: e, at: at}
	c.router = zmtp.NewRouter(c.handle, r.conns.Options(zmtp.RouterOptions{
		MaxFrameBytes: mooncake.MaxPullBytes, MaxMessageBytes: mooncake.MaxPullBytes, OnRefused: r.refusedSocket, Networks: r.o.Networks, Log: r.log,
	}))
	addr, err := c.router.Listen(r.ctx, "tcp://"+net.JoinHostPort(r.o.Host, "*"))
	if err != nil {
		return nil, fmt.Errorf("relay: listen for pulls of D: %w", err)
	}
	c.addr = "tcp://" + addr.String()
	r.mu.Lock()
	if r.mu.closed || e.closed {
		r.mu.Unlock()
		_ = c.router.Close()
		return nil, errClosed
	}
	e.channels[at] = c
	r.mu.Unlock()
	return c, nil
}

// close ends the engine's side channels and watches.
func (e *engine) close() {
	e.r.mu.Lock()
	e.closed = true
	channels, watches := e.channels, e.watches
	e.channels, e.watches = nil, nil
	e.r.mu.Unlock()
	for _, c := range channels {
		_ = c.router.Close() // a failure changes nothing
	}
	for _, w := range watches {
		_ = w.dealer.Close()
	}
}
