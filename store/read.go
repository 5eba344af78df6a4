package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lease"
	"github.com/kvasir-kv/kvasir/pool"
)

// Looked is the outcome of a lookup.
type Looked struct {
	Hit    int    // chunks of the prefix that every shard can serve
	Reason Reason // why the prefix ends there; None when it is whole
	Shard  int    // where the first missing chunk is missing
}

// Lookup finds the longest prefix of hashes that all shards keep, and pins it
// for the session, readers readers per chunk and shard. The hit is also kept for
// TakeHit. Nothing can be evicted between the decision and the pin.
func (s *Store) Lookup(session []byte, sh Shard, hashes []kv.Hash, readers int) Looked {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	sess := s.openLocked(session, now)
	out := Looked{Hit: len(hashes)}
	slots := make([]uint32, 0, sh.World*len(hashes))
	var k pool.Key
	for shard := range sh.World {
		for c := 0; c < out.Hit; c++ {
			sh.key(&k, shard, hashes[c])
			slot, st := s.mu.pool.Find(&k)
			if st != pool.Resident {
				out.Hit, out.Shard = c, shard
				out.Reason = s.whyLocked(&k, st)
				slots = cut(slots, shard, len(hashes), c)
				break
			}
			slots = append(slots, uint32(slot))
		}
		hashes = hashes[:out.Hit]
	}
	if out.Hit > 0 {
		l := lease.Lease{Chunks: out.Hit, Slots: slots, Left: make([]uint8, len(slots))}
		for i, slot := range slots {
			l.Left[i] = uint8(readers)
			s.pinLocked(pool.Slot(slot))
		}
		dropped := s.mu.leases.Grant(sess, l)
		s.releaseLeaseLocked(&dropped)
	}
	sess.Hit, sess.HitUnread = out.Hit, true
	s.mu.n.Lookups++
	return out
}

// Kept returns how many leading chunks of hashes all shards keep, without
// promising any.
func (s *Store) Kept(sh Shard, hashes []kv.Hash) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	var k pool.Key
	for shard := range sh.World {
		for c, h := range hashes {
			sh.key(&k, shard, h)
			if _, st := s.mu.pool.Find(&k); st != pool.Resident {
				hashes = hashes[:c]
				break
			}
		}
	}
	return len(hashes)
}

// cut shortens the rows of `shards` whole shards from old to c chunks each; the
// unfinished row after them has c chunks already.
func cut(slots []uint32, shards, old, c int) []uint32 {
	if old == c {
		return slots
	}
	for shard := range shards + 1 {
		copy(slots[shard*c:(shard+1)*c], slots[shard*old:])
	}
	return slots[:(shards+1)*c]
}

func (s *Store) openLocked(session []byte, now time.Time) *lease.Session {
	sess, pushed := s.mu.leases.Open(session, now)
	if pushed != nil {
		s.mu.n.SessionsPushed++
		s.releaseLocked(pushed)
	}
	return sess
}

// NoHit records that the session's lookup found nothing for a reason outside the
// store.
func (s *Store) NoHit(session []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sess := s.openLocked(session, time.Now())
	sess.Hit, sess.HitUnread = 0, true
	s.mu.n.Lookups++
}

// TakeHit returns the chunks that the session's last lookup found, once; 0 when
// there was none since.
func (s *Store) TakeHit(session []byte) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	sess := s.mu.leases.Get(session, time.Now())
	if sess == nil || !sess.HitUnread {
		return 0
	}
	sess.HitUnread = false
	return sess.Hit
}

// Load lets the worker of name read the chunks hashes[From:To] of its shard: the
// session's pins, one reader each, become a hold that CommitLoad ends. All
// chunks must be kept and pinned by the session, else nothing changes and the
// reason says why; a commit that follows nonetheless finds this refusal.
func (s *Store) Load(session []byte, name Transfer, hashes []kv.Hash, p *Place) Reason {
	p.Offsets, p.Indices = p.Offsets[:0], p.Indices[:0]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed || s.mu.holds.len >= s.opts.MaxHolds {
		return Busy
	}
	slots, why := s.loadLocked(session, name, hashes)
	if why != None {
		s.mu.n.ReadFailures++
		slots = nil
	}
	for _, slot := range slots {
		p.Offsets = append(p.Offsets, s.mu.pool.Offset(slot))
	}
	s.holdLocked(name, session, slots)
	return why
}

func (s *Store) loadLocked(session []byte, name Transfer, hashes []kv.Hash) ([]pool.Slot, Reason) {
	sess := s.mu.leases.Get(session, time.Now())
	if sess == nil || len(sess.Leases()) == 0 {
		return nil, NotPinned
	}
	n := name.To - name.From
	slots, pins := make([]pool.Slot, n), make([]uint32, n)
	var k pool.Key
	for i, h := range hashes[name.From:name.To] {
		name.Shard.key(&k, name.Shard.Index, h)
		slot, st := s.mu.pool.Find(&k)
		if st != pool.Resident {
			return nil, s.whyLocked(&k, st)
		}
		slots[i], pins[i] = slot, uint32(slot)
	}
	l := sess.Find(name.Shard.Index, name.From, pins)
	if l == nil {
		return nil, NotPinned
	}
	for _, slot := range slots {
		s.mu.pool.Hold(slot)
	}
	l.Take(name.Shard.Index, name.From, name.To, 1, s.unpinLocked)
	return slots, None
}

// CommitLoad ends the transfer that Load began, or forgets its refusal (no
// chunks).
func (s *Store) CommitLoad(name Transfer, requestID []byte) Committed {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.mu.holds.match(name, requestID)
	if h == nil {
		return Committed{}
	}
	out := Committed{Found: true, Chunks: len(h.slots), Late: h.orphan}
	if out.Chunks > 0 && !out.Late {
		s.mu.n.LoadedChunks += uint64(out.Chunks)
		s.mu.n.LoadedBytes += uint64(out.Chunks) * uint64(s.mu.pool.Length(h.slots[0]))
	}
	s.endHoldLocked(h, false)
	return out
}

// FreePins gives back readers readers of the chunks [from, to) that the
// session's newest lookup pinned, of all shards.
func (s *Store) FreePins(session []byte, from, to, readers int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sess := s.mu.leases.Get(session, time.Now())
	if sess == nil {
		return
	}
	leases := sess.Leases()
	if len(leases) == 0 {
		return
	}
	l := &leases[len(leases)-1]
	for shard := range l.Shards() {
		l.Take(shard, from, to, readers, s.unpinLocked)
	}
}

// EndSession gives back what the session still pins; each chunk so released
// becomes the most recently used, heads after tails.
func (s *Store) EndSession(session []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sess := s.mu.leases.End(session); sess != nil {
		s.releaseLocked(sess)
	}
}
