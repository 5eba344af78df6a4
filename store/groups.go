// SPDX-License-Identifier: Apache-2.0

package store

import (
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// dropDeadLocked drops the window chunks of a prompt that no hit could need, given which of its chunks are stored. They are evicted before
// any chunk that is of use.
func (s *Store) dropDeadLocked(sh object.Shard, hashes []kv.Hash) {
	find := func(group, chunk int) (pool.Slot, pool.State) {
		var k kv.Key
		sh.Key(&k, sh.Index, group, hashes[chunk])
		return s.mu.pool.Find(&k)
	}
	kept := func(group, chunk int) bool { // a chunk that is being stored counts as stored
		_, st := find(group, chunk)
		return st != pool.Free
	}
	sh.Groups.Dead(len(hashes), kept, func(group, chunk int) {
		if slot, st := find(group, chunk); st == pool.Resident && !s.keptLocked(slot) {
			s.mu.n.DeadChunks++
			s.evictLocked(slot, miss.Window)
		}
	})
}

// evictLocked drops the key of a slot to make room, and counts the eviction; also as lost, if the tier should have the object and does
// not have it yet. `why` is the reason that a later miss of the object gets.
func (s *Store) evictLocked(slot pool.Slot, why miss.Reason) {
	s.mu.n.EvictedChunks++
	if s.outbox != nil && !s.answerLocked(slot) && !s.mu.lives.limited(slot) && s.mu.pool.Below(slot) != s.place {
		s.mu.n.LostChunks++
	}
	s.mu.n.EvictedBytes += uint64(s.mu.pool.Length(slot))
	s.dropLocked(slot, why)
}
