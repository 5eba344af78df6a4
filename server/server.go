// SPDX-License-Identifier: Apache-2.0

// Package server is the node: it answers LMCache clients, and engines of vLLM with tiered offloading, from a store whose chunks are in
// shared memory.
//
// Every request gets an answer. A request that cannot be served is declined with a value that the client survives, because the protocol has
// no error frame; it is counted and logged with its reason. Mostly only names and offsets pass through here: workers copy chunk bytes in
// and out of the pool themselves. The server copies for workers that lend their KV, and the chunks of workers that cannot map the pool may
// pass through the socket.
//
// Requests are answered on the goroutine that reads them. None waits, except for copies that the server makes itself. The client asks again
// for the result of a pending lookup, or a goroutine answers later.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/statefile"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/beginning"
	"github.com/kvasir-kv/kvasir/server/events"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/server/offload"
	"github.com/kvasir-kv/kvasir/server/usage"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Server answers LMCache clients. Its methods are safe for concurrent use.
type Server struct {
	opts     Options
	store    *store.Store
	own      *chunking // chunk size of --chunk-size
	sizes    sizes     // other chunk sizes
	bases    bases     // chunk sizes of listeners
	log      *slog.Logger
	started  time.Time
	registry *workers.Registry
	router   *zmtp.Router
	scratch  sync.Pool // *scratch

	draining      atomic.Bool
	lost          atomic.Bool   // the pool's name was removed
	sweeps        chan struct{} // see sweepSoon; capacity 1
	clearing      sync.Mutex    // orders the generations that clears begin
	clears        atomic.Uint64
	lastMalformed atomic.Pointer[string] // why the last unreadable request could not be read
	n             counters
	p2p           *peerLookups
	former        formerSizes
	finder        access.Finder
	held          heldMessages[*zmtp.Peer, principal] // messages that wait until their clients' generation is known
	waits         waits
	streams       streams
	saving        *statefile.PacedWriter // writes the note
	strangers     bool                   // used only by Tick: it has logged that workers without a registration send heartbeats
	noted         noteState
	leftovers     lent.Leftovers
	recent        recently
	turnedAway    explain.Refusals
	names         *tier.Names   // of the namespaces that requests used
	ended         *explain.Book // lookups that found less than they asked for
	beginnings    *beginning.Finder
	slow          *slowLog
	tally         *usage.Tally
	offload       *offload.Server
	vllmTier      bool // the tier socket is served; set before Run
	complete      bool // every worker of the earlier server was taken over; set by New
}

// New returns a Server over st that does not listen yet. o must pass Validate. The Server takes over the workers whose registrations an
// earlier server stored beside the pool. The caller must close st after the Server.
func New(st *store.Store, o Options) *Server {
	o = o.withDefaults()
	s := &Server{
		opts: o, store: st, log: o.Log, started: time.Now(),
		own: &chunking{o.ChunkTokens, lmcache.NewMemo(o.ChunkTokens, o.MemoBytes)}, p2p: newPeerLookups(st), names: o.Names, sweeps: make(chan struct{}, 1),
	}
	if s.names == nil {
		s.names = tier.NewNames()
	}
	s.ended, s.beginnings, s.tally, s.slow = explain.New(s.names), beginning.New(), usage.New(), newSlowLog(time.Millisecond)
	s.n.init()
	s.registry = workers.NewRegistry(o.MaxInstances)
	s.saving = statefile.NewPacedWriter(noteEvery, s.writeNote)
	s.scratch.New = func() any { return new(scratch) }
	if s.opts.Generations != nil {
		s.opts.Generations.Follow(s.followClear)
	}
	s.offload = s.newOffload()
	s.recallSizes()
	s.restore()
	s.logTrust()
	ro := zmtp.RouterOptions{Log: o.Log, HeartbeatInterval: 30 * time.Second, Identify: s.identify, Share: shareOf, OnDisconnect: s.connectionEnded, GiveWay: true, Large: s.mayPickle, LargeBytes: plainFrame, MaxFirstBytes: maxUID, Networks: o.Networks, Authentication: o.Clients}
	o.routerLimits(&ro)
	s.router = zmtp.NewRouter(s.serve, ro)
	return s
}

// Look returns a map of the pool with `cells` cells, and the slowest requests of the last ten minutes that took at least a millisecond from
// their last byte to their answer. Waits for pending lookups are not among them.
func (s *Server) Look(cells int) (pool.Map, []SlowRequest) {
	return s.store.Map(cells, 0), s.slow.Latest(time.Now())
}

// Listen binds a ZMQ endpoint (tcp://host:port, ipc:///path) and serves it until
// Shutdown. It returns the bound address.
func (s *Server) Listen(ctx context.Context, endpoint string) (string, error) {
	return s.ListenChunks(ctx, endpoint, 0)
}

// ListenChunks is Listen for clients with chunks of chunkTokens tokens; 0: Options.ChunkTokens. A client of 0.5.7 may negotiate a multiple.
func (s *Server) ListenChunks(ctx context.Context, endpoint string, chunkTokens int) (string, error) {
	if chunkTokens < 0 || chunkTokens > kv.MaxChunkTokens {
		return "", fmt.Errorf("chunks of %d tokens for %s are outside 1 to %d", chunkTokens, endpoint, kv.MaxChunkTokens)
	}
	s.bases.Lock() // held until the listener's size is recorded, before the first connection asks for it
	defer s.bases.Unlock()
	addr, err := s.router.Listen(ctx, endpoint)
	if err != nil {
		return "", err
	}
	if s.bases.of == nil {
		s.bases.of = make(map[string]int)
	}
	s.bases.of[listenerOf(addr)] = chunkTokens
	return addr.String(), nil
}

// Run does the Server's background work until ctx ends: among others it calls Tick once a second, and provides pool memory.
func (s *Server) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.store.Run(ctx) })
	wg.Go(func() { s.saving.Run(ctx) })
	if s.opts.ProbeTiers != nil {
		wg.Go(func() { s.opts.ProbeTiers(ctx) })
	}
	if s.opts.Generations != nil {
		wg.Go(func() { s.opts.Generations.Run(ctx) })
		wg.Go(func() { s.runSweeps(ctx) })
	}
	if s.opts.Events != nil {
		wg.Go(func() { s.opts.Events.Run(ctx) })
	}
	if s.opts.Publisher != nil {
		wg.Go(func() { s.opts.Publisher.Run(ctx) })
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	last := s.count()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s.Tick(time.Now())
		if n%10 == 0 {
			s.checkName()
			last = s.summarize(last)
		}
	}
}

// Publisher returns the publisher of KV events on its own sockets; nil for none.
func (s *Server) Publisher() *events.Publisher { return s.opts.Publisher }

// NameOf returns the model and the salt of a namespace. It reports false if no request has named the namespace since the start.
func (s *Server) NameOf(ns kv.Namespace) (tier.Name, bool) { return s.names.Of(ns) }

// Tick does once what Run does every second: it ends held messages that are too old, drops dead and silent workers, and removes what dead
// engines left.
func (s *Server) Tick(now time.Time) {
	s.dropDead(now)
	s.reap(now)
	s.sweep()
	s.forgetSizes(now)
	s.expireHeld(now)
	s.offload.Tick()
}

// checkName notices that the pool's name was removed, and logs that once. Workers that have mapped the pool continue; new ones could not map
// it.
func (s *Server) checkName() {
	if s.store.Files().NameLost() && !s.lost.Swap(true) {
		s.log.Error("the pool's shared-memory name was removed; new workers cannot map it: restart the server", "shm", s.store.Files().Name())
	}
}

// Shutdown stops serving. New transfers are declined at once. Those in progress may commit until the drain timeout or ctx ends; then the
// sockets close. It returns after the last reply is sent.
func (s *Server) Shutdown(ctx context.Context) error {
	s.draining.Store(true)
	s.waits.stop()
	s.streams.stop()
	ctx, cancel := context.WithTimeout(ctx, s.opts.DrainTimeout)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		st := s.store.Stats()
		if st.Transfers == st.Quarantined {
			break
		}
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
			s.log.Warn("stopping with transfers in progress; their workers get no answer", "transfers", st.Transfers-st.Quarantined)
		}
		break
	}
	return errors.Join(s.offload.Close(), s.router.Shutdown(ctx))
}

// Close stops serving at once and unmaps the memory of workers.
func (s *Server) Close() error {
	s.waits.stop()
	s.streams.stop()
	err := errors.Join(s.offload.Close(), s.router.Close())
	if s.opts.Publisher != nil {
		err = errors.Join(err, s.opts.Publisher.Close())
	}
	s.saving.Flush()
	for _, in := range s.registry.List() {
		if in.Lent != nil {
			err = errors.Join(err, in.Lent.Close())
		}
	}
	return err
}

// scratch is the memory for answering one request. It is used again.
type scratch struct {
	peer      *zmtp.Peer // the sender; nil for a caller in this process
	inProcess *caller    // if peer is nil: the caller that a test sets; nil: this process
	conn      *connection
	chunk     *chunking // the request's chunk size
	silent    bool      // the request gets no answer
	denied    *refusal  // why a lookup must not search under its salt; else nil
	readings  [4]lmcache.Reading
	decoder   lmcache.Decoder
	out       []byte
	frames    [3][]byte
	place     store.Transfer
	slots     lmcache.Slots
}

func (s *Server) serve(p *zmtp.Peer, m zmtp.Message) {
	before := whoIs(p).connection().generations
	s.reply(p, m)
	s.release(p, before)
}

// reply answers one message.
func (s *Server) reply(p *zmtp.Peer, m [][]byte) {
	sc := s.scratch.Get().(*scratch)
	defer s.scratch.Put(sc)
	sc.peer = p
	reply := s.answer(sc, m)
	sc.peer, sc.conn, sc.chunk = nil, nil, nil
	if reply == nil {
		return
	}
	if len(sc.out) > keepLarge {
		s.sent(sc.sendLarge(p, reply))
		return
	}
	s.send(p, reply...)
}

// send sends one reply.
func (s *Server) send(p *zmtp.Peer, frames ...[]byte) { s.sent(p.Send(frames...)) }

// sent counts a reply that could not be sent because its client is gone or too slow.
func (s *Server) sent(err error) {
	if err != nil {
		s.n.dropped.Add(1)
	}
}

// Answer returns the frames of the answer to message m, or nil for a message without an answer. Tests and clients in this process use it.
func (s *Server) Answer(m [][]byte) [][]byte {
	return s.answer(new(scratch), m)
}

func (s *Server) answer(sc *scratch, m [][]byte) [][]byte {
	if len(m) < 2 {
		s.refuse(lmcache.OpUnknown, errShort)
		return nil
	}
	if len(m[1]) == 0 && len(m) == 3 && isStreamControl(m[2]) {
		s.streams.control(sc.peer, m[0], m[2])
		return nil
	}
	if len(m[0]) > maxUID { // it would be sent back
		s.refuse(lmcache.OpUnknown, errUID)
		return nil
	}
	began, op, asked := time.Now(), lmcache.OpUnknown, lmcache.Request(nil)
	sc.frames, sc.out, sc.silent = [3][]byte{m[0], m[1]}, sc.out[:0], false
	sc.conn = sc.caller().connection()
	err := s.contain(op, func() (err error) {
		op, err = s.read(sc, m)
		return err
	})
	if err == nil {
		s.n.requests[op].Add(1)
		err = s.contain(op, func() error {
			var err error
			if sc.chunk, err = s.sizeFor(sc, op, m[2:]); err != nil {
				return err
			}
			r, err := sc.decoder.Decode(sc.chunk.memo, sc.conn.generations, op, m[2:])
			if err != nil {
				return err
			}
			asked = r
			sc.conn.opened(r)
			if err := s.takeTenant(sc, r); err != nil {
				return err
			}
			return s.handle(sc, r)
		})
	}
	if errors.Is(err, errHeld) {
		return nil
	}
	defer func() { s.took(op, lmcache.RequestID(asked), began) }()
	if err != nil {
		ok := s.decline(sc, op, err)
		s.refuse(op, err)
		if !ok {
			sc.out = sc.out[:0]
		}
	}
	if sc.silent {
		return nil
	}
	if len(sc.out) == 0 {
		return sc.frames[:2]
	}
	sc.frames[2] = sc.out
	return sc.frames[:3]
}

// took records how long the answer to a request took.
func (s *Server) took(op lmcache.Op, request []byte, began time.Time) {
	took := time.Since(began)
	now := began.Add(took)
	s.n.times[op].Took(took)
	s.slow.Note(op, request, began, now)
	s.ended.Took(op.String(), request, began, now)
}

// maxUID bounds the first frame of a request, in bytes. A request with a longer one is refused without an answer. LMCache's clients send 16.
const maxUID = 1024

func isStreamControl(b []byte) bool {
	return string(b) == lmcache.StreamAck || string(b) == lmcache.StreamCancel
}

// handle answers one request: it appends the result frame to sc.out, or leaves sc.out empty for None. The caller answers an error with the
// operation's negative value.
func (s *Server) handle(sc *scratch, r lmcache.Request) error {
	switch r := r.(type) {
	case *lmcache.NoopRequest:
		sc.out = lmcache.AppendString(sc.out, "OK")
	case *lmcache.PingRequest:
		s.ping(sc, r)
	case *lmcache.LookupRequest:
		return s.lookup(sc, r)
	case *lmcache.PrefetchStatusRequest:
		return s.prefetchStatus(sc, r)
	case *lmcache.FreeLookupLocksRequest:
		s.freeLookupLocks(sc, r)
	case *lmcache.EndSessionRequest:
		s.store.EndSession(r.RequestID, sc.caller().Owner())
	case *lmcache.PrepareStoreRequest:
		return s.prepareStore(sc, r)
	case *lmcache.CommitStoreRequest:
		return s.commitStore(sc, r)
	case *lmcache.PrepareRetrieveRequest:
		return s.prepareRetrieve(sc, r)
	case *lmcache.CommitRetrieveRequest:
		return s.commitRetrieve(sc, r)
	case *lmcache.StoreRequest:
		return s.storeBlocks(sc, r)
	case *lmcache.RetrieveRequest:
		return s.retrieveBlocks(sc, r)
	case *lmcache.ReportBlockAllocationRequest: // information that this server does not use
	default:
		return s.handleRare(sc, r)
	}
	return nil
}

// handleRare answers operations that engines call once, or never.
func (s *Server) handleRare(sc *scratch, r lmcache.Request) error {
	switch r := r.(type) {
	case *lmcache.GetChunkSizeRequest:
		s.findClient(sc.caller())
		s.fix(sc.conn, s.current(sc.conn))
		sc.out = lmcache.AppendInt(sc.out, int64(sc.conn.chunk.tokens))
		return nil
	case *lmcache.NegotiateRequest:
		s.findClient(sc.caller())
		s.negotiate(sc, r)
		return nil
	case *lmcache.GetExperimentalRequest:
		var features []string
		if sc.conn.generations != lmcache.Only(lmcache.Gen057) { // clients of 0.5.7 do not look for the event stream
			features = s.features()
		}
		sc.out = lmcache.AppendExperimental(sc.out, features...)
		return nil
	case *lmcache.SubscribeRequest:
		return s.subscribe(sc, r)
	case *lmcache.EngineDriven:
		return s.registerEngineDriven(sc, r)
	case *lmcache.KVCache:
		return s.registerKVCache(sc, r)
	case *lmcache.UnregisterRequest:
		s.unregister(sc, r.InstanceID)
		return nil
	case *lmcache.ClearRequest:
		if s.limitOf(sc).Limited() { // the clear would drop chunks of all tenants
			return errTenant
		}
		return s.clearFor(sc.caller(), r.Force)
	case *lmcache.P2PLookupRequest, *lmcache.P2PResultRequest, *lmcache.P2PUnlockRequest:
		s.answerPeer(sc, r)
		return nil
	}
	if r.Op() == lmcache.OpUnknown {
		s.warnNewer(sc)
		return errUnknownOp
	}
	return errUnsupported
}
