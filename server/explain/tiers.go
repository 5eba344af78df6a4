// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"sync"

	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// TierMisses count the lookups that a tier ended. The zero TierMisses is empty; methods are safe for
// concurrent use.
type TierMisses struct {
	mu sync.Mutex
	of map[tierMiss]uint64
}

type tierMiss struct {
	tier string
	why  miss.Reason
}

// AnyTier stands for a tier that did not say its name.
const AnyTier = "any"

// Add counts a lookup that a tier ended. A name that no tier has counts for AnyTier, or for the
// only tier.
func (m *TierMisses) Add(tiers []*tier.Counting, name string, why miss.Reason) {
	if len(tiers) == 0 {
		return
	}
	if !slices.ContainsFunc(tiers, func(t *tier.Counting) bool { return t.Name() == name }) {
		name = AnyTier
	}
	if len(tiers) == 1 {
		name = tiers[0].Name()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.of == nil {
		m.of = make(map[tierMiss]uint64)
	}
	m.of[tierMiss{name, why}]++
}

// Counts returns the number for each reason of one tier, also those that did not occur.
// call names the reasons.
func (m *TierMisses) Counts(name string, call func(miss.Reason) string) map[string]uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make(map[string]uint64)
	for _, why := range []miss.Reason{miss.BelowSlow, miss.BelowFailed, miss.BelowCorrupt, miss.BelowSlower} {
		out[call(why)] = m.of[tierMiss{name, why}]
	}
	return out
}

// TierEnds are the lookups that a tier ended, for metrics.
type TierEnds struct {
	Lookups map[string]uint64 `counter:"kvasir_tier_ended_lookups_total" label:"reason" help:"Lookups whose next chunk this tier could have had, by why it did not give it; tier any where that is not known."`
}

// Stats returns the lookups that one tier ended.
func (m *TierMisses) Stats(name string) TierEnds { return TierEnds{m.Counts(name, miss.Reason.Label)} }
