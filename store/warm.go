// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"

	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

// A new server has an empty pool. With Options.WarmBytes it reads the hottest objects of the tier below in the background, into free
// memory: it evicts nothing for them, and lookups go first.

const warmPeer = "warming" // name under which the reads of Warm count, like those of a user or address

// warmer implements tiering.Warmer.
type warmer struct{ *Store }

func (s *Store) warm(ctx context.Context) {
	tiering.Warm(ctx, warmer{s}, tiering.WarmOptions{Bytes: s.opts.WarmBytes, Time: s.opts.WarmTime, Longest: s.mu.pool.Bytes(), Log: s.log})
}

// Hottest implements tiering.Warmer.
func (w warmer) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	return w.below.Hottest(ctx, n, f)
}

// Warmed implements tiering.Warmer.
func (w warmer) Warmed() (objects, bytes uint64) {
	n := w.Stats()
	return n.WarmedChunks, n.WarmedBytes
}

// Usable implements tiering.Warmer.
func (w warmer) Usable() bool { return w.AsksBelow() }

// Warm implements tiering.Warmer.
func (w warmer) Warm(ctx context.Context, k kv.Key, bytes int64) (wait chan struct{}, room bool) {
	w.memory.Prepare(bytes)
	ended := make(chan struct{})
	var next chan struct{}
	var had bool
	if !w.Go(func() { // Close waits for a flight from its beginning on
		defer close(ended)
		var fl *flight
		if fl, next, had = w.beginWarm(&k, bytes); fl != nil {
			w.read(fl, k)
		}
	}) {
		return nil, true
	}
	select {
	case <-ended:
		return next, had
	case <-ctx.Done(): // the object stays in the pool when it comes
		return nil, true
	}
}

// beginWarm makes a slot and its flight for an object. The flight is nil if the object is in the pool or on its way, or if there is no
// room. wait is not nil while lookups read from the tier: the caller waits until it is closed.
func (s *Store) beginWarm(k *kv.Key, bytes int64) (_ *flight, wait chan struct{}, room bool) {
	s.lock()
	defer s.unlock()
	size, l := s.mu.pool.Round(bytes), &s.mu.loading
	if l.All().Count > l.Of(warmPeer).Count || !l.May(warmPeer, size, fair.Amount{Count: maxLoads, Size: s.opts.LoadBytes}) {
		return nil, l.Next(), true
	}
	if _, st := s.mu.pool.Find(k); st != pool.Free || s.mu.closed {
		return nil, nil, true
	}
	slot, err := s.mu.pool.Reserve(k, bytes, pool.Writer{})
	if errors.Is(err, pool.ErrIndexMemory) {
		s.mu.indexShort = true // unlock provides it
		again := make(chan struct{})
		close(again)
		return nil, again, true
	}
	if err != nil {
		return nil, nil, false
	}
	s.takenLocked(slot)
	s.mu.warmed.Add(uint32(slot))
	l.Add(warmPeer, fair.Amount{Count: 1, Size: size})
	fl := s.newFlightLocked(slot)
	fl.begun, fl.below, fl.peer, fl.removals = true, true, warmPeer, s.mu.removals
	return fl, nil, true
}
