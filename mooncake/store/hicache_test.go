// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/store"
)

// Hashes of pages and names of objects are those of SGLang 0.5.23.
func TestHiCacheNames(t *testing.T) {
	var v struct {
		Tokens       []uint32
		Page         int
		Hashes       []string
		HashesSeeded []string `json:"hashes_seeded"`
		Big          struct {
			Tokens []uint32
			Hash   []string
		} `json:"big_token"`
		Examples struct{ Keys []string } `json:"key_examples"`
	}
	testkit.ReadVector(t, "lmcache-sglang/hicache.json", &v)
	lora, tenant := "lora-a", "tenant"
	if got := store.HiCacheHashes(v.Tokens, v.Page, nil, nil); !slices.Equal(got, v.Hashes) || len(got) != 2 {
		t.Errorf("%v, want %v", got, v.Hashes)
	}
	if got := store.HiCacheHashes(v.Tokens, v.Page, &lora, &tenant); !slices.Equal(got, v.HashesSeeded) {
		t.Errorf("%v, want %v", got, v.HashesSeeded)
	}
	if got := store.HiCacheHashes(v.Big.Tokens, v.Page, nil, nil); !slices.Equal(got, v.Big.Hash) {
		t.Errorf("%v, want %v", got, v.Big.Hash)
	}
	if got := store.HiCacheHashes(v.Tokens, 0, nil, nil); got != nil {
		t.Errorf("pages of no tokens: %v", got)
	}
	for i, name := range v.Examples.Keys {
		k, ok := store.ParseHiCacheKey(name)
		if want := (store.HiCacheKey{Model: "tiny", Hash: strings.Split(name, "_")[1], TP: 0, PP: -1, Part: []string{"k", "v"}[i]}); !ok || k != want || k.String() != name {
			t.Errorf("%q is %+v, %v", name, k, ok)
		}
	}
	hash := v.Hashes[0]
	for name, want := range map[string]store.HiCacheKey{
		"a_b-c_" + hash + "_3_1_v":            {Model: "a_b-c", Hash: hash, TP: 3, PP: 1, Part: "v"},
		"m_" + hash + "__k":                   {Model: "m", Hash: hash, TP: -1, PP: -1, Part: "k"},
		"m_" + hash + "_dcp1_cp0_k":           {Model: "m", Hash: hash, TP: -1, PP: -1, Shard: "dcp1_cp0", Part: "k"},
		"m_" + hash + "_dcp1_cp0_2_indexer":   {Model: "m", Hash: hash, TP: -1, PP: 2, Shard: "dcp1_cp0", Pool: "indexer"},
		"m_" + hash + "__indexer":             {Model: "m", Hash: hash, TP: -1, PP: -1, Pool: "indexer"},
		"m_" + hash + "__deepseek_v4_c4_rope": {Model: "m", Hash: hash, TP: -1, PP: -1, Pool: "deepseek_v4_c4_rope"},
		"m_" + hash + "_2_swa_v":              {Model: "m", Hash: hash, TP: 2, PP: -1, Pool: "swa", Part: "v"},
		"m_" + hash + "_2_1_draft_swa_k":      {Model: "m", Hash: hash, TP: 2, PP: 1, Pool: "draft_swa", Part: "k"},
		"m_" + hash + "_0_temporal":           {Model: "m", Hash: hash, TP: 0, PP: -1, Part: "temporal"},
		"m_" + hash + "_0_1_conv_3":           {Model: "m", Hash: hash, TP: 0, PP: 1, Part: "conv_3"},
		hash + "_" + hash + "_0_k":            {Model: hash, Hash: hash, TP: 0, PP: -1, Part: "k"},
		"m_" + hash + "_" + hash + "_10_0_k":  {Model: "m_" + hash, Hash: hash, TP: 10, PP: 0, Part: "k"},
	} {
		if k, ok := store.ParseHiCacheKey(name); !ok || k != want || k.String() != name {
			t.Errorf("%q is %+v, %v, want %+v", name, k, ok, want)
		}
	}
	for _, name := range []string{
		"", "_", "m_" + hash, "m_" + hash + "_", "m_" + hash + "_0", "m_" + hash + "_0_x", "m_" + hash + "_k", "_" + hash + "_0_k", "m_" + hash + "_0_0_0_k", "m_" + hash + "_00_k",
		"m_" + hash + "_-1_k", "m_" + hash[1:] + "_0_k", "m_" + hash + "_70000_k", "sglang_mooncake_store_warmup_key0", "org@tp_rank:0@" + hash,
	} {
		if k, ok := store.ParseHiCacheKey(name); ok {
			t.Errorf("%q is %+v", name, k)
		}
	}
	if got := store.HiCacheModel("blue", "org/m"); got != "blue_org-m" || store.HiCacheModel("", "m") != "m" {
		t.Error(got)
	}
}

func FuzzParseHiCacheKey(f *testing.F) {
	hash := strings.Repeat("ab", 32)
	f.Add("m_" + hash + "_0_k")
	f.Add("t_m_" + hash + "_1_2_v")
	f.Add("m_" + hash + "__k")
	f.Fuzz(func(t *testing.T, name string) {
		if k, ok := store.ParseHiCacheKey(name); ok && k.String() != name {
			t.Errorf("%q is read as %q", name, k)
		}
	})
}
