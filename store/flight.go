// SPDX-License-Identifier: Apache-2.0

package store

import (
	"runtime"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// flight is an object on its way to being served: one for each object, whoever wants
// it. Guarded by Store.mu.
type flight struct {
	slot     pool.Slot
	begun    bool
	pinned   bool        // resident, and pinned for its waiters
	below    bool        // it comes from the tier; the slot is staged
	removals uint64      // from the tier, when the read began
	chunk    int         // of the prompts that joined it
	peer     string      // the user or address that began the read
	waiting  []*prefetch // that joined it and still wait
}

// flights are those of one store.
type flights struct {
	of     map[pool.Slot]*flight
	wanted fair.Turns[*prefetch] // with flights that have not begun
}

// joinFlightLocked makes pf wait for the flight of an object. If the object is resident and was not
// compared yet, the first lookup that waits makes the flight. chunk is the object's place in the
// prompt.
func (s *Store) joinFlightLocked(pf *prefetch, slot pool.Slot, chunk int) {
	fl := s.mu.flights.of[slot]
	if fl == nil {
		fl = s.newFlightLocked(slot)
	}
	if len(fl.waiting) == 0 && !fl.below {
		s.keepLocked(slot)
		fl.pinned = true
	}
	fl.chunk, fl.waiting = chunk, append(fl.waiting, pf) // the same chunk for all: its name covers those before it
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

// endFlightLocked ends a flight. It pins the slot for each lookup that waits for it, if the slot
// may be served.
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

// leaveFlights ends pf's interest in what is still on its way. A flight that has not
// begun and has no other waiter is left to the background.
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
			continue // it has landed
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

// nextWantedLocked begins a flight that a lookup waits for. Users and addresses take turns, and
// so do the pending lookups of each, so that neither a long lookup nor many of them delay
// other users.
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

// readers is how many goroutines read chunks at once: where there are two processors or more, one
// is left to the goroutines that answer requests.
func readers() int { return max(1, runtime.GOMAXPROCS(0)-1) }
