// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

// With a tier below the pool, a lookup that the pool cannot serve whole is pending while the tier is asked for the missing objects. They
// are read straight into their slots, head first. Each object that is read, and each whose checksum must be compared, has one flight for
// all lookups that want it. An object that differs from the tier's checksum is dropped. An object that arrives after LoadTimeout stays in
// the pool.

const (
	maxLoads = 32 // reads at once, further ones wait; a user or address may have at most half of those that others leave free

	// loadLife is how many times LoadTimeout a read may take before it is canceled.
	loadLife = 10
)

// AsksBelow reports whether lookups may ask the tier for objects that the pool lacks. It is false without a tier, and while the tier does
// not answer.
func (s *Store) AsksBelow() bool { return s.below != nil && s.below.Answers() }

// Go starts a goroutine that Close waits for. It returns false if s is closed.
func (s *Store) Go(f func()) bool {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return false
	}
	s.running.Go(f)
	return true
}

// search looks for objects that the tier can add to those of the pool, for one pending lookup.
type search struct {
	*Store
	*tiering.Probe
	pf   *prefetch
	next int // the first object that was not taken yet
}

// fetch gets the objects that a pending lookup needs and that cannot be served yet: objects of the pool that have a flight, and objects of
// the tier.
func (s *Store) fetch(pf *prefetch) {
	x := &search{Store: s, Probe: tiering.NewProbe(&pf.shard, pf.hashes, pf.prompt.From, places{s, pf}), pf: pf}
	x.Find(pf.ctx, x.take)
}

// places implements tiering.Places for the search of a pending lookup.
type places struct {
	*Store
	pf *prefetch
}

// InPool implements tiering.Places.
func (p places) InPool(keys []kv.Key, there []bool) {
	for ; len(keys) > dropBatch; keys, there = keys[dropBatch:], there[dropBatch:] { // an object that has expired is dropped here
		p.InPool(keys[:dropBatch], there[:dropBatch])
	}
	p.lock()
	defer p.unlock()
	for i := range keys {
		_, _, there[i] = p.servableLocked(&keys[i])
	}
}

// InTier implements tiering.Places.
func (p places) InTier(ctx context.Context, keys []kv.Key) ([]tier.Meta, error) {
	return p.below.Ask(ctx, keys, p.Go)
}

// Failed implements tiering.Places.
func (p places) Failed(err error) { p.belowFailed(p.pf, miss.BelowFailed, tier.NameOf(err)) }

// Differs implements tiering.Places.
func (p places) Differs(kv.Key) { p.belowFailed(p.pf, miss.BelowCorrupt, "") }

// belowFailed records, as the reason of a miss, why the tier did not help. tier is the name of the tier that failed, or "".
func (s *Store) belowFailed(pf *prefetch, why miss.Reason, tier string) {
	s.lock()
	defer s.unlock()
	pf.belowWhy, pf.tier = why, tier
	s.mu.n.BelowFailures++
}

// take takes the objects of a hit of `hit` chunks that the lookup has not taken yet, head first. It pins objects in the pool, or joins
// their flights, and begins a flight for each object in the tier. It reports false if the prefix cannot get longer.
func (x *search) take(hit int) (more bool) {
	missing := int64(0)
	for i := x.next; i < hit*x.Rows(); i++ {
		if x.Where(i) == tiering.InTier && x.Needs(i, hit) {
			missing += x.mu.pool.Round(x.Bytes(i))
		}
	}
	x.memory.Prepare(missing)
	for load := false; x.next < hit*x.Rows() && x.pf.ctx.Err() == nil; {
		if x.next, load, more = x.takeSome(x.next, hit); !more || load && !x.load(x.next) {
			return false
		}
		if load {
			x.next++
		}
	}
	return x.pf.ctx.Err() == nil
}

// takeSome takes objects of the pool from object i on. next is the object at which it stopped; load says that this one must be read from
// the tier. more is false if the prefix ends there.
func (x *search) takeSome(i, hit int) (next int, load, more bool) {
	x.lock()
	defer x.unlock()
	for end := min(i+batch, hit*x.Rows()); i < end; i++ {
		if !x.Needs(i, hit) {
			continue
		}
		k := x.Key(i)
		switch taken := x.takeLocked(x.pf, &k, i/x.Rows()); {
		case taken:
		case x.Where(i) == tiering.InTier:
			return i, true, true
		case x.Full(i):
			return i, false, false
		}
	}
	return i, false, true
}

// takeLocked pins the object of k for a pending lookup if it may be served, or else joins its flight. It reports false if the object is
// neither.
func (s *Store) takeLocked(pf *prefetch, k *kv.Key, chunk int) bool {
	slot, ready, ok := s.servableLocked(k)
	switch {
	case ok && ready:
		s.pinForLocked(pf, slot)
	case ok:
		s.joinFlightLocked(pf, slot, chunk)
	}
	return ok
}

// load begins to read object i from the tier, once a read may begin. It reports false if the pool has no room, or the lookup's time is
// over.
func (x *search) load(i int) bool {
	return x.Store.load(x.pf, x.Key(i), x.Bytes(i), i/x.Rows())
}

// load begins to read an object of n bytes from the tier for a pending lookup, once a read may begin. It reports false if the pool has no
// room, or the lookup's time is over.
func (s *Store) load(pf *prefetch, k kv.Key, n int64, chunk int) bool {
	for {
		fl, wait, err := s.beginLoad(pf, &k, n, chunk)
		switch {
		case errors.Is(err, errAgain):
		case wait != nil:
			select {
			case <-wait:
			case <-pf.ctx.Done():
				return false
			}
		case fl == nil: // another search reads it already, or the pool is full
			return err == nil
		case s.Go(func() { s.read(fl, k) }):
			return true
		default:
			s.endTierRead(fl, 0, miss.BelowFailed, "")
			return false
		}
	}
}

// beginLoad makes a slot and its flight for an object of n bytes; `chunk` is the object's chunk in the prompt. The flight is nil with an
// error, and if the object is resident or on its way meanwhile. wait is not nil if too many reads are running: the caller waits until this
// channel is closed and tries again.
func (s *Store) beginLoad(pf *prefetch, k *kv.Key, n int64, chunk int) (_ *flight, wait chan struct{}, err error) {
	s.lock()
	defer s.unlock()
	if s.takeLocked(pf, k, chunk) {
		return nil, nil, nil
	}
	size := s.mu.pool.Round(n)
	peer := pf.prompt.Owner.Peer
	if !s.mu.loading.May(peer, size, fair.Amount{Count: maxLoads, Size: s.opts.LoadBytes}) {
		return nil, s.mu.loading.Next(), nil
	}
	slot, err := s.reserveLocked(k, n, pool.Writer{}, &prefixGuard{store: s, by: peer, on: true})
	if err != nil {
		if errors.Is(err, pool.ErrFull) { // everything is pinned, being written or within the quotas of other tenants
			pf.belowWhy = cmp.Or(pf.belowWhy, miss.NoRoom)
		}
		return nil, nil, err
	}
	s.mu.loading.Add(peer, fair.Amount{Count: 1, Size: size})
	fl := s.newFlightLocked(slot)
	fl.begun, fl.below, fl.peer, fl.removals = true, true, peer, s.mu.removals
	if chunk <= len(pf.hashes) { // else the hash of the chunk before it is not known
		s.continuesLocked(slot, k, pf.hashes, chunk)
	}
	s.joinFlightLocked(pf, slot, chunk)
	return fl, nil, nil
}

// read reads an object from the tier into its slot. The slot is not reused until the tier has returned.
func (s *Store) read(fl *flight, k kv.Key) {
	ctx, cancel := context.WithTimeout(s.life, loadLife*min(s.opts.LoadTimeout, forever/loadLife))
	defer cancel()
	sum, err := s.below.Read(ctx, k, s.view(fl))
	_, corrupt := errors.AsType[*tier.CorruptError](err)
	switch {
	case corrupt:
		s.endTierRead(fl, 0, miss.BelowCorrupt, tier.NameOf(err))
	case err != nil:
		s.endTierRead(fl, 0, miss.BelowFailed, tier.NameOf(err))
	default:
		s.endTierRead(fl, sum, miss.None, "")
	}
}

// view returns the bytes of a flight's slot in the pool.
func (s *Store) view(fl *flight) []byte {
	s.lock()
	defer s.unlock()
	return s.mu.pool.View(fl.slot)
}

// endTierRead ends the flight of an object that was read from the tier, and so wakes the lookups that wait for it. If `why` is None the
// object becomes resident with the checksum sum, otherwise it is dropped for that reason. `tier` is the name of the tier that failed, or "".
func (s *Store) endTierRead(fl *flight, sum uint64, why miss.Reason, tier string) {
	s.lock()
	defer s.unlock()
	p := s.mu.pool
	n := p.Length(fl.slot)
	s.mu.loading.Add(fl.peer, fair.Amount{Count: -1, Size: -p.Round(n)})
	s.mu.loading.Ended()
	staged := p.StateOf(fl.slot) == pool.Staged // else it was cleared meanwhile
	if staged && s.outdatedLocked(fl.slot) {
		why = miss.Cleared
	}
	switch {
	case staged && why == miss.None:
		p.Commit(fl.slot)
		s.addLocked(fl.slot)
		p.Stamp(fl.slot)
		p.SetSum(fl.slot, sum)
		s.recordBelowLocked(fl.slot, fl.removals)
		s.mu.n.BelowChunks++
		s.mu.n.BelowBytes += uint64(n)
		if fl.peer == warmPeer {
			s.mu.n.WarmedChunks++
			s.mu.n.WarmedBytes += uint64(n)
		}
		for _, pf := range fl.waiting {
			pf.fromBelow = append(pf.fromBelow, fl.chunk)
			pf.loaded += n
		}
	case staged:
		s.mu.n.BelowFailures++
		if why == miss.BelowCorrupt {
			s.mu.n.BelowCorrupt++
		}
		for _, pf := range fl.waiting {
			pf.tier = tier
		}
		s.dropLocked(fl.slot, why)
		p.Unhold(fl.slot)
	default:
		p.Unhold(fl.slot)
	}
	s.endFlightLocked(fl, staged && why == miss.None)
}

// dropMoving drops the objects that are being read from the tier or written to it.
func (s *Store) dropMoving() {
	s.lock()
	defer s.unlock()
	for slot := range s.mu.writing {
		if s.mu.pool.StateOf(slot) == pool.Resident {
			s.dropLocked(slot, miss.Cleared)
		}
	}
	for slot, fl := range s.mu.flights.of {
		if fl.below && s.mu.pool.StateOf(slot) == pool.Staged {
			s.dropLocked(slot, miss.Cleared)
		}
	}
}

// fromBelowLocked counts the chunks of a hit, and their objects, that were read from the tier for this lookup.
func (pf *prefetch) fromBelowLocked(hit int) (chunks, objects int) {
	slices.Sort(pf.fromBelow)
	for i, c := range pf.fromBelow {
		if c >= hit {
			break
		}
		objects++
		if i == 0 || c != pf.fromBelow[i-1] {
			chunks++
		}
	}
	return chunks, objects
}
