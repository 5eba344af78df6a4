// Package store is the tiered store: which chunks are kept, found, promised to
// engines and evicted. Its only tier so far is the shared-memory pool, which
// workers read and write themselves; the store hands out places and keeps them
// safe.
//
// Two kinds of promise keep a chunk. A pin belongs to a session: a lookup takes
// it, a retrieve or the session's end gives it back, and only eviction looks at
// it. A hold belongs to a worker instance that was told where a slot is and may
// touch its bytes: it ends with that worker's commit, or a quarantine after the
// worker was last known to care. No slot is reused while it is held, whatever
// else happens.
//
// One mutex guards everything, held for microseconds and never over I/O.
package store

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/evict"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lease"
	"github.com/kvasir-kv/kvasir/pool"
)

// Options configures a Store. A zero field means its default.
type Options struct {
	Quarantine  time.Duration // life of a hold without commit, from prepare or from the worker's end; default 600 s
	SessionIdle time.Duration // life of a session after its last use; default 600 s
	MaxSessions int           // default 65,536
	MaxHolds    int           // transfers in progress, of a user or address half of what others leave; default 65,536
	Checksums   bool          // of committed chunks, for SumNext to compute
	SumAfter    time.Duration // age of a chunk whose checksum is computed: many do not live long; default 10 s, < 0 none
	Ghosts      int           // evicted keys remembered to explain misses; default 65,536

	// Shares of the pool for which one worker, and all workers of one user or address,
	// may have chunks evicted: what they were told to write and did not commit,
	// quarantine included; defaults 1/4 and 3/4. One chunk is always possible. Free
	// memory they may have beyond that, but for an eighth of a pool of many chunks.
	WorkerShare, PeerShare float64
}

// Store keeps chunks in a pool. Its methods are safe for concurrent use.
type Store struct {
	opts     Options
	suspects atomic.Int64 // restored objects to be compared before they are served

	mu struct {
		sync.Mutex
		closed bool
		pool   *pool.Pool
		lru    *evict.LRU
		leases *lease.Table
		holds  holds
		pins   []uint32 // by slot: leases that pin it
		copies uint64   // begun by this process itself
		drops  uint64   // keys that went, whatever the reason
		ghosts ghosts
		sums   sums
		n      Counters
	}
}

// New returns a Store over p, which it owns from then on.
func New(p *pool.Pool, o Options) *Store {
	o.Quarantine = cmp.Or(o.Quarantine, 600*time.Second)
	o.SumAfter = cmp.Or(o.SumAfter, 10*time.Second)
	o.MaxHolds = cmp.Or(o.MaxHolds, 1<<16)
	o.WorkerShare = cmp.Or(o.WorkerShare, 0.25)
	o.PeerShare = cmp.Or(o.PeerShare, 0.75)
	o.Ghosts = cmp.Or(o.Ghosts, 1<<16)
	s := &Store{opts: o}
	s.mu.pool = p
	s.mu.lru = evict.NewLRU()
	s.mu.leases = lease.New(lease.Options{Idle: o.SessionIdle, MaxSessions: o.MaxSessions})
	s.mu.holds.init()
	s.mu.ghosts.max = o.Ghosts
	s.restoreLocked() // nobody else knows s yet
	return s
}

// restoreLocked takes over the chunks that the pool kept from an earlier server.
// What workers of that server may still touch goes into quarantine.
func (s *Store) restoreLocked() {
	r := s.mu.pool.Restored()
	for _, slot := range r.Resident {
		s.touchLocked(slot)
		if _, ok := s.mu.pool.Sum(slot); ok {
			s.suspectLocked(slot)
		}
	}
	type former struct {
		writer pool.Writer
		age    time.Duration
		reader bool
	}
	of := map[former][]pool.Slot{}
	for _, h := range r.Held {
		k := former{h.Writer, h.For, s.mu.pool.StateOf(h.Slot) == pool.Resident}
		of[k] = append(of[k], h.Slot)
	}
	order := func(a, b former) int {
		return cmp.Or(cmp.Compare(a.age, b.age), cmp.Compare(of[a][0], of[b][0]))
	}
	for _, k := range slices.SortedFunc(maps.Keys(of), order) {
		life := s.opts.Quarantine
		if k.reader {
			life *= 2
		}
		s.formerLocked(of[k], k.writer, life-k.age)
	}
	s.mu.n.RestoredChunks = uint64(len(r.Resident))
}

// formerLocked holds slots that a worker of an earlier server may still touch.
// Readers are given twice the quarantine: a late commit of one could mean a load
// that this server granted of the same chunks, which then has no hold of its own
// left.
func (s *Store) formerLocked(slots []pool.Slot, by pool.Writer, left time.Duration) {
	s.mu.copies++
	h := &hold{transfer: Transfer{own: s.mu.copies}, slots: slots, orphan: true, deadline: time.Now().Add(left)}
	if by.Name != 0 {
		t := &s.mu.holds
		t.former[by.Name] = append(t.former[by.Name], h.deadline.Add(s.opts.Quarantine))
	}
	s.mu.holds.add(h)
	s.mu.holds.orphans++
}

// Close leaves the pool for a later server. Nothing may be called afterwards.
func (s *Store) Close() error {
	s.lock()
	defer s.unlock()
	s.mu.closed = true
	return s.mu.pool.Close()
}

// Remove removes the pool's files; call it before Close. Workers that map the
// pool keep their mapping.
func (s *Store) Remove() error { return s.mu.pool.Remove() }

// SetNote keeps b beside the pool, and Note returns it after a restart.
func (s *Store) SetNote(b []byte) error { return s.mu.pool.SetNote(b) }

// Note returns what SetNote kept last, nil when there is nothing.
func (s *Store) Note() ([]byte, error) { return s.mu.pool.Note() }

// FormerChunkTokens returns the chunk sizes that earlier servers of the pool told
// engines which may still run.
func (s *Store) FormerChunkTokens() []int {
	s.lock()
	defer s.unlock()
	return s.mu.pool.FormerChunkTokens()
}

// ForgetFormer says that none of these engines is left.
func (s *Store) ForgetFormer() {
	s.lock()
	defer s.unlock()
	s.mu.pool.ForgetFormer()
}

// Shard says whose chunks a call concerns: one namespace, and one of World
// shards, or all of them.
type Shard struct {
	Namespace kv.Namespace
	World     int
	Index     int     // 0 to World-1; ignored by lookups, which concern all
	Groups    *Groups // nil is one group of full attention

	// Each is for lookups only: the namespace of each shard, where the workers of
	// a model have unlike layouts. Nil means Namespace for all.
	Each *Namespaces
}

// Namespaces are those of all shards of a model.
type Namespaces []kv.Namespace

func (sh Shard) key(k *pool.Key, index, group int, chunk kv.Hash) {
	k.Namespace = sh.Namespace
	if sh.Each != nil {
		k.Namespace = (*sh.Each)[index]
	}
	k.Rank, _ = kv.NewRank(sh.World, index)
	k.Group = uint32(group)
	k.Chunk = chunk
}

// pinLocked takes one lease's pin on a resident slot.
func (s *Store) pinLocked(slot pool.Slot) {
	for int(slot) >= len(s.mu.pins) {
		s.mu.pins = append(s.mu.pins, 0)
	}
	s.mu.pins[slot]++
	s.mu.lru.Remove(uint32(slot))
}

func (s *Store) unpinLocked(slot uint32) {
	s.mu.pins[slot]--
	s.touchLocked(pool.Slot(slot))
}

// touchLocked makes a slot the most recently used, if nothing keeps it from
// being evicted.
func (s *Store) touchLocked(slot pool.Slot) {
	if s.mu.pool.StateOf(slot) == pool.Resident && s.mu.pool.Holds(slot) == 0 && !s.pinnedLocked(slot) {
		s.mu.lru.Touch(uint32(slot))
		s.mu.pool.Stamp(slot)
	}
}

func (s *Store) pinnedLocked(slot pool.Slot) bool {
	return int(slot) < len(s.mu.pins) && s.mu.pins[slot] > 0
}

// dropLocked removes a resident or staged slot's key.
func (s *Store) dropLocked(slot pool.Slot, why Reason) {
	s.mu.drops++
	k := s.mu.pool.KeyOf(slot)
	s.mu.ghosts.add(&k, why)
	s.mu.lru.Remove(uint32(slot))
	s.trustLocked(slot)
	s.mu.pool.Drop(slot)
}

// Clear drops every chunk that nothing pins or holds, and with force every chunk
// and every promise: memory that a worker may still touch comes back when its
// hold ends. What is stored meanwhile stays. It returns the number of chunks
// dropped.
func (s *Store) Clear(force bool) int {
	n := 0
	if force {
		s.giveBack(s.dropLeases())
		n = s.dropHeld()
	}
	left := s.Stats().EvictableObjs
	for more := true; more && left > 0; left -= dropBatch {
		var dropped int
		dropped, more = s.dropOldest(min(dropBatch, left))
		n += dropped
	}
	return n
}

// dropLeases ends the promises of all sessions.
func (s *Store) dropLeases() (given []lease.Lease) {
	s.lock()
	defer s.unlock()
	s.mu.leases.Each(func(sess *lease.Session) { given = append(given, sess.Drop()...) })
	return given
}

// dropHeld drops the keys of what transfers in progress hold.
func (s *Store) dropHeld() (n int) {
	for _, h := range s.inProgress() {
		n += s.dropKeys(h, Cleared, pool.Staged, pool.Resident)
	}
	s.lock()
	defer s.unlock()
	s.mu.n.Cleared += uint64(n)
	return n
}

func (s *Store) inProgress() []*hold {
	s.lock()
	defer s.unlock()
	return s.mu.holds.which(func(h *hold) bool { return len(h.slots) > 0 })
}

// dropOldest drops up to max chunks; more is false when no other is left.
func (s *Store) dropOldest(max int) (n int, more bool) {
	s.lock()
	defer s.unlock()
	defer func() { s.mu.n.Cleared += uint64(n) }()
	for ; n < max; n++ {
		slot, ok := s.mu.lru.Oldest()
		if !ok {
			return n, false
		}
		s.dropLocked(pool.Slot(slot), Cleared)
	}
	return n, true
}

// Expire ends sessions that are idle and holds whose quarantine is over. Its
// owner calls it about once a second.
func (s *Store) Expire() {
	now := time.Now()
	for more := true; more; {
		var given []lease.Lease
		given, more = s.expireSessions(now)
		s.giveBack(given)
	}
	s.expire(now)
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
		given = append(given, sess.Drop()...)
	}
	return given, true
}

// PoolName returns the shared-memory name of the pool.
func (s *Store) PoolName() string { return s.mu.pool.Name() }

// PoolBytes returns the pool's size.
func (s *Store) PoolBytes() int64 { return s.mu.pool.Bytes() }

// NameLost reports whether somebody removed the pool's name.
func (s *Store) NameLost() bool { return s.mu.pool.NameLost() }
