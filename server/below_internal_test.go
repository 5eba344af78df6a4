// SPDX-License-Identifier: Apache-2.0

package server

import (
	"testing"

	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// A lookup that a tier ended is counted for that one; where its name is not known, for the
// only tier there is, or for any.
func TestMissesNameTheTier(t *testing.T) {
	one, two := tier.Counted(tier.NewMemory(1), "disk"), tier.Counted(tier.NewMemory(1), "fs")
	f := func(tiers []*tier.Counting, said, counted string) {
		t.Helper()
		s := &Server{opts: Options{Tiers: tiers}}
		s.n.tierMisses.Add(tiers, said, miss.BelowFailed)
		for _, name := range s.TierNames() {
			want := uint64(0)
			if name == counted {
				want = 1
			}
			ends := s.TierEnds(name).Lookups
			if ends[miss.BelowFailed.Label()] != want || ends[miss.BelowSlow.Label()] != 0 || len(ends) != 4 {
				t.Errorf("%q said: tier %s has %v, want %d", said, name, ends, want)
			}
		}
	}
	f([]*tier.Counting{one, two}, "fs", "fs")
	f([]*tier.Counting{one, two}, "", "any")
	f([]*tier.Counting{one, two}, "another", "any")
	f([]*tier.Counting{one}, "", "disk")
	f(nil, "fs", "none")
	st := Status{}
	if do := st.adviceFor("tier fs: " + miss.BelowSlow.String()); do != st.adviceFor(miss.BelowSlow.String()) || do == "see docs/operate/server.md" {
		t.Errorf("advice: %s", do)
	}
}
