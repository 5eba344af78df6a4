// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"sync"

	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// TierMisses counts the lookups whose hit ended because of a tier. The zero TierMisses is empty; methods are safe for concurrent use.
type TierMisses struct {
	mu sync.Mutex
	of map[tierMiss]uint64
}

type tierMiss struct {
	tier string
	why  miss.Reason
}

// AnyTier is the name for a tier that is not known.
const AnyTier = "any"

// Add counts a lookup whose hit ended because of a tier. If no tier has the name, the lookup counts for the only tier, or for AnyTier if
// there are several.
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

// Counts returns the number of lookups for each reason of one tier, 0 included. call returns the name of a reason.
func (m *TierMisses) Counts(name string, call func(miss.Reason) string) map[string]uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make(map[string]uint64)
	for _, why := range []miss.Reason{miss.BelowSlow, miss.BelowFailed, miss.BelowCorrupt, miss.BelowSlower} {
		out[call(why)] = m.of[tierMiss{name, why}]
	}
	return out
}

// TierEnds has the lookups whose hits ended because of one tier, for metrics.
type TierEnds struct {
	Lookups map[string]uint64 `counter:"kvasir_tier_ended_lookups_total" label:"reason" help:"Lookups whose next chunk this tier could have had, by why it did not give it; tier any where that is not known."`
}

// Stats returns the figures of one tier.
func (m *TierMisses) Stats(name string) TierEnds { return TierEnds{m.Counts(name, miss.Reason.Label)} }
