// SPDX-License-Identifier: Apache-2.0

package store

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// quotas orders changes of quotas. While no tenant has a quota or a TTL of its own, requests only read `named`.
type quotas struct {
	changing sync.Mutex // held during a change; taken before Store.mu
	named    atomic.Bool
}

// SetQuota gives the tenant of a cache salt a quota of `bytes` in the pool: an eviction for another tenant never leaves this tenant with
// less than its quota. The empty salt is a tenant like others. Objects that the tenant stored before count from its next request of the
// same model on. Errors: tenant.ErrTooMany, ErrSum, ErrQuota.
func (s *Store) SetQuota(salt string, bytes int64) error {
	s.quotas.changing.Lock()
	defer s.quotas.changing.Unlock()
	s.lock()
	defer s.unlock()
	err := s.mu.policy.SetQuota(salt, bytes)
	s.quotas.named.Store(s.mu.policy.Named())
	return err
}

// SetTTL sets the idle time after which the objects of a cache salt are dropped. ttl is at least a second, or tenant.Forever, or 0 for
// Options.TTL. Errors: tenant.ErrTTL, ErrTooMany.
func (s *Store) SetTTL(salt string, ttl time.Duration) (err error) {
	s.lock()
	defer s.unlock()
	if ttl == 0 {
		s.mu.policy.DropTTL(salt)
	} else {
		err = s.mu.policy.SetTTL(salt, ttl)
	}
	s.quotas.named.Store(s.mu.policy.Named())
	return err
}

// DropQuota ends a tenant's quota, and reports whether it had one. Its objects stay, but may then be evicted for any tenant.
func (s *Store) DropQuota(salt string) bool {
	s.quotas.changing.Lock()
	defer s.quotas.changing.Unlock()
	dropped, ok := s.beginDropQuota(salt)
	if ok {
		s.eachSlot(func(slot pool.Slot, st pool.State) {
			id, parent := s.contentLocked(slot)
			s.mu.policy.Release(dropped, uint32(slot), st == pool.Resident, id, parent)
		})
	}
	return ok
}

func (s *Store) beginDropQuota(salt string) (tenant.Dropped, bool) {
	s.lock()
	defer s.unlock()
	dropped, ok := s.mu.policy.DropQuota(salt)
	s.quotas.named.Store(s.mu.policy.Named())
	return dropped, ok
}

// Tenants returns the figures of each tenant that has a quota, a TTL of its own, or may pin, by salt.
func (s *Store) Tenants() []tenant.Usage {
	s.lock()
	defer s.unlock()
	return s.mu.policy.List()
}

// NamesTenants reports whether NameTenant has any effect. It takes no lock.
func (s *Store) NamesTenants() bool { return s.quotas.named.Load() }

// NameTenant sets the tenant of a namespace. From then on the objects in the namespace count for the tenant's quota and have its TTL. While
// no tenant has a quota or a TTL it does nothing.
func (s *Store) NameTenant(space kv.Namespace, salt []byte) {
	if !s.quotas.named.Load() || !s.nameTenant(space, salt) {
		return
	}
	s.eachSlot(func(slot pool.Slot, st pool.State) {
		if s.mu.pool.KeyOf(slot).Namespace == space {
			id, parent := s.contentLocked(slot)
			s.mu.policy.Adopt(uint32(slot), space, st == pool.Resident, id, parent)
		}
	})
}

func (s *Store) nameTenant(space kv.Namespace, salt []byte) (news bool) {
	s.lock()
	defer s.unlock()
	return s.mu.policy.Name(space, salt)
}

// eachSlot calls f, under the mutex, for every slot that is staged or resident when it comes to it. It releases the mutex between batches.
func (s *Store) eachSlot(f func(slot pool.Slot, st pool.State)) {
	for from, more := 0, true; more; from += batch {
		more = s.someSlots(from, f)
	}
}

func (s *Store) someSlots(from int, f func(slot pool.Slot, st pool.State)) (more bool) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return false
	}
	to := min(from+batch, s.mu.pool.Slots())
	for slot := pool.Slot(from); int(slot) < to; slot++ {
		if st := s.mu.pool.StateOf(slot); st == pool.Staged || st == pool.Resident {
			f(slot, st)
		}
	}
	return to < s.mu.pool.Slots()
}

// contentLocked returns the ids by which a policy knows a slot's object and the object before it.
func (s *Store) contentLocked(slot pool.Slot) (id, parent uint64) {
	k := s.mu.pool.KeyOf(slot)
	if int(slot) < s.mu.parents.Len() {
		parent = *s.mu.parents.At(int(slot))
	}
	return miss.ID(&k), parent
}

// placeLocked stages an object of n bytes in free memory of the pool for the transfer `by`. Its errors are those of Reserve.
func (s *Store) placeLocked(k *kv.Key, n int64, by pool.Writer) (pool.Slot, error) {
	slot, err := s.mu.pool.Reserve(k, n, by)
	if err == nil {
		s.takenLocked(slot)
	}
	if err == nil && s.mu.policy.Any() {
		s.mu.policy.Stage(uint32(slot), k.Namespace)
	}
	return slot, err
}

// makeRoomForLocked tells the policy for which object the next victims make room.
func (s *Store) makeRoomForLocked(k *kv.Key, n int64) {
	if s.mu.policy.Any() {
		s.mu.policy.For(k.Namespace, s.mu.pool.Round(n))
	}
}

// findLocked is pool.Find, but first drops an object that was not used for its TTL, whose end has come, or that is from before a clear.
func (s *Store) findLocked(k *kv.Key) (pool.Slot, pool.State) {
	slot, st := s.mu.pool.Find(k)
	if st != pool.Free && s.outdatedLocked(slot) && s.dropOutdatedLocked(slot) {
		return slot, pool.Free
	}
	if s.mu.policy.Mortal() && st == pool.Resident && s.expireLocked(slot) {
		return slot, pool.Free
	}
	if s.mu.lives.any() && st == pool.Resident && s.mu.lives.ended(slot) && s.endLifeLocked(slot) {
		return slot, pool.Free
	}
	return slot, st
}

// expireLocked drops a slot that was not used for its TTL, unless a pin or hold keeps it.
func (s *Store) expireLocked(slot pool.Slot) bool {
	if !s.mu.policy.Expired(uint32(slot)) || !s.evictableLocked(slot) {
		return false
	}
	s.mu.n.ExpiredChunks++
	s.mu.n.ExpiredBytes += uint64(s.mu.pool.Length(slot))
	s.dropLocked(slot, miss.Expired)
	return true
}

// expireLooks is how many slots one Expire looks at for their TTLs.
const expireLooks = 1 << 17

// expireSlots looks at the next expireLooks slots, and drops those that were not used for their TTL.
func (s *Store) expireSlots() {
	for looks := 0; looks < expireLooks && s.expireSome(); looks += dropBatch {
	}
}

func (s *Store) expireSome() (more bool) {
	s.lock()
	defer s.unlock()
	if !s.mu.policy.Mortal() || s.mu.closed {
		return false
	}
	to := min(s.mu.aging+dropBatch, s.mu.pool.Slots())
	for ; s.mu.aging < to; s.mu.aging++ {
		s.expireLocked(pool.Slot(s.mu.aging))
	}
	if more = to < s.mu.pool.Slots(); !more {
		s.mu.aging = 0
	}
	return more
}
