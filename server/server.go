// Package server is the node: it answers LMCache clients over a store whose
// chunks live in shared memory.
//
// Every request gets an answer. What cannot be done is declined with the value
// that the client survives, counted and logged with its reason; the protocol has
// no error frame. Only names and offsets pass through here: workers copy chunk
// bytes in and out of the pool themselves.
//
// Requests are answered on the goroutine that read them. None waits: the store
// answers within microseconds.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/paged"
	"github.com/kvasir-kv/kvasir/shm"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Options configures a Server. A zero field means its default.
type Options struct {
	ChunkTokens       int                 // tokens per chunk; default 256
	WorkerReap        time.Duration       // silence after which a worker that has pinged is dropped; default 120 s, < 0 never
	RegistrationGrace time.Duration       // the same for one that never pinged; default 3600 s
	MemoBytes         int64               // token-list memo; default 64 MiB, < 0 none
	MaxInstances      int                 // registered workers; default 4096
	PopulateRate      int64               // bytes per second of pool memory prepared ahead; 0 = none
	ChecksumRate      int64               // bytes per second of chunks checksummed in the background; 0 = none
	DrainTimeout      time.Duration       // for transfers in progress at shutdown; default 10 s
	RefuseDriven      bool                // workers whose KV the server would copy (lmcache_driven)
	RefuseEngine      bool                // workers that copy themselves (engine_driven)
	SeparateGroups    bool                // an object per kind of attention and chunk, not one for all
	CopyWorkers       int                 // goroutines per copy; default: the processors
	Pickle            PickleMode          // chunks that pass through the socket; default none
	PickleBytes       int64               // of such a message; default and limit MaxPickleBytes
	Trust             []netip.Prefix      // addresses whose peers are taken for this server's user; see identity.go
	ShmDir            string              // where workers' segments are; default shm.Dir
	Logger            *slog.Logger        // default slog.Default()
	ClientGenerations lmcache.Generations // that clients can be of; default all that are served
	Version           string              // reported over HTTP
	AllowHosts        []string            // names of this machine that HTTP requests may ask for, besides its host name
}

// Server answers LMCache clients. Its methods are safe for concurrent use.
type Server struct {
	opts     Options
	store    *store.Store
	memo     *lmcache.Memo
	log      *slog.Logger
	started  time.Time
	registry registry
	router   *zmtp.Router
	scratch  sync.Pool // *scratch

	draining atomic.Bool
	lost     atomic.Bool // the pool's name is gone
	memory   memory
	n        counters
	limiter  limiter
	p2p      p2pTasks
	former   formerSizes
	looks    looks
	held     heldMessages
	saving   saving
	lending  chan struct{} // closed with the first worker that lends its KV
	lendOnce sync.Once
	remains  remains
	proofs   proofs // of the goroutine of Tick
	complete bool   // every worker of the earlier server was taken over; set by New
}

// New returns a Server over st that does not listen yet. It takes over the
// workers whose registrations an earlier server kept beside the pool. The caller
// closes st after the Server.
func New(st *store.Store, o Options) *Server {
	o.ChunkTokens = cmp.Or(o.ChunkTokens, 256)
	o.WorkerReap = cmp.Or(o.WorkerReap, 120*time.Second)
	o.RegistrationGrace = cmp.Or(o.RegistrationGrace, 3600*time.Second)
	o.MemoBytes = cmp.Or(o.MemoBytes, 64<<20)
	o.MaxInstances = cmp.Or(o.MaxInstances, 4096)
	o.DrainTimeout = cmp.Or(o.DrainTimeout, 10*time.Second)
	o.CopyWorkers = cmp.Or(o.CopyWorkers, runtime.GOMAXPROCS(0))
	o.Logger = safelog.New(cmp.Or(o.Logger, slog.Default()))
	o.ClientGenerations = cmp.Or(o.ClientGenerations, lmcache.AllGenerations)
	if o.PickleBytes <= 0 || o.PickleBytes > MaxPickleBytes {
		o.PickleBytes = MaxPickleBytes
	}
	s := &Server{
		opts: o, store: st, log: o.Logger, started: time.Now(),
		memo: lmcache.NewMemo(o.ChunkTokens, o.MemoBytes), lending: make(chan struct{}),
	}
	s.registry.init(o.MaxInstances)
	s.saving.wake = make(chan struct{}, 1)
	s.scratch.New = func() any { return new(scratch) }
	s.beginMemory()
	s.recallSizes()
	s.restore()
	s.sayTrust()
	ro := zmtp.RouterOptions{Logger: o.Logger, HeartbeatInterval: 30 * time.Second, Identify: s.identify, Share: shareOf, OnDisconnect: s.departed}
	ro.GiveWay = true
	ro.Large, ro.LargeBytes = s.mayPickle, plainFrame
	o.routerLimits(&ro)
	s.router = zmtp.NewRouter(s.serve, ro)
	return s
}

// Listen binds a ZMQ endpoint (tcp://host:port, ipc:///path) and serves it until
// Shutdown. It returns the bound address.
func (s *Server) Listen(ctx context.Context, endpoint string) (string, error) {
	addr, err := s.router.Listen(ctx, endpoint)
	if err != nil {
		return "", err
	}
	return addr.String(), nil
}

// Run does the Server's background work until ctx ends: expiry once a second,
// and the preparation of pool memory.
func (s *Server) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	if s.opts.PopulateRate > 0 {
		wg.Go(func() { s.populate(ctx) })
	}
	if s.opts.ChecksumRate > 0 {
		wg.Go(func() { s.checksums(ctx) })
	}
	wg.Go(func() { s.keepNote(ctx) })
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var last summary
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

// Tick does once what Run does every second: expiry of pins and holds, dropping
// of dead and silent workers, removal of what dead engines left.
func (s *Server) Tick(now time.Time) {
	s.store.Expire()
	s.dropDead(now)
	s.reap(now)
	s.sweep()
	s.forgetSizes(now)
	s.expireHeld(now)
}

// checkName notices that somebody removed the pool's name: workers that have
// mapped it go on, new ones could not map it.
func (s *Server) checkName() {
	if s.store.NameLost() && !s.lost.Swap(true) {
		s.log.Error("the pool's shared-memory name was removed; new workers cannot map it: restart the server", "shm", s.store.PoolName())
	}
}

// Shutdown stops serving: new transfers are declined at once, those in progress
// may commit until the drain timeout or ctx ends, then the sockets close. It
// returns after the last reply is sent.
func (s *Server) Shutdown(ctx context.Context) error {
	s.draining.Store(true)
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
			s.log.Warn(fmt.Sprintf("stopping with %d transfers in progress; their workers get no answer", st.Transfers-st.Quarantined))
		}
		break
	}
	return s.router.Shutdown(ctx)
}

// Close stops serving at once and unmaps the memory of workers.
func (s *Server) Close() error {
	err := s.router.Close()
	s.saveDue()
	for _, in := range s.registry.list() {
		if in.driven != nil {
			err = errors.Join(err, in.driven.memory.close())
		}
	}
	return err
}

// scratch is what answering one request needs; reused.
type scratch struct {
	peer      *zmtp.Peer // who asks; nil in-process
	inProcess *caller    // then who it is taken for, of tests; nil is this process
	conn      *connection
	silent    bool // the request gets no answer
	readings  [4]lmcache.Reading
	key       lmcache.KeyView
	out       []byte
	frames    [3][]byte
	place     store.Place
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
	sc.peer, sc.conn = nil, nil
	if reply == nil {
		return
	}
	var err error
	if len(sc.out) > keepLarge {
		err = sc.sendLarge(p, reply)
	} else {
		err = p.Send(reply...)
	}
	if err != nil {
		s.n.dropped.Add(1)
	}
}

// Answer returns the frames that answer message m, or nil for a message that
// gets no answer. The frames are valid until the next call with the same
// goroutine's scratch; tests and in-process clients use it.
func (s *Server) Answer(m [][]byte) [][]byte {
	return s.answer(new(scratch), m)
}

func (s *Server) answer(sc *scratch, m [][]byte) [][]byte {
	if len(m) < 2 {
		s.refuse(lmcache.OpUnknown, errShort)
		return nil
	}
	if len(m[1]) == 0 && len(m) == 3 && isStreamControl(m[2]) {
		return nil // flow control of an event stream: we have none open
	}
	if len(m[0]) > maxUID { // it would be sent back
		s.refuse(lmcache.OpUnknown, errUID)
		return nil
	}
	sc.frames = [3][]byte{m[0], m[1]}
	sc.out, sc.silent = sc.out[:0], false
	sc.conn = sc.caller().connection()
	op := lmcache.OpUnknown
	err := s.contain(op, func() (err error) {
		op, err = s.read(sc, m)
		return err
	})
	if err == nil {
		err = s.contain(op, func() error { return s.handle(sc, op, m[2:]) })
	}
	if errors.Is(err, errHeld) {
		return nil
	}
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

// maxUID bounds the first frame of a request, bytes; clients send 16.
const maxUID = 1024

func isStreamControl(b []byte) bool { return string(b) == "ack" || string(b) == "cancel" }

// handle answers one operation: it appends the result frame to sc.out, or leaves
// it empty for None. An error is answered with the operation's negative value.
func (s *Server) handle(sc *scratch, op lmcache.Op, p [][]byte) error {
	s.n.requests[op].Add(1)
	if err := sc.conn.generations.CheckPayloads(op, len(p)); err != nil {
		return err
	}
	switch op {
	case lmcache.OpNoop:
		sc.out = lmcache.AppendString(sc.out, "OK")
		return nil
	case lmcache.OpPing:
		return s.ping(sc, p)
	case lmcache.OpGetChunkSize:
		sc.conn.fresh = true
		sc.out = lmcache.AppendInt(sc.out, int64(s.opts.ChunkTokens))
		return nil
	case lmcache.OpGetExperimental: // no optional features yet
		sc.out, _ = lmcache.AppendNegative(sc.out, op, "")
		return nil
	case lmcache.OpLookup:
		return s.lookup(sc, p)
	case lmcache.OpQueryPrefetchStatus, lmcache.OpWaitPrefetchStatus:
		return s.prefetchStatus(sc, p)
	case lmcache.OpFreeLookupLocks:
		return s.freeLookupLocks(sc, p)
	case lmcache.OpEndSession:
		return s.endSession(sc, p)
	case lmcache.OpPrepareStore:
		return s.prepareStore(sc, p)
	case lmcache.OpCommitStore:
		return s.commitStore(sc, p)
	case lmcache.OpPrepareRetrieve:
		return s.prepareRetrieve(sc, p)
	case lmcache.OpCommitRetrieve:
		return s.commitRetrieve(sc, p)
	case lmcache.OpStore:
		return s.storeBlocks(sc, p)
	case lmcache.OpRetrieve:
		return s.retrieveBlocks(sc, p)
	case lmcache.OpRegisterEngineDriven:
		return s.registerEngineDriven(sc, p)
	case lmcache.OpUnregisterEngineDriven, lmcache.OpUnregisterKVCache:
		return s.unregister(sc, p)
	case lmcache.OpClear:
		return s.clear(p)
	case lmcache.OpReportBlockAllocation:
		return lmcache.CheckBlockAllocations(p[2])
	}
	return s.handleRare(sc, op, p)
}

// handleRare answers what engines ask for once, or never.
func (s *Server) handleRare(sc *scratch, op lmcache.Op, p [][]byte) error {
	switch op {
	case lmcache.OpRegisterKVCache:
		return s.registerKVCache(sc, p)
	case lmcache.OpP2PLookupAndLock:
		return s.p2p.lookup(sc, p)
	case lmcache.OpP2PQueryLookupResults:
		return s.p2p.query(sc, p)
	case lmcache.OpP2PUnlockObjects: // nothing is ever locked for a peer
		_, err := lmcache.CountObjectKeys(p[0])
		return err
	case lmcache.OpUnknown:
		return errUnknownOp
	}
	return errUnsupported
}

// reasons of refusals, also the label values of the metric
var (
	errShort       = errors.New("message with fewer than two frames")
	errUnknownOp   = errors.New("unknown operation")
	errUnsupported = errors.New("operation is not supported by this server")
	errInstance    = errors.New("worker instance is not registered")
	errRefused     = errors.New("worker's registration was refused")
	errMode        = errors.New("worker registered for the other transfer mode")
	errModel       = errors.New("no worker is registered for this model and world size")
	errDraining    = errors.New("server is shutting down")
	errMiss        = errors.New("chunks are not readable")
	errNoCommit    = errors.New("no transfer of that key is in progress")
	errReaders     = errors.New("num_kv_readers is 0")
	errPickle      = errors.New("worker does not map the pool, and this server reads no pickled tensors")
	errSide        = errors.New("worker stored in the pool itself before, and now sends pickled tensors, or the other way round")
	errLate        = errors.New("commit of a worker that was dropped or registered anew in between")
	errRoom        = errors.New("no room in the pool")
	errUnread      = errors.New("replies that their clients have not read hold too much memory")
	errUID         = errors.New("request uid is too long")
)

// maxReasons is room for refusalNames.
const maxReasons = 64

var refusalNames = []struct {
	err  error
	name string
}{
	{errShort, "short_message"},
	{errUnknownOp, "unknown_operation"},
	{errUnsupported, "unsupported"},
	{errInstance, "unknown_instance"},
	{errRefused, "refused_instance"},
	{errMode, "other_mode"},
	{paged.ErrBlocks, "block_ids"},
	{shm.ErrFault, "memory_gone"},
	{errModel, "unknown_model"},
	{errDraining, "draining"},
	{errMiss, "miss"},
	{errNoCommit, "no_transfer"},
	{errReaders, "no_readers"},
	{errPickle, "pickle"},
	{errSide, "other_side"},
	{errLender, "not_lender"},
	{errTensors, "tensors"},
	{errLate, "late_commit"},
	{errRoom, "no_room"},
	{errAmbiguous, "ambiguous"},
	{errGeneration, "generation"},
	{errPanic, "internal_error"},
	{errChunkSize, "chunk_size"},
	{errUnread, "unread_replies"},
	{errUID, "request_uid"},
	{store.ErrBusy, "busy"},
	{lmcache.ErrRange, "range"},
	{lmcache.ErrPayloads, "payload_count"},
	{nil, "malformed"}, // everything else: a frame that does not decode
}

func refusalIndex(err error) int {
	for i, r := range refusalNames {
		if r.err != nil && errors.Is(err, r.err) {
			return i
		}
	}
	return len(refusalNames) - 1
}

// refuse counts and logs a declined request, a few lines per second and reason.
func (s *Server) refuse(op lmcache.Op, err error) {
	i := refusalIndex(err)
	s.n.refusals[i].Add(1)
	if ok, more := s.limiter.allow(i, time.Now()); ok {
		attrs := []any{"operation", op.String(), "reason", err.Error()}
		if more > 0 {
			attrs = append(attrs, "not_shown", more)
		}
		s.log.Warn("declined", attrs...)
	}
}
