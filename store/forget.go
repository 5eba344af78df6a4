// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// An epoch begins with each Forget. A slot has the epoch in which its place was taken. A slot of an earlier epoch is outdated: no lookup
// finds it, it is not written to the tier below, and it is dropped once no pin or hold keeps it. So an object that a transfer, a pin or a
// read from the tier keeps during a clear is not served to later lookups.

// BeginForget must be called before a Forget is recorded anywhere else. If the server is killed before Forget, the next server takes over
// nothing of what is in the pool now.
func (s *Store) BeginForget() {
	s.lock()
	defer s.unlock()
	s.mu.pool.Outdate()
}

// Forget makes every object outdated that is in the pool or on its way there, also for a later server. It calls commit at the same moment,
// under the mutex. Clear drops the objects that may be dropped at once; Expire drops the others later.
//
// With keepPinned, resident chunks that sessions have pinned stay valid until the next Forget, as in LMCache's clear without force. They
// are not written to the tier below.
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

// survives is set in the epoch of a slot that Forget kept because a session had pinned it.
const survives = 1 << 31

// pinnedLocked returns the resident slots that sessions have pinned and that are not outdated.
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

// mayWriteLocked reports whether a slot may be written to the tier below: it is of this epoch, and no request gave it an end.
func (s *Store) mayWriteLocked(slot pool.Slot) bool {
	if s.mu.lives.limited(slot) {
		return false
	}
	return s.mu.epoch == 0 || int(slot) < s.mu.epochs.Len() && *s.mu.epochs.At(int(slot)) == s.mu.epoch
}

// endPinLocked ends an operator's pin of an outdated slot, because no lookup finds the slot any more.
func (s *Store) endPinLocked(slot pool.Slot) {
	if s.mu.policy.Unpin(uint32(slot)) {
		s.letGoUnusedLocked(slot)
	}
}

// dropOutdatedLocked drops the key of an outdated slot, so that its object can be stored again. Transfers keep the slot's memory until they
// end. It reports false for a slot that lookups have pinned, because their loads find the slot by its key.
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

// DropOutdated drops the outdated slots that no pin or hold keeps. It reports whether no outdated slot is left.
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

// dropSomeOutdated looks at some slots from slot `from` on. next is where to continue, or `from` when no slot is left. kept is how many
// outdated slots must stay for now.
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

// anyOutdated looks at all slots under one lock, so that no clear can come between.
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

// takenLocked records the present epoch for a slot whose place was just taken.
func (s *Store) takenLocked(slot pool.Slot) {
	s.mu.epochs.Grow(int(slot) + 1)
	*s.mu.epochs.At(int(slot)) = s.mu.epoch
}

// outdatedLocked reports whether a slot is of an earlier epoch. Objects of an earlier server are of epoch 0.
func (s *Store) outdatedLocked(slot pool.Slot) bool {
	if s.mu.epoch == 0 {
		return false
	}
	return int(slot) >= s.mu.epochs.Len() || *s.mu.epochs.At(int(slot))&^survives != s.mu.epoch
}

// DeleteBelow deletes objects from the tier below. It first waits for writes of them that are in progress. Objects that are still resident
// are written there again when an engine loads them.
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
			return fmt.Errorf("store: writes of the objects to tiers have not ended: %w", wait.Err())
		}
	}
	err := s.opts.Below.Delete(s.life, keys)
	s.eachResident(keys, dropBatch, func(slot pool.Slot) bool {
		s.notBelowLocked(slot)
		return true
	})
	return err
}

// writeOf looks at a batch of keys, from keys[*from] on. If one of them is being written to the tier, it returns a channel that is closed
// when the next write ends. Otherwise it returns nil and moves *from past the batch.
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

// ForgetBelow records that the tier below has no more objects of the namespaces for which `gone` reports true. Resident objects of them are
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

// countRemoval counts a removal from the tier. A read or write that began before it does not record its object as being in the tier.
func (s *Store) countRemoval() {
	s.lock()
	defer s.unlock()
	s.mu.removals++
}
