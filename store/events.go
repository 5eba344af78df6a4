// SPDX-License-Identifier: Apache-2.0

package store

import (
	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Event says that an object became resident in the pool, or went.
type Event struct {
	Key     kv.Key
	Removed bool
}

// events are the last changes of what is resident, numbered. The store writes them
// under its mutex and never waits for a reader. 64 bytes per event.
type events struct {
	container.Ring[Event]
	news bool // since the mutex was locked
}

func (e *events) add(k kv.Key, removed bool) {
	e.news = e.Add(Event{Key: k, Removed: removed}) || e.news
}

// Watch begins to number what becomes resident and what goes, and keeps the last events,
// at least size of them. Later calls change nothing.
func (s *Store) Watch(size int) {
	s.lock()
	defer s.unlock()
	s.mu.events.Keep(size)
}

// News gets a value, one for any number of events, after there were some. One reader may use it.
func (s *Store) News() <-chan struct{} { return s.news }

// Events copies into dst the events that follow number after, oldest first. It returns how
// many; with lost there are none, because some of those after that number are not kept any more.
func (s *Store) Events(after uint64, dst []Event) (n int, lost bool) {
	s.lock()
	defer s.unlock()
	return s.mu.events.After(after, dst)
}

// LastEvent returns the number of the newest event. A reader that lost events
// calls LastEvent first, then reads all of Residents, and continues with the events after that
// number: they include every change made in between.
func (s *Store) LastEvent() uint64 {
	s.lock()
	defer s.unlock()
	return s.mu.events.Last()
}

// Residents appends the keys of some resident objects to dst, from slot from on; 0 begins. more is
// false when no slot is left, else next is where to go on. Others have the lock between two calls.
func (s *Store) Residents(from int, dst []kv.Key) (_ []kv.Key, next int, more bool) {
	more = s.someSlots(from, func(slot pool.Slot, st pool.State) {
		if st == pool.Resident {
			dst = append(dst, s.mu.pool.KeyOf(slot))
		}
	})
	return dst, from + batch, more
}
