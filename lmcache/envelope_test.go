// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

var (
	oneLayout  = []kv.Layout{{Layers: 1, Slots: 4, Hidden: 2, DType: "float16"}}
	twoLayouts = []kv.Layout{oneLayout[0], {SinglePlane: true, Layers: 2, Slots: 2, Hidden: 3, DType: "uint8"}}
)

func object(l kv.Layout, tint byte) []byte {
	n, err := l.Bytes()
	if err != nil {
		panic(err)
	}
	return bytes.Repeat([]byte{tint}, int(n))
}

func envelopes() (one, two []byte) {
	e := &lmcache.Envelope{Groups: []lmcache.EnvelopeGroup{{Chunks: []int{0, 1}, Data: [][]byte{object(oneLayout[0], 1), object(oneLayout[0], 2)}}}}
	one = lmcache.AppendEnvelope(nil, oneLayout, e)
	e.Groups = append(e.Groups, lmcache.EnvelopeGroup{Chunks: []int{1}, Data: [][]byte{object(twoLayouts[1], 3)}})
	return one, lmcache.AppendEnvelope(nil, twoLayouts, e)
}

// An envelope is read as it was written, of one group and of several.
func TestEnvelopeRoundTrip(t *testing.T) {
	one, two := envelopes()
	for i, layouts := range [][]kv.Layout{oneLayout, twoLayouts} {
		b := [][]byte{one, two}[i]
		e, err := lmcache.DecodeEnvelope(b, layouts, 2)
		if err != nil || len(e.Groups) != len(layouts) {
			t.Fatal(e, err)
		}
		if got := lmcache.AppendEnvelope(nil, layouts, &e); !bytes.Equal(got, b) {
			t.Errorf("%x, want %x", got, b)
		}
		if !bytes.Equal(e.Groups[0].Data[1], object(oneLayout[0], 2)) {
			t.Error("other bytes")
		}
	}
}

// What does not fit the registration or the range is refused.
func TestEnvelopeThatDoesNotFit(t *testing.T) {
	one, two := envelopes()
	f := func(what string, b []byte, layouts []kv.Layout, chunks int) {
		t.Helper()
		if _, err := lmcache.DecodeEnvelope(b, layouts, chunks); !errors.Is(err, lmcache.ErrEnvelope) {
			t.Errorf("%s: %v", what, err)
		}
	}
	f("two tensors for three chunks", one, oneLayout, 3)
	f("two tensors for one chunk", one, oneLayout, 1)
	f("one group for two", one, twoLayouts, 2)
	f("two groups for one", two, oneLayout, 2)
	f("two groups for three", two, append(twoLayouts[:2:2], oneLayout[0]), 2)
	f("a chunk outside the range", two, twoLayouts, 1)
	f("nothing", nil, oneLayout, 0)
	f("a pickle", []byte{0x80, 4, 0x95}, oneLayout, 1)
	f("bytes behind it", append(one[:len(one):len(one)], 0), oneLayout, 2)
	f("another dtype", one, []kv.Layout{{Layers: 1, Slots: 4, Hidden: 2, DType: "bfloat16"}}, 2)
	f("another shape of the same bytes", one, []kv.Layout{{Layers: 1, Slots: 2, Hidden: 4, DType: "float16"}}, 2)
	for _, change := range [][2]string{
		{"version\x01", "version\x02"}, {"version\x01", "versiom\x01"}, {"tensors", "tensorz"}, {"data\xc4\x20", "data\xc4\x1f"},
	} {
		f(change[1], bytes.Replace(one, []byte(change[0]), []byte(change[1]), 1), oneLayout, 2)
	}
	e := &lmcache.Envelope{Groups: []lmcache.EnvelopeGroup{
		{Chunks: []int{1, 0}, Data: [][]byte{object(oneLayout[0], 1), object(oneLayout[0], 2)}}, {},
	}}
	f("chunks that fall", lmcache.AppendEnvelope(nil, twoLayouts, e), twoLayouts, 2)
	e.Groups[0].Chunks = []int{1, 1}
	f("a chunk twice", lmcache.AppendEnvelope(nil, twoLayouts, e), twoLayouts, 2)
	e.Groups[0].Chunks = []int{1}
	f("more tensors than chunks", lmcache.AppendEnvelope(nil, twoLayouts, e), twoLayouts, 2)
}

// Envelopes of a hostile client: an error, or objects of the registered lengths.
func FuzzEnvelope(f *testing.F) {
	one, two := envelopes()
	f.Add(one, false)
	f.Add(two, true)
	f.Add([]byte{0x82, 0xa7, 't', 'e', 'n', 's', 'o', 'r', 's', 0xdd, 0xff, 0xff, 0xff, 0xff, 0x83}, false)
	f.Fuzz(func(t *testing.T, b []byte, several bool) {
		layouts := oneLayout
		if several {
			layouts = twoLayouts
		}
		e, err := lmcache.DecodeEnvelope(b, layouts, 2)
		if err != nil {
			return
		}
		for i, g := range e.Groups {
			n, _ := layouts[i].Bytes()
			for j, data := range g.Data {
				if int64(len(data)) != n || g.Chunks[j] < 0 || g.Chunks[j] > 1 {
					t.Fatalf("group %d: chunk %d of %d bytes", i, g.Chunks[j], len(data))
				}
			}
		}
	})
}
