// SPDX-License-Identifier: Apache-2.0

package kv_test

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
)

func TestTokenHashes(t *testing.T) {
	var file struct {
		Meta struct {
			Seed string `json:"seed_hash_hex"`
		}
		Cases []struct {
			Name      string
			ChunkSize int      `json:"chunk_size"`
			Tokens    []uint32 `json:"token_ids"`
			Start     int
			End       *int
			Want      []string `json:"chunk_hashes_hex"`
		}
	}
	testkit.ReadVector(t, "lmcache-mp/token_hashes.json", &file)
	if got := kv.Seed.String(); got != file.Meta.Seed {
		t.Errorf("Seed = %s, want %s", got, file.Meta.Seed)
	}
	for _, c := range file.Cases {
		end := len(c.Tokens)
		if c.End != nil {
			end = min(*c.End, end)
		}
		got := kv.ChunkHashes(c.Tokens[:end], c.ChunkSize)
		got = got[min(c.Start/c.ChunkSize, len(got)):]
		if len(got) != len(c.Want) {
			t.Errorf("%s: %d hashes, want %d", c.Name, len(got), len(c.Want))
			continue
		}
		for i, w := range c.Want {
			if got[i].String() != w {
				t.Errorf("%s: hash %d = %s, want %s", c.Name, i, got[i], w)
			}
		}
	}
	t.Logf("%d cases", len(file.Cases))
}

func TestRanks(t *testing.T) {
	var file struct {
		Ranks []struct {
			World int     `json:"world_size"`
			ID    int     `json:"worker_id"`
			Rank  kv.Rank `json:"kv_rank"`
		} `json:"kv_ranks"`
		Keys []struct {
			Rank kv.Rank `json:"kv_rank"`
		} `json:"keys"`
	}
	testkit.ReadVector(t, "lmcache-mp/object_keys.json", &file)
	if len(file.Ranks)+len(file.Keys) == 0 { // files recorded with other seeds have keys only
		t.Fatal("the file has no case")
	}
	for _, r := range file.Ranks {
		if got, ok := kv.NewRank(r.World, r.ID); !ok || got != r.Rank {
			t.Errorf("NewRank(%d, %d) = %08x, %v, want %08x", r.World, r.ID, got, ok, r.Rank)
		}
	}
	for _, k := range file.Keys { // the two upper bytes of a rank are world size and worker id
		world, id := int(k.Rank>>24), int(k.Rank>>16&0xff)
		if got, ok := kv.NewRank(world, id); !ok || got != k.Rank {
			t.Errorf("NewRank(%d, %d) = %08x, %v, want %08x of a key", world, id, got, ok, k.Rank)
		}
	}
	t.Logf("%d ranks, %d keys", len(file.Ranks), len(file.Keys))
}

func TestNewRankRefuses(t *testing.T) {
	f := func(world, worker int) {
		t.Helper()
		if r, ok := kv.NewRank(world, worker); ok {
			t.Errorf("NewRank(%d, %d) = %08x, want refusal", world, worker, r)
		}
	}
	f(0, 0)
	f(-1, 0)
	f(1, 1)
	f(1, -1)
	f(256, 0)
}

func TestLayoutBytes(t *testing.T) {
	f := func(l kv.Layout, want int64) {
		t.Helper()
		got, err := l.Bytes()
		if want == 0 {
			if !errors.Is(err, kv.ErrLayout) {
				t.Errorf("%+v: error %v, want ErrLayout", l, err)
			}
			return
		}
		if err != nil || got != want {
			t.Errorf("%+v: Bytes = %d, %v, want %d", l, got, err, want)
		}
	}
	f(kv.Layout{Layers: 2, Slots: 32, Hidden: 8, DType: "float16"}, 2048)
	f(kv.Layout{SinglePlane: true, Layers: 2, Slots: 32, Hidden: 8, DType: "float16"}, 1024)
	f(kv.Layout{Layers: 32, Slots: 256, Hidden: 1024, DType: "bfloat16"}, 32<<20)
	f(kv.Layout{Layers: 1, Slots: 1, Hidden: 1, DType: "float8_e4m3fn"}, 2)
	f(kv.Layout{Layers: 0, Slots: 32, Hidden: 8, DType: "float16"}, 0)
	f(kv.Layout{Layers: -2, Slots: -32, Hidden: 8, DType: "float16"}, 0)
	f(kv.Layout{Layers: 2, Slots: 32, Hidden: 8, DType: "float17"}, 0)
	f(kv.Layout{Layers: 1 << 40, Slots: 1 << 40, Hidden: 1 << 40, DType: "uint8"}, 0)
	f(kv.Layout{SinglePlane: true, Layers: 1, Slots: 1, Hidden: 4 << 30, DType: "uint8"}, 4<<30)
	f(kv.Layout{SinglePlane: true, Layers: 1, Slots: 1, Hidden: 4<<30 + 1, DType: "uint8"}, 0)
}

// Whatever changes the meaning of a chunk's bytes changes its namespace.
func TestNamespaceSeparates(t *testing.T) {
	base := kv.Layout{Layers: 2, Slots: 32, Hidden: 8, DType: "float16"}
	seen := map[kv.Namespace]string{}
	add := func(what, model, salt string, l kv.Layout) {
		t.Helper()
		n := kv.NamespaceOf(model, salt, l.Fingerprint())
		if other, ok := seen[n]; ok {
			t.Errorf("%s and %s share namespace %s", what, other, n)
		}
		seen[n] = what
	}
	add("base", "m", "", base)
	add("salt", "m", "s", base)
	add("moved boundary", "ms", "", base)
	for what, change := range map[string]func(*kv.Layout){
		"plane":  func(l *kv.Layout) { l.SinglePlane = true },
		"layers": func(l *kv.Layout) { l.Layers = 4 },
		"slots":  func(l *kv.Layout) { l.Slots = 16 },
		"hidden": func(l *kv.Layout) { l.Hidden = 16 },
		"dtype":  func(l *kv.Layout) { l.DType = "bfloat16" },
	} {
		l := base
		change(&l)
		add(what, "m", "", l)
	}
}

func TestCheckSalt(t *testing.T) {
	f := func(salt string, ok bool) {
		t.Helper()
		if err := kv.CheckSalt(salt); (err == nil) != ok {
			t.Errorf("CheckSalt(%q) = %v", salt, err)
		}
	}
	f("", true)
	f("tenant-1", true)
	f("a@b", false)
	f("a/b", false)
	f("a\\b", false)
	f("a\x00b", false)
	long := make([]byte, kv.MaxSaltLength+1)
	for i := range long {
		long[i] = 'x'
	}
	f(string(long[1:]), true)
	f(string(long), false)
}

// 128 chunks of 256 tokens: the hashing part of a 32k-token lookup miss.
func BenchmarkChunkHashes(b *testing.B) {
	c := kv.NewChain(256)
	for i := range 256 {
		binary.BigEndian.PutUint32(c.Tokens()[4*i:], uint32(i))
	}
	b.SetBytes(128 * 1056)
	b.ReportAllocs()
	for b.Loop() {
		h := kv.Seed
		for range 128 {
			h = c.Next(h)
		}
	}
}
