// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"slices"

	"github.com/kvasir-kv/kvasir/server/usage"
)

// Share is what one model and tenant asked for and found since the start.
type Share struct {
	Model       string `json:"model_name"`
	Salt        string `json:"cache_salt"`
	Lookups     uint64 `json:"lookups"`
	AskedTokens uint64 `json:"asked_tokens"`
	HitTokens   uint64 `json:"hit_tokens"`
	BelowTokens uint64 `json:"below_tokens"` // of the hits, those that came from tiers below the pool
}

// sharesOf lists at most most shares, those that asked for most first.
func sharesOf(st usage.Stats, most int) []Share {
	out := []Share{}
	for of, n := range st.Lookups {
		if n > 0 {
			out = append(out, Share{of[0], of[1], n, st.Asked[of], st.Hit[of], st.HitL2[of]})
		}
	}
	slices.SortFunc(out, func(a, b Share) int {
		return cmp.Or(cmp.Compare(b.AskedTokens, a.AskedTokens), cmp.Compare(a.Model, b.Model), cmp.Compare(a.Salt, b.Salt))
	})
	return out[:min(len(out), most)]
}
