// SPDX-License-Identifier: Apache-2.0

package store

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/store/pool"
)

// Random ends against a map: next is a slot that is due, the earliest, and none while nothing is.
func TestLivesAgainstMap(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		var l slotEnds
		type want struct{ end, due time.Duration }
		of := map[pool.Slot]want{}
		for range 3000 {
			slot := pool.Slot(r.IntN(200))
			at := l.now + time.Duration(r.IntN(100))
			w, has := of[slot]
			if l.limited(slot) != has {
				t.Fatalf("seed %d: slot %d is limited: %v", seed, slot, !has)
			}
			switch r.IntN(4) {
			case 0:
				l.remove(slot)
				delete(of, slot)
			case 1:
				l.now += time.Duration(r.IntN(3))
			case 2:
				if !has {
					l.begin(slot, at)
					of[slot] = want{at, at}
				} else if l.extend(slot, at); at > w.end {
					of[slot] = want{at, at}
				}
			case 3:
				first, ok := l.next()
				for _, o := range of {
					if ok && o.due < of[first].due || !ok && o.due <= l.now {
						t.Fatalf("seed %d: next is %d, %v; another is due at %v", seed, first, ok, o.due)
					}
				}
				if ok && of[first].due > l.now {
					t.Fatalf("seed %d: %d is not due", seed, first)
				}
				if ok {
					l.postpone(first, l.now+5)
					of[first] = want{of[first].end, l.now + 5}
				}
			}
			if w, has := of[slot]; l.ended(slot) != (has && w.end <= l.now) || l.any() != (len(of) > 0) {
				t.Fatalf("seed %d: slot %d has ended: %v", seed, slot, l.ended(slot))
			}
		}
	}
}
