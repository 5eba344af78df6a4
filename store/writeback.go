// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

// Stored objects are also written to the tier below, in the background: slot by slot, straight from the pool. A slot is held while the tier
// reads it, as a worker's slot is. The pool's index records which objects are in the tier, so that no later server writes them again.

// WritePolicy says when objects are written to the tier below.
type WritePolicy uint8

// The policies. An object that the tier did not take is offered again at each hit.
const (
	WriteAtCommit   WritePolicy = iota // soon after they were stored
	WriteAtFirstHit                    // once an engine has loaded them
	WriteNever
)

// writers is how many objects are written to the tier at once.
const writers = 8

// offerLocked queues a resident object for the tier below, unless the tier has it or it must not be written.
func (s *Store) offerLocked(slot pool.Slot) {
	if s.answerLocked(slot) {
		return
	}
	if p := s.mu.pool; s.outbox != nil && s.mayWriteLocked(slot) && p.Below(slot) != s.place && !s.suspectedLocked(slot) {
		delete(s.mu.unwanted, slot)
		s.outbox.Add(tiering.WriteItem{Slot: uint32(slot), Generation: p.Generation(slot), Bytes: p.Round(p.Length(slot))})
	}
}

// offerNewLocked queues an object that became resident, if objects are written at their commit (WriteAtCommit).
func (s *Store) offerNewLocked(slot pool.Slot) {
	if s.opts.Write == WriteAtCommit {
		s.offerLocked(slot)
	}
}

// beginWriting starts the write of one object on a goroutine that Close waits for.
func (s *Store) beginWriting(it tiering.WriteItem) (ended chan tiering.WriteOutcome, ok bool) {
	ended = make(chan tiering.WriteOutcome, 1)
	return ended, s.Go(func() { ended <- s.write(it) })
}

// nextLanding returns a channel that is closed when the next object has come from the tier, or nil while none is on its way.
func (s *Store) nextLanding() chan struct{} {
	s.lock()
	defer s.unlock()
	if s.mu.loading.All().Count == 0 {
		return nil
	}
	return s.mu.loading.Next()
}

// write writes one object to the tier, if its slot still has it.
func (s *Store) write(it tiering.WriteItem) tiering.WriteOutcome {
	w, ok := s.beginWrite(it)
	if !ok {
		return tiering.Settled
	}
	sum, err := s.below.Write(w.ctx, w.key, w.view, tier.Meta{Sum: w.sum, NoSum: !w.known, End: w.end})
	return s.endWrite(it, sum, err)
}

// belowWrite is a write below that has begun.
type belowWrite struct {
	ctx   context.Context // carries the generation of Options.Moment
	key   kv.Key
	view  []byte
	sum   uint64
	known bool   // sum is known
	end   uint32 // end of the object's life: see tier.Meta
}

func (s *Store) beginWrite(it tiering.WriteItem) (w belowWrite, ok bool) {
	s.lock()
	defer s.unlock()
	slot := pool.Slot(it.Slot)
	_, writing := s.mu.writing[slot] // it was offered again meanwhile
	if generation, unwanted := s.mu.unwanted[slot]; unwanted && generation == it.Generation {
		return w, false
	}
	if writing || !s.mayWriteLocked(slot) || !s.sameLocked(slot, it.Generation) || s.mu.pool.Below(slot) == s.place {
		return w, false
	}
	s.mu.pool.Hold(slot)
	s.keepLocked(slot)
	s.mu.writing[slot] = s.mu.removals
	w = belowWrite{ctx: s.life, key: s.mu.pool.KeyOf(slot), view: s.mu.pool.View(slot)}
	w.sum, w.known = s.mu.pool.Sum(slot)
	if left, ok := s.mu.policy.Left(uint32(slot)); ok {
		w.end = uint32(time.Now().Add(left).Unix()) + 1
	}
	if s.opts.Moment != nil { // under the mutex, as Forget's commit is
		w.ctx = tier.AtMoment(s.life, s.opts.Moment())
	}
	return w, true
}

// endWrite releases the slot, and records that the tier has the object if the write succeeded.
func (s *Store) endWrite(it tiering.WriteItem, sum uint64, err error) (out tiering.WriteOutcome) {
	s.lock()
	defer s.unlock()
	p, slot := s.mu.pool, pool.Slot(it.Slot)
	same := p.StateOf(slot) == pool.Resident && p.Generation(slot) == it.Generation
	switch {
	case errors.Is(err, tier.ErrResting):
		out = tiering.Resting
	case errors.Is(err, tier.ErrNotKept):
		s.mu.n.NotKeptBelow++
	case err != nil:
		s.mu.n.WriteFailures++
		out = tiering.Failed
	default:
		s.mu.n.WrittenChunks++
		s.mu.n.WrittenBytes += uint64(p.Length(slot))
		if same {
			p.SetSum(slot, sum)
			s.recordBelowLocked(slot, s.mu.writing[slot])
		}
	}
	delete(s.mu.writing, slot)
	if s.mu.writeEnded != nil {
		close(s.mu.writeEnded)
		s.mu.writeEnded = nil
	}
	s.letGoUnusedLocked(slot)
	p.Unhold(slot)
	return out
}
