// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

func TestNewCache(t *testing.T) {
	mem := [][]byte{make([]byte, 4096)}
	tensor := mooncake.Tensor{Layer: "a", Shape: []int{2, 8, 16, 2}, Stride: []int{256, 32, 2, 1}, Element: 2}
	c, err := NewCache(mem, []mooncake.Tensor{tensor, tensor}, mooncake.Cache{KVHeads: 2})
	if err != nil || len(c.Regions) != 2 || c.Regions[1].Base-c.Regions[0].Base != 512 || c.Regions[0].Stride != 64 {
		t.Fatalf("%+v %v", c, err) // keys and values; the second tensor is the same memory as the first
	}
	mla := mooncake.Tensor{Layer: "a", Kind: mooncake.MLATensor, Shape: []int{8, 16, 4}, Stride: []int{64, 4, 1}, Element: 2}
	if c, err = NewCache(mem, []mooncake.Tensor{mla}, mooncake.Cache{}); err != nil || len(c.Regions) != 1 || c.Regions[0].Payload != 128 {
		t.Fatalf("%+v %v", c, err)
	}
	if _, err = NewCache(mem, []mooncake.Tensor{tensor}, mooncake.Cache{KernelBlocks: 2}); !errors.Is(err, mooncake.ErrCache) {
		t.Fatal(err)
	}
	tensor.Shape[0] = 3
	if _, err = NewCache(mem, []mooncake.Tensor{tensor}, mooncake.Cache{}); !errors.Is(err, mooncake.ErrCache) {
		t.Fatal(err)
	}
}

// What vLLM 0.13 registers: FlashAttention's tensors in either order of heads
// and tokens, FlashInfer's, MLA's.
func TestLayouts(t *testing.T) {
	const n, tokens, heads, size = 8, 16, 2, 4
	mem := make([]byte, 2*n*tokens*heads*size*2)
	f := func(name string, x mooncake.Tensor, regions int, payload uint64) {
		t.Helper()
		x.Layer, x.Element = "l", 2
		c, err := NewCache([][]byte{mem}, []mooncake.Tensor{x}, mooncake.Cache{})
		if err != nil || len(c.Regions) != regions || c.Regions[0].Payload != payload || c.Regions[0].Stride != payload {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
	const plane = tokens * heads * size
	f("tokens first", mooncake.Tensor{Shape: []int{2, n, tokens, heads, size}, Stride: []int{n * plane, plane, heads * size, size, 1}}, 2, 2*plane)
	f("heads first", mooncake.Tensor{Shape: []int{2, n, tokens, heads, size}, Stride: []int{n * plane, plane, size, tokens * size, 1}}, 2, 2*plane)
	f("FlashInfer", mooncake.Tensor{Shape: []int{n, 2, tokens, heads, size}, Stride: []int{2 * plane, plane, heads * size, size, 1}}, 1, 4*plane)
	f("MLA", mooncake.Tensor{Kind: mooncake.MLATensor, Shape: []int{n, tokens, heads * size}, Stride: []int{plane, heads * size, 1}}, 1, 2*plane)
}

// A pull that decodes can be planned for without a panic.
func FuzzPlan(f *testing.F) {
	f.Add(wire.AppendPull013(nil, &wire.Pull013{Host: "10.0.0.9", Port: 15001, Requests: []string{"a"}, Bases: []uint64{1 << 40}, Blocks: [][]int{{1, 2, 4}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := wire.DecodePull013(b); err == nil {
			own := memory{Bases: []uint64{1 << 40, 1 << 41}, BlockBytes: 4096}
			_, _ = own.plan(nil, p, make([][]int, len(p.Requests)))
		}
	})
}
