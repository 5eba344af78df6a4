// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

func newPaged(form paged.Form, layers, blocks, blockTokens, heads, headSize int) *connector.Paged {
	p := &connector.Paged{Form: form, Blocks: blocks, BlockTokens: blockTokens, Heads: heads, HeadSize: headSize, DType: "float16"}
	planes := 2
	if form == paged.FusedNHD {
		planes = 1
	}
	for range layers {
		p.Layers = append(p.Layers, make([]byte, planes*blocks*blockTokens*heads*headSize*2))
	}
	return p
}

// at is where a byte of a token lies, written from the shapes alone.
func at(p *connector.Paged, plane, block, slot, byteOf int) int {
	token := p.Heads * p.HeadSize * 2
	switch p.Form {
	case paged.PlanesNHD:
		return ((plane*p.Blocks+block)*p.BlockTokens+slot)*token + byteOf
	case paged.BlocksNHD:
		return ((block*2+plane)*p.BlockTokens+slot)*token + byteOf
	}
	return (block*p.BlockTokens+slot)*token + byteOf
}

// checkPaged gathers and scatters random blocks and compares each byte with the
// naive index arithmetic.
func checkPaged(t *testing.T, p *connector.Paged, perChunk, skip int, rnd *rand.Rand) {
	t.Helper()
	chunkTokens := perChunk * p.BlockTokens
	layout, err := p.Layout(chunkTokens)
	if err != nil {
		t.Fatal(err)
	}
	size, err := layout.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range p.Layers {
		for i := range l {
			l[i] = byte(rnd.Uint32())
		}
	}
	ids := rnd.Perm(p.Blocks)[:perChunk]
	planes, token := 2, p.Heads*p.HeadSize*2
	if layout.SinglePlane {
		planes = 1
	}
	each := func(f func(layer, in, out, tok int)) { // in a layer, in the chunk
		for plane := range planes {
			for layer := range p.Layers {
				for tok := range chunkTokens {
					for b := range token {
						out := ((plane*len(p.Layers)+layer)*chunkTokens+tok)*token + b
						f(layer, at(p, plane, ids[tok/p.BlockTokens], tok%p.BlockTokens, b), out, tok)
					}
				}
			}
		}
	}
	chunk := make([]byte, size)
	p.Gather(ids, chunk)
	each(func(layer, in, out, _ int) {
		if chunk[out] != p.Layers[layer][in] {
			t.Fatalf("%v, layer %d: byte %d of the chunk is not byte %d of the layer", p.Form, layer, out, in)
		}
	})
	want := make([][]byte, len(p.Layers))
	for i, l := range p.Layers {
		want[i] = bytes.Clone(l)
	}
	for i := range chunk {
		chunk[i] = byte(rnd.Uint32())
	}
	each(func(layer, in, out, tok int) {
		if tok >= skip {
			want[layer][in] = chunk[out]
		}
	})
	p.Scatter(ids, chunk, skip)
	for i, l := range p.Layers {
		if !bytes.Equal(l, want[i]) {
			t.Fatalf("%v, layer %d, skip %d: scattered to wrong places", p.Form, i, skip)
		}
	}
}

func TestPaged(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, form := range []paged.Form{paged.PlanesNHD, paged.BlocksNHD, paged.FusedNHD} {
		for _, skip := range []int{0, 1, 4, 7, 8, 11, 12, 100} {
			checkPaged(t, newPaged(form, 3, 9, 4, 2, 3), 3, skip, rnd)
		}
		checkPaged(t, newPaged(form, 1, 1, 1, 1, 1), 1, 0, rnd)
	}
}

func TestPagedRefuses(t *testing.T) {
	f := func(what string, chunkTokens int, change func(*connector.Paged)) {
		t.Helper()
		p := newPaged(paged.PlanesNHD, 2, 4, 4, 1, 8)
		change(p)
		if _, err := p.Layout(chunkTokens); err == nil {
			t.Errorf("%s is accepted", what)
		}
	}
	none := func(*connector.Paged) {}
	f("a chunk that is not made of blocks", 6, none)
	f("an empty chunk", 0, none)
	f("a short layer", 8, func(p *connector.Paged) { p.Layers[1] = p.Layers[1][1:] })
	f("no layers", 8, func(p *connector.Paged) { p.Layers = nil })
	f("no heads", 8, func(p *connector.Paged) { p.Heads = 0 })
	f("an unknown form", 8, func(p *connector.Paged) { p.Form = 9 })
	f("an unknown dtype", 8, func(p *connector.Paged) { p.DType = "float17" })
	f("huge sizes", 8, func(p *connector.Paged) { p.Heads, p.HeadSize = 1<<40, 1<<40 })
	f("huge block count", 8, func(p *connector.Paged) { p.Blocks = 1 << 60 })
	p := newPaged(paged.PlanesNHD, 2, 4, 4, 1, 8)
	for _, id := range []int{-1, 4, 1 << 60} {
		if err := p.CheckIDs([]int{0, id}); !errors.Is(err, connector.ErrPaged) {
			t.Errorf("block %d: %v", id, err)
		}
	}
}

func FuzzPaged(f *testing.F) {
	f.Add(uint8(0), uint8(2), uint8(5), uint8(4), uint8(3), uint8(2), uint8(2), uint16(5), uint64(1))
	f.Add(uint8(2), uint8(1), uint8(3), uint8(1), uint8(1), uint8(1), uint8(3), uint16(0), uint64(2))
	f.Fuzz(func(t *testing.T, form, layers, blocks, blockTokens, heads, headSize, perChunk uint8, skip uint16, seed uint64) {
		n := func(v uint8, limit int) int { return 1 + int(v)%limit }
		p := newPaged(paged.Form(form%3), n(layers, 3), n(blocks, 8), n(blockTokens, 6), n(heads, 3), n(headSize, 5))
		checkPaged(t, p, 1+int(perChunk)%p.Blocks, int(skip), rand.New(rand.NewPCG(seed, 3)))
	})
}

// A chunk of a model with 32 layers and 8 heads of 128, 16 blocks of 16 tokens.
func BenchmarkGather(b *testing.B) {
	p := newPaged(paged.PlanesNHD, 32, 64, 16, 8, 128)
	layout, err := p.Layout(256)
	if err != nil {
		b.Fatal(err)
	}
	size, _ := layout.Bytes()
	chunk := make([]byte, size)
	ids := rand.New(rand.NewPCG(1, 2)).Perm(64)[:16]
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		p.Gather(ids, chunk)
	}
}
