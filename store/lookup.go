// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// LookupState says how far a session's last lookup has come.
type LookupState uint8

// The states of a lookup.
const (
	Unknown LookupState = iota // there was no lookup, or its session ended
	Pending                    // objects that it found may not be served yet
	Ready                      // it has a result that was not taken
	Taken                      // its result was taken
)

// session is an engine's request with its last lookup, which Store.mu guards.
type session = lease.Session[lastLookup]

// lastLookup is the last lookup of a session. The zero value means that there was none.
type lastLookup struct {
	state   LookupState
	from    int       // leading chunks that the engine had itself
	hit     int       // chunks of the prefix hit
	pending *prefetch // the pending lookup, until its result is taken
}

// LookupResult is the outcome of a lookup. Only in the state Ready its other fields have a meaning.
type LookupResult struct {
	State  LookupState
	Asked  int         // chunks of the prompt
	Tokens int         // Prompt.Tokens
	From   int         // Prompt.From
	Hit    int         // chunks of the prefix that every shard can serve
	Why    miss.Reason // why the prefix ends there; None if the hit is the whole prompt
	Shard  int         // the shard of Missing
	Waited bool        // the lookup was pending before
	Below  int         // of Hit, chunks that were read from the tier below for this lookup
	Tier   string      // name of the tier that Why is about, if it is known

	Note         any          // Prompt.Note
	Namespace    kv.Namespace // the namespace of the first shard
	Objects      int          // objects that a load of the hit needs
	BelowObjects int          // of them, objects that were read from the tier below for this lookup

	Missing kv.Key    // the object that is missing, unless Why is None
	Gone    miss.Gone // how that object was lost, if Why is such a reason
	Others  []kv.Key  // objects of the missing chunk under other names, if it was never stored under this name; a few of them
}

// query has the parameters of a lookup.
type query struct {
	session []byte
	shard   object.Shard
	prompt  Prompt
	readers int
}

// Lookup finds the longest prefix of a prompt that all shards can serve in all groups. It pins the objects that a load of the prefix needs
// for the session, with `readers` pins on each object. It never waits. If all objects that it finds are ready, the result is Ready at once;
// an object that is evicted between the search and the pin shortens the hit. Otherwise the lookup is Pending, for Options.LoadTimeout at
// most, until the objects are ready. In both cases Result returns the result, once. An earlier pending lookup of the same session is given
// up.
func (s *Store) Lookup(session []byte, sh object.Shard, p Prompt, readers int) LookupResult {
	if p.From > 0 {
		n := min(p.From, maxLookup/(sh.Groups.Len()*sh.World))
		s.touchAll(sh, p.Hashes(n)[:n])
	}
	q := query{session, sh, p, readers}
	f := found{rows: sh.Groups.Len() * sh.World}
	hashes := s.find(sh, p, &f)
	below := s.below != nil && f.hit(sh) < min(p.Chunks, maxLookup/f.rows)
	ask := below && s.AsksBelow()
	why := miss.BelowSlow
	if ask && s.opts.LoadIfFaster && !s.rates.WorthLoading() {
		ask, why = false, miss.BelowSlower
	}
	if ask {
		hashes = p.Hashes(min(p.Chunks, maxLookup/f.rows)) // the tier may have more chunks
	}
	if f.unready || ask {
		if s.begin(&q, &f, hashes) {
			return LookupResult{State: Pending, Asked: p.Chunks}
		}
		f = found{rows: f.rows, readyOnly: true}
		hashes = s.find(sh, p, &f)
	}
	l, hit := s.pinHit(&q, &f, hashes)
	out, given := s.grant(&q, hashes, l, hit)
	s.giveBack(given)
	if below { // a tier could have more chunks, and was not asked
		out.Why, out.Gone = out.Why.Because(why, out.Gone)
	}
	s.curves.lookup(&q, hashes, &out)
	return out
}

// pinHit pins the longest hit among the found objects. It returns the lease and the hit in chunks.
func (s *Store) pinHit(q *query, f *found, hashes []kv.Hash) (l lease.Lease, hit int) {
	for {
		hit = f.hit(q.shard)
		if l, ok := s.pin(q.shard, hashes, f, hit, q.readers); ok {
			return l, hit
		}
	}
}

// grant ends a lookup that was not pending: the session gets its lease and its result. grant returns leases of other sessions that had to
// make room.
func (s *Store) grant(q *query, hashes []kv.Hash, l lease.Lease, hit int) (LookupResult, []lease.Lease) {
	s.lock()
	defer s.unlock()
	sess, given := s.openLocked(q.session, q.prompt.Owner, time.Now())
	out, more := s.grantLocked(q, sess, hashes, l, hit)
	return out, append(given, more...)
}

func (s *Store) grantLocked(q *query, sess *session, hashes []kv.Hash, l lease.Lease, hit int) (out LookupResult, given []lease.Lease) {
	hit = max(hit, q.prompt.From) // the engine may have more chunks than a lookup searches
	out = LookupResult{State: Ready, Asked: q.prompt.Chunks, Tokens: q.prompt.Tokens, From: q.prompt.From, Hit: hit, Namespace: q.shard.Namespace, Note: q.prompt.Note}
	for g := range q.shard.Groups.Len() {
		need := q.shard.Groups.Need(g, q.prompt.From, hit)
		out.Objects += (need.End - need.Start) * q.shard.World
	}
	if hit < min(q.prompt.Chunks, maxLookup/l.Rows) {
		s.whyEndsLocked(&out, q.shard, hashes, q.prompt.From)
	}
	if hit > q.prompt.From {
		given = s.mu.leases.Grant(sess, l)
	}
	sess.Note.state, sess.Note.from, sess.Note.hit = Ready, q.prompt.From, hit
	s.mu.n.Lookups++
	if s.below != nil && hit < out.Asked {
		s.rates.Answered(q.session)
	}
	return out, given
}

// whyEndsLocked sets in out why a hit is not longer: the first missing object among those that one more chunk needs. `from` is the first
// chunk that the engine would load.
func (s *Store) whyEndsLocked(out *LookupResult, sh object.Shard, hashes []kv.Hash, from int) {
	out.Why = miss.NeverStored // also if a longer hit would fail at a later chunk
	hit, k := out.Hit, &out.Missing
	if hit >= len(hashes) {
		return
	}
	for g := range sh.Groups.Len() {
		need := sh.Groups.Need(g, from, hit+1)
		for shard := range sh.World {
			for c := need.End - 1; c >= need.Start; c-- {
				sh.Key(k, shard, g, hashes[c])
				if _, ok := s.residentLocked(k); !ok {
					_, st := s.mu.pool.Find(k)
					out.Shard, out.Gone = shard, s.whyLocked(k, st)
					out.Why = out.Gone.Why
					if out.Why == miss.NeverStored && !s.opts.OwnNames {
						out.Why, out.Others = s.mu.chunks.Others(k, !sh.Groups.Full(g), s.keyOfLocked)
					}
					return
				}
				if sh.Groups.Full(g) {
					break // the group has the chunks before
				}
			}
		}
	}
}

// keyOfLocked returns the key of a slot, for the index by chunk hashes.
func (s *Store) keyOfLocked(slot uint32) kv.Key { return s.mu.pool.KeyOf(pool.Slot(slot)) }

// whyLocked returns why the object of k, whose slot is in state st, is not served.
func (s *Store) whyLocked(k *kv.Key, st pool.State) miss.Gone {
	if slot, _ := s.mu.pool.Find(k); st != pool.Free && s.outdatedLocked(slot) {
		return miss.Gone{Why: miss.Cleared}
	}
	switch st {
	case pool.Staged:
		if slot, _ := s.mu.pool.Find(k); s.mu.flights.of[slot] != nil {
			return miss.Gone{Why: miss.BelowSlow}
		}
		return miss.Gone{Why: miss.BeingStored}
	case pool.Resident: // else it would be served
		if slot, _ := s.mu.pool.Find(k); s.mu.lives.ended(slot) {
			return miss.Gone{Why: miss.RequestTTL}
		}
		return miss.Gone{Why: miss.NotCompared}
	}
	return s.mu.misses.Why(k)
}

// openLocked returns a session without a lookup, and the leases of another session that had to make room for it.
func (s *Store) openLocked(session []byte, owner lease.Owner, now time.Time) (*session, []lease.Lease) {
	sess, pushed := s.mu.leases.Open(session, owner, now)
	abandonLocked(sess)
	if pushed == nil {
		return sess, nil
	}
	s.mu.n.SessionsPushed++
	abandonLocked(pushed)
	return sess, pushed.Drop()
}

// NoHit records that a lookup of the session found nothing, for a reason outside the store.
func (s *Store) NoHit(session []byte, owner lease.Owner) {
	s.giveBack(func() []lease.Lease {
		s.lock()
		defer s.unlock()
		sess, given := s.openLocked(session, owner, time.Now())
		sess.Note = lastLookup{state: Ready}
		s.mu.n.Lookups++
		return given
	}())
}

// Result returns the result of the last lookup of owner's session: once in the state Ready, later as Taken. If the lookup was Ready at
// once, the result has only the hit.
func (s *Store) Result(session []byte, owner lease.Owner) LookupResult {
	out, _ := s.result(session, owner)
	return out
}

// result also returns a channel. It is closed when a pending lookup has its result, or has lost its session.
func (s *Store) result(session []byte, owner lease.Owner) (LookupResult, <-chan struct{}) {
	s.lock()
	defer s.unlock()
	sess := s.mu.leases.Get(session, owner, time.Now())
	if sess == nil {
		return LookupResult{}, nil
	}
	last := &sess.Note
	switch pf := last.pending; last.state {
	case Pending:
		return LookupResult{State: Pending, Asked: pf.prompt.Chunks}, pf.ended
	case Ready:
		last.state, last.pending = Taken, nil
		if pf != nil {
			return pf.out, nil
		}
		return LookupResult{State: Ready, Hit: last.hit}, nil
	}
	return LookupResult{State: last.state}, nil
}

// Await is Result for a caller that waits while the lookup is pending. It returns at the latest when ctx ends.
func (s *Store) Await(ctx context.Context, session []byte, owner lease.Owner) LookupResult {
	for {
		out, ended := s.result(session, owner)
		if out.State != Pending {
			return out
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return out
		}
	}
}

// FreePins releases `readers` pins of each object of the chunks [from, to) that the newest lookup of owner's session pinned, in all shards
// and groups. While that lookup is pending it does nothing.
func (s *Store) FreePins(session []byte, owner lease.Owner, from, to, readers int) {
	for more := true; more; {
		to, more = s.freeSome(session, owner, from, to, readers)
	}
}

// freeSome releases a batch of the pins of the chunks [from, to), the last chunks first. begin is the first chunk of the batch; more says
// that pins are left before it.
func (s *Store) freeSome(session []byte, owner lease.Owner, from, to, readers int) (begin int, more bool) {
	s.lock()
	defer s.unlock()
	sess := s.mu.leases.Get(session, owner, time.Now())
	if sess == nil || len(sess.Leases()) == 0 || sess.Note.state == Pending {
		return from, false
	}
	leases := sess.Leases()
	l := &leases[len(leases)-1]
	from, to = max(from, sess.Note.from), min(to, sess.Note.hit, l.Chunks) // a lookup that found nothing has no lease
	begin = max(from, to-max(1, batch/l.Rows))
	for row := range l.Rows {
		l.Take(row, begin, to, readers, s.unpinLocked)
	}
	return begin, begin > from
}

// FreeAbandoned releases `readers` pins of each object of the chunks [from, to) that a lookup of owner's session pinned and no load needs.
// It is the oldest lookup that began at `from`, found the chunks up to `to`, and still has pins there. If there is none, and the range is
// one chunk, it is the newest lookup, if that found the chunks up to `to`: an engine that computes the end of a prompt itself does not load
// the hit's last chunk.
func (s *Store) FreeAbandoned(session []byte, owner lease.Owner, from, to, readers int) {
	for at, more := to, true; more; {
		at, more = s.freeAbandonedSome(session, owner, from, to, at, readers)
	}
}

// freeAbandonedSome releases the pins of the last chunks of [from, at), and returns the first of these chunks.
func (s *Store) freeAbandonedSome(session []byte, owner lease.Owner, from, to, at, readers int) (begin int, more bool) {
	s.lock()
	defer s.unlock()
	sess := s.mu.leases.Get(session, owner, time.Now())
	if sess == nil || sess.Note.state == Pending || from >= at {
		return from, false
	}
	l := abandonedOf(sess.Leases(), from, to, at)
	if l == nil {
		return from, false
	}
	begin = max(from, at-max(1, batch/l.Rows))
	for row := range l.Rows {
		l.Take(row, begin, at, readers, s.unpinLocked)
	}
	return begin, begin > from
}

// abandonedOf returns the lease that FreeAbandoned means, if it still has pins of [from, at), or nil.
func abandonedOf(leases []lease.Lease, from, to, at int) *lease.Lease {
	for i := range leases {
		l := &leases[i]
		last := i == len(leases)-1 && from == to-1 && l.From < from
		if (l.From == from || last) && l.Chunks == to && l.Pinned(from, at) {
			return l
		}
	}
	return nil
}

// touchAll marks the objects of chunks as used, in all shards and groups. The first chunk is the last, so it becomes the most recently
// used.
func (s *Store) touchAll(sh object.Shard, hashes []kv.Hash) {
	columns := max(1, dropBatch/(sh.Groups.Len()*sh.World)) // an object that has expired is dropped here
	for to := len(hashes); to > 0; to -= columns {
		s.touchColumns(sh, hashes, max(0, to-columns), to)
	}
}

func (s *Store) touchColumns(sh object.Shard, hashes []kv.Hash, from, to int) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return
	}
	var k kv.Key
	for i := to - 1; i >= from; i-- {
		for g := range sh.Groups.Len() {
			for index := range sh.World {
				sh.Key(&k, index, g, hashes[i])
				if slot, ok := s.residentLocked(&k); ok {
					s.useLocked(slot)
				}
			}
		}
	}
}

// EndSession releases the pins of owner's session. Each chunk so released becomes the most recently used, heads after tails. A pending
// lookup of the session ends.
func (s *Store) EndSession(session []byte, owner lease.Owner) {
	if s.prompts != nil {
		s.prompts.end(owner.Peer, session)
	}
	s.giveBack(func() []lease.Lease {
		s.lock()
		defer s.unlock()
		sess := s.mu.leases.End(session, owner)
		if sess == nil {
			return nil
		}
		abandonLocked(sess)
		return sess.Drop()
	}())
}

// Leave informs the store that owner has disconnected and cannot take the results of its lookups. Sessions that owner was the last to use end
// if their results were not taken. Chunks of a taken result may still be loaded over other connections.
func (s *Store) Leave(owner lease.Owner) {
	s.giveBack(s.endUntaken(owner))
}

func (s *Store) endUntaken(owner lease.Owner) (given []lease.Lease) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return nil
	}
	var untaken []*session
	s.mu.leases.Newest(owner, batch, func(sess *session) bool {
		if st := sess.Note.state; st == Pending || st == Ready {
			untaken = append(untaken, sess)
		}
		return true
	})
	for _, sess := range untaken {
		s.mu.leases.EndThis(sess)
		abandonLocked(sess)
		given = append(given, sess.Drop()...)
	}
	return given
}

// servableLocked returns the slot with the object of k. ready says that it may be served now. ok says that it may be served now, or once
// its flight has ended.
func (s *Store) servableLocked(k *kv.Key) (slot pool.Slot, ready, ok bool) {
	slot, st := s.findLocked(k)
	if s.outdatedLocked(slot) || st == pool.Resident && s.mu.lives.ended(slot) {
		return slot, false, false
	}
	switch st {
	case pool.Resident:
		return slot, !s.suspectedLocked(slot), true
	case pool.Staged:
		return slot, false, s.mu.flights.of[slot] != nil
	}
	return slot, false, false
}
