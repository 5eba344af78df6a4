// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// prefetch is a pending lookup. It has its own goroutine, which pins the objects that are ready, joins the flight of each object that is on
// its way, and waits for the flights. Then it searches once more for what can be served, and gives the session its lease. It ends when all
// flights have landed, when LoadTimeout is over (the result is then what is resident), or when its session has ended or begun another
// lookup.
type prefetch struct {
	query // its bytes are the prefetch's own

	found   found // what the lookup found when it began
	hashes  []kv.Hash
	sess    *session
	objects int // number of its objects in Store.mu.pending
	began   time.Time
	landed  chan struct{}   // closed once all joined flights have landed
	ended   chan struct{}   // closed when the session has its result, or the lookup has lost its session
	ctx     context.Context // ends with LoadTimeout, with the session, with the session's next lookup, and with Close
	cancel  context.CancelFunc

	// Guarded by Store.mu.
	abandoned bool
	planned   bool        // it has joined all its flights
	done      bool        // no more slots are pinned for it
	flights   []*flight   // flights that it joined
	todo      []*flight   // of them, those that have not begun, head first
	queued    bool        // in Store.mu.flights.wanted
	waiting   int         // flights that have not landed
	pins      []pool.Slot // slots that are pinned until the lookup has its result
	fromBelow []int       // chunks of the objects that came from the tier
	loaded    int64       // bytes of the objects that came from the tier
	belowWhy  miss.Reason // why the tier did not help; None when it did
	tier      string      // name of the tier that did not help, if the error had it
	out       LookupResult
}

const (
	// maxPending bounds the pending lookups. A user or address may have at most half of those that others leave free. A further lookup does
	// not wait: its result is what can be served at once.
	maxPending = 256

	// defaultLoadTimeout is the default of Options.LoadTimeout.
	defaultLoadTimeout = 2 * time.Second
)

// mayPendLocked reports whether the user or address `peer` may have one more pending lookup, one of `objects` objects.
func (s *Store) mayPendLocked(peer string, objects int) bool {
	return s.mu.pending.MayCount(peer, maxPending) && s.mu.pending.MaySize(peer, int64(objects), maxLookup)
}

// begin makes a lookup pending. It reports false when too many are pending: the caller then answers it from what can be served at once.
func (s *Store) begin(q *query, f *found, hashes []kv.Hash) bool {
	given, ok := s.beginPrefetch(q, f, hashes)
	s.giveBack(given)
	return ok
}

func (s *Store) beginPrefetch(q *query, f *found, hashes []kv.Hash) ([]lease.Lease, bool) {
	s.lock()
	defer s.unlock()
	peer, objects := q.prompt.Owner.Peer, f.rows*len(hashes)
	if s.mu.closed || !s.mayPendLocked(peer, objects) {
		return nil, false
	}
	sess, given := s.openLocked(q.session, q.prompt.Owner, time.Now())
	pf := &prefetch{
		found: *f, hashes: slices.Clone(hashes), sess: sess, objects: objects,
		landed: make(chan struct{}), ended: make(chan struct{}), began: time.Now(),
	}
	pf.ctx, pf.cancel = context.WithTimeout(s.life, s.opts.LoadTimeout)
	// This is no copy of q, because the caller owns q's bytes and functions.
	pf.query = query{session: slices.Clone(q.session), shard: q.shard, readers: q.readers, prompt: Hashed(pf.hashes)}
	pf.prompt.Chunks, pf.prompt.Tokens, pf.prompt.From = q.prompt.Chunks, q.prompt.Tokens, q.prompt.From
	pf.prompt.Owner, pf.prompt.Note = q.prompt.Owner, q.prompt.Note
	sess.Note = lastLookup{state: Pending, pending: pf}
	s.mu.pending.Add(peer, fair.Amount{Count: 1, Size: int64(objects)})
	s.mu.n.PendingLookups++
	s.running.Go(func() { s.run(pf) })
	return given, true
}

// abandonLocked ends a session's pending lookup, and forgets the result of its last lookup.
func abandonLocked(sess *session) {
	if pf := sess.Note.pending; pf != nil && !pf.abandoned {
		pf.abandoned = true
		pf.cancel()
	}
	sess.Note = lastLookup{}
}

// run does the work of a prefetch on its goroutine.
func (s *Store) run(pf *prefetch) {
	defer pf.cancel()
	switch {
	case s.AsksBelow():
		s.fetch(pf)
	case s.below != nil: // the tier has stopped to answer since the lookup began
		s.belowFailed(pf, miss.BelowSlow, "")
		s.join(pf)
	default:
		s.join(pf)
	}
	s.flyers.Wake()
	s.plannedAll(pf)
	select {
	case <-pf.landed:
	case <-pf.ctx.Done():
	}
	s.conclude(pf, errors.Is(pf.ctx.Err(), context.DeadlineExceeded))
}

// plannedAll records that a prefetch joins no more flights: it ends once those that it joined have landed.
func (s *Store) plannedAll(pf *prefetch) {
	s.lock()
	defer s.unlock()
	pf.planned = true
	s.landedLocked(pf)
}

// join takes the objects that the expected hit needs, head first, a batch at a time. It pins those that are ready, and joins the flights of
// the others.
func (s *Store) join(pf *prefetch) {
	hit := pf.found.hit(pf.shard)
	columns := max(1, batch/pf.found.rows)
	for from, more := pf.prompt.From, true; more; from += columns {
		more = s.joinColumns(pf, hit, from, min(from+columns, hit))
		s.flyers.Wake()
	}
}

func (s *Store) joinColumns(pf *prefetch, hit, from, to int) (more bool) {
	s.lock()
	defer s.unlock()
	more = to < hit && !pf.abandoned && !s.mu.closed
	var k kv.Key
	for c := from; c < to; c++ {
		for row := range pf.found.rows {
			g := row / pf.shard.World
			if c < pf.shard.Groups.Need(g, pf.prompt.From, hit).Start {
				continue
			}
			pf.shard.Key(&k, row%pf.shard.World, g, pf.hashes[c])
			switch slot, ready, ok := s.servableLocked(&k); {
			case ok && ready:
				s.pinForLocked(pf, slot)
			case ok:
				s.joinFlightLocked(pf, slot, c)
			case pf.shard.Groups.Full(g): // the chunks after it are of no use
				more, to = false, c
			}
		}
	}
	return more
}

// pinForLocked pins a resident slot until the lookup has its result.
func (s *Store) pinForLocked(pf *prefetch, slot pool.Slot) {
	s.keepLocked(slot)
	s.hitLocked(slot)
	pf.pins = append(pf.pins, slot)
}

// landedLocked closes pf.landed if the prefetch joins no more flights and waits for none.
func (s *Store) landedLocked(pf *prefetch) {
	if pf.planned && pf.waiting == 0 && !pf.done {
		pf.done = true
		close(pf.landed)
	}
}

// conclude gives a pending lookup its result, from what can be served now. late means that LoadTimeout was over.
func (s *Store) conclude(pf *prefetch, late bool) {
	s.leaveFlights(pf)
	var given []lease.Lease
	if s.stillWanted(pf) {
		f := found{rows: pf.found.rows, readyOnly: true}
		hashes := s.find(pf.shard, pf.prompt, &f)
		l, hit := s.pinHit(&pf.query, &f, hashes)
		if given = s.grantPrefetch(pf, hashes, l, hit, late); pf.out.State == Ready {
			s.curves.lookup(&pf.query, pf.hashes, &pf.out)
		}
	}
	for to := len(pf.pins); to > 0; to -= batch {
		s.unpinSome(pf.pins[max(0, to-batch):to])
	}
	s.forget(pf)
	s.giveBack(given)
	close(pf.ended)
}

func (s *Store) stillWanted(pf *prefetch) bool {
	s.lock()
	defer s.unlock()
	return !s.mu.closed && !pf.abandoned && !pf.sess.Ended()
}

// grantPrefetch gives the session its lease and its result. It returns leases that must be released: those of sessions that had to make
// room, or l itself if the session has ended.
func (s *Store) grantPrefetch(pf *prefetch, hashes []kv.Hash, l lease.Lease, hit int, late bool) []lease.Lease {
	s.lock()
	defer s.unlock()
	if pf.abandoned || pf.sess.Ended() {
		return []lease.Lease{l}
	}
	out, given := s.grantLocked(&pf.query, pf.sess, hashes, l, hit)
	out.Waited = true
	if late {
		s.mu.n.LateLookups++
		if s.below != nil && pf.belowWhy == miss.None {
			pf.belowWhy = miss.BelowSlow
		}
	}
	if pf.belowWhy != miss.None {
		out.Why, out.Gone = out.Why.Because(pf.belowWhy, out.Gone)
	}
	if pf.loaded > 0 {
		s.rates.Loaded(pf.loaded, time.Since(pf.began))
	}
	if out.Below, out.BelowObjects = pf.fromBelowLocked(hit); out.Why.IsBelow() {
		out.Tier = pf.tier
	}
	pf.out = out
	return given
}

func (s *Store) unpinSome(slots []pool.Slot) {
	s.lock()
	defer s.unlock()
	for i := len(slots) - 1; i >= 0; i-- {
		s.letGoLocked(slots[i])
	}
}

func (s *Store) forget(pf *prefetch) {
	s.lock()
	defer s.unlock()
	s.mu.pending.Add(pf.prompt.Owner.Peer, fair.Amount{Count: -1, Size: -int64(pf.objects)})
}
