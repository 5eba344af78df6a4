// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
)

func spaceName(i int) (ns kv.Namespace) {
	binary.BigEndian.PutUint64(ns[:], uint64(i)+1)
	return ns
}

// At the limit a new name takes the place of the one that has no slot and was not named for the longest. No other is
// looked at: here all others are not even there.
func TestANewNameLooksAtOneOther(t *testing.T) {
	var s owners[*account]
	a := &account{}
	for i := range 3 {
		s.name(spaceName(i), a)
	}
	s.name(spaceName(0), a) // again
	for i := 3; len(s.of) < maxOwners; i++ {
		s.of[spaceName(i)] = nil // who looks at it panics
	}
	for i, gone := range []int{1, 2, 0} {
		if !s.name(spaceName(maxOwners+i), a) {
			t.Fatal("a new name is no news")
		}
		if _, there := s.of[spaceName(gone)]; there || len(s.of) != maxOwners {
			t.Errorf("after %d new names %d is still there, of %d", i+1, gone, len(s.of))
		}
	}
}

// Names come, get slots, lose them and change hands, as a plain count of slots says.
func TestSpacesAgainstACount(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	var s owners[*account]
	accounts := []*account{{}, {}, {}}
	slots := map[*owner[*account]]int{} // those with slots, also of forgotten ones
	for step := range 20000 {
		switch ns, what := spaceName(random.IntN(64)), random.IntN(40); {
		case what == 0:
			s.forgetAll(accounts[random.IntN(len(accounts))])
		case what < 13:
			if of := s.of[ns]; of != nil {
				s.enter(of)
				slots[of]++
			}
		case what < 25:
			for of := range slots { // any
				s.leave(of)
				if slots[of]--; slots[of] == 0 {
					delete(slots, of)
				}
				break
			}
		default:
			s.name(ns, accounts[random.IntN(len(accounts))])
		}
		empty := 0
		for ns, of := range s.of {
			if of.name != ns || of.forgotten || of.slots != slots[of] {
				t.Fatalf("step %d: %+v, %d slots", step, of, slots[of])
			}
			if of.slots == 0 {
				empty++
			}
		}
		n := 0
		for of := s.empty.next; s.anyEmpty() && of != &s.empty; of = of.next {
			if of.slots > 0 || s.of[of.name] != of || of.next.before != of {
				t.Fatalf("step %d: %+v is in the ring", step, of)
			}
			n++
		}
		if n != empty {
			t.Fatalf("step %d: %d in the ring, %d without a slot", step, n, empty)
		}
	}
}
