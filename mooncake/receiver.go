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

	// Target is the transfer engine's server that peers push to. The Receiver registers the engine's memory in its Table. The Receiver
	// does not close Target.
	Target *transfer.Target

	// Release is the vLLM release of P; set it if P is older than 0.20. Default is the newest. Pulls before 0.19 do not carry block
	// sizes, so the Receiver then checks that every byte came.
	Release wire.Release
	// Bootstrap configures the queries of bootstrap servers.
	Bootstrap bootstrap.ClientOptions
	// Dialect pulls from P engines of another generation, which have no bootstrap server; default none.
	Dialect Dialect
	// Find returns P's workers; with Find set, the Receiver asks no bootstrap server. Default none.
	Find func(context.Context, Source) (bootstrap.Engine, error)

	// Timeout limits the time from Start to the result of a pull, with the time that the request waits and is computed at P; default
	// 120 s.
	Timeout time.Duration
	// UnknownTimeout is how long a transfer may stay unknown at a Kvasir P before its pull fails; default 10 s. A stock P does not
	// report unknown transfers: Timeout applies there.
	UnknownTimeout time.Duration
	// ConnectTimeout is how long the side channel of a P worker may refuse connections before the pull fails; default 5 s.
	ConnectTimeout time.Duration
	// ArrivalTimeout is how long D waits for missing blocks after P's answer, if P's transfer engine does not confirm its writes
	// (before 0.3.12); default 5 s.
	ArrivalTimeout time.Duration
	// FenceTimeout is how long a peer's write in progress may go on after its pull failed. Then the Receiver cuts the write's
	// connection. Default 1 s.
	FenceTimeout time.Duration

	// KeepAtP says that D does not tell P to free its blocks when D aborts a request or the request times out; P then frees them after
	// its own timeout. By default D tells P. KeepAtP is for callers that tell P themselves.
	KeepAtP bool

	Attempts int // tries of a pull at one P worker while the side channel breaks; default 3
	MaxIdle  int // sockets kept open without a pull, per P worker; default 8

	// Progress counts the bytes that P engines write for all pulls; default none.
	Progress *transfer.Progress

	// Sockets is the pool of connections to P workers. Several Receivers may share one; the Receiver does not close a shared pool.
	// Default is a pool of its own.
	Sockets *Sockets

	Metrics *Metrics     // default none
	Log     *slog.Logger // default none
}

// The reasons for which a request fails.
var (
	// ErrTimeout means that a pull took longer than ReceiverOptions.Timeout.
	ErrTimeout = errors.New("mooncake: pull timed out")
	// ErrUnknownTransfer means that P does not know the transfer id.
	ErrUnknownTransfer = errors.New("mooncake: P does not know the transfer")
	// ErrUnreachable means that the bootstrap server or a P worker cannot be reached.
	ErrUnreachable = errors.New("mooncake: P or its bootstrap server cannot be reached")
	// ErrNoEngine means that the bootstrap server does not know the engine.
	ErrNoEngine = errors.New("mooncake: engine not registered")
	// ErrAborted means that Abort ended the pull.
	ErrAborted = errors.New("mooncake: the pull was aborted")
	// ErrPeer means that P answered with a failure; the error has P's message.
	ErrPeer = errors.New("mooncake: P failed the pull")
	// ErrUnconfirmed means that P reported the blocks as pushed, but not all of them came in time. P's transfer engine does not confirm
	// its writes.
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

// Dialect pulls from a P of another generation, which has no bootstrap server. A pull takes one connection and gets one answer for all
// of its requests. Such a P knows requests by D's ids and reports success even for requests that it does not know, so the Receiver
// checks that every byte came.
type Dialect interface {
	// Worker returns the side channel of the P worker that D's TP rank pulls from.
	Worker(from Source, tpRank int) (addr string, err error)
	// Pull sends p to the worker at addr and returns nil when P reports that all requests of p are filled. An ErrPeer means that P
	// failed them; any other error means that no answer came. When ctx ends, Pull must end so that P notices, for example by closing
	// the connection.
	Pull(ctx context.Context, addr string, p *wire.Pull) error
}

// Receiver is the worker of a decode engine: it pulls blocks from P workers into
// the engine's memory. Its methods are safe for concurrent use.
//
// The Receiver fences a failed request's blocks before it reports the failure: from then on no write of that request's P can reach
// these blocks. See docs/how/mooncake.md.
type Receiver struct {
	o     ReceiverOptions // immutable
	cache *Cache
	log   *slog.Logger

	warn       LogLimit // of log lines that P may cause
	ownSockets bool

	host    string // of Target's address
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
		known   map[string]uint64 // P worker → id of the last layout that it keeps
		kvasir  map[string]bool   // P workers that are known to be Kvasir
		active  map[string]*receiving
		results Results
	}
	stats receiverStats
}

// ReceiverStats are counters since NewReceiver, except Active and Windows, which are current values.
type ReceiverStats struct {
	Active       int64 // requests being pulled now
	Windows      int64 // windows of the memory that exist now; more than one per P only after failures
	Received     int64 // requests whose blocks all arrived
	Released     int64 // requests pulled without blocks, so that P frees its own
	Failed       int64 // requests that failed; an aborted one counts from the moment of the abort
	Fenced       int64 // requests whose blocks were fenced
	Cut          int64 // connections cut by fences
	Resent       int64 // pulls sent again after the side channel broke
	LayoutsSent  int64 // pulls that carried the list of regions
	LayoutsNamed int64 // pulls that only named the list by its layout id
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
	// Failed has, for each request of Received whose KV did not arrive, the reason.
	Failed map[string]error
	// FailedBlocks are the blocks of the failed requests, if the cache has one group. vLLM's scheduler recomputes them.
	FailedBlocks []int
}

// receiving is one request that is being pulled.
type receiving struct {
	key    string // its key in Receiver.mu.active
	id     string // D's request id, as messages carry it
	want   wire.Wanted
	from   Source
	group  *group // the requests that one call of Start began
	ctx    context.Context
	giveUp context.CancelCauseFunc // ends ctx, because the request was aborted or its window ended
	done   chan struct{}           // closed when settled

	// Guarded by Receiver.mu.
	window  *window  // nil before the first pull is sent
	workers *pairing // set with window
	left    int      // P workers that have not answered
	err     error    // the first failure; readable without the lock after done
	suspect bool     // a P may still write into the blocks
	filled  bool     // every P worker reported success
	settled bool     // a goroutine has begun to settle it; no other may
	resent  []string // P workers that got the pull again after their side channel broke
	counted bool     // counted in stats.failed
}

// group is the requests that one call of Start began. Their common context ends when the last of them is settled.
type group struct {
	left   int // requests not settled yet; guarded by Receiver.mu
	cancel context.CancelFunc
}

// gaveUp returns the reason why D does not want the request any more, or nil if D still wants it.
func (q *receiving) gaveUp() error {
	if q.ctx.Err() == nil {
		return nil
	}
	return context.Cause(q.ctx)
}

// NewReceiver returns a Receiver for the engine's memory. It publishes the memory to a P at the first pull from that P.
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

// Start begins to pull the requests in `wanted`, by D's request ids, from the P engine `from`. Results reports later how they ended. A
// request without blocks only makes P free its blocks, and has no result. The error names the requests whose pull cannot start; the
// others are pulled. Results lists those requests as failed, too, except requests that are being pulled already.
func (r *Receiver) Start(from Source, wanted map[string]wire.Wanted) error {
	_, err := r.start(from, wanted, "")
	return err
}

// Pull is like Start, but waits for the results. It returns the errors of failed requests by id; the map is empty when all KV has
// arrived. Results lists the requests as well. When ctx ends first, Pull aborts the requests.
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

// start registers the requests, each under its id with suffix appended, and pulls them in the background.
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

// checkBlocks refuses block ids that lie outside D's memory, before a pull with them goes to P.
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

// Abort ends a request. Its result comes when its blocks are fenced. A stock P pushes the requests of a pull together, and all of them
// fail if one hits fenced blocks. With a stock P, the blocks therefore stay open, and the result comes only when P has answered or all
// other requests of the pull have ended.
func (r *Receiver) Abort(request string) {
	r.mu.Lock()
	q := r.mu.active[request]
	r.mu.Unlock()
	if q != nil {
		r.abort(q)
	}
}

// abort ends q. It wakes the goroutines that pull q. If no pull of q has been sent yet, q ends here.
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

// Results returns the requests that ended since the last call, and forgets them.
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

// Close aborts the pulls in progress, fences their blocks, and withdraws the memory from the target. No peer writes into the memory
// after Close.
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
		_ = c.Close() // the error is always nil
	}
	r.windows.close()
	return nil
}
