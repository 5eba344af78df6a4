// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

// notes is the store as tiering.Recheck sees it.
type notes struct{ *Store }

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
	if !s.useBelow() {
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
		s.offerNewLocked(slot)
	}
}
