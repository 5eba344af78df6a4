// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

// RecheckBelow makes the store ask the tier for each resident object that is recorded as being in the tier. It is for use after objects
// were removed from the tier. An object that the tier lacks is written there again when an engine loads it.
func (s *Store) RecheckBelow() {
	s.countRemoval()
	select {
	case s.rechecks <- struct{}{}:
	default: // a recheck that was asked for before begins later
	}
}

// runRechecks rechecks at the start, and after each RecheckBelow, until ctx ends.
func (s *Store) runRechecks(ctx context.Context) {
	tiering.Recheck(ctx, notes{Store: s, write: true}, s.opts.BelowOpened)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.rechecks:
		}
		tiering.Recheck(ctx, notes{Store: s}, s.opts.BelowOpened)
	}
}

// recordBelowLocked records that a slot's object, which was just read from the tier or written to it, is in the tier. removals is the
// number of removals when the read or write began. If there was another removal since, nothing is recorded, because it may have removed the
// object.
func (s *Store) recordBelowLocked(slot pool.Slot, removals uint64) {
	if s.mu.removals == removals {
		s.mu.pool.SetBelow(slot, s.place)
	}
}

// notes implements tiering.Notes for a recheck.
type notes struct {
	*Store
	write bool // objects that the tier lacks are written there at once
}

// Slots implements tiering.Notes.
func (s notes) Slots() int {
	s.lock()
	defer s.unlock()
	return s.mu.pool.Slots()
}

// Recorded implements tiering.Notes.
func (s notes) Recorded(from, end, most int) (keys []kv.Key, of []tiering.RecordedObject, next int) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return nil, nil, end
	}
	p := s.mu.pool
	for next = from; next < min(end, from+batch) && len(keys) < most; next++ {
		if slot := pool.Slot(next); p.StateOf(slot) == pool.Resident && p.Below(slot) == s.place {
			keys = append(keys, p.KeyOf(slot))
			of = append(of, tiering.RecordedObject{Slot: uint32(slot), Generation: p.Generation(slot), Bytes: p.Length(slot)})
		}
	}
	return keys, of, next
}

// Ask implements tiering.Notes.
func (s notes) Ask(ctx context.Context, keys []kv.Key) ([]tier.Meta, error) {
	if !s.AsksBelow() {
		return nil, tier.ErrResting
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.LoadTimeout)
	defer cancel()
	return s.below.Ask(ctx, keys, s.Go)
}

// Settle implements tiering.Notes.
func (s notes) Settle(of []tiering.RecordedObject, metas []tier.Meta) {
	s.lock()
	defer s.unlock()
	for i, o := range of {
		slot := pool.Slot(o.Slot)
		if metas[i].Fits(o.Bytes) || !s.sameLocked(slot, o.Generation) || s.mu.pool.Below(slot) != s.place {
			continue
		}
		s.mu.pool.SetBelow(slot, 0)
		s.mu.n.GoneBelow++
		if s.write {
			s.offerNewLocked(slot)
		}
	}
}
