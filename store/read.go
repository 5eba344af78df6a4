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

// Lookup finds the longest prefix of a prompt that all shards can serve in all
// groups, and pins what a load of it needs for the session, readers readers per
// object. The hit is also kept for TakeHit. Whatever is evicted between the search
// and the pin shortens the hit. What an earlier server left is compared with its
// checksums first.
func (s *Store) Lookup(session []byte, sh Shard, p Prompt, readers int) Looked {
	f := found{rows: sh.Groups.Len() * sh.World}
	hashes := s.find(sh, p, &f)
	var l lease.Lease
	out := Looked{}
	for {
		out.Hit = f.hit(sh)
		var ok bool
		if l, ok = s.pin(sh, hashes, &f, out.Hit, readers); ok {
			break
		}
	}
	given := s.grant(session, sh, hashes, p, &l, &out)
	s.giveBack(given)
	return out
}

// grant ends a lookup: the session gets its lease and its hit. It returns leases
// that had to make room.
func (s *Store) grant(session []byte, sh Shard, hashes []kv.Hash, p Prompt, l *lease.Lease, out *Looked) []lease.Lease {
	s.lock()
	defer s.unlock()
	sess, given := s.openLocked(session, p.Owner, time.Now())
	if out.Hit < min(p.Chunks, maxLookup/l.Rows) {
		out.Shard, out.Reason = s.whyEndsLocked(sh, hashes, out.Hit)
	}
	if out.Hit > 0 {
		given = append(given, s.mu.leases.Grant(sess, *l)...)
	}
	sess.Hit, sess.HitUnread = out.Hit, true
	s.mu.n.Lookups++
	return given
}

// whyEndsLocked says why a hit is not longer: the first object that is missing
// of what one more chunk needs.
func (s *Store) whyEndsLocked(sh Shard, hashes []kv.Hash, hit int) (shard int, why Reason) {
	var k pool.Key
	for g := range sh.Groups.Len() {
		need := sh.Groups.Need(g, 0, hit+1)
		for shard := range sh.World {
			for c := need.End - 1; c >= need.Start; c-- {
				sh.key(&k, shard, g, hashes[c])
				if _, ok := s.residentLocked(&k); !ok {
					_, st := s.mu.pool.Find(&k)
					return shard, s.whyLocked(&k, st)
				}
				if sh.Groups.full(g) {
					break // its other chunks are there
				}
			}
		}
	}
	return 0, NeverStored // a longer hit ends at a chunk that is missing later
}

// openLocked returns a session, and the leases of another one that had to make
// room for it.
func (s *Store) openLocked(session []byte, owner lease.Owner, now time.Time) (*lease.Session, []lease.Lease) {
	sess, pushed := s.mu.leases.Open(session, owner, now)
	if pushed == nil {
		return sess, nil
	}
	s.mu.n.SessionsPushed++
	return sess, pushed.Drop()
}

// NoHit records that the session's lookup found nothing for a reason outside the
// store.
func (s *Store) NoHit(session []byte, owner lease.Owner) {
	s.giveBack(func() []lease.Lease {
		s.lock()
		defer s.unlock()
		sess, given := s.openLocked(session, owner, time.Now())
		sess.Hit, sess.HitUnread = 0, true
		s.mu.n.Lookups++
		return given
	}())
}

// TakeHit returns the chunks that the last lookup of owner's session found, once; 0
// when there was none since.
func (s *Store) TakeHit(session []byte, owner lease.Owner) int {
	s.lock()
	defer s.unlock()
	sess := s.mu.leases.Get(session, owner, time.Now())
	if sess == nil || !sess.HitUnread {
		return 0
	}
	sess.HitUnread = false
	return sess.Hit
}

// Load lets the worker of name read the chunks hashes[From:To] of its shard: the
// pins of a session of that id, one reader each, become a hold that CommitLoad ends.
// All chunks must be kept and pinned by the session, else nothing changes and the
// reason says why; stock workers send a commit after that, too.
func (s *Store) Load(session []byte, name Transfer, hashes []kv.Hash, p *Place) Reason {
	p.Offsets, p.Indices = p.Offsets[:0], p.Indices[:0]
	s.lock()
	defer s.unlock()
	if s.busyLocked(&name) {
		s.oweLocked(name, session, time.Now().Add(s.opts.Quarantine))
		return Busy
	}
	objects, why := s.loadLocked(session, name, hashes)
	if why != None {
		s.mu.n.ReadFailures++
		s.oweLocked(name, session, time.Now().Add(s.opts.Quarantine))
		return why
	}
	for _, o := range objects {
		p.Offsets = append(p.Offsets, o.offset)
	}
	s.mu.holds.add(s.newHold(name, session, objects))
	return None
}

// Refuse notes that a load was refused before Load was asked: the worker may send
// its commit all the same, and that one must not end another hold.
func (s *Store) Refuse(session []byte, name Transfer) {
	s.lock()
	defer s.unlock()
	s.oweLocked(name, session, time.Now().Add(s.opts.Quarantine))
}

// loadLocked turns the pins of what a load of name's range moves into holds.
func (s *Store) loadLocked(session []byte, name Transfer, hashes []kv.Hash) ([]object, Reason) {
	now := time.Now()
	if _, known := s.mu.leases.Pinned(session, name.By, now); !known {
		return nil, NotPinned
	}
	if (name.To-name.From)*name.Shard.Groups.Len() > maxTransfer {
		return nil, Busy
	}
	var objects []object
	var spans []lease.Span
	var k pool.Key
	for g := range name.Shard.Groups.Len() {
		need := name.Shard.Groups.Need(g, name.From, name.To)
		span := lease.Span{Row: g*name.Shard.World + name.Shard.Index, From: need.Start}
		for c := need.Start; c < need.End; c++ {
			name.Shard.key(&k, name.Shard.Index, g, hashes[c])
			slot, ok := s.residentLocked(&k)
			if !ok {
				_, st := s.mu.pool.Find(&k)
				return nil, s.whyLocked(&k, st)
			}
			span.Slots = append(span.Slots, uint32(slot))
			objects = append(objects, object{slot, c - name.From, g, s.mu.pool.Offset(slot), s.mu.pool.Length(slot)})
		}
		spans = append(spans, span)
	}
	l, _ := s.mu.leases.Pinned(session, name.By, now, spans...)
	if l == nil {
		return nil, NotPinned
	}
	for _, o := range objects {
		s.mu.pool.Hold(o.slot)
	}
	for _, span := range spans {
		l.Take(span.Row, span.From, span.From+len(span.Slots), 1, s.unpinLocked)
	}
	return objects, None
}

// CommitLoad ends the transfer that Load began, or forgets its refusal (no
// chunks). Of several transfers of one name and request it is as with CommitStore.
func (s *Store) CommitLoad(name Transfer, requestID []byte) Committed {
	ended, out := s.commit(name, requestID)
	for _, h := range ended {
		out.Chunks += len(h.slots)
		s.end(h, false)
	}
	return out
}

// FreePins gives back readers readers of the chunks [from, to) that the
// newest lookup of owner's session pinned, of all shards and groups.
func (s *Store) FreePins(session []byte, owner lease.Owner, from, to, readers int) {
	for more := true; more; {
		to, more = s.freeSome(session, owner, from, to, readers)
	}
}

// freeSome gives back the last ones of [from, to), and returns where they begin; more
// is false when they were all.
func (s *Store) freeSome(session []byte, owner lease.Owner, from, to, readers int) (begin int, more bool) {
	s.lock()
	defer s.unlock()
	sess := s.mu.leases.Get(session, owner, time.Now())
	if sess == nil || len(sess.Leases()) == 0 {
		return from, false
	}
	leases := sess.Leases()
	l := &leases[len(leases)-1]
	to = min(to, l.Chunks)
	begin = max(from, to-max(1, batch/l.Rows))
	for row := range l.Rows {
		l.Take(row, begin, to, readers, s.unpinLocked)
	}
	return begin, begin > from
}

// EndSession gives back what owner's session still pins; each chunk so released
// becomes the most recently used, heads after tails.
func (s *Store) EndSession(session []byte, owner lease.Owner) {
	s.giveBack(func() []lease.Lease {
		s.lock()
		defer s.unlock()
		if sess := s.mu.leases.End(session, owner); sess != nil {
			return sess.Drop()
		}
		return nil
	}())
}
