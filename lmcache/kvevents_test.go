// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// The recorded batches are read, and written again byte for byte.
func TestRecordedKVEventBatches(t *testing.T) {
	var rec testkit.Recording
	testkit.ReadVector(t, "lmcache-mp/kv_events_stream.json", &rec)
	batches := 0
	for _, step := range rec.Steps {
		for _, f := range step.Frames {
			m := testkit.Frames(f.Hex)
			if f.Direction != "server_to_client" || len(m) != 3 || len(m[1]) == 1 {
				continue
			}
			batches++
			b, err := lmcache.DecodeKVEventBatch(m[2])
			if err != nil {
				t.Fatalf("%s: %v", step.Step, err)
			}
			if out := b.Append(nil); !bytes.Equal(out, m[2]) {
				t.Errorf("%s: %x, want %x", step.Step, out, m[2])
			}
			for i := range m[2] {
				if _, err := lmcache.DecodeKVEventBatch(m[2][:i]); err == nil {
					t.Errorf("%s: %d of %d bytes are read", step.Step, i, len(m[2]))
				}
			}
		}
	}
	if batches < 3 {
		t.Errorf("%d batches", batches)
	}
}

// chunksOf returns a function that tells the tokens of a chunk.
func chunksOf(memo *lmcache.Memo, view *lmcache.KeyView) func(i int) []byte {
	head, text, ends := memo.Tokens(view)
	return func(i int) []byte {
		from := 0
		if i > 0 {
			from = ends[i-1]
		}
		return append(bytes.Clone(head), text[from:ends[i]]...)
	}
}

// The tokens of a key come back chunk by chunk, whatever their width on the wire.
func TestTokensOfAKey(t *testing.T) {
	memo := lmcache.NewMemo(4, 1<<20)
	k := lmcache.Key{Model: "m", WorldSize: 1, Tokens: []uint32{1, 200, 70000, 1 << 31, 5, 6, 7, 8, 9, 10, 11, 12, 13}, End: 12, RequestID: "r"}
	for range 2 { // the second time the hashes are remembered
		var view lmcache.KeyView
		frame := k.Append(nil)
		if err := memo.DecodeKey(frame, &view); err != nil {
			t.Fatal(err)
		}
		memo.Hash(&view, 3)
		tokens := chunksOf(memo, &view)
		if got := tokens(0); !bytes.Equal(got, lmcache.AppendTokens(nil, k.Tokens[:4])) {
			t.Errorf("chunk 0: %x", got)
		}
		if got := tokens(2); !bytes.Equal(got, lmcache.AppendTokens(nil, k.Tokens[8:12])) {
			t.Errorf("chunk 2: %x", got)
		}
		if !slices.Equal(view.Hashes, kv.ChunkHashes(k.Tokens, 4)) {
			t.Error("other hashes")
		}
	}
	wide := msgp.AppendArrayHeader(nil, 4)
	for range 4 {
		wide = append(wide, 0xcf, 0, 0, 0, 0, 0, 0, 0, 3) // as no client of ours sends it
	}
	frame := bytes.Replace((&lmcache.Key{Model: "m", WorldSize: 1, Tokens: []uint32{9, 9, 9, 9}, End: 4}).Append(nil), []byte{0x94, 9, 9, 9, 9}, wide, 1)
	var view lmcache.KeyView
	if err := memo.DecodeKey(frame, &view); err != nil {
		t.Fatal(err)
	}
	memo.Hash(&view, 1)
	if got := chunksOf(memo, &view)(0); !bytes.Equal(got, []byte{0x94, 3, 3, 3, 3}) {
		t.Errorf("%x", got)
	}
}

func TestSubscribeRequest(t *testing.T) {
	f := func(want *lmcache.SubscribeRequest, payloads ...[]byte) {
		t.Helper()
		var d lmcache.Decoder
		r, err := d.Decode(lmcache.NewMemo(4, 0), lmcache.Only(lmcache.Latest), lmcache.OpSubscribeKVEvents, payloads)
		if (err == nil) != (want != nil) {
			t.Errorf("%v", err)
		} else if want != nil && !reflect.DeepEqual(r, lmcache.Request(want)) {
			t.Errorf("%+v", r)
		}
	}
	n := func(v int64) []byte { return lmcache.AppendInt(nil, v) }
	m := lmcache.AppendString(nil, "m")
	f(&lmcache.SubscribeRequest{InstanceID: 7, Model: []byte("m"), Cursor: 9, MaxEvents: 1024}, n(7), m, n(9), n(1024))
	f(nil, n(7), m, n(-1), n(1))
	f(nil, n(7), m, n(0), n(0))
	f(nil, n(7), m, n(0), n(1025))
	f(nil, m, m, n(0), n(1))
	f(nil, n(7), m, n(0))
}

// Whatever forms a client's integers have, and wherever the list ends, the tokens told are the same, in 5 bytes each at most.
func TestTokensOfAnyForm(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	edges := []uint32{0, 1, 127, 128, 255, 256, 0x7fff, 0xffff, 0x10000, 0x7fffffff, 0xffffffff}
	for round := range 500 {
		memo := lmcache.NewMemo(4, 1<<20)
		key := lmcache.Key{Model: "m", WorldSize: 1, End: 8}
		list := msgp.AppendArrayHeader(nil, 8)
		for range 8 {
			v := edges[random.IntN(len(edges))]
			key.Tokens = append(key.Tokens, v)
			widest := 0
			if round%2 > 0 { // else as clients write it
				widest = random.IntN(8)
			}
			switch {
			case widest == 1:
				list = binary.BigEndian.AppendUint64(append(list, 0xd3), uint64(v))
			case widest == 2:
				list = binary.BigEndian.AppendUint64(append(list, 0xcf), uint64(v))
			case widest == 3:
				list = binary.BigEndian.AppendUint32(append(list, 0xce), v)
			case widest == 4 && v <= 0xffff:
				list = append(list, 0xcd, byte(v>>8), byte(v))
			case widest == 5 && v <= 0xff:
				list = append(list, 0xcc, byte(v))
			case widest == 6 && v <= 0x7fff:
				list = append(list, 0xd1, byte(v>>8), byte(v))
			default:
				list = append(list, lmcache.AppendTokens(nil, []uint32{v})[1:]...)
			}
		}
		frame := bytes.Replace(key.Append(nil), lmcache.AppendTokens(nil, key.Tokens), list, 1)
		var view lmcache.KeyView
		if err := memo.DecodeKey(frame, &view); err != nil {
			t.Fatal(err)
		}
		memo.Hash(&view, 1+random.IntN(2))
		for from := range 3 {
			most := random.IntN(10)
			want := key.Tokens[4*from:]
			if got := memo.AppendTokens([]uint32{7}, &view, from, most); !slices.Equal(got[1:], want[:min(most, len(want))]) {
				t.Fatalf("round %d: %d tokens from chunk %d of %x are %d", round, most, from, list, got)
			}
		}
		tokens := chunksOf(memo, &view)
		for i := len(view.Hashes) - 1; i >= 0; i-- {
			n, b, err := msgp.ReadArrayHeaderBytes(tokens(i))
			if err != nil || n != 4 || len(b) > 4*5 {
				t.Fatalf("round %d: chunk %d of %x is %x: %v", round, i, list, b, err)
			}
			for _, want := range key.Tokens[4*i : 4*i+4] {
				var got uint64
				if got, b, err = msgp.ReadUint64Bytes(b); err != nil || got != uint64(want) {
					t.Fatalf("round %d: chunk %d of %x has %d, want %d: %v", round, i, list, got, want, err)
				}
			}
		}
	}
}
