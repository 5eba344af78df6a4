// SPDX-License-Identifier: Apache-2.0

// Package store decides which chunks are stored, found, promised to engines and evicted. The chunks are in the shared-memory pool, which
// workers read and write themselves; the store assigns places and protects them. One tier.Tier may lie below the pool: objects that a
// lookup wants and only the tier has are read into the pool first.
//
// Two kinds of promise keep a chunk. A pin belongs to a session: a lookup takes it, a retrieve or the session's end releases it, and it
// only prevents eviction. A hold belongs to a worker instance that knows the place of a slot and may touch its bytes. It ends with that
// worker's commit, or when the quarantine after the worker's last sign of life is over. A held slot is never reused.
//
// A lookup never waits. An object that it finds and cannot serve yet has a flight, and the lookup is pending until the flight has landed;
// see prefetch.go and flight.go.
//
// One mutex guards everything, held for microseconds and never over I/O.
package store

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tenant"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

// Options configures a Store. A zero field means its default.
type Options struct {
	Quarantine  time.Duration // life of a hold without commit, from prepare or from the worker's end; default 600 s
	SessionIdle time.Duration // life of a session after its last use; default 600 s
	MaxSessions int           // sessions at once; beyond it another one ends; default 65,536
	MaxHolds    int           // transfers at once; a user or address may have half of those that others leave free, then ErrBusy; default 65,536

	// Rates of the background work in bytes per second; 0: no such work.
	PopulateRate int64 // provides pool memory ahead of its use
	ChecksumRate int64 // computes checksums of chunks, and compares them after a restart

	SumAfter  time.Duration // age at which a chunk's checksum is computed, as many chunks do not live long; default 1 s
	SumAtOnce bool          // computes checksums without waiting for SumAfter

	// Stopped reports whether a process that maps the pool is stopped (as by SIGSTOP). While one is, slots that workers of an earlier
	// server may still touch stay out of use, because a stopped process may continue. Default: looks at /proc.
	Stopped func() bool

	// TrustUnsummed serves objects that an earlier server left without a checksum: those stored in the seconds before it was killed.
	// Otherwise they are dropped.
	TrustUnsummed bool

	Ghosts      int           // evicted keys remembered to explain misses; default 65,536
	LoadTimeout time.Duration // longest time that a lookup is pending; its result is then what is resident; default 2 s
	Log         *slog.Logger  // nil discards
	Policy      evict.Policy  // decides what is evicted next; the store owns it; default an evict.LRU

	// TenantPolicy makes the policy of a tenant that gets a quota; default an evict.LRU.
	TenantPolicy func(quota int64) evict.Policy

	// Curves makes the store estimate what other amounts of memory would find (Store.Curves); nil: no estimate. The store sets its fields
	// Bytes and Teach itself.
	Curves *hitcurve.Options

	// TTL is the idle time after which an object is dropped, unless its tenant has a TTL of its own; 0: never.
	TTL time.Duration

	Below     tier.Tier // the tier below the pool, which the store closes; nil: none
	LoadBytes int64     // the most bytes that are being read from Below at once; default a quarter of the pool, 1 GiB at most
	OwnNames  bool      // no lookup searches for a chunk under other names: the time it takes would show which chunks other tenants have
	Place     string    // name of Below: a later server does not write objects again that are in the tier of the same name

	// Moment returns the generation of Below in which a write begins (generation.Book); nil: Below has no generations.
	Moment func() uint64

	DropRestored bool // drop the objects of an earlier server, because they may be from before a clear

	BelowOpened <-chan struct{} // closed once Below knows all its objects; nil: it knows them from the start

	// LoadIfFaster makes a lookup ask the tier only if a load is expected to be faster than to compute again: see tiering.Rates.
	LoadIfFaster bool

	WarmBytes int64         // bytes that Run reads from Below at its start, the hottest objects first, into free memory; 0: none
	WarmTime  time.Duration // longest time for WarmBytes; default 5 minutes

	Write        WritePolicy  // when objects are written to Below
	WriteAnswers AnswerPolicy // whether objects of answers are written later, or never
	WriteBytes   int64        // most bytes that may wait to be written; objects beyond are skipped and counted; default the pool's size

	// WorkerShare and PeerShare are the shares of the pool that one worker, and all workers of one user or address, may have staged by
	// evicting other objects. Staged are the bytes that they may write and have not committed, quarantine included. Defaults 1/4 and 3/4.
	// One chunk is always allowed. They may use free memory beyond their share, except for the last eighth of a pool of many chunks.
	WorkerShare, PeerShare float64
}

// Store keeps chunks in a pool. Its methods are safe for concurrent use.
type Store struct {
	opts   Options
	log    *slog.Logger
	memory *pool.Memory
	busy   func(slot uint32) bool // keptLocked, which the policy calls

	// untouchable also reports true for slots within the quota of a tenant other than the one that needs room.
	untouchable func(slot uint32) bool

	flyers   crew            // compare the checksums of objects that lookups wait for
	readers  chan struct{}   // one element for each goroutine that reads chunks, which bounds their number
	life     context.Context // ends with Close
	endLife  context.CancelFunc
	running  sync.WaitGroup     // pending lookups, and calls of the tier below
	below    *tiering.Guard     // nil: none
	place    uint32             // Options.Place as a mark in the pool's index
	outbox   *tiering.WriteBack // nil: nothing is written to the tier below
	rechecks chan struct{}      // requests for a recheck of what is recorded as being below; capacity 1
	prompts  *promptLengths     // nil: answers are written as prompts are
	rates    tiering.Rates      // learned only if there is a tier
	quotas   quotas
	curves   *curves       // nil: none
	news     chan struct{} // see News; capacity 1
	began    time.Time
	marks    uint64 // random part of the marks

	mu struct {
		sync.Mutex
		closed bool
		pool   *pool.Pool
		policy *tenant.Table // knows the resident slots
		leases *lease.Table[lastLookup]
		holds  *hold.Table

		lives     slotEnds                     // ends that requests gave to slots
		passed    container.PagedSlice[bool]   // by slot: the policy may have passed it over as kept, and looks at it again only after a use
		warmed    tiering.WarmedSlots          // slots that Warm read without knowing the right length
		parents   container.PagedSlice[uint64] // by slot: miss.ID of the object before it, 0 if that is not known
		answers   container.PagedSlice[bool]   // by slot: it has tokens of an answer, and is not written to the tier below for that reason
		kept      container.PagedSlice[uint32] // by slot: promises that keep it from being evicted
		evictable int                          // resident slots without such a promise

		epoch    uint32                       // number of Forgets
		epochs   container.PagedSlice[uint32] // by slot: the epoch in which its place was taken
		outdated bool                         // there may be a resident slot of an earlier epoch

		drops      uint64       // number of dropped keys, whatever the reason
		misses     *miss.Memory // remembers dropped objects
		chunks     miss.Chunks  // resident slots by chunk hash
		needs      needs        // who needs room, while objects are evicted for it
		sums       checksumQueue
		flights    flights
		writing    map[pool.Slot]uint64 // slots that are being written to the tier below, kept and held; value: removals when the write began
		writeEnded chan struct{}        // closed when the next of these writes ends; nil while no one waits for it
		unwanted   map[pool.Slot]uint32 // slots whose object was deleted below after it was offered to be written there; value: the slot's generation
		removals   uint64               // number of removals from the tier: see countRemoval
		aging      int                  // the slot that Expire looks at next for its TTL
		pending    fair.Shares          // pending lookups and their objects
		loading    fair.AwaitedShares   // reads from the tier below and their bytes, by the user or address that began them
		n          Counters
		events     events

		indexShort bool // the pool's index needs more memory, which unlock provides
	}
}

// needs says who needs room in the pool: a user or address, for objects of a namespace.
type needs struct {
	by        string
	namespace kv.Namespace
}

// New returns a Store over p. The Store owns p from then on.
func New(p *pool.Pool, o Options) *Store {
	o.Quarantine = cmp.Or(o.Quarantine, 600*time.Second)
	o.SumAfter = cmp.Or(o.SumAfter, time.Second)
	if o.SumAtOnce {
		o.SumAfter = -1
	}
	o.MaxHolds = cmp.Or(o.MaxHolds, 1<<16)
	if o.Policy == nil {
		o.Policy = evict.NewLRU()
	}
	if o.TenantPolicy == nil {
		o.TenantPolicy = func(int64) evict.Policy { return evict.NewLRU() }
	}
	if o.Stopped == nil {
		o.Stopped = func() bool { return peercred.MapperStopped(filepath.Base(p.Path()), p.Inode()) }
	}
	o.WorkerShare = cmp.Or(o.WorkerShare, 0.25)
	o.PeerShare = cmp.Or(o.PeerShare, 0.75)
	o.Ghosts = cmp.Or(o.Ghosts, 1<<16)
	o.WarmTime = cmp.Or(o.WarmTime, 5*time.Minute)
	o.LoadTimeout = cmp.Or(o.LoadTimeout, defaultLoadTimeout)
	o.LoadBytes = cmp.Or(o.LoadBytes, min(p.Bytes()/4, 1<<30))
	s := &Store{opts: o, log: o.Log, flyers: newCrew(), readers: make(chan struct{}, readers()), news: make(chan struct{}, 1), rechecks: make(chan struct{}, 1), began: time.Now(), marks: rand.Uint64()}
	s.life, s.endLife = context.WithCancel(context.Background())
	s.mu.flights.of, s.mu.writing = make(map[pool.Slot]*flight), make(map[pool.Slot]uint64)
	s.mu.unwanted = make(map[pool.Slot]uint32)
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if o.Below != nil {
		s.below = tiering.NewGuard(o.Below, o.LoadTimeout, max(1, o.LoadBytes/2), s.log)
		s.place = pool.MarkOf(o.Place)
		if o.Write != WriteNever {
			s.outbox = tiering.NewWriteBack(cmp.Or(o.WriteBytes, p.Bytes()))
			if o.WriteAnswers != AnswersAsPrompts {
				s.prompts = newPromptLengths(maxPrompts)
			}
		}
	}
	s.mu.pool = p
	s.busy = func(slot uint32) bool {
		kept := s.keptLocked(pool.Slot(slot))
		if kept {
			s.mu.passed.Grow(int(slot) + 1)
			*s.mu.passed.At(int(slot)) = true
		}
		return kept
	}
	s.mu.policy = tenant.New(p.Bytes(), o.Policy, o.TenantPolicy, func(slot uint32) bool { return s.busy(slot) }, func(slot uint32) int64 { return p.Round(p.Length(pool.Slot(slot))) })
	_ = s.mu.policy.SetCommonTTL(o.TTL) // Validate has checked it
	s.untouchable = func(slot uint32) bool { return s.busy(slot) || s.mu.policy.Any() && s.mu.policy.Spared(slot) }
	s.mu.leases = lease.New[lastLookup](lease.Options{Idle: o.SessionIdle, MaxSessions: o.MaxSessions})
	s.mu.holds = hold.NewTable(o.Quarantine, o.MaxHolds)
	s.mu.misses = miss.NewMemory(o.Ghosts)
	s.curves = s.newCurves()
	s.restoreLocked() // no other goroutine has s yet
	s.memory = pool.NewMemory(backed{p, s}, o.PopulateRate, s.log)
	if s.below != nil { // which is read into the pool and written from it by this process
		s.memory.MapAhead()
	}
	return s
}

// restoreLocked takes over the chunks that the pool kept from an earlier server. Slots that workers of that server may still touch go into
// quarantine.
func (s *Store) restoreLocked() {
	r := s.mu.pool.Restored()
	var unsummed, cleared, limited []pool.Slot
	for _, slot := range r.Resident {
		s.addLocked(slot)
		s.markAnswerLocked(slot, s.mu.pool.Below(slot) == answerMark)
		if s.mu.pool.Expired(slot) {
			limited = append(limited, slot)
		} else if _, ok := s.mu.pool.Sum(slot); s.opts.DropRestored || s.mu.pool.Outdated(slot) {
			cleared = append(cleared, slot)
		} else if ok {
			s.mu.sums.Suspect(uint32(slot))
		} else if s.opts.TrustUnsummed {
			s.unsummedLocked(slot)
		} else {
			unsummed = append(unsummed, slot)
		}
	}
	for _, f := range s.mu.pool.FormerTransfers() {
		s.formerLocked(f)
	}
	for _, slot := range unsummed {
		s.dropLocked(slot, miss.Unsummed)
	}
	for _, slot := range cleared {
		s.dropLocked(slot, miss.Cleared)
	}
	for _, slot := range limited {
		s.dropLocked(slot, miss.RequestTTL)
	}
	if len(limited) > 0 {
		s.log.Info("chunks with a time to live of their request end with their server: they are dropped", "chunks", len(limited))
	}
	if len(cleared) > 0 {
		s.log.Warn("the earlier server ended before all chunks from before a clear were gone: they are dropped", "chunks", len(cleared))
	}
	if len(unsummed) > 0 {
		s.log.Warn("the earlier server was killed before these chunks had a checksum: they are dropped, because nothing shows that their bytes are whole", "chunks", len(unsummed))
	}
	s.mu.n.RestoredChunks = uint64(len(r.Resident) - len(unsummed) - len(cleared) - len(limited))
	s.mu.n.UnsummedChunks = uint64(len(unsummed))
}

// formerLocked holds slots that a worker of an earlier server may still touch. Slots that it reads are held for twice the quarantine. A
// late commit of such a worker could otherwise end a load of the same chunks that this server granted, and leave that load without a hold.
func (s *Store) formerLocked(f pool.FormerTransfer) {
	life := s.opts.Quarantine
	if f.Reads {
		life *= 2
	}
	h := &hold.Hold{Slots: make([]uint32, len(f.Slots)), Deadline: time.Now().Add(life - f.For), Reads: f.Reads}
	for i, slot := range f.Slots {
		h.Slots[i] = uint32(slot)
		if f.Reads {
			s.keepLocked(slot)
		}
	}
	s.mu.holds.AddFormer(h, f.Writer.Name)
}

// Close leaves the pool for a later server. Run must have returned, and no method may be called afterwards. Chunks without a checksum get
// one first, for maxCloseSums at most.
func (s *Store) Close() error {
	s.sumRest()
	return s.close()
}

func (s *Store) close() error {
	s.beginClose()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.running.Wait()
	}()
	patience := time.NewTimer(closePatience)
	defer patience.Stop()
	select {
	case <-ended:
	case <-patience.C:
		return ErrBelowHangs
	}
	if s.below != nil {
		return errors.Join(s.below.Close(), s.mu.pool.Close())
	}
	return s.mu.pool.Close()
}

// closePatience is how long Close waits for calls of the tier below. If one still runs then, Close returns ErrBelowHangs.
const closePatience = 10 * time.Second

// ErrBelowHangs means that a call of the tier below did not end when its context did. The pool stays mapped, because that call may still
// write to it.
var ErrBelowHangs = errors.New("store: a call of the tier below does not end, so the pool stays mapped")

func (s *Store) beginClose() {
	s.lock()
	defer s.unlock()
	s.mu.closed = true
	s.endLife()
}

// Files returns the part of the pool that needs no lock. Its files must be removed before Close.
func (s *Store) Files() pool.Files { return s.mu.pool }

// Clear drops every chunk that no pin or hold keeps. With force it drops every chunk and ends every pin; memory that a worker may still
// touch becomes free when its hold ends. Chunks that are stored meanwhile stay. Clear returns the number of dropped chunks.
func (s *Store) Clear(force bool) int {
	n := 0
	if force {
		s.endPins(true)
		s.giveBack(s.dropLeases())
		n = s.dropHeld()
		s.dropMoving()
	}
	return n + s.dropIdle()
}

// dropLeases ends the pins of all sessions, and returns the leases, whose pins the caller releases. A lookup whose result was not fetched
// yet gets an empty hit.
func (s *Store) dropLeases() (given []lease.Lease) {
	s.lock()
	defer s.unlock()
	s.mu.leases.Each(func(sess *session) {
		if st := sess.Note.state; st == Pending || st == Ready { // its result is now an empty hit
			abandonLocked(sess)
			sess.Note.state = Ready
		}
		given = append(given, sess.Drop()...)
	})
	return given
}

// dropHeld drops the keys of the slots that transfers in progress hold, and returns how many it dropped, which count as cleared.
func (s *Store) dropHeld() (n int) {
	for _, h := range s.inProgress() {
		n += s.dropKeys(h, miss.Cleared, pool.Staged, pool.Resident)
	}
	s.lock()
	defer s.unlock()
	s.mu.n.Cleared += uint64(n)
	return n
}

func (s *Store) inProgress() []*hold.Hold {
	s.lock()
	defer s.unlock()
	return s.mu.holds.InProgress()
}

// Expire ends idle sessions, holds whose quarantine is over, and operators' pins whose time is over. It drops objects that were not used
// for their TTL, or whose request's TTL is over. Run calls it once a second.
func (s *Store) Expire() {
	now := time.Now()
	for more := true; more; {
		var given []lease.Lease
		given, more = s.expireSessions(now)
		s.giveBack(given)
	}
	s.expire(now)
	s.endPins(false)
	s.endLives()
	s.expireSlots()
	s.DropOutdated()
}

// expireSessions ends some idle sessions; more is false when no other is idle.
func (s *Store) expireSessions(now time.Time) (given []lease.Lease, more bool) {
	s.lock()
	defer s.unlock()
	for range batch {
		sess := s.mu.leases.Expire(now)
		if sess == nil {
			return given, false
		}
		s.mu.n.SessionsExpired++
		abandonLocked(sess)
		given = append(given, sess.Drop()...)
	}
	return given, true
}
