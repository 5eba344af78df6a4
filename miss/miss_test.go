package miss_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/miss"
)

// TestTheOldestIsForgottenFirst drops three objects, one of them twice, into a memory of
// two.
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
	if a, b, c := m.Why(&one).Why, m.Why(&two).Why, m.Why(&three).Why; a != miss.NeverStored || b != miss.Cleared || c != miss.Corrupt {
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

// TestTheTierIsToBlameForWhatThePoolLacksOnly keeps the reasons that a tier cannot mend.
func TestTheTierIsToBlameForWhatThePoolLacksOnly(t *testing.T) {
	if got := miss.Evicted.Because(miss.BelowSlow); got != miss.BelowSlow {
		t.Errorf("evicted, and the tier is slow: %v", got)
	}
	if got := miss.BeingStored.Because(miss.BelowSlow); got != miss.BeingStored {
		t.Errorf("being stored, whatever the tier has: %v", got)
	}
}
