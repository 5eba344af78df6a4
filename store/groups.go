// SPDX-License-Identifier: Apache-2.0

package store

import (
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// dropDeadLocked drops the window chunks of a prompt that no hit could load,
// given what is kept of it: they go before anything that is of use.
func (s *Store) dropDeadLocked(sh object.Shard, hashes []kv.Hash) {
	find := func(group, chunk int) (pool.Slot, pool.State) {
		var k kv.Key
		sh.Key(&k, sh.Index, group, hashes[chunk])
		return s.mu.pool.Find(&k)
	}
	kept := func(group, chunk int) bool { // being stored counts
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

// evictLocked drops a slot to make room.
func (s *Store) evictLocked(slot pool.Slot, why miss.Reason) {
	s.mu.n.EvictedChunks++
	if s.outbox != nil && !s.answerLocked(slot) && !s.mu.lives.limited(slot) && s.mu.pool.Below(slot) != s.place {
		s.mu.n.LostChunks++
	}
	s.mu.n.EvictedBytes += uint64(s.mu.pool.Length(slot))
	s.dropLocked(slot, why)
}
