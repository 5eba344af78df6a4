// SPDX-License-Identifier: Apache-2.0

package store

import (
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Object is a resident object.
type Object struct {
	Key   kv.Key
	Bytes int64
}

// Objects appends some resident objects to dst, until it has `most` of them, from slot `from` on; 0 begins. next is the slot for the next
// call; more is false when no slot is left. The store's lock is free between two calls.
func (s *Store) Objects(from int, dst []Object, most int) (_ []Object, next int, more bool) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return dst, 0, false
	}
	end := s.mu.pool.Slots()
	for next = max(from, 0); next < min(end, max(from, 0)+batch) && len(dst) < most; next++ {
		if slot := pool.Slot(next); s.mu.pool.StateOf(slot) == pool.Resident {
			dst = append(dst, Object{s.mu.pool.KeyOf(slot), s.mu.pool.Length(slot)})
		}
	}
	return dst, next, next < end
}

// OfChunk returns the keys of resident objects with a chunk's hash, in any namespace, shard and group. It looks at 512 slots at most.
func (s *Store) OfChunk(h kv.Hash) []kv.Key {
	s.lock()
	defer s.unlock()
	return s.mu.chunks.Of(&h, s.keyOfLocked)
}

// Drop drops resident objects that no pin or hold keeps, and skips those that one keeps. An object that is not resident counts as neither.
// An object that is being read from the tier is not served when it comes.
func (s *Store) Drop(keys []kv.Key) (dropped, skipped int) {
	s.dropComing(keys)
	s.eachResident(keys, dropBatch, func(slot pool.Slot) bool {
		if !s.evictableLocked(slot) {
			skipped++
			return true
		}
		s.dropLocked(slot, miss.Cleared)
		s.mu.n.Cleared++
		dropped++
		return true
	})
	return dropped, skipped
}

// dropComing drops those of the objects that are being read from the tier.
func (s *Store) dropComing(keys []kv.Key) {
	for ; len(keys) > 0; keys = keys[min(dropBatch, len(keys)):] {
		s.dropSomeComing(keys[:min(dropBatch, len(keys))])
	}
}

func (s *Store) dropSomeComing(keys []kv.Key) {
	s.lock()
	defer s.unlock()
	for i := range keys {
		slot, st := s.mu.pool.Find(&keys[i])
		if fl := s.mu.flights.of[slot]; st == pool.Staged && fl != nil && fl.below && !s.mu.closed {
			s.dropLocked(slot, miss.Cleared)
		}
	}
}

// eachResident calls f, under the mutex, for the slots of the keys that are resident, until f reports false. It releases the mutex after
// each `most` keys.
func (s *Store) eachResident(keys []kv.Key, most int, f func(slot pool.Slot) bool) {
	for more := true; more && len(keys) > 0; keys = keys[min(most, len(keys)):] {
		more = s.someResident(keys[:min(most, len(keys))], f)
	}
}

func (s *Store) someResident(keys []kv.Key, f func(slot pool.Slot) bool) (more bool) {
	s.lock()
	defer s.unlock()
	for i := range keys {
		if slot, st := s.findLocked(&keys[i]); st == pool.Resident && !s.mu.closed && !f(slot) {
			return false
		}
	}
	return true
}
