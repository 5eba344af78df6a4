package store

import (
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
)

// Event says that an object became resident in the pool, or went.
type Event struct {
	Key     kv.Key
	Removed bool
}

// events are the last changes of what is resident, numbered from 1. The store writes them
// under its mutex and waits for nobody: readers ask by number, and one that is slower than
// the ring is told that it lost some. 64 bytes per event.
type events struct {
	ring []Event // a power of two long; nil while nobody watches
	last uint64  // number of the newest
	news bool    // since the mutex was locked
}

func (e *events) add(k kv.Key, removed bool) {
	if e.ring == nil {
		return
	}
	e.last++
	e.ring[e.last&uint64(len(e.ring)-1)] = Event{Key: k, Removed: removed}
	e.news = true
}

// Watch begins to number what becomes resident and what goes, and keeps the last events,
// at least size of them. Later calls change nothing.
func (s *Store) Watch(size int) {
	s.lock()
	defer s.unlock()
	if s.mu.events.ring != nil {
		return
	}
	n := 1
	for n < size {
		n *= 2
	}
	s.mu.events.ring = make([]Event, n)
}

// News gets a value, one for any number of events, after there were some. One reader may use it.
func (s *Store) News() <-chan struct{} { return s.news }

// Events copies into dst the events that follow number after, oldest first. It returns how
// many; with lost there are none, because some of those after that number are not kept any more.
func (s *Store) Events(after uint64, dst []Event) (n int, lost bool) {
	s.lock()
	defer s.unlock()
	e := &s.mu.events
	if kept := uint64(len(e.ring)); e.last > kept && after < e.last-kept {
		return 0, true
	}
	for after < e.last && n < len(dst) {
		after++
		dst[n] = e.ring[after&uint64(len(e.ring)-1)]
		n++
	}
	return n, false
}

// LastEvent returns the number of the newest event. Who lost some asks for it first, then
// for all of Residents, and goes on with the events after that number: then whatever
// changed in between is told as an event, too.
func (s *Store) LastEvent() uint64 {
	s.lock()
	defer s.unlock()
	return s.mu.events.last
}

// Residents appends the keys of some resident objects to dst, from slot from on; 0 begins. more is
// false when no slot is left, else next is where to go on. Others have the lock between two calls.
func (s *Store) Residents(from int, dst []kv.Key) (_ []kv.Key, next int, more bool) {
	s.lock()
	defer s.unlock()
	to := min(from+batch, s.mu.pool.Slots())
	for slot := pool.Slot(from); int(slot) < to; slot++ {
		if s.mu.pool.StateOf(slot) == pool.Resident {
			dst = append(dst, s.mu.pool.KeyOf(slot))
		}
	}
	return dst, to, to < s.mu.pool.Slots()
}
