// SPDX-License-Identifier: Apache-2.0

package tiertest_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestAdmissionValidate(t *testing.T) { testkit.CheckNumbers[tier.Admission](t) }

// An object is kept once it was offered often enough, the first time long enough ago. Offers of other
// objects do not count.
func TestAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := tier.Admitted(memory(), tier.Admission{MinHits: 2, MinAge: time.Minute})
		offer := func(seed int) bool {
			b, m := tiertest.Object(seed, 100)
			err := a.Write(t.Context(), tiertest.Key(seed), m, b)
			if err != nil && !errors.Is(err, tier.ErrNotKept) {
				t.Error(err)
			}
			return err == nil
		}
		for range 3 {
			if offer(1) {
				t.Error("it is kept before its time")
			}
		}
		time.Sleep(time.Minute)
		for range 2 {
			if offer(2) {
				t.Error("it is kept before it was offered often enough")
			}
		}
		if !offer(1) {
			t.Error("it is not kept a minute after the first offer")
		}
		if offer(2) {
			t.Error("the other one is younger")
		}
		if got := has(t, a, 1, 2); len(got) != 1 || got[0] != 1 {
			t.Errorf("kept: %v", got)
		}
	})
}

// The number of remembered objects is bounded: an object counts as new again after many offers of others.
func TestAdmissionForgets(t *testing.T) {
	a := tier.Admitted(memory(), tier.Admission{MinHits: 1, Remember: 100})
	b, m := tiertest.Object(1, 10)
	offer := func(seed int) bool { return a.Write(t.Context(), tiertest.Key(seed), m, b) == nil }
	for seed := range 1000 {
		if offer(seed) {
			t.Fatalf("%d is kept at once", seed)
		}
	}
	kept := 0
	for seed := range 1000 {
		if offer(999 - seed) {
			kept++
		}
	}
	if kept < 50 || kept > 200 {
		t.Errorf("%d of 1,000 were remembered", kept)
	}
}
