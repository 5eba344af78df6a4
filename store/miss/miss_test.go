// SPDX-License-Identifier: Apache-2.0

package miss_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// TestTheOldestIsForgottenFirst drops three objects, one of them twice, into a memory of
// two: what went first and came back is not the oldest.
func TestTheOldestIsForgottenFirst(t *testing.T) {
	one, two, three := kv.Key{Chunk: kv.Hash{1}}, kv.Key{Chunk: kv.Hash{2}}, kv.Key{Chunk: kv.Hash{1}, Group: 1}
	m := miss.NewMemory(2)
	m.Add(&one, miss.Gone{Why: miss.Failed})
	m.Add(&two, miss.Gone{Why: miss.Cleared})
	m.Add(&one, miss.Gone{Why: miss.Evicted})
	if a, b, c := m.Why(&one).Why, m.Why(&two).Why, m.Why(&three).Why; a != miss.Evicted || b != miss.Cleared || c != miss.NeverStored {
		t.Errorf("%v, %v, %v", a, b, c)
	}
	m.Add(&three, miss.Gone{Why: miss.Corrupt})
	if a, b, c := m.Why(&one).Why, m.Why(&two).Why, m.Why(&three).Why; a != miss.Evicted || b != miss.NeverStored || c != miss.Corrupt {
		t.Errorf("with a third: %v, %v, %v", a, b, c)
	}
}

// TestEveryReasonHasAWordAndALabelOfItsOwn shows what people and metrics tell apart.
func TestEveryReasonHasAWordAndALabelOfItsOwn(t *testing.T) {
	words, labels := map[string]bool{}, map[string]bool{}
	for i := range miss.NumReasons {
		r := miss.Reason(i)
		if words[r.String()] || labels[r.Label()] || r.Label() == "" {
			t.Errorf("reason %d: %q, %q", i, r, r.Label())
		}
		words[r.String()], labels[r.Label()] = true, true
	}
}

// TestTierMissesExplainOnlyPoolMisses keeps the reasons that a tier cannot mend.
func TestTierMissesExplainOnlyPoolMisses(t *testing.T) {
	gone := miss.Gone{Why: miss.Evicted, By: "uid 1"}
	if got, of := miss.Evicted.Because(miss.BelowSlow, gone); got != miss.BelowSlow || of != (miss.Gone{}) {
		t.Errorf("evicted, and the tier is slow: %v, %+v", got, of)
	}
	if got, of := miss.BeingStored.Because(miss.BelowSlow, gone); got != miss.BeingStored || of != gone {
		t.Errorf("being stored, whatever the tier has: %v, %+v", got, of)
	}
}

// TestRepeatedDropsStayAmongTheLast drops the same object again and again, among others that go once.
func TestRepeatedDropsStayAmongTheLast(t *testing.T) {
	const most = 64
	m := miss.NewMemory(most)
	again := kv.Key{Group: 1}
	for i := range 10 * most {
		m.Add(&kv.Key{Chunk: kv.Hash{byte(i), byte(i >> 8)}}, miss.Gone{Why: miss.Evicted})
		if i%(most/4) != 0 {
			continue
		}
		m.Add(&again, miss.Gone{Why: miss.Cleared})
		for j := range most / 2 {
			m.Add(&kv.Key{Chunk: kv.Hash{byte(j), byte(j >> 8), byte(i), byte(i >> 8), 1}}, miss.Gone{Why: miss.Evicted})
			if got := m.Why(&again).Why; got != miss.Cleared {
				t.Fatalf("%d objects after it went: %v", j+1, got)
			}
		}
	}
}

// When an object went is known on the monotonic clock, so a wall clock that is set in between changes no age.
func TestAgesAreMonotonic(t *testing.T) {
	m := miss.NewMemory(2)
	known, unknown, now := kv.Key{Group: 1}, kv.Key{Group: 2}, time.Now()
	m.Add(&known, miss.Gone{Why: miss.Evicted, At: now})
	m.Add(&unknown, miss.Gone{Why: miss.Evicted})
	got := m.Why(&known).At
	if d := got.Sub(now); d < 0 || d > time.Microsecond || !strings.Contains(got.String(), " m=") {
		t.Errorf("it went at %v, %v after %v", got, d, now)
	}
	if got := m.Why(&unknown).At; !got.IsZero() {
		t.Errorf("a time that is not known is %v", got)
	}
}
