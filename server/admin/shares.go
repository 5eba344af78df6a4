// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"slices"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/usage"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Share is what one model and tenant asked for and found since the start.
type Share struct {
	Model       string `json:"model_name"`
	Salt        string `json:"cache_salt"`
	Lookups     uint64 `json:"lookups"`
	AskedTokens uint64 `json:"asked_tokens"`
	HitTokens   uint64 `json:"hit_tokens"`
	BelowTokens uint64 `json:"below_tokens"` // of the hit tokens, those from tiers below the pool
}

// sharesOf returns shares, `most` at most, those that asked for most tokens first.
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

// PoolOwner is how much of the pool one model and tenant have.
type PoolOwner struct {
	Model  string `json:"model_name"` // empty with Known false
	Salt   string `json:"cache_salt"`
	Known  bool   `json:"known"` // false: no request has named them since the start, or it is the sum of the others
	Bytes  int64  `json:"bytes"`
	Chunks int    `json:"chunks"`
}

// maxPoolOwners bounds the owners of an event. The owners that have least share the last entry.
const maxPoolOwners = 12

// ownersOf returns the owners of a map, those that have most first, and makes the elements of m.Owner indices into the result.
func ownersOf(s *server.Server, m *pool.Map) []PoolOwner {
	type name struct {
		model, salt string
		known       bool
	}
	var all []PoolOwner
	at := make(map[name]int)
	place := make([]name, len(m.Owners))
	for i, o := range m.Owners {
		var of name
		if n, ok := s.NameOf(o.Namespace); ok && o.Namespace != (kv.Namespace{}) {
			of = name{n.Model, n.Salt, true}
		}
		k, ok := at[of]
		if !ok {
			k = len(all)
			at[of] = k
			all = append(all, PoolOwner{Model: of.model, Salt: of.salt, Known: of.known})
		}
		all[k].Bytes += o.Bytes
		all[k].Chunks += o.Chunks
		place[i] = of
	}
	slices.SortStableFunc(all, func(a, b PoolOwner) int { return cmp.Compare(b.Bytes, a.Bytes) })
	if len(all) > maxPoolOwners {
		rest := PoolOwner{}
		for _, o := range all[maxPoolOwners-1:] {
			rest.Bytes += o.Bytes
			rest.Chunks += o.Chunks
		}
		all = append(all[:maxPoolOwners-1:maxPoolOwners-1], rest)
	}
	for k, o := range all {
		at[name{o.Model, o.Salt, o.Known}] = -1 - k // the index in all, as a negative number
	}
	for i, o := range m.Owner {
		if o < 0 {
			continue
		}
		if k := at[place[o]]; k < 0 {
			m.Owner[i] = -1 - k
		} else {
			m.Owner[i] = len(all) - 1
		}
	}
	return append([]PoolOwner{}, all...)
}
