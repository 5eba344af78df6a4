// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// run pulls a list of requests of one engine and returns when all are settled.
func (r *Receiver) run(ctx context.Context, from Source, list []*receiving) {
	defer func() {
		for _, q := range list {
			<-q.done
		}
	}()
	p, err := r.workers(ctx, from)
	if err != nil {
		r.forgetEngine(from) // the engine may have been half registered
		r.failAll(list, cause(ctx, err))
		return
	}
	w, err := r.windows.acquire(ctx, from, list)
	if err != nil {
		r.failAll(list, err)
		return
	}
	r.mu.Lock()
	asked := make([]*receiving, 0, len(list))
	for _, q := range list {
		if !q.settled {
			q.window, q.left, q.workers = w, len(p.addrs), p
			asked = append(asked, q)
		}
	}
	r.mu.Unlock()
	for _, q := range list {
		if q.window == nil { // aborted meanwhile
			r.windows.release(w, q)
		}
	}
	if r.windows.watched || r.o.Target.Table().Confirmation(w.handles...) == transfer.Unconfirmed {
		for _, q := range asked {
			r.o.Target.Table().Forget(r.windows.expected(w, q.want.Blocks)...)
		}
	}
	for i := range p.addrs {
		r.wg.Go(func() { r.pullFrom(ctx, from, i, p, w, asked) })
	}
}

// failAll fails those requests of list that are not settled yet, with the error err. Use it only before a pull of them has been sent.
func (r *Receiver) failAll(list []*receiving, err error) {
	for _, q := range list {
		r.mu.Lock()
		mine := !q.settled
		if mine {
			q.settled, q.err = true, err
		}
		r.mu.Unlock()
		if mine {
			r.settle(q)
		}
	}
}

// pairing names the workers of P that a pull goes to. It is immutable.
type pairing struct {
	addrs      []string // side channels
	tp, stages int      // P's TP size and pipeline stages, as the directory shows them
}

// sameShape reports whether the i-th worker of o fills the same parts of D's blocks as the i-th worker of p, for all i.
func (p *pairing) sameShape(o *pairing) bool {
	return len(p.addrs) == len(o.addrs) && p.tp == o.tp && p.stages == o.stages
}

// workers returns the P workers that hold the KV that this D worker needs.
func (r *Receiver) workers(ctx context.Context, from Source) (*pairing, error) {
	if r.o.Dialect != nil {
		addr, err := r.o.Dialect.Worker(from, r.o.Self.TPRank)
		return &pairing{addrs: []string{addr}}, err
	}
	e, err := r.engine(ctx, from)
	if err != nil {
		return nil, err
	}
	return r.pair(from, e)
}

// pair returns the workers of the engine e that hold the KV that this D worker needs.
func (r *Receiver) pair(from Source, e bootstrap.Engine) (*pairing, error) {
	if e.TPSize() == 0 {
		return nil, fmt.Errorf("%w: engine %s at %s has no worker", ErrNoEngine, from.EngineID, from.Bootstrap)
	}
	ranks, err := pairedRanks(r.o.Self.TPRank, r.o.Self.TPSize, e.TPSize())
	if err != nil {
		return nil, fmt.Errorf("engine %s at %s: %w", from.EngineID, from.Bootstrap, err)
	}
	if h := r.cache.KVHeads; h > 0 && r.cache.Unsliced != "" && min(h, r.o.Self.TPSize) != min(h, e.TPSize()) {
		return nil, layoutError("P of TP size %d, D of %d: D's blocks cannot be filled head by head: %s.", e.TPSize(), r.o.Self.TPSize, r.cache.Unsliced)
	}
	p := &pairing{tp: e.TPSize()}
	for _, rank := range ranks {
		stages := e.Workers[rank]
		if len(stages) == 0 {
			return nil, fmt.Errorf("%w: engine %s at %s has no worker of TP rank %d among %d",
				ErrNoEngine, from.EngineID, from.Bootstrap, rank, e.TPSize())
		}
		p.stages = max(p.stages, len(stages))
		if own, ok := stages[r.o.PPRank]; ok && len(stages) == r.o.Self.PPSize {
			p.addrs = append(p.addrs, own)
			continue
		}
		for _, pp := range slices.Sorted(maps.Keys(stages)) {
			p.addrs = append(p.addrs, stages[pp])
		}
	}
	return p, nil
}

// maxRemembered bounds how many engines, P workers and bootstrap servers a Receiver remembers. With one more engine or P worker it forgets
// all of them and asks again; pulls that need one more bootstrap server fail.
const maxRemembered = 4096

// engine returns the workers of the P engine `from`: as the bootstrap server named them before, or, if a connection to one of them has
// ended since, as it names them now.
func (r *Receiver) engine(ctx context.Context, from Source) (bootstrap.Engine, error) {
	if r.o.Find != nil {
		return r.o.Find(ctx, from)
	}
	r.mu.Lock()
	known, ok := r.mu.engines[from]
	r.mu.Unlock()
	switch {
	case !ok:
		return r.askEngine(ctx, from)
	case !r.sockets.anyBroke(&known):
		return known.Engine, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	e, err := r.askEngine(ctx, from)
	if err != nil {
		return known.Engine, nil // it may still be there
	}
	return e, nil
}

// knownEngine is what the bootstrap server answered about an engine, and when the Receiver asked.
type knownEngine struct {
	bootstrap.Engine
	asked time.Time
}

// askEngine asks the bootstrap server for the workers of the P engine `from`, and remembers them.
func (r *Receiver) askEngine(ctx context.Context, from Source) (e bootstrap.Engine, err error) {
	asked := time.Now()
	c, err := r.client(from.Bootstrap)
	if err != nil {
		return e, err
	}
	d, err := c.Query(ctx)
	if err != nil {
		return e, fmt.Errorf("%w: bootstrap server %s: %w", ErrUnreachable, from.Bootstrap, cause(ctx, err))
	}
	_, e, ok := d.Engine(from.EngineID)
	if !ok {
		return e, fmt.Errorf("%w: remote engine_id %s not found from bootstrap server %s", ErrNoEngine, from.EngineID, from.Bootstrap)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.engines) >= maxRemembered {
		clear(r.mu.engines)
	}
	r.mu.engines[from] = knownEngine{e, asked}
	return e, nil
}

func (r *Receiver) client(base string) (*bootstrap.Client, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.mu.clients[base]; c != nil {
		return c, nil
	}
	if len(r.mu.clients) >= maxRemembered {
		return nil, wire.Refusef(wire.CodeFull, "%d bootstrap servers are in use: no further one is asked", maxRemembered)
	}
	c, err := bootstrap.NewClient(base, r.o.Bootstrap)
	if err == nil {
		r.mu.clients[base] = c
	}
	return c, err
}

// cause returns the reason for which ctx ended. If ctx has not ended, it returns err.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// pullConn is one pull from one P worker. Its goroutine owns all fields except wake.
type pullConn struct {
	r       *Receiver
	from    Source
	workers *pairing
	index   int // of the worker among them
	addr    string
	looked  time.Time // when the registry was last asked whether the worker has moved
	window  *window
	left    map[string]*receiving // requests without an answer, by id
	unknown map[string]bool       // the requests of left that P does not know
	wake    chan struct{}
	kvasir  bool // P is Kvasir, which answers each request on its own
	sent    bool // P may have read the pull
	resent  bool // P may have read the pull over an earlier connection, too
	full    bool // send the list of regions even if P should know it
	missed  bool // P once answered that it does not know the layout
}

func (t *pullConn) wakeUp() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// pullFrom pulls all requests of list from one worker of the P engine `from`, the one at p.addrs[index], into the window w. If the side
// channel breaks, it tries again, at most Attempts times in all.
func (r *Receiver) pullFrom(ctx context.Context, from Source, index int, p *pairing, w *window, list []*receiving) {
	addr := p.addrs[index]
	t := &pullConn{
		r: r, from: from, workers: p, index: index, addr: addr, window: w, left: make(map[string]*receiving, len(list)),
		unknown: make(map[string]bool), wake: make(chan struct{}, 1),
	}
	for _, q := range list {
		t.left[q.id] = q
	}
	r.mu.Lock()
	t.kvasir = r.mu.kvasir[addr]
	r.mu.Unlock()
	for _, q := range list {
		defer context.AfterFunc(q.ctx, t.wakeUp)()
	}
	t.run(ctx)
}

func (t *pullConn) run(ctx context.Context) {
	for attempt := 1; ; attempt++ {
		var err error
		if t.r.o.Dialect != nil {
			err = t.pullForAll(ctx)
		} else {
			err = t.pullOverSocket(ctx)
		}
		if err == nil {
			return
		}
		if errors.Is(err, errMoved) {
			t.full, t.sent = true, false
			attempt--
			continue
		}
		if errors.Is(err, errPullAgain) {
			t.resent = true
			attempt--
			continue
		}
		if ctx.Err() != nil || attempt >= t.r.o.Attempts || !errors.Is(err, ErrLost) {
			if errors.Is(err, ErrUnreachable) || errors.Is(err, ErrLost) {
				t.r.forgetEngine(t.from) // it may have moved: ask again next time
			}
			t.failAll(cause(ctx, err))
			return
		}
		t.resent = t.resent || t.sent
		t.r.stats.resent.Add(1)
		t.r.log.Info("mooncake: side channel lost, pulling again", "worker", t.addr, "attempt", attempt, "err", err)
	}
}

func (t *pullConn) failAll(err error) {
	for id := range t.left {
		t.recordResult(id, fmt.Errorf("pull from %s: %w", t.addr, err))
	}
}

// pullOverSocket sends the pull over one socket and handles P's replies until the pull has ended.
func (t *pullConn) pullOverSocket(ctx context.Context) error {
	s, pooled, err := t.r.sockets.take(t.addr)
	for pooled && s.lost() {
		t.r.sockets.drop(s)
		s, pooled, err = t.r.sockets.take(t.addr)
	}
	if err != nil {
		return err
	}
	if !pooled {
		if err := t.confirmPlace(ctx); err != nil {
			t.r.sockets.drop(s)
			return err
		}
	}
	ended, err := t.exchange(ctx, s, pooled)
	if ended && err == nil {
		t.r.sockets.put(s)
	} else {
		t.r.sockets.drop(s)
	}
	return err
}

// exchange sends the pull over s and handles P's replies until every request has a result. connected means that s is known to have a
// connection; without one, exchange waits for it, at most ConnectTimeout. ended means that P has ended the pull too, so the socket may
// carry another pull.
func (t *pullConn) exchange(ctx context.Context, s *socket, connected bool) (ended bool, err error) {
	if t.recordAborted(true); len(t.left) == 0 {
		return false, nil
	}
	if err := t.send(ctx, s); err != nil {
		return false, err
	}
	connect := time.NewTimer(t.r.o.ConnectTimeout)
	defer connect.Stop()
	var unknown <-chan time.Time // fires UnknownTimeout after P first reported that it does not know a transfer
	var refused error
	for len(t.left) > 0 {
		select {
		case e := <-s.events:
			switch {
			case e.reply != nil:
				connected = true
				before := len(t.unknown)
				ended, err = t.handleReply(ctx, s, e.reply)
				if err != nil || ended {
					return ended, err
				}
				if before == 0 && len(t.unknown) > 0 {
					unknown = time.After(t.r.o.UnknownTimeout)
				}
			case e.up:
				connected = true
			case connected:
				return false, fmt.Errorf("%w: %w", ErrLost, e.err)
			default: // a dial that failed: the dealer tries again
				refused = e.err
				if err := t.moved(ctx); err != nil {
					return false, err
				}
			}
		case <-connect.C:
			if !connected {
				if err := t.moved(ctx); err != nil {
					return false, err
				}
				return false, fmt.Errorf("%w: %w", ErrUnreachable, errors.Join(refused, errNoAnswer))
			}
		case <-unknown:
			for _, id := range slices.Collect(maps.Keys(t.unknown)) {
				t.recordResult(id, fmt.Errorf("%w %s after %v", ErrUnknownTransfer, t.left[id].want.TransferID, t.r.o.UnknownTimeout))
			}
		case <-t.wake:
			t.recordAborted(false)
		case <-s.flooded:
			return false, fmt.Errorf("%w: replies came faster than they were read", ErrLost)
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	return false, nil
}

var errNoAnswer = errors.New("no connection in time")

// send sends the pull for the requests without an answer.
func (t *pullConn) send(ctx context.Context, s *socket) error {
	r := t.r
	p := wire.Pull{
		Host: r.host, Port: r.port, TPSize: r.o.Self.TPSize, TPRank: r.o.Self.TPRank, PPSize: r.o.Self.PPSize,
		Wanted: make(map[string]wire.Wanted, len(t.left)), LayoutID: t.window.id,
	}
	if d, ok := ctx.Deadline(); ok {
		p.DeadlineMillis = max(1, int(time.Until(d).Milliseconds()))
	}
	for id, q := range t.left {
		p.Wanted[id] = q.want
	}
	r.mu.Lock()
	known := r.mu.known[t.addr] == t.window.id
	r.mu.Unlock()
	if known && !t.full {
		r.stats.layoutsNamed.Add(1)
	} else {
		p.Regions = t.window.regions
		r.stats.layoutsSent.Add(1)
	}
	t.sent = true
	if err := s.dealer.SendOwned(wire.AppendPull(nil, &p, r.o.Release)); err != nil {
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return nil
}

// handleReply records the results that one reply carries. ended means that it was P's last reply to the pull.
func (t *pullConn) handleReply(ctx context.Context, s *socket, y *wire.Reply) (ended bool, err error) {
	if y.Status == wire.StatusLayoutMiss {
		if t.missed {
			return false, fmt.Errorf("%w: P lost D's layout %#x again after D had sent it anew: %s", ErrPeer, t.window.id, y.Message)
		}
		t.missed, t.full = true, true
		t.r.stats.layoutMisses.Add(1)
		return false, t.send(ctx, s)
	}
	t.kvasir = y.Kvasir
	t.r.recordReply(t.addr, y, t.window.id)
	if y.Status == wire.StatusError {
		t.r.forgetEngine(t.from) // D may know only a part of the engine
		t.failAll(fmt.Errorf("%w: %s", ErrPeer, messageOrDefault(y.Message)))
		return true, nil
	}
	for _, id := range y.Unknown {
		if t.left[id] != nil {
			t.unknown[id] = true
		}
	}
	for _, id := range y.Known {
		delete(t.unknown, id)
	}
	for _, id := range y.Failed {
		t.recordResult(id, fmt.Errorf("pull from %s: %w: %s", t.addr, ErrPeer, messageOrDefault(y.Message)))
	}
	for _, id := range y.OK {
		t.recordResult(id, nil)
	}
	if y.Status == wire.StatusFinish {
		t.failAll(fmt.Errorf("%w: peer finished without reporting a transfer result", ErrPeer))
		return true, nil
	}
	return false, nil
}

func messageOrDefault(s string) string {
	if s == "" {
		return "unknown error"
	}
	return s
}

// recordReply remembers whether the P worker is Kvasir and which layout it keeps.
func (r *Receiver) recordReply(addr string, y *wire.Reply, layout uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.known) >= maxRemembered || len(r.mu.kvasir) >= maxRemembered {
		clear(r.mu.known)
		clear(r.mu.kvasir)
	}
	if y.LayoutID == layout {
		r.mu.known[addr] = layout
	}
	if y.Kvasir {
		r.mu.kvasir[addr] = true
	} else {
		delete(r.mu.kvasir, addr)
	}
}
