// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"errors"
	"fmt"
	"testing"
)

func TestNewCache(t *testing.T) {
	f := func(name string, storages []int, tensors []Tensor, kernel int, want string) *Cache {
		t.Helper()
		var mem [][]byte
		for _, n := range storages {
			mem = append(mem, make([]byte, n))
		}
		c, err := NewCache(mem, tensors, Cache{Kinds: []GroupKind{Attention, Attention}, KVHeads: 8, KernelBlocks: kernel})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := ""
		for i, r := range c.Regions {
			s := c.home(i)
			got += fmt.Sprintf("%s %d+%d %d/%d g%d%v row%d; ", r.Layer, s, r.Base-c.Storages[s].Addr, r.Payload, r.Stride, r.Group, r.Shared, r.RowOffset)
		}
		if got != want {
			t.Errorf("%s:\n got %s\nwant %s", name, got, want)
		}
		return c
	}
	// [blocks, heads, tokens, size], a storage per layer: head-major, one region.
	f("LBHNC", []int{4 * 512, 4 * 512}, []Tensor{
		{Layer: "a", Shape: []int{4, 2, 16, 8}, Stride: []int{256, 128, 8, 1}, Element: 2},
		{Layer: "b", Storage: 1, Shape: []int{4, 2, 16, 8}, Stride: []int{256, 128, 8, 1}, Element: 2},
	}, 1, "a 0+0 512/512 g0[0] row-1; b 1+0 512/512 g0[0] row-1; ")
	// MLA: one plane, whole rows of an allocation.
	f("MLA", []int{4 * 128}, []Tensor{{Layer: "a", Kind: MLATensor, Shape: []int{4, 16, 4}, Stride: []int{64, 4, 1}, Element: 2}},
		1, "a 0+0 128/128 g0[0] row0; ")
	// Two layers packed in one row, by name; the same bytes for a second group.
	f("packed", []int{4 * 256}, []Tensor{
		{Layer: "a", Kind: MLATensor, Shape: []int{4, 16, 4}, Stride: []int{128, 4, 1}, Element: 2},
		{Layer: "b", Kind: MLATensor, Offset: 128, Shape: []int{4, 16, 4}, Stride: []int{128, 4, 1}, Element: 2},
		{Layer: "c", Kind: MLATensor, Group: 1, Shape: []int{4, 16, 4}, Stride: []int{128, 4, 1}, Element: 2},
	}, 1, "a 0+0 128/256 g-1[0 1] row0; b 0+128 128/256 g0[0] row128; ")
	// Blocks that do not lie in one piece within rows: the row under one name.
	c := f("opaque", []int{4 * 256}, []Tensor{
		{Layer: "a", Kind: MLATensor, Shape: []int{4, 2, 16}, Stride: []int{128, 64, 1}, Element: 2},
		{Layer: "b", Kind: MLATensor, Offset: 32, Shape: []int{4, 2, 16}, Stride: []int{128, 64, 1}, Element: 2},
	}, 1, "a 0+0 256/256 g0[0] row0; ")
	if !c.Opaque {
		t.Error("opaque rows are not told")
	}
	// Heads apart, [heads outer]: a region per head.
	f("heads", []int{2 * 4 * 64}, []Tensor{{Layer: "a", Shape: []int{4, 2, 16, 2}, Stride: []int{32, 128, 2, 1}, Element: 2}},
		1, "a 0+0 64/64 g0[0] row-1; a 0+256 64/64 g0[0] row-1; ")
	// State pages with padding, two kernel blocks per logical block of attention.
	f("mamba", []int{4 * 512, 8 * 256}, []Tensor{
		{Layer: "m", Kind: MambaTensor, Shape: []int{4, 512}, Stride: []int{512, 1}, Element: 1, PageBytes: 500},
		{Layer: "a", Group: 1, Storage: 1, Shape: []int{8, 2, 16, 4}, Stride: []int{128, 64, 4, 1}, Element: 2, PageBytes: 512},
	}, 2, "m 0+0 500/512 g0[0] row-1; a 1+0 256/256 g1[1] row-1; ")
}

func TestNewCacheRefuses(t *testing.T) {
	f := func(x Tensor) {
		t.Helper()
		if _, err := NewCache([][]byte{make([]byte, 1024)}, []Tensor{x}, Cache{Kinds: []GroupKind{Attention}}); !errors.Is(err, ErrCache) {
			t.Errorf("%+v: %v", x, err)
		}
	}
	ok := Tensor{Layer: "a", Shape: []int{4, 2, 16, 2}, Stride: []int{64, 32, 2, 1}, Element: 2}
	for _, change := range []func(x *Tensor){
		func(x *Tensor) { x.Storage = 1 },
		func(x *Tensor) { x.Storage = -1 },
		func(x *Tensor) { x.Offset = 1 << 63 },
		func(x *Tensor) { x.Offset = 1000 },
		func(x *Tensor) { x.Shape = []int{1 << 62, 2, 16, 2} },
		func(x *Tensor) { x.Stride = []int{1 << 62, 32, 2, 1} },
		func(x *Tensor) { x.Stride = []int{-64, 32, 2, 1} },
		func(x *Tensor) { x.Shape = nil },
		func(x *Tensor) { x.Element = 0 },
		func(x *Tensor) { x.Group = 1 },
		func(x *Tensor) { x.PageBytes = 1 << 40 },
	} {
		x := ok
		change(&x)
		f(x)
	}
	if _, err := NewCache([][]byte{make([]byte, 1024)}, nil, Cache{}); !errors.Is(err, ErrCache) {
		t.Error(err)
	}
}
