// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// A request may say how long the objects that it stores are served (lmcache.ttl). Such an object has an end from the moment its place is
// taken. A later store of the same object, or of one that continues it, may move the end to a later time or remove it, and never makes it
// earlier; a hit changes nothing. From its end on no lookup finds the object, even while a pin or hold keeps its slot. Such an object is
// never written to the tier below. The pool's index marks it as outdated for a later server, so only this process's monotonic clock counts.

// slotEnds has the ends of slots, guarded by Store.mu. The zero slotEnds has none; then a search costs one comparison.
type slotEnds struct {
	slots container.PagedSlice[life]
	heap  []uint32      // slots with an end, as a heap: the one that is due first at 0
	now   time.Duration // time since Store.began; kept up to date while there are any ends
}

// life says when a slot ends. The zero life has no end.
type life struct {
	end time.Duration // since Store.began
	due time.Duration // when the slot is looked at next: its end, or a later time if a pin or hold kept it then
	at  int           // 1 + its place in the heap
}

// any reports whether any slot has an end.
func (l *slotEnds) any() bool { return len(l.heap) > 0 }

// limited reports whether a slot has an end.
func (l *slotEnds) limited(slot pool.Slot) bool {
	return l.any() && int(slot) < l.slots.Len() && l.slots.At(int(slot)).at > 0
}

// ended reports whether the end of a slot has come.
func (l *slotEnds) ended(slot pool.Slot) bool {
	return l.limited(slot) && l.now >= l.slots.At(int(slot)).end
}

// begin gives an end to a slot that has none.
func (l *slotEnds) begin(slot pool.Slot, end time.Duration) {
	l.slots.Grow(int(slot) + 1)
	l.heap = append(l.heap, uint32(slot))
	*l.slots.At(int(slot)) = life{end: end, due: end, at: len(l.heap)}
	l.up(len(l.heap) - 1)
}

// extend moves the end of a slot that has one to a later time; an earlier `end` changes nothing.
func (l *slotEnds) extend(slot pool.Slot, end time.Duration) {
	if of := l.slots.At(int(slot)); end > of.end {
		l.move(of, end)
		of.end = end
	}
}

// postpone sets a later time for the next look at a slot that is due.
func (l *slotEnds) postpone(slot pool.Slot, due time.Duration) { l.move(l.slots.At(int(slot)), due) }

// move sets the time at which the slot of the entry `of` is due.
func (l *slotEnds) move(of *life, due time.Duration) {
	of.due = due
	l.down(of.at - 1)
	l.up(of.at - 1)
}

// remove removes the end of a slot, if it has one.
func (l *slotEnds) remove(slot pool.Slot) {
	if !l.limited(slot) {
		return
	}
	i, last := l.slots.At(int(slot)).at-1, len(l.heap)-1
	l.swap(i, last)
	l.heap = l.heap[:last]
	if i < last {
		l.down(i)
		l.up(i)
	}
	*l.slots.At(int(slot)) = life{}
}

// next returns the slot that is due first. It reports false if none is due.
func (l *slotEnds) next() (slot pool.Slot, ok bool) {
	if !l.any() || l.dueOf(0) > l.now {
		return 0, false
	}
	return pool.Slot(l.heap[0]), true
}

func (l *slotEnds) dueOf(i int) time.Duration { return l.slots.At(int(l.heap[i])).due }

func (l *slotEnds) swap(i, j int) {
	l.heap[i], l.heap[j] = l.heap[j], l.heap[i]
	l.slots.At(int(l.heap[i])).at, l.slots.At(int(l.heap[j])).at = i+1, j+1
}

func (l *slotEnds) up(i int) {
	for ; i > 0 && l.dueOf(i) < l.dueOf((i-1)/2); i = (i - 1) / 2 {
		l.swap(i, (i-1)/2)
	}
}

func (l *slotEnds) down(i int) {
	for {
		child := 2*i + 1
		if child+1 < len(l.heap) && l.dueOf(child+1) < l.dueOf(child) {
			child++
		}
		if child >= len(l.heap) || l.dueOf(i) <= l.dueOf(child) {
			return
		}
		l.swap(i, child)
		i = child
	}
}

// endOf returns the end, since Store.began, of an object that is stored now with a TTL; 0 for no end.
func (s *Store) endOf(ttl time.Duration) time.Duration {
	if ttl <= 0 {
		return 0
	}
	return time.Since(s.began) + ttl
}

// limitLocked gives an end to a slot whose place was just taken, unless end is 0.
func (s *Store) limitLocked(slot pool.Slot, end time.Duration) {
	if end > 0 {
		s.mu.pool.Expire(slot)
		s.mu.lives.begin(slot, end)
	}
}

// prolongLocked makes the end of a staged or resident slot at least as late as end. With an end of 0 it removes the slot's end. A slot
// without an end stays without one.
func (s *Store) prolongLocked(slot pool.Slot, end time.Duration) {
	switch l := &s.mu.lives; {
	case !l.limited(slot):
	case end > 0:
		l.extend(slot, end)
	default:
		l.remove(slot)
		if s.mu.pool.StateOf(slot) == pool.Resident {
			s.mu.pool.Stamp(slot)
			s.offerNewLocked(slot)
		}
	}
}

// prolongHeads makes the chunks before a transfer's range live as long as those in it, because the chunks in the range are of no use
// without them.
func (st *stage) prolongHeads() {
	columns := max(1, batch/st.name.Shard.Groups.Len())
	for from := 0; from < st.name.From; from += columns {
		if !st.prolongSome(from, min(from+columns, st.name.From)) {
			return
		}
	}
}

func (st *stage) prolongSome(from, to int) (more bool) {
	s := st.store
	s.lock()
	defer s.unlock()
	var k kv.Key
	for c := from; c < to && s.mu.lives.any() && !s.mu.closed; c++ {
		for g := range st.name.Shard.Groups.Len() {
			st.name.Shard.Key(&k, st.name.Shard.Index, g, st.hashes[c])
			if slot, state := s.mu.pool.Find(&k); state != pool.Free && !s.mu.lives.ended(slot) {
				s.prolongLocked(slot, st.ends)
			}
		}
	}
	return s.mu.lives.any() && !s.mu.closed
}

// endLifeLocked drops a slot whose end has come, and ends an operator's pin of it. It reports false for a slot that a session or a worker
// keeps.
func (s *Store) endLifeLocked(slot pool.Slot) bool {
	s.endPinLocked(slot)
	if !s.evictableLocked(slot) {
		return false
	}
	s.mu.n.EndedChunks++
	s.mu.n.EndedBytes += uint64(s.mu.pool.Length(slot))
	s.dropLocked(slot, miss.RequestTTL)
	return true
}

// lookAgain is the time until the next look at a slot that a pin or hold kept beyond its end.
const lookAgain = time.Second

// endLivesLocked drops slots whose end has come, after a look at `most` slots at most. more says that other slots may be due.
func (s *Store) endLivesLocked(most int) (dropped int, more bool) {
	for range most {
		slot, ok := s.mu.lives.next()
		if !ok {
			return dropped, false
		}
		if s.endLifeLocked(slot) {
			dropped++
		} else {
			s.mu.lives.postpone(slot, s.mu.lives.now+lookAgain)
		}
	}
	return dropped, true
}

// endLives drops all slots whose end has come.
func (s *Store) endLives() {
	for s.endSomeLives() {
	}
}

func (s *Store) endSomeLives() (more bool) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return false
	}
	_, more = s.endLivesLocked(dropBatch)
	return more
}
