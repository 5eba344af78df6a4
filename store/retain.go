// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// mu.kept counts the promises that keep a resident slot from being evicted: pins, holds of readers, and a store that guards its own prefix.
// The policy knows every resident slot, and is told only of uses: a promise changes nothing in its books.

// errAgain means that the policy has not looked at all slots for a victim yet. The caller must release the lock for a moment and try again.
var errAgain = errors.New("store: continue after releasing the lock")

// addLocked adds a resident slot to the policy, the index by chunks and the events.
func (s *Store) addLocked(slot pool.Slot) {
	k := s.mu.pool.KeyOf(slot)
	parent := uint64(0)
	if int(slot) < s.mu.parents.Len() {
		parent = *s.mu.parents.At(int(slot))
	}
	s.mu.policy.Add(uint32(slot), k.Namespace, miss.ID(&k), parent)
	s.mu.chunks.Add(uint32(slot), &k.Chunk)
	s.mu.events.add(k, false)
	if !s.keptLocked(slot) {
		s.mu.evictable++
	}
}

// continuesLocked records which object a staged slot with hashes[c] continues: that of the chunk before. For objects of an earlier server,
// and those that Warm reads, this is not known.
func (s *Store) continuesLocked(slot pool.Slot, k *kv.Key, hashes []kv.Hash, c int) {
	s.mu.parents.Grow(int(slot) + 1)
	parent := uint64(0)
	if c > 0 {
		before := *k
		before.Chunk = hashes[c-1]
		parent = miss.ID(&before)
	}
	*s.mu.parents.At(int(slot)) = parent
}

// keepLocked counts one more promise on a resident slot.
func (s *Store) keepLocked(slot pool.Slot) {
	s.mu.kept.Grow(int(slot) + 1)
	n := s.mu.kept.At(int(slot))
	if *n++; *n == 1 {
		s.mu.evictable--
	}
}

// letGoLocked ends one promise on a slot, and records a use of the slot.
func (s *Store) letGoLocked(slot pool.Slot) {
	if s.letGoUnusedLocked(slot) {
		s.useLocked(slot)
	}
}

// letGoUnusedLocked ends one promise on a slot. It records a use only if the policy needs one to look at the slot again. It reports false
// if the slot was dropped meanwhile.
func (s *Store) letGoUnusedLocked(slot pool.Slot) bool {
	n := s.mu.kept.At(int(slot))
	*n--
	resident := s.mu.pool.StateOf(slot) == pool.Resident
	if resident && *n == 0 {
		s.mu.evictable++
		if int(slot) < s.mu.passed.Len() && *s.mu.passed.At(int(slot)) {
			s.useLocked(slot)
		}
	}
	return resident
}

// useLocked records a use of a resident slot, also in the pool's index for the order after a restart.
func (s *Store) useLocked(slot pool.Slot) {
	s.mu.policy.Use(uint32(slot))
	if !s.outdatedLocked(slot) && !s.mu.lives.limited(slot) { // without a stamp a later server sees that the slot is outdated or has an end
		s.mu.pool.Stamp(slot)
	}
	if int(slot) < s.mu.passed.Len() && !s.keptLocked(slot) {
		*s.mu.passed.At(int(slot)) = false
	}
}

func (s *Store) keptLocked(slot pool.Slot) bool {
	return int(slot) < s.mu.kept.Len() && *s.mu.kept.At(int(slot)) > 0
}

// evictableLocked reports whether a slot may be evicted: it is resident and no promise keeps it.
func (s *Store) evictableLocked(slot pool.Slot) bool {
	return s.mu.pool.StateOf(slot) == pool.Resident && !s.keptLocked(slot)
}

// victimLocked returns the slot to evict next: see evict.Policy.
func (s *Store) victimLocked() (victim pool.Slot, ok, more bool) {
	if s.mu.evictable == 0 {
		return 0, false, false
	}
	slot, ok, more := s.mu.policy.Victim()
	return pool.Slot(slot), ok, more
}

// neighbourhoods is how many places are searched for a run of slots whose eviction costs few bytes.
const neighbourhoods = 16

// evictNearLocked evicts one run of neighbouring slots and so makes n bytes free in a row. Of the runs around the slots that the policy
// would evict next it takes the one that evicts the fewest bytes. It reports false if it found none.
func (s *Store) evictNearLocked(n int64) bool {
	best, _ := s.mu.pool.CheapestRun(n, neighbourhoods, s.mu.policy.Ascend, s.untouchable)
	for _, slot := range best.Slots {
		if s.mu.policy.Any() && s.mu.policy.Spared(uint32(slot)) { // asked now, because other slots of its tenant were just evicted
			return false
		}
		s.evictLocked(slot, miss.Evicted)
	}
	return best.Bytes >= 0
}

// pinLocked adds the pin of one lease to a resident slot.
func (s *Store) pinLocked(slot pool.Slot) { s.keepLocked(slot) }

func (s *Store) unpinLocked(slot uint32) { s.letGoLocked(pool.Slot(slot)) }

// dropLocked removes the key of a resident or staged slot, and remembers `why` for later misses. The object is no longer written to a tier.
func (s *Store) dropLocked(slot pool.Slot, why miss.Reason) {
	s.mu.drops++
	k := s.mu.pool.KeyOf(slot)
	gone := miss.Gone{Why: why, At: time.Now()}
	if why == miss.Evicted || why == miss.Window {
		gone.By, gone.For = s.mu.needs.by, s.mu.needs.namespace
	}
	s.mu.misses.Add(&k, gone)
	s.mu.chunks.Remove(uint32(slot), &k.Chunk)
	if s.mu.pool.StateOf(slot) == pool.Resident {
		s.mu.events.add(k, true)
	}
	if s.evictableLocked(slot) {
		s.mu.evictable--
	}
	s.mu.policy.Remove(uint32(slot), causes[why])
	if int(slot) < s.mu.passed.Len() {
		*s.mu.passed.At(int(slot)) = false
	}
	s.mu.warmed.Remove(uint32(slot))
	s.outbox.Drop(uint32(slot))
	delete(s.mu.unwanted, slot)
	s.mu.sums.Trust(uint32(slot))
	if int(slot) < s.mu.parents.Len() {
		*s.mu.parents.At(int(slot)) = 0
	}
	s.markAnswerLocked(slot, false)
	s.mu.lives.remove(slot)
	s.mu.pool.Drop(slot)
	if s.mu.policy.Unpin(uint32(slot)) {
		s.letGoUnusedLocked(slot)
	}
}

// causes maps the reason of a drop to the cause in the books of tenants.
var causes = map[miss.Reason]tenant.Cause{miss.Evicted: tenant.Evicted, miss.Window: tenant.Evicted, miss.Expired: tenant.Expired}

// dropIdle drops the slots that are evictable when it begins and still are when it reaches them. It returns how many it dropped.
func (s *Store) dropIdle() (n int) {
	was := s.idle()
	for from := 0; from < len(was); from += dropBatch {
		n += s.dropIdleSlots(from, was[from:min(from+dropBatch, len(was))])
	}
	return n
}

// idle returns, by slot, 1 + the slot's generation if the slot is evictable, else 0.
func (s *Store) idle() (was []uint64) {
	for more := true; more; {
		was = slices.Grow(was, batch) // allocated here, where the lock is free
		was, more = s.idleSlots(was)
	}
	return was
}

func (s *Store) idleSlots(was []uint64) (_ []uint64, more bool) {
	s.lock()
	defer s.unlock()
	to := min(len(was)+batch, s.mu.pool.Slots())
	for slot := pool.Slot(len(was)); int(slot) < to; slot++ {
		is := uint64(0)
		if s.evictableLocked(slot) {
			is = 1 + uint64(s.mu.pool.Generation(slot))
		}
		was = append(was, is)
	}
	return was, len(was) < s.mu.pool.Slots()
}

func (s *Store) dropIdleSlots(from int, was []uint64) (n int) {
	s.lock()
	defer s.unlock()
	for i, is := range was {
		slot := pool.Slot(from + i)
		if is > 0 && s.evictableLocked(slot) && s.mu.pool.Generation(slot) == uint32(is-1) {
			s.dropLocked(slot, miss.Cleared)
			n++
		}
	}
	s.mu.n.Cleared += uint64(n)
	return n
}
