// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// SetPinLimit says how many bytes of the pool may be pinned of a cache salt, 0 for none. Pins beyond that end. Errors: tenant.ErrTooMany,
// ErrSum, ErrQuota.
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

// Pin keeps resident objects of a cache salt from being evicted, dropped by Clear without force or expiring, for life. An object that is
// pinned for longer already stays so. keys are those of a chunk or two: Pin pins all at once. If one may not be pinned, it pins none that
// was not pinned before. It returns how many are pinned now. Errors: tenant.ErrNoPins, ErrPinLimit, ErrTooManyPins.
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

// Unpin ends the pins of objects, and returns how many there were.
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

// endPins ends pins whose time is over or that pass a limit, or all.
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

// PinnedObject is an object that is pinned.
type PinnedObject struct {
	Key   kv.Key
	Bytes int64
	Left  time.Duration // until the pin ends
}

// Pins appends some pinned objects to dst, from number from on; 0 begins. next is 0 when none is left, else where to
// continue. A pin that changes between two calls may be missed or returned twice.
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
