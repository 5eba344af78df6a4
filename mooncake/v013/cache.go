// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// NewCache makes the regions that vLLM 0.13 publishes for tensors: for a tensor [2, blocks, ...] keys and values are two regions; an
// MLA tensor [blocks, ...] and FlashInfer's [blocks, 2, ...] are one region. Each base address comes once, in the order of the tensors.
// The order of dimensions inside a block does not matter. All blocks must have one size.
func NewCache(storages [][]byte, tensors []mooncake.Tensor, c mooncake.Cache) (*mooncake.Cache, error) {
	out := mooncake.Cache{Storages: mooncake.PlaceStorages(storages), Kinds: c.Kinds, KVHeads: c.KVHeads}
	if out.Kinds == nil {
		out.Kinds = []mooncake.GroupKind{mooncake.Attention}
	}
	if c.KernelBlocks > 1 {
		return nil, fmt.Errorf("%w: %d kernel blocks in a block: 0.13 transfers blocks as the kernel has them", mooncake.ErrCache, c.KernelBlocks)
	}
	bases := make(map[uint64]bool)
	for i := range tensors {
		t := &tensors[i]
		if err := t.Check(storages); err != nil {
			return nil, err
		}
		planes, dim := 1, 0 // number of planes (keys and values); the dimension that counts blocks
		split := t.Kind != mooncake.MLATensor && len(t.Shape) > 1 && t.Shape[0] == 2
		switch {
		case split:
			planes, dim = 2, 1
		case t.Kind != mooncake.MLATensor && (len(t.Shape) < 2 || t.Shape[1] != 2):
			return nil, fmt.Errorf("%w: layer %q: shape %v has no keys and values in front", mooncake.ErrCache, t.Layer, t.Shape)
		}
		size := t.Dense(dim + 1)
		if size == 0 {
			return nil, fmt.Errorf("%w: layer %q: a block does not lie in one piece: strides %v", mooncake.ErrCache, t.Layer, t.Stride)
		}
		for plane := range planes {
			base := out.Storages[t.Storage].Addr + t.Offset
			if split {
				base += uint64(plane) * uint64(t.Stride[0]) * uint64(t.Element)
			}
			if bases[base] {
				continue
			}
			bases[base] = true
			out.Regions = append(out.Regions, wire.Region{
				Layer: t.Layer, Index: t.Index, Base: base, Stride: uint64(t.Stride[dim]) * uint64(t.Element), Payload: size,
				Group: 0, RowOffset: wire.NoRow,
			})
		}
	}
	return &out, out.Check()
}
