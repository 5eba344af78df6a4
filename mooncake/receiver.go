// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// ReceiverOptions configures a Receiver. A zero field means its default.
type ReceiverOptions struct {
	Engine Engine
	Self   Peer
	PPRank int

	// Target takes the pushes; its Table gets the engine's memory. The Receiver
	// does not close it.
	Target *transfer.Target

	// Release is that of P's vLLM, when it is older than 0.20; default newest. Pulls
	// before 0.19 do not carry block sizes, so the Receiver checks that every byte came.
	Release wire.Release
	// Bootstrap configures the queries of bootstrap servers.
	Bootstrap bootstrap.ClientOptions
	// Dialect pulls from P's that have no bootstrap server; default none.
	Dialect Dialect
	// Find returns P's workers in place of a bootstrap server; default none.
	Find func(context.Context, Source) (bootstrap.Engine, error)

	// Timeout bounds a pull, from Start to its result: queueing and computing at P
	// included; default 120 s.
	Timeout time.Duration
	// UnknownTimeout is how long a transfer may stay unknown at a Kvasir P; default
	// 10 s. A stock P does not report unknown transfers: Timeout applies there.
	UnknownTimeout time.Duration
	// ConnectTimeout is how long a P worker may refuse the side channel; default 5 s.
	ConnectTimeout time.Duration
	// ArrivalTimeout is how long blocks may arrive after P's answer, if P's transfer
	// engine does not confirm its writes (before 0.3.12); default 5 s.
	ArrivalTimeout time.Duration
	// FenceTimeout is how long a write in progress may go on after its pull failed,
	// before its connection is cut; default 1 s.
	FenceTimeout time.Duration

	// KeepAtP leaves P's blocks to P's own timeout when D aborts a request or the request times out; by default D tells P to free them.
	// It is for callers that tell P themselves.
	KeepAtP bool

	Attempts int // per pull and P worker, when the side channel breaks; default 3
	MaxIdle  int // idle sockets per P worker; default 8

	// Progress counts what P writes, of all pulls; default none.
	Progress *transfer.Progress

	// Sockets may be shared with other Receivers; default is a pool of its own. The
	// Receiver does not close shared ones.
	Sockets *Sockets

	Metrics *Metrics     // default none
	Log     *slog.Logger // default none
}

// The reasons of a failed request.
var (
	// ErrTimeout means that a pull took longer than ReceiverOptions.Timeout.
	ErrTimeout = errors.New("mooncake: pull timed out")
	// ErrUnknownTransfer means that P does not know the transfer id.
	ErrUnknownTransfer = errors.New("mooncake: P does not know the transfer")
	// ErrUnreachable means that the bootstrap server or a P worker cannot be reached.
	ErrUnreachable = errors.New("mooncake: P unreachable")
	// ErrNoEngine means that the bootstrap server does not know the engine.
	ErrNoEngine = errors.New("mooncake: engine not registered")
	// ErrAborted means that Abort ended the pull.
	ErrAborted = errors.New("mooncake: the pull was aborted")
	// ErrPeer means that P answered with a failure; the error has P's message.
	ErrPeer = errors.New("mooncake: P failed the pull")
	// ErrUnconfirmed means that P said it had pushed the blocks, but its transfer engine
	// does not confirm its writes, and not all of them came.
	ErrUnconfirmed = errors.New("mooncake: blocks did not arrive; P's transfer engine does not confirm its writes: it needs mooncake-transfer-engine 0.3.12 or later")
	// ErrLost means that the side channel broke at every attempt.
	ErrLost = errors.New("mooncake: the side channel to P was lost")
)

// Source says where the KV of requests is: an engine that a bootstrap server knows,
// or, for a Dialect, the side channel of P's TP rank 0.
type Source struct {
	EngineID  string
	Bootstrap string // http://host:port

	Host string // for a Dialect
	Port int    // for a Dialect
}

// Dialect pulls from a P of another generation: without a bootstrap server, over one
// connection per pull, with one answer for all of its requests. Such a P knows requests
// by D's ids and reports success even for requests that it does not know, so the
// Receiver checks that every byte came.
type Dialect interface {
	// Worker returns the side channel of the P worker that D's TP rank pulls from.
	Worker(from Source, tpRank int) (addr string, err error)
	// Pull sends p to the worker at addr and returns nil when P says that all of its
	// requests are filled. An ErrPeer means that P failed them; any other error, that
	// no answer came. When ctx ends, Pull must end in a way that P notices.
	Pull(ctx context.Context, addr string, p *wire.Pull) error
}

// Receiver is the worker of a decode engine: it pulls blocks from P workers into
// the engine's memory. Its methods are safe for concurrent use.
//
// The Receiver fences a failed request's blocks before it reports the failure: no
// write of its P reaches them any more, see docs/how/mooncake.md.
type Receiver struct {
	o     ReceiverOptions // immutable
	cache *Cache
	log   *slog.Logger

	warn       LogLimit // of what P may cause
	ownSockets bool

	host    string // of the target
	port    int
	windows *windows
	sockets *Sockets
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu struct {
		sync.Mutex
		closed  bool
		clients map[string]*bootstrap.Client // by address
		engines map[Source]knownEngine
		known   map[string]uint64 // P worker → id of the layout that it has kept
		kvasir  map[string]bool   // P workers that are Kvasir
		active  map[string]*receiving
		results Results
	}
	stats receiverStats
}

// ReceiverStats are counters since NewReceiver, but for the first two.
type ReceiverStats struct {
	Active       int64 // requests being pulled now
	Windows      int64 // publications of the memory now; more than one after failures
	Received     int64 // requests
	Released     int64 // requests pulled without blocks, so that P frees its own
	Failed       int64 // aborted ones from the moment of the abort
	Fenced       int64 // requests whose blocks were fenced
	Cut          int64 // connections cut by fences
	Resent       int64 // pulls sent again after the side channel broke
	LayoutsSent  int64 // pulls with regions
	LayoutsNamed int64 // pulls that only named them
	LayoutMisses int64
}

type receiverStats struct {
	received, released, failed, fenced, cut, resent atomic.Int64
	layoutsSent, layoutsNamed, layoutMisses         atomic.Int64
}

// Results lists the requests that ended since the last call.
type Results struct {
	// Received has all requests that ended, the failed ones too, as vLLM's scheduler
	// expects.
	Received []string
	// Failed has the reason for those of them whose KV did not arrive.
	Failed map[string]error
	// FailedBlocks are their blocks if the cache has one group: what vLLM's
	// scheduler recomputes.
	FailedBlocks []int
}

// receiving is one request being pulled.
type receiving struct {
	key    string // in Receiver.mu.active
	id     string // on the wire
	want   wire.Wanted
	from   Source
	group  *group // the requests of the same Start
	ctx    context.Context
	giveUp context.CancelCauseFunc // ends ctx: the request is aborted, or its window goes
	done   chan struct{}           // closed when settled

	// Guarded by Receiver.mu.
	window  *window  // nil before the first pull is sent
	workers *pairing // set with window
	left    int      // P workers that have not answered
	err     error    // the first failure; readable without the lock after done
	suspect bool     // a P may still write into the blocks
	filled  bool     // every P worker reported success
	settled bool     // one goroutine has taken on to settle it
	resent  []string // P workers that got the pull again after their side channel broke
	counted bool     // counted as failed
}

// group is the requests of one Start. Its context ends when the last of them is settled.
type group struct {
	left   int // not settled; guarded by Receiver.mu
	cancel context.CancelFunc
}

// gaveUp returns why D does not want the request any more, or nil.
func (q *receiving) gaveUp() error {
	if q.ctx.Err() == nil {
		return nil
	}
	return context.Cause(q.ctx)
}

// NewReceiver returns a Receiver for the engine's memory, which is published at
// the first pull.
func NewReceiver(cache *Cache, o ReceiverOptions) (*Receiver, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if err := cache.Check(); err != nil {
		return nil, err
	}
	var err error
	if o.Engine, err = o.Engine.WithDefaults(); err != nil {
		return nil, err
	}
	if o.Target == nil {
		return nil, errors.New("mooncake: a Receiver needs a transfer target")
	}
	host, port, err := net.SplitHostPort(o.Target.Name())
	if err != nil {
		return nil, fmt.Errorf("mooncake: transfer target: %w", err)
	}
	o.Self.TPSize, o.Self.PPSize = max(o.Self.TPSize, 1), max(o.Self.PPSize, 1)
	o.Timeout = cmp.Or(o.Timeout, 120*time.Second)
	o.UnknownTimeout = cmp.Or(o.UnknownTimeout, 10*time.Second)
	o.ConnectTimeout = cmp.Or(o.ConnectTimeout, 5*time.Second)
	o.ArrivalTimeout = cmp.Or(o.ArrivalTimeout, 5*time.Second)
	o.FenceTimeout = cmp.Or(o.FenceTimeout, time.Second)
	o.Attempts = cmp.Or(o.Attempts, 3)
	r := &Receiver{
		o: o, cache: cache, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), host: host,
	}
	if r.ownSockets = o.Sockets == nil; r.ownSockets {
		o.Sockets = NewSockets(cmp.Or(o.MaxIdle, 8))
	}
	r.sockets = o.Sockets
	r.windows = newWindows(cache, o.Target.Table(), o.FenceTimeout, &r.wg)
	r.windows.progress = o.Progress
	r.windows.watched = o.Dialect != nil || !o.Release.BlockSizes()
	r.port, _ = strconv.Atoi(port) // from a listener
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.mu.clients = make(map[string]*bootstrap.Client)
	r.mu.engines = make(map[Source]knownEngine)
	r.mu.known = make(map[string]uint64)
	r.mu.active = make(map[string]*receiving)
	r.mu.kvasir = make(map[string]bool)
	return r, nil
}

// Apply starts the pulls that the scheduler has decided in one step, and aborts
// those of requests that have ended. The error names the pulls that could not start;
// the others run.
func (r *Receiver) Apply(m *wire.Metadata) error {
	for _, id := range m.Aborted {
		r.Abort(id)
	}
	bySource := make(map[Source]map[string]wire.Wanted)
	for _, p := range m.Pulls {
		from := Source{EngineID: p.EngineID, Bootstrap: p.BootstrapAddr, Host: p.Host, Port: p.Port}
		if bySource[from] == nil {
			bySource[from] = make(map[string]wire.Wanted)
		}
		bySource[from][p.RequestID] = wire.Wanted{TransferID: p.TransferID, Blocks: p.Blocks}
	}
	var err error
	for from, wanted := range bySource {
		err = errors.Join(err, r.Start(from, wanted))
	}
	return err
}

// Start begins to pull requests from one P engine; Results reports how they ended. A
// request without blocks makes P free its blocks, and has no result. The error names
// the requests that cannot be pulled; the others run. Results has the failed ones too,
// except those that are being pulled already.
func (r *Receiver) Start(from Source, wanted map[string]wire.Wanted) error {
	_, err := r.start(from, wanted, "")
	return err
}

// Pull is like Start, and waits for the results. It returns the errors of failed
// requests by id; empty when all KV has arrived. Results lists the requests as well.
// When ctx ends first, Pull aborts them.
func (r *Receiver) Pull(ctx context.Context, from Source, wanted map[string]wire.Wanted) (map[string]error, error) {
	list, err := r.start(from, wanted, "")
	if err != nil {
		for _, q := range list {
			r.abort(q)
		}
		return nil, err
	}
	failed := make(map[string]error)
	for _, q := range list {
		select {
		case <-q.done:
		case <-ctx.Done():
			for _, q := range list {
				r.abort(q)
			}
			<-q.done
		}
		if q.err != nil {
			failed[q.id] = q.err
		}
	}
	return failed, nil
}

// start registers the requests, under their ids and suffix, and pulls them in the
// background.
func (r *Receiver) start(from Source, wanted map[string]wire.Wanted, suffix string) (list []*receiving, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return nil, errReceiverClosed
	}
	ctx, cancel := context.WithTimeoutCause(r.ctx, r.o.Timeout, ErrTimeout)
	g := &group{cancel: cancel}
	for id, w := range wanted {
		q := &receiving{key: id + suffix, id: id + suffix, want: w, from: from, group: g, done: make(chan struct{})}
		if r.o.Dialect != nil {
			q.id = id // P knows the request only by D's own id
		}
		if r.mu.active[q.key] != nil {
			err = errors.Join(err, wire.Refusef(wire.CodeBusy, "request %s is being pulled already", id))
			continue
		}
		if q.err = r.checkBlocks(w.Blocks); q.err != nil {
			err = errors.Join(err, fmt.Errorf("request %s: %w", id, q.err))
			r.reportLocked(q)
			continue
		}
		q.ctx, q.giveUp = context.WithCancelCause(context.Background())
		r.mu.active[q.key] = q
		list = append(list, q)
	}
	if g.left = len(list); g.left == 0 {
		cancel()
		return nil, err
	}
	r.wg.Go(func() { r.run(ctx, from, list) })
	return list, err
}

// checkBlocks refuses ids that lie outside the memory, before they go to a peer.
func (r *Receiver) checkBlocks(blocks [][]int) error {
	if len(blocks) > len(r.cache.Kinds) {
		return wire.Refusef(wire.CodeGroups, "%d lists of blocks for %d KV cache groups", len(blocks), len(r.cache.Kinds))
	}
	for i := range r.cache.Regions {
		g := &r.cache.Regions[i]
		if g.Group < 0 || g.Group >= len(blocks) || len(blocks[g.Group]) == 0 {
			continue
		}
		last := slices.Max(blocks[g.Group])
		if r.cache.Kinds[g.Group] != Mamba {
			last = (last+1)*max(r.cache.KernelBlocks, 1) - 1
		}
		if slices.Min(blocks[g.Group]) < 0 || r.cache.Bytes(g.Base+uint64(last)*g.Stride, g.Payload) == nil {
			return wire.Refusef(wire.CodeRange, "block %d of group %d is not in the KV cache", last, g.Group)
		}
	}
	return nil
}

// Abort ends a request. Its result comes when its blocks are fenced. A stock P pushes
// the requests of a pull together, and all fail if one hits closed blocks. From such a
// P, the blocks stay open and the result waits until P has answered or the rest of the
// pull has ended.
func (r *Receiver) Abort(request string) {
	r.mu.Lock()
	q := r.mu.active[request]
	r.mu.Unlock()
	if q != nil {
		r.abort(q)
	}
}

// abort ends q. It wakes the connections that pull q; if there is none yet, q ends here.
func (r *Receiver) abort(q *receiving) {
	q.giveUp(ErrAborted)
	r.mu.Lock()
	early := q.window == nil && !q.settled
	if !q.settled && !q.counted {
		q.counted = true
		r.stats.failed.Add(1)
	}
	if early {
		q.settled, q.err = true, ErrAborted
	}
	r.mu.Unlock()
	if early {
		r.settle(q)
		r.sendRelease(q)
	}
}

// Results returns the requests that ended since the last call.
func (r *Receiver) Results() Results {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.mu.results
	r.mu.results = Results{}
	return out
}

// Stats returns the counters.
func (r *Receiver) Stats() ReceiverStats {
	r.mu.Lock()
	n := int64(len(r.mu.active))
	r.mu.Unlock()
	s := &r.stats
	return ReceiverStats{
		Active: n, Windows: int64(r.windows.count()), Received: s.received.Load(), Released: s.released.Load(),
		Failed: s.failed.Load(), Fenced: s.fenced.Load(), Cut: s.cut.Load(), Resent: s.resent.Load(),
		LayoutsSent: s.layoutsSent.Load(), LayoutsNamed: s.layoutsNamed.Load(), LayoutMisses: s.layoutMisses.Load(),
	}
}

// Close aborts what is being pulled, fences it, and withdraws the memory from the
// target. No peer writes into it afterwards.
func (r *Receiver) Close() error {
	r.mu.Lock()
	r.mu.closed = true
	clients := r.mu.clients
	r.mu.Unlock()
	r.cancel()
	r.wg.Wait()
	if r.ownSockets {
		r.sockets.Close()
	}
	for _, c := range clients {
		_ = c.Close() // always nil
	}
	r.windows.close()
	return nil
}
