// SPDX-License-Identifier: Apache-2.0

package fair_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/fair"
)

// TestShareIsHalfOfTheRest takes as much as it may as one user, and then as two others.
func TestShareIsHalfOfTheRest(t *testing.T) {
	var b fair.Shares
	fill := func(who string) {
		for b.MayCount(who, 16) {
			b.Add(who, fair.Amount{Count: 1})
		}
	}
	fill("one")
	fill("two")
	fill("three")
	if one, two, three := b.Of("one").Count, b.Of("two").Count, b.Of("three").Count; one != 8 || two != 4 || three != 2 {
		t.Errorf("of 16 they have %d, %d, %d", one, two, three)
	}
	for _, who := range []string{"one", "two", "three"} {
		b.Add(who, fair.Amount{Count: -b.Of(who).Count})
	}
	if !b.Empty() {
		t.Errorf("left in the books: %+v", b)
	}
}

// TestOwnerWithoutAnyGetsTheLastPlace shows both sides of the limit.
func TestOwnerWithoutAnyGetsTheLastPlace(t *testing.T) {
	var b fair.Shares
	b.Add("one", fair.Amount{Count: 3})
	if b.MayCount("one", 4) || !b.MayCount("two", 4) {
		t.Error("the last one is for who has none")
	}
	b.Add("two", fair.Amount{Count: 1})
	if b.MayCount("three", 4) {
		t.Error("the limit is passed")
	}
}

// TestSizesAreDividedAsNumbersAre shows that what the others have counts.
func TestSizesAreDividedAsNumbersAre(t *testing.T) {
	var b fair.Shares
	b.Add("one", fair.Amount{Count: 1, Size: 50})
	for size, want := range map[int64]bool{25: true, 26: false} {
		if got := b.MaySize("two", size, 100); got != want {
			t.Errorf("%d of 100 besides 50: %v", size, got)
		}
	}
	if b.MaySize("one", 1, 100) {
		t.Error("one has its half already")
	}
	if all := b.All(); all != (fair.Amount{Count: 1, Size: 50}) {
		t.Errorf("all have %+v", all)
	}
}

// TestOneThingAtATime shows who may have a thing that is larger than a share.
func TestOneThingAtATime(t *testing.T) {
	var b fair.Shares
	limit := fair.Amount{Count: 8, Size: 100}
	want := func(what, who string, size int64, may bool) {
		t.Helper()
		if got := b.May(who, size, limit); got != may {
			t.Errorf("%s: %s may have %d more: %v", what, who, size, got)
		}
	}
	want("nobody has any", "one", 1000, true)
	b.Add("one", fair.Amount{Count: 1, Size: 30})
	want("within its share", "one", 20, true)
	want("beyond it", "one", 21, false)
	want("as much as there is room for", "two", 70, true)
	want("more than there is room for", "two", 71, false)
	b.Add("two", fair.Amount{Count: 6, Size: 60})
	want("the last one", "three", 10, true)
	b.Add("three", fair.Amount{Count: 1, Size: 1})
	want("no more of them", "four", 1, false)
}
