// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// An epoch begins with each Forget. A slot has the epoch in which its place was taken;
// one of an earlier epoch is outdated: no lookup finds it, it is not written below, and it
// goes when nothing keeps it. So what a transfer, a pin or a read from below holds at the
// time of a clear is not served to later lookups.

// BeginForget is called before a Forget is noted anywhere else: if the server is killed
// before Forget, the next one has nothing of what is in the pool now.
func (s *Store) BeginForget() {
	s.lock()
	defer s.unlock()
	s.mu.pool.Outdate()
}

// Forget makes everything outdated that is in the pool or on its way there, also for a
// later server. commit is called at the same moment, under the mutex. Clear drops what
// may go at once; Expire does the rest.
//
// With keepPinned, resident chunks that sessions have pinned stay as they are until the
// next Forget, as with LMCache's clear without force; they are not written below.
func (s *Store) Forget(commit func(), keepPinned bool) {
	s.lock()
	defer s.unlock()
	var pinned []pool.Slot
	if keepPinned {
		pinned = s.pinnedLocked()
	}
	s.mu.epoch++
	for _, slot := range pinned {
		s.takenLocked(slot)
		*s.mu.epochs.At(int(slot)) |= survives
	}
	s.mu.outdated = true
	s.mu.pool.Outdate()
	commit()
}

// survives is set in the epoch of a slot that an earlier epoch left to this one.
const survives = 1 << 31

// pinnedLocked returns the resident slots that sessions have pinned and later lookups find.
func (s *Store) pinnedLocked() (slots []pool.Slot) {
	s.mu.leases.Each(func(sess *session) {
		for _, l := range sess.Leases() {
			for i, slot := range l.Slots {
				if at := pool.Slot(slot); l.Left[i] > 0 && s.mu.pool.StateOf(at) == pool.Resident && !s.outdatedLocked(at) {
					slots = append(slots, at)
				}
			}
		}
	})
	return slots
}

// mayWriteLocked reports whether a slot may be written below: it is of this epoch, and has no end.
func (s *Store) mayWriteLocked(slot pool.Slot) bool {
	if s.mu.lives.limited(slot) {
		return false
	}
	return s.mu.epoch == 0 || int(slot) < s.mu.epochs.Len() && *s.mu.epochs.At(int(slot)) == s.mu.epoch
}

// endPinLocked ends an operator's pin of an outdated slot: no lookup finds what it keeps.
func (s *Store) endPinLocked(slot pool.Slot) {
	if s.mu.policy.Unpin(uint32(slot)) {
		s.letGoUnusedLocked(slot)
	}
}

// dropOutdatedLocked drops the key of an outdated slot, so that its object can be stored anew. Transfers keep the slot's memory until they
// end. It reports false for a slot that lookups have pinned: their loads find it by its key.
func (s *Store) dropOutdatedLocked(slot pool.Slot) bool {
	s.endPinLocked(slot)
	resident := s.mu.pool.StateOf(slot) == pool.Resident
	if resident && s.keptLocked(slot) && int(*s.mu.kept.At(int(slot))) > s.mu.pool.Holds(slot) {
		return false
	}
	s.dropLocked(slot, miss.Cleared)
	if resident {
		s.mu.n.Cleared++
	}
	return true
}

// DropOutdated drops what is outdated and kept by nothing. It reports whether nothing
// outdated is left.
func (s *Store) DropOutdated() bool {
	for from, left := 0, 0; ; {
		next, kept, begun := s.dropSomeOutdated(from)
		if left += kept; next > from && begun {
			from = next
			continue
		}
		return begun && left == 0 && !s.anyOutdated()
	}
}

// dropSomeOutdated looks at some slots. next is where to go on, or from when no slot is left.
func (s *Store) dropSomeOutdated(from int) (next, kept int, ok bool) {
	s.lock()
	defer s.unlock()
	if s.mu.closed || !s.mu.outdated {
		return from, 0, !s.mu.closed
	}
	for next = from; next < min(from+dropBatch, s.mu.pool.Slots()); next++ {
		slot := pool.Slot(next)
		if s.mu.pool.StateOf(slot) != pool.Resident || !s.outdatedLocked(slot) {
			continue
		}
		s.endPinLocked(slot)
		switch {
		case s.evictableLocked(slot):
			s.dropLocked(slot, miss.Cleared)
			s.mu.n.Cleared++
		default:
			kept++
		}
	}
	return next, kept, true
}

// anyOutdated looks at all slots under one lock, so that nothing is cleared meanwhile.
func (s *Store) anyOutdated() bool {
	s.lock()
	defer s.unlock()
	if !s.mu.outdated {
		return false
	}
	for i := range s.mu.pool.Slots() {
		if slot := pool.Slot(i); s.mu.pool.StateOf(slot) == pool.Resident && s.outdatedLocked(slot) {
			return true
		}
	}
	s.mu.outdated = false
	return false
}

// takenLocked notes the epoch of a slot whose place was just taken.
func (s *Store) takenLocked(slot pool.Slot) {
	s.mu.epochs.Grow(int(slot) + 1)
	*s.mu.epochs.At(int(slot)) = s.mu.epoch
}

// outdatedLocked reports whether a slot is of an earlier epoch. What an earlier server
// kept is of epoch 0.
func (s *Store) outdatedLocked(slot pool.Slot) bool {
	if s.mu.epoch == 0 {
		return false
	}
	return int(slot) >= s.mu.epochs.Len() || *s.mu.epochs.At(int(slot))&^survives != s.mu.epoch
}

// DeleteBelow deletes objects from the tier below, after it has waited for writes of them that are in progress. Resident objects are
// written there again when an engine loads them.
func (s *Store) DeleteBelow(keys []kv.Key) error {
	if s.opts.Below == nil {
		return nil
	}
	s.countRemoval()
	s.eachResident(keys, dropBatch, func(slot pool.Slot) bool {
		s.mu.unwanted[slot] = s.mu.pool.Generation(slot)
		return true
	})
	wait, cancel := context.WithTimeout(s.life, closePatience)
	defer cancel()
	for from := 0; from < len(keys); {
		ended := s.writeOf(&from, keys)
		if ended == nil {
			continue
		}
		select {
		case <-ended:
		case <-wait.Done():
			return fmt.Errorf("store: writes of the objects go on: %w", wait.Err())
		}
	}
	err := s.opts.Below.Delete(s.life, keys)
	s.eachResident(keys, dropBatch, func(slot pool.Slot) bool {
		s.notBelowLocked(slot)
		return true
	})
	return err
}

// writeOf looks at a batch of keys from *from on. If one of them is being written, it returns a channel that is closed when the next write
// has ended. Else it returns nil, and *from is behind the batch.
func (s *Store) writeOf(from *int, keys []kv.Key) (ended chan struct{}) {
	s.lock()
	defer s.unlock()
	for i := range keys[*from:min(*from+batch, len(keys))] {
		slot, st := s.mu.pool.Find(&keys[*from+i])
		if _, writing := s.mu.writing[slot]; writing && st == pool.Resident {
			if s.mu.writeEnded == nil {
				s.mu.writeEnded = make(chan struct{})
			}
			return s.mu.writeEnded
		}
	}
	*from = min(*from+batch, len(keys))
	return nil
}

// ForgetBelow notes that the tier below has nothing more of the namespaces that gone answers true for. Their resident objects are
// written there again when an engine loads them.
func (s *Store) ForgetBelow(gone func(kv.Namespace) bool) {
	if s.below == nil {
		return
	}
	s.countRemoval()
	for from, more := 0, true; more; {
		from, more = s.forgetSomeBelow(from, gone)
	}
}

func (s *Store) forgetSomeBelow(from int, gone func(kv.Namespace) bool) (next int, more bool) {
	s.lock()
	defer s.unlock()
	for next = from; next < min(from+batch, s.mu.pool.Slots()); next++ {
		slot := pool.Slot(next)
		if s.mu.pool.StateOf(slot) == pool.Resident && s.mu.pool.Below(slot) == s.place && gone(s.mu.pool.KeyOf(slot).Namespace) {
			s.notBelowLocked(slot)
		}
	}
	return next, !s.mu.closed && next < s.mu.pool.Slots()
}

func (s *Store) notBelowLocked(slot pool.Slot) {
	if s.mu.pool.Below(slot) == s.place {
		s.mu.pool.SetBelow(slot, 0)
	}
}

// countRemoval counts a removal from the tier: a read or write that began earlier does not record its object as being there.
func (s *Store) countRemoval() {
	s.lock()
	defer s.unlock()
	s.mu.removals++
}
