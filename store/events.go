// SPDX-License-Identifier: Apache-2.0

package store

import (
	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Event says that an object became resident in the pool or, with Removed, that it was dropped.
type Event struct {
	Key     kv.Key
	Removed bool
}

// events has the last changes of the set of resident objects. Each has a number. The store writes them under its mutex and never waits for
// a reader. An event takes 64 bytes.
type events struct {
	container.Ring[Event]
	news bool // an event was added since the mutex was locked
}

func (e *events) add(k kv.Key, removed bool) {
	e.news = e.Add(Event{Key: k, Removed: removed}) || e.news
}

// Watch starts to number the objects that become resident or are dropped. At least the last `size` events are kept. A second call has no
// effect.
func (s *Store) Watch(size int) {
	s.lock()
	defer s.unlock()
	s.mu.events.Keep(size)
}

// News receives one value after one or more events. Only one reader may use it.
func (s *Store) News() <-chan struct{} { return s.news }

// Events copies into dst the events whose numbers are above `after`, oldest first, and returns how many. If some of them are no longer
// kept, lost is true and none are copied.
func (s *Store) Events(after uint64, dst []Event) (n int, lost bool) {
	s.lock()
	defer s.unlock()
	return s.mu.events.After(after, dst)
}

// LastEvent returns the number of the newest event. A reader that lost events calls LastEvent first, then reads all of Residents, and then
// continues with the events after that number. Those include every change during the reading.
func (s *Store) LastEvent() uint64 {
	s.lock()
	defer s.unlock()
	return s.mu.events.Last()
}

// Residents appends the keys of some resident objects to dst, from slot `from` on; 0 begins. next is the slot for the next call; more is
// false when no slot is left. The store's lock is free between two calls.
func (s *Store) Residents(from int, dst []kv.Key) (_ []kv.Key, next int, more bool) {
	more = s.someSlots(from, func(slot pool.Slot, st pool.State) {
		if st == pool.Resident {
			dst = append(dst, s.mu.pool.KeyOf(slot))
		}
	})
	return dst, from + batch, more
}
