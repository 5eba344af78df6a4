// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// SetPinLimit sets how many bytes of a cache salt's objects may be pinned in the pool; 0: none. Pins beyond the limit end. Errors:
// tenant.ErrTooMany, ErrSum, ErrQuota.
func (s *Store) SetPinLimit(salt string, bytes int64) error {
	err := s.setPinLimit(salt, bytes)
	s.endPins(false)
	return err
}

func (s *Store) setPinLimit(salt string, bytes int64) error {
	s.lock()
	defer s.unlock()
	return s.mu.policy.SetPinLimit(salt, bytes)
}

// Pin pins resident objects of a cache salt for the time life: they are not evicted, do not expire, and Clear without force keeps them. An
// object that is pinned for longer already keeps its longer pin. Pin works under one lock, so keys should be those of a chunk or two. If
// one object may not be pinned, Pin undoes the pins that it made. It returns how many of the objects are pinned now. Errors:
// tenant.ErrNoPins, ErrPinLimit, ErrTooManyPins.
func (s *Store) Pin(salt string, keys []kv.Key, life time.Duration) (pinned int, err error) {
	var fresh []pool.Slot
	s.eachResident(keys, len(keys), func(slot pool.Slot) bool {
		if s.outdatedLocked(slot) { // no lookup finds it
			return true
		}
		s.mu.policy.Tick(time.Since(s.began))
		news := false
		if news, err = s.mu.policy.Pin(salt, uint32(slot), life); err != nil {
			for _, slot := range fresh {
				s.mu.policy.Unpin(uint32(slot))
				s.letGoUnusedLocked(slot)
			}
			pinned = 0
			return false
		}
		if news {
			s.keepLocked(slot)
			fresh = append(fresh, slot)
		}
		pinned++
		return true
	})
	return pinned, err
}

// Unpin ends the operator's pins of objects, and returns how many it ended.
func (s *Store) Unpin(keys []kv.Key) (n int) {
	s.eachResident(keys, batch, func(slot pool.Slot) bool {
		if s.mu.policy.Unpin(uint32(slot)) {
			s.letGoLocked(slot)
			n++
		}
		return true
	})
	return n
}

// endPins ends operators' pins whose time is over or that exceed a limit; with all it ends every pin.
func (s *Store) endPins(all bool) {
	for more := true; more; {
		more = s.endSomePins(all)
	}
}

func (s *Store) endSomePins(all bool) (more bool) {
	s.lock()
	defer s.unlock()
	return !s.mu.closed && s.mu.policy.EndPins(all, batch, func(slot uint32) { s.letGoLocked(pool.Slot(slot)) })
}

// PinnedObject is an object that an operator has pinned.
type PinnedObject struct {
	Key   kv.Key
	Bytes int64
	Left  time.Duration // until the pin ends
}

// Pins appends some pinned objects to dst, from pin number `from` on; 0 begins. next is the number for the next call, or 0 when none is
// left. A pin that changes between two calls may be missed or returned twice.
func (s *Store) Pins(from int, dst []PinnedObject) (_ []PinnedObject, next int) {
	s.lock()
	defer s.unlock()
	list, next := s.mu.policy.Pins(from, batch, nil)
	for _, p := range list {
		slot := pool.Slot(p.Slot)
		dst = append(dst, PinnedObject{s.mu.pool.KeyOf(slot), s.mu.pool.Length(slot), p.Left})
	}
	return dst, next
}
