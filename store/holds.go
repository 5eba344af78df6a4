// SPDX-License-Identifier: Apache-2.0

package store

import (
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// newHold returns the hold of a transfer over objects whose slots are already held in the pool.
func (s *Store) newHold(name hold.Transfer, requestID []byte, objects []heldObject) *hold.Hold {
	h := &hold.Hold{
		Transfer: name, RequestID: string(requestID), Slots: make([]uint32, len(objects)),
		Deadline: time.Now().Add(s.opts.Quarantine), Reads: name.Load,
	}
	for i, o := range objects {
		h.Slots[i] = uint32(o.slot)
		h.Bytes += o.bytes
		if !name.Load {
			h.Staged += s.mu.pool.Round(o.bytes)
		}
	}
	return h
}

// end releases the slots of a hold that is no longer in the table, because the worker does not touch them any more. Staged slots become
// resident with publish, otherwise they are dropped. It works in batches, the last chunks first. So heads are the more recently used ones,
// and a chunk is part of a hit only once all chunks before it are. It returns how many objects became resident.
func (s *Store) end(h *hold.Hold, publish bool) (published int) {
	for to := len(h.Slots); to > 0; to -= batch {
		published += s.endSome(h, max(0, to-batch), to, publish)
	}
	return published
}

func (s *Store) endSome(h *hold.Hold, from, to int, publish bool) int {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return 0
	}
	return s.giveBackLocked(h, from, to, publish)
}

func (s *Store) giveBackLocked(h *hold.Hold, from, to int, publish bool) (published int) {
	for i := to - 1; i >= from; i-- {
		slot := pool.Slot(h.Slots[i])
		if s.mu.pool.StateOf(slot) == pool.Staged {
			outdated := s.outdatedLocked(slot) // a clear came after its place was taken
			if publish && !outdated {
				s.mu.pool.Commit(slot)
				s.mu.n.StoredChunks++
				s.mu.n.StoredBytes += uint64(s.mu.pool.Length(slot))
				s.addLocked(slot)
				if !s.mu.lives.limited(slot) {
					s.mu.pool.Stamp(slot)
				}
				published++
				continue
			}
			if publish {
				s.dropLocked(slot, miss.Cleared)
			} else {
				s.dropLocked(slot, miss.Failed)
			}
		}
		if h.Reads {
			s.letGoLocked(slot)
		}
		s.mu.pool.Unhold(slot)
	}
	for i := from; published > 0 && i < to; i++ { // the first chunks are written to the tier first
		if slot := pool.Slot(h.Slots[i]); s.mu.pool.StateOf(slot) == pool.Resident {
			s.unsummedLocked(slot)
		}
	}
	return published
}

// Detach records that a worker instance unregistered, fell silent or registered again. Objects that it reserved and did not commit are
// never served. Memory that it may still touch stays out of use until its late commit or the end of the quarantine. Detach returns the
// number of transfers in quarantine.
func (s *Store) Detach(instance int64) int {
	of := s.orphan(instance)
	for _, h := range of {
		s.dropKeys(h, miss.Failed, pool.Staged)
	}
	return len(of)
}

// dropKeys drops the keys of those slots of a transfer that are in one of the states, a batch at a time, as long as the transfer is in
// progress. It returns how many it dropped.
func (s *Store) dropKeys(h *hold.Hold, why miss.Reason, states ...pool.State) (n int) {
	for from, more := 0, true; more; from += dropBatch {
		var dropped int
		dropped, more = s.dropSome(h, from, why, states)
		n += dropped
	}
	return n
}

func (s *Store) dropSome(h *hold.Hold, from int, why miss.Reason, states []pool.State) (n int, more bool) {
	s.lock()
	defer s.unlock()
	if s.mu.closed || !s.mu.holds.Keeps(h) {
		return 0, false
	}
	to := min(from+dropBatch, len(h.Slots))
	for _, slot := range h.Slots[from:to] {
		if slot := pool.Slot(slot); slices.Contains(states, s.mu.pool.StateOf(slot)) {
			s.dropLocked(slot, why)
			n++
		}
	}
	return n, to < len(h.Slots)
}

// orphan marks the transfers of an instance as those of a detached worker and returns them, oldest first.
func (s *Store) orphan(instance int64) []*hold.Hold {
	s.lock()
	defer s.unlock()
	return s.mu.holds.Orphans(instance, time.Now())
}

// EndQuarantine ends the quarantine of a detached instance whose process has ended, because that process can no longer touch its slots. It
// returns the number of transfers whose memory was freed.
func (s *Store) EndQuarantine(instance int64) int {
	now := time.Now()
	n := s.dueNow(instance, now)
	if n > 0 {
		s.expire(now)
	}
	return n
}

func (s *Store) dueNow(instance int64, now time.Time) int {
	s.lock()
	defer s.unlock()
	return s.mu.holds.EndQuarantine(instance, now)
}

// expire ends the holds whose deadline is over.
func (s *Store) expire(now time.Time) {
	keepFormer := s.formerDue(now) && s.opts.Stopped()
	for _, h := range s.expired(now, keepFormer) {
		s.end(h, false)
	}
}

// formerDue reports whether the quarantine is over for slots that a worker of an earlier server may touch.
func (s *Store) formerDue(now time.Time) bool {
	s.lock()
	defer s.unlock()
	return s.mu.holds.FormerDue(now)
}

func (s *Store) expired(now time.Time, keepFormer bool) []*hold.Hold {
	s.lock()
	defer s.unlock()
	s.mu.policy.Tick(time.Since(s.began))
	ended := s.mu.holds.Expire(now, keepFormer)
	s.mu.n.HoldsExpired += uint64(len(ended))
	return ended
}
