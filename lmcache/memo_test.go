// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

func randomTokens(rnd *rand.Rand, n int) []uint32 {
	limits := []uint32{100, 200, 60000, 151936, 1 << 31, 0xffffffff}
	out := make([]uint32, n)
	for i := range out {
		out[i] = rnd.Uint32N(limits[rnd.IntN(len(limits))])
	}
	return out
}

func encodeKey(tokens []uint32) []byte {
	return (&lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens, RequestID: "r"}).Append(nil)
}

// Whatever the memo remembers, forgets or shares between prompts, the hashes are
// those of the tokens.
func TestMemoAgainstChunkHashes(t *testing.T) {
	for _, memory := range []int64{0, 200 << 10, 8 << 20} { // nothing, a few chunks, all
		t.Run(fmt.Sprint(memory), func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			rnd := rand.New(rand.NewPCG(seed, 0))
			const chunk = 16
			memo := lmcache.NewMemo(chunk, memory)
			var prompts [][]uint32
			var view lmcache.KeyView
			for range 2000 {
				var p []uint32
				if len(prompts) > 0 && rnd.IntN(4) > 0 { // continue or fork an old one
					old := prompts[rnd.IntN(len(prompts))]
					p = slices.Concat(old[:rnd.IntN(len(old)+1)], randomTokens(rnd, rnd.IntN(60)))
				} else {
					p = randomTokens(rnd, rnd.IntN(200))
				}
				prompts = append(prompts, p)
				if err := memo.DecodeKey(encodeKey(p), &view); err != nil {
					t.Fatal(err)
				}
				for len(view.Hashes) < view.Chunks { // bit by bit, as a lookup asks
					memo.Hash(&view, len(view.Hashes)+1+rnd.IntN(3))
				}
				if want := kv.ChunkHashes(p, chunk); !slices.Equal(view.Hashes, want) || view.NumTokens != len(p) {
					t.Fatalf("%d tokens: %v, want %v", len(p), view.Hashes, want)
				}
			}
		})
	}
}

// The same tokens in wider integers are the same prompt.
func TestMemoWideTokens(t *testing.T) {
	memo := lmcache.NewMemo(4, 1<<20)
	tokens := []uint32{1, 2, 3, 4, 5}
	wide := []byte{0x87}
	field := func(name string) { wide = lmcache.AppendString(wide, name) }
	field("model_name")
	wide = lmcache.AppendString(wide, "m")
	field("world_size")
	wide = lmcache.AppendInt(wide, 1)
	field("worker_id")
	wide = lmcache.AppendNil(wide)
	field("start")
	wide = lmcache.AppendInt(wide, 0)
	field("end")
	wide = lmcache.AppendInt(wide, 4)
	field("request_id")
	wide = lmcache.AppendString(wide, "r")
	field("token_ids")
	wide = append(wide, 0x95)
	for _, v := range tokens {
		wide = append(wide, 0xcf, 0, 0, 0, 0, 0, 0, 0, byte(v))
	}
	var view lmcache.KeyView
	for range 2 {
		if err := memo.DecodeKey(wide, &view); err != nil {
			t.Fatal(err)
		}
		memo.Hash(&view, view.Chunks)
		if want := kv.ChunkHashes(tokens, 4); !slices.Equal(view.Hashes, want) {
			t.Fatalf("%v, want %v", view.Hashes, want)
		}
	}
}

func TestMemoConcurrent(t *testing.T) {
	memo := lmcache.NewMemo(16, 300<<10)
	rnd := rand.New(rand.NewPCG(1, 2))
	prompts := make([][]uint32, 50)
	for i := range prompts {
		prompts[i] = randomTokens(rnd, 300)
		copy(prompts[i], prompts[i/2][:100])
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			var view lmcache.KeyView
			for i := range 400 {
				p := prompts[(i*7+g*13)%len(prompts)]
				if err := memo.DecodeKey(encodeKey(p), &view); err != nil {
					t.Error(err)
					return
				}
				memo.Hash(&view, view.Chunks)
				if !slices.Equal(view.Hashes, kv.ChunkHashes(p, 16)) {
					t.Error("wrong hashes")
					return
				}
			}
		})
	}
	wg.Wait()
}

func FuzzDecodeKey(f *testing.F) {
	f.Add(encodeKey([]uint32{1, 200, 70000, 5, 6, 7, 8, 9}))
	f.Add(encodeKey(nil))
	f.Add((&lmcache.Key{Model: "m", WorldSize: 1, Tokens: []uint32{1, 200, 70000, 5, 6, 7, 8, 9}, End: 8, RequestID: "r", Readers: 1, Packed: true}).Append(nil))
	f.Add([]byte{0x81, 0xab, 't', 'o', 'k', 'e', 'n', '_', 'b', 'y', 't', 'e', 's', 0xc6, 0xff, 0xff, 0xff, 0xfc, 1, 2})
	f.Add([]byte{0x81, 0xa9, 't', 'o', 'k', 'e', 'n', '_', 'i', 'd', 's', 0xdd, 0xff, 0xff, 0xff, 0xff, 1, 2})
	f.Fuzz(func(t *testing.T, b []byte) {
		memo := lmcache.NewMemo(4, 64<<10)
		var one, two lmcache.KeyView
		err1 := memo.DecodeKey(b, &one)
		if err1 == nil {
			memo.Hash(&one, one.Chunks)
		}
		hashes := slices.Clone(one.Hashes)
		err2 := memo.DecodeKey(b, &two) // now from memory
		if (err1 == nil) != (err2 == nil) || err1 == nil && !slices.Equal(hashes, two.Hashes) {
			t.Fatalf("%v, %v; %v, %v", err1, hashes, err2, two.Hashes)
		}
		if len(one.Hashes)*4 > len(b) {
			t.Fatalf("%d hashes out of %d bytes", len(one.Hashes), len(b))
		}
		if err2 == nil && !slices.Equal(kv.ChunkHashes(memo.AppendTokens(nil, &two, 0, len(b)), 4), hashes) {
			t.Fatalf("the tokens have other hashes than %v", hashes)
		}
	})
}

// free_lookup_locks compares no packed tokens with those remembered; a lookup of the same key has all hashes.
func TestFreeLookupLocksSearchesNoTokens(t *testing.T) {
	memo := lmcache.NewMemo(4, 8<<20)
	tokens := randomTokens(rand.New(rand.NewPCG(1, 2)), 40)
	key := (&lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens, End: 40, RequestID: "r", Readers: 1, Packed: true}).Append(nil)
	var view lmcache.KeyView
	if err := memo.DecodeKey(key, &view); err != nil {
		t.Fatal(err)
	}
	memo.Hash(&view, view.Chunks)
	var d lmcache.Decoder
	for _, op := range []lmcache.Op{lmcache.OpLookup, lmcache.OpFreeLookupLocks, lmcache.OpLookup} {
		r, err := d.Decode(memo, lmcache.AllGenerations, op, [][]byte{key, {1}})
		if err != nil {
			t.Fatal(err)
		}
		switch r := r.(type) {
		case *lmcache.LookupRequest:
			if want := kv.ChunkHashes(tokens, 4); !slices.Equal(r.Key.Hashes, want) {
				t.Errorf("a lookup has hashes %v, want %v", r.Key.Hashes, want)
			}
		case *lmcache.FreeLookupLocksRequest:
			if len(r.Key.Hashes) != 0 || r.From != 0 || r.To != 10 {
				t.Errorf("free_lookup_locks has %d hashes, chunks %d to %d", len(r.Key.Hashes), r.From, r.To)
			}
		}
	}
}

// A request of any operation decodes or is refused; nothing panics.
func FuzzRequest(f *testing.F) {
	f.Add(uint8(14), (&lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, Layers: 1, Hidden: 1, DType: "float16"}).Append(nil), []byte{1}, []byte{0xc4, 0})
	f.Add(uint8(16), encodeKey([]uint32{1, 2, 3}), []byte{1}, []byte{0xc4, 0})
	f.Add(uint8(23), []byte{1}, []byte{0xa1, 'm'}, []byte{0x91, 0x81, 0xa6, 'r', 'e', 'q', '_', 'i', 'd', 0xa1, 'x'})
	f.Add(uint8(29), []byte{0x91, 0x80}, []byte{0x80}, []byte{})
	packed := (&lmcache.Key{Model: "m", WorldSize: 1, Tokens: make([]uint32, 8), End: 8, RequestID: "r", Readers: 1, Packed: true}).Append(nil)
	f.Add(uint8(12), packed, []byte{1}, []byte{0x92, 0x92, 0, 8, 0x92, 4, 4})
	f.Add(uint8(16), packed, []byte{1}, []byte{0x92, 0x90, 0x92, 0, 1})
	f.Add(uint8(14), (&lmcache.EngineDriven{
		InstanceID: 7, Model: "m", WorldSize: 1, Layers: 1, Hidden: 1, DType: "float16", HasGroups: true,
		Groups: []lmcache.GroupLayout{{Layers: 1, Hidden: 1, DType: "uint8"}, {Layers: 2, Hidden: 3, DType: "float16", WindowTokens: 1, WindowChunks: 1, Planes: 1}},
	}).Append(nil), []byte{1}, []byte{2})
	f.Add(uint8(lmcache.OpNegotiateChunkSize), []byte{24}, []byte{1}, []byte{2})
	f.Fuzz(func(t *testing.T, op uint8, a, b, c []byte) {
		memo := lmcache.NewMemo(4, 0)
		var d lmcache.Decoder
		decode := func(op lmcache.Op, p ...[]byte) {
			r, err := d.Decode(memo, lmcache.AllGenerations, op, p)
			if err == nil && r.Op() != op {
				t.Fatalf("%v decodes as %v", op, r.Op())
			}
		}
		for n := range 4 {
			decode(lmcache.Op(op), [][]byte{a, b, c}[:n]...)
		}
		decode(lmcache.Op(op), a, b, c, c)
		decode(lmcache.Op(op), a, b, c, c, b)
		decode(lmcache.OpRegisterKVCache, b, a, c, b, c, a, a)
	})
}

// A client survives any reply.
func FuzzReply(f *testing.F) {
	s := lmcache.Slots{Layouts: []kv.Layout{{Layers: 1, Slots: 2, Hidden: 3, DType: "float16"}}, Lengths: []int64{24}, Offsets: []int64{0, 4096}, Indices: []int{0, 1}}
	f.Add(lmcache.AppendPrepareStore(nil, &s))
	f.Add(lmcache.AppendPrepareRetrieve(nil, &s))
	f.Add(lmcache.AppendPrepareRetrieve(nil, nil))
	f.Add(lmcache.Pool{ShmName: "x", Bytes: 1}.Append(nil))
	g := lmcache.Slots{Layouts: []kv.Layout{s.Layouts[0], s.Layouts[0]}, Lengths: []int64{24, 24}, Offsets: s.Offsets, Indices: s.Indices, Groups: []int{0, 1}}
	f.Add(lmcache.AppendPrepareStore(nil, &g))
	f.Add(lmcache.AppendPrepareRetrieve(nil, &g))
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := lmcache.DecodePrepareStore(b); err == nil && len(p.Slots) != len(p.Indices) {
			t.Fatalf("%d slots, %d indices", len(p.Slots), len(p.Indices))
		}
		_, _ = lmcache.DecodePrepareRetrieve(b)
		_, _ = lmcache.DecodePool(b)
		_, _ = lmcache.DecodeInt(b)
		_, _ = lmcache.DecodeBool(b)
		_, _ = lmcache.ParseOp(b)
		_, _ = lmcache.DecodeCopied(b)
		_, _ = lmcache.DecodeKVEventBatch(b)
	})
}

// A 32k-token prompt: known, unknown, and known but for the last 512 tokens.
func BenchmarkDecodeKey(b *testing.B) {
	rnd := rand.New(rand.NewPCG(3, 4))
	tokens := make([]uint32, 32768)
	for i := range tokens {
		tokens[i] = rnd.Uint32N(1 << 17)
	}
	frame := encodeKey(tokens)
	run := func(name string, memory int64, hashed int) {
		b.Run(name, func(b *testing.B) {
			memo := lmcache.NewMemo(256, memory)
			var view lmcache.KeyView
			b.SetBytes(int64(len(frame)))
			b.ReportAllocs()
			for b.Loop() {
				if err := memo.DecodeKey(frame, &view); err != nil {
					b.Fatal(err)
				}
				memo.Hash(&view, hashed)
			}
		})
	}
	run("known", 16<<20, 128)
	run("unknown, hashed", 0, 128)
	run("unknown, not hashed", 0, 0)
}

// The same prompt as 0.5.7 sends it.
func BenchmarkDecodePackedKey(b *testing.B) {
	rnd := rand.New(rand.NewPCG(3, 4))
	tokens := make([]uint32, 32768)
	for i := range tokens {
		tokens[i] = rnd.Uint32N(1 << 17)
	}
	frame := (&lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens, End: len(tokens), RequestID: "r", Readers: 1, Packed: true}).Append(nil)
	for name, memory := range map[string]int64{"known": 16 << 20, "unknown": 0} {
		b.Run(name, func(b *testing.B) {
			memo := lmcache.NewMemo(256, memory)
			var view lmcache.KeyView
			b.SetBytes(int64(len(frame)))
			b.ReportAllocs()
			for b.Loop() {
				if err := memo.DecodeKey(frame, &view); err != nil {
					b.Fatal(err)
				}
				memo.Hash(&view, 128)
			}
		})
	}
}
