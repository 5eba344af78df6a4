// SPDX-License-Identifier: Apache-2.0

package store

import (
	"runtime"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// flight is the wait of lookups for one object that cannot be served yet: it is being read from the tier, or must be compared with its
// checksum. All lookups that want the object share it. Guarded by Store.mu.
type flight struct {
	slot     pool.Slot
	begun    bool
	pinned   bool        // the slot is resident and pinned for the lookups that wait
	below    bool        // the object comes from the tier, and its slot is staged
	removals uint64      // Store.mu.removals when the read began
	chunk    int         // the object's chunk in the prompts that joined the flight
	peer     string      // the user or address that began the read
	waiting  []*prefetch // lookups that joined the flight and still wait
}

// flights are the flights of one store.
type flights struct {
	of     map[pool.Slot]*flight
	wanted fair.Turns[*prefetch] // lookups that wait for flights that have not begun
}

// joinFlightLocked makes pf wait for the flight of an object. If the object is resident and was not compared yet, the first lookup that
// waits begins the flight. chunk is the position of the object's chunk in the prompt.
func (s *Store) joinFlightLocked(pf *prefetch, slot pool.Slot, chunk int) {
	fl := s.mu.flights.of[slot]
	if fl == nil {
		fl = s.newFlightLocked(slot)
	}
	if len(fl.waiting) == 0 && !fl.below {
		s.keepLocked(slot)
		fl.pinned = true
	}
	fl.chunk, fl.waiting = chunk, append(fl.waiting, pf) // the same number for all: the hash of a chunk covers those before it
	pf.flights = append(pf.flights, fl)
	pf.waiting++
	if fl.begun {
		return
	}
	pf.todo = append(pf.todo, fl)
	if !pf.queued {
		pf.queued = true
		s.mu.flights.wanted.Add(pf.prompt.Owner.Peer, pf)
	}
}

func (s *Store) newFlightLocked(slot pool.Slot) *flight {
	fl := &flight{slot: slot}
	s.mu.flights.of[slot] = fl
	return fl
}

// endFlightLocked ends a flight. With ok the object may be served, and its slot is pinned for each lookup that waits for it.
func (s *Store) endFlightLocked(fl *flight, ok bool) {
	delete(s.mu.flights.of, fl.slot)
	for _, pf := range fl.waiting {
		if ok && !pf.done {
			s.pinForLocked(pf, fl.slot)
		}
		pf.waiting--
		s.landedLocked(pf)
	}
	if fl.pinned {
		s.letGoLocked(fl.slot)
	}
	fl.waiting = nil
}

// leaveFlights removes pf from the flights that have not ended. A flight that has not begun and has no other waiter is left to the
// background work.
func (s *Store) leaveFlights(pf *prefetch) {
	for more := true; more; {
		more = s.leaveSome(pf)
	}
}

func (s *Store) leaveSome(pf *prefetch) (more bool) {
	s.lock()
	defer s.unlock()
	pf.done, pf.todo = true, nil
	n := min(batch, len(pf.flights))
	for _, fl := range pf.flights[:n] {
		i := slices.Index(fl.waiting, pf)
		if i < 0 {
			continue // it has ended
		}
		fl.waiting = slices.Delete(fl.waiting, i, i+1)
		if len(fl.waiting) > 0 {
			continue
		}
		if fl.pinned {
			fl.pinned = false
			s.letGoLocked(fl.slot)
		}
		if !fl.begun {
			delete(s.mu.flights.of, fl.slot)
			s.mu.sums.Return(uint32(fl.slot))
		}
	}
	pf.flights = pf.flights[n:]
	return len(pf.flights) > 0
}

// nextWantedLocked begins a flight that a lookup waits for. Users and addresses take turns, and so do the pending lookups of each. So
// neither a long lookup nor many lookups of one user delay other users.
func (s *Store) nextWantedLocked() (next *flight) {
	s.mu.flights.wanted.Next(func(pf *prefetch) bool {
		for len(pf.todo) > 0 {
			fl := pf.todo[0]
			pf.todo = pf.todo[1:]
			if !fl.begun {
				fl.begun, next = true, fl
				return true
			}
		}
		pf.queued = false
		return false
	})
	return next
}

// readers returns how many goroutines read chunks at once. With two or more processors, one of them is left to the goroutines that answer
// requests.
func readers() int { return max(1, runtime.GOMAXPROCS(0)-1) }
