// SPDX-License-Identifier: Apache-2.0

package kvmem_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

func heap(_, _ int, n int64) ([]byte, error) { return make([]byte, n), nil }

func memory(t testing.TB, tp int) *kvmem.Memory {
	t.Helper()
	return memoryOf(t, tp, kvmem.Fused)
}

func memoryOf(t testing.TB, tp int, layout kvmem.Layout) *kvmem.Memory {
	t.Helper()
	heads := 4
	if layout == kvmem.MLA {
		heads = 1
	}
	m, err := kvmem.New(kvmem.Geometry{Layers: 3, Heads: heads, HeadBytes: 16, BlockTokens: 8, Blocks: 10, TPSize: tp, Layout: layout}, heap)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// The check finds any wrong byte, wherever it is.
func TestEveryByteIsChecked(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	c := kvmem.Chain(nil).Append(tokens...)
	f := func(tp int, layout kvmem.Layout) {
		t.Helper()
		m := memoryOf(t, tp, layout)
		table := [][]int32{{7, 3}}
		m.Write(table, c, 0, 5)
		m.Write(table, c, 5, len(c))
		if err := m.Check(table, c, 0, len(c)); err != nil {
			t.Fatal(err)
		}
		written := 0
		for rank := range tp {
			for layer, mem := range m.RankLayers(rank) {
				for i := range mem {
					mem[i] ^= 0x40
					err := m.Check(table, c, 0, len(c))
					if err != nil {
						written++
						wrong, ok := errors.AsType[*kvmem.WrongBytesError](err)
						if !ok || wrong.Layer != layer || wrong.Rank != rank {
							t.Fatalf("byte %d of layer %d, rank %d: %v", i, layer, rank, err)
						}
					}
					mem[i] ^= 0x40
				}
			}
		}
		if want := len(c) * m.TokenBytes(); written != want {
			t.Fatalf("TP %d, %v: %d bytes are looked at, %d were written", tp, layout, written, want)
		}
	}
	for _, tp := range []int{1, 2, 4} {
		for _, layout := range layouts {
			f(tp, layout)
		}
	}
}

var layouts = []kvmem.Layout{kvmem.Fused, kvmem.NHD, kvmem.HND, kvmem.FlashInfer, kvmem.MLA}

// Each layout places a block as documented: package paged reads each form with its own code, and gets the same chunk from
// all layouts with separate K and V. The pieces of a block cover all of it.
func TestLayouts(t *testing.T) {
	c := kvmem.Chain(nil).Append(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
	table := [][]int32{{7, 3}}
	var first []byte
	for _, layout := range layouts {
		m := memoryOf(t, 2, layout)
		m.Write(table, c, 0, len(c))
		view, size, err := paged.Dense(layout.Form(), m.Blocks, m.BlockTokens, m.RankHeads(), m.Row())
		if err != nil || size != m.LayerBytes() {
			t.Fatal(layout, size, err)
		}
		g := &paged.Group{PerChunk: 2, Keep: 2}
		for _, layer := range m.RankLayers(1) {
			g.Layers = append(g.Layers, paged.Layer{Memory: layer, View: view})
		}
		if err := g.Check(); err != nil {
			t.Fatal(layout, err)
		}
		chunk := make([]byte, g.Bytes())
		g.Gather(chunk, []int{7, 3})
		switch layout {
		case kvmem.NHD:
			first = chunk
		case kvmem.HND, kvmem.FlashInfer:
			if !bytes.Equal(chunk, first) {
				t.Errorf("%v is not what %v is", layout, kvmem.NHD)
			}
		}
		pieces := 0
		for _, layer := range m.RankLayers(0) {
			for _, piece := range m.BlockParts(nil, layer, 7) {
				pieces += len(piece)
				clear(piece)
			}
		}
		if pieces != m.Layers*m.BlockBytes() {
			t.Errorf("%v: pieces of %d bytes", layout, pieces)
		}
		wrong, ok := errors.AsType[*kvmem.WrongBytesError](m.Check(table, c, 0, len(c)))
		if !ok || wrong.Token != 0 || m.Check([][]int32{{0, 3}}, c, 0, len(c)) != nil {
			t.Errorf("%v: the pieces of block 7 are not that block: %v", layout, wrong)
		}
		if name, err := kvmem.ParseLayout(layout.String()); err != nil || name != layout {
			t.Error(name, err)
		}
	}
	if _, err := kvmem.ParseLayout("nhs"); !errors.Is(err, kvmem.ErrGeometry) {
		t.Error(err)
	}
}

// KV of a token depends on all tokens before it; equal prefixes have equal KV, in any block.
func TestPrefixes(t *testing.T) {
	m := memory(t, 2)
	a, b := kvmem.Chain(nil).Append(1, 2, 3, 4, 5, 6, 7, 8, 9), kvmem.Chain(nil).Append(1, 2, 3, 4, 5, 6, 7, 8, 10)
	other := kvmem.Chain(nil).Append(0, 2, 3, 4, 5, 6, 7, 8, 9)
	m.Write([][]int32{{1, 2}}, a, 0, 9)
	if err := m.Check([][]int32{{1}}, b, 0, 8); err != nil {
		t.Fatal("equal prefixes differ:", err)
	}
	if m.Check([][]int32{{1, 2}}, b, 0, 9) == nil || m.Check([][]int32{{1}}, other, 7, 8) == nil {
		t.Fatal("unlike prefixes have equal KV")
	}
	if err := m.Check([][]int32{{0, 2}}, a, 0, 9); err != nil {
		t.Fatal("the placeholder is looked at:", err)
	}
}

// A state is that of the last token; a block that the sequence has left keeps the state at its
// end.
func TestStates(t *testing.T) {
	m, err := kvmem.New(kvmem.Geometry{
		Layers: 2, Heads: 2, HeadBytes: 8, BlockTokens: 4, Blocks: 10, TPSize: 2, Groups: []kvmem.Group{{}, {State: true}},
	}, heap)
	if err != nil {
		t.Fatal(err)
	}
	c := kvmem.Chain(nil).Append(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
	tables := [][]int32{{1, 2, 3}, {4, 5, 6}}
	m.Write(tables, c, 0, 10)
	for _, n := range []int{4, 8, 10} {
		if err := m.Check(tables, c, 0, n); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Check([][]int32{{1, 2}, {0, 5}}, c, 0, 8); err != nil {
		t.Fatal(err)
	}
	if m.Check([][]int32{{0, 0}, {4, 5}}, c, 0, 7) == nil {
		t.Fatal("the state after token 8 passes for that after token 7")
	}
	if m.Check([][]int32{{4}, {1}}, c, 0, 4) == nil {
		t.Fatal("groups are not told apart")
	}
}

func TestGeometry(t *testing.T) {
	good := kvmem.Geometry{Layers: 1, Heads: 2, HeadBytes: 8, BlockTokens: 1, Blocks: 2, TPSize: 1}
	for _, change := range []func(g *kvmem.Geometry){
		func(g *kvmem.Geometry) { g.Layers = 0 },
		func(g *kvmem.Geometry) { g.Heads = 3; g.TPSize = 2 },
		func(g *kvmem.Geometry) { g.HeadBytes = 12 },
		func(g *kvmem.Geometry) { g.BlockTokens = -1 },
		func(g *kvmem.Geometry) { g.Blocks = 1 },
		func(g *kvmem.Geometry) { g.TPSize = 0 },
		func(g *kvmem.Geometry) { g.Layout = kvmem.NHD },
		func(g *kvmem.Geometry) { g.Layout = kvmem.MLA },
		func(g *kvmem.Geometry) { g.Layout, g.HeadBytes, g.Groups = kvmem.HND, 16, []kvmem.Group{{State: true}} },
		func(g *kvmem.Geometry) { g.Blocks, g.HeadBytes, g.BlockTokens = 1<<26, 1<<16, 1<<12 },
	} {
		g := good
		change(&g)
		if _, err := kvmem.New(g, heap); !errors.Is(err, kvmem.ErrGeometry) {
			t.Errorf("%+v: %v", g, err)
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	m, err := kvmem.New(kvmem.Geometry{Layers: 4, Heads: 8, HeadBytes: 256, BlockTokens: 16, Blocks: 40, TPSize: 1}, heap)
	if err != nil {
		b.Fatal(err)
	}
	c := make(kvmem.Chain, 512)
	table := make([]int32, 32)
	for i := range table {
		table[i] = int32(i + 1)
	}
	b.SetBytes(int64(len(c) * m.TokenBytes()))
	for b.Loop() {
		m.Write([][]int32{table}, c, 0, len(c))
	}
}
