// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// TensorKind says how a layer's KV cache is laid out in memory, as far as that matters for transfers.
type TensorKind int

// The kinds of a layer.
const (
	AttentionTensor TensorKind = iota
	MLATensor                  // multi-head latent attention: one plane, no heads
	MambaTensor                // recurrent state: a block is one page of all states
)

// Tensor is one layer's KV cache as the engine holds it: a view of an allocation,
// blocks first.
type Tensor struct {
	Layer   string
	Index   int // of the layer
	Group   int // transferred KV cache group
	Kind    TensorKind
	Storage int    // index into the allocations
	Offset  uint64 // bytes from the allocation's start

	Shape   []int // elements; Shape[0] counts kernel blocks
	Stride  []int // elements, parallel to Shape
	Element int   // bytes

	// HeadAxis is the axis of Shape that counts KV heads; 0 means that it is not known or that there is none. It is 1 for [blocks,
	// heads, tokens, size], 2 for [blocks, tokens, heads, size], 3 for FlashInfer's [blocks, 2, tokens, heads, size]. The order in
	// memory follows from Stride. Engines of unequal TP size can exchange heads only if the heads are the outermost part of a block in
	// memory.
	HeadAxis int

	// PageBytes is the size of one logical block of the layer in bytes, padding included; 0 means that nothing is padded.
	PageBytes uint64
}

// NewCache builds the Cache of tensors that lie in storages: which regions a worker registers, and what each region covers. It copies c
// and sets Storages, Regions, In and, if a tensor cannot be cut by heads, Unsliced.
//
// If the blocks of a tensor are contiguous in an allocation that holds nothing else, the tensor becomes one region, packed with its
// neighbours of the same row; layers of several groups over the same bytes share one region. A tensor whose heads lie apart becomes one
// region per head. Source: register_kv_caches of vLLM 0.32.
func NewCache(storages [][]byte, tensors []Tensor, c Cache) (*Cache, error) {
	c.Storages, c.Regions, c.In = PlaceStorages(storages), nil, nil
	type view struct{ base, stride, payload uint64 }
	seen := make(map[view]int) // packed view → region
	for i := range tensors {
		t := &tensors[i]
		if err := t.Check(storages); err != nil {
			return nil, err
		}
		if why := t.unsliced(); why != "" && c.Unsliced == "" {
			c.Unsliced = fmt.Sprintf("layer %.64q: %s", t.Layer, why)
		}
		for _, r := range t.regions(&c) {
			v := view{r.Base, r.Stride, r.Payload}
			if at, ok := seen[v]; ok && r.RowOffset != wire.NoRow {
				share(&c.Regions[at], t.Group)
				continue
			}
			if r.RowOffset != wire.NoRow {
				seen[v] = len(c.Regions)
			}
			c.Regions = append(c.Regions, r)
		}
	}
	return &c, c.Check()
}

// PlaceStorages gives each allocation an address of its own, with gaps that no region spans.
func PlaceStorages(storages [][]byte) []Storage {
	list := make([]Storage, len(storages))
	next := uint64(windowAlign)
	for i, mem := range storages {
		list[i] = Storage{next, mem}
		next += windowBytes(mem)
	}
	return list
}

// share adds a group to a region over which several groups have views.
func share(r *wire.Region, group int) {
	if !slices.Contains(r.Shared, group) {
		r.Shared = append(r.Shared, group)
		r.Group = wire.SharedGroup
	}
}

// maxTensorElements is the largest product of a tensor's shape or strides; for a larger one, Check returns an ErrCache.
const maxTensorElements = 1 << 44

// Check returns an ErrCache if the tensor's shape and strides do not fit into its allocation.
func (t *Tensor) Check(storages [][]byte) error {
	fail := func(what string) error {
		return fmt.Errorf("%w: layer %q: %s: shape %v, strides %v, %d bytes per element, beginning at byte %d", ErrCache, t.Layer, what,
			t.Shape, t.Stride, t.Element, t.Offset)
	}
	switch {
	case t.Storage < 0 || t.Storage >= len(storages):
		return fmt.Errorf("%w: layer %q: it is in storage %d, there are %d", ErrCache, t.Layer, t.Storage, len(storages))
	case t.HeadAxis < 0 || t.HeadAxis >= max(1, len(t.Shape)):
		return fail(fmt.Sprintf("its shape has no axis %d for the KV heads", t.HeadAxis))
	case len(t.Shape) == 0 || len(t.Shape) > 8 || len(t.Shape) != len(t.Stride) || t.Element <= 0 || t.Element > 64:
		return fail("not 1 to 8 dimensions with a stride each, of elements of 1 to 64 bytes")
	}
	last := uint64(0)
	for i, n := range t.Shape {
		if n <= 0 || t.Stride[i] < 0 || t.Stride[i] > maxTensorElements || n > maxTensorElements {
			return fail("a dimension is below 1, or a stride is negative or too large")
		}
		step := uint64(n-1) * uint64(t.Stride[i])
		if n > 1 && step/uint64(n-1) != uint64(t.Stride[i]) || step > maxTensorElements {
			return fail("it spans more than 2^44 elements")
		}
		last += step
	}
	size := uint64(len(storages[t.Storage]))
	if end := (last + 1) * uint64(t.Element); t.Offset > size || end > size-t.Offset {
		return fail(fmt.Sprintf("does not fit into its storage of %d bytes", size))
	}
	return nil
}

// regions returns the regions that make up the tensor.
func (t *Tensor) regions(c *Cache) []wire.Region {
	s := c.Storages[t.Storage]
	r := wire.Region{
		Layer: t.Layer, Index: t.Index, Base: s.Addr + t.Offset, Stride: uint64(t.Stride[0]) * uint64(t.Element),
		Group: t.Group, Shared: []int{t.Group}, RowOffset: wire.NoRow,
	}
	inner := t.Dense(1) // bytes of a block if they lie in one piece, else 0
	rows := uint64(t.Shape[0])*r.Stride == uint64(len(s.Mem))
	if t.Kind != MambaTensor && rows && r.Stride > 0 && (t.Kind == MLATensor || !t.headMajor()) {
		if inner > 0 && inner <= r.Stride {
			r.Payload, r.RowOffset = inner, int(t.Offset)
		} else { // only the whole row can be a region
			r.Base, r.Payload, r.RowOffset = s.Addr, r.Stride, 0
			c.Opaque = true
		}
		return []wire.Region{r}
	}
	if inner > 0 || len(t.Shape) < 2 {
		r.Payload = r.Stride
		if page := t.PageBytes; page > 0 {
			if t.Kind != MambaTensor {
				page /= uint64(max(c.KernelBlocks, 1))
			}
			r.Payload = page
		}
		return []wire.Region{r}
	}
	heads := make([]wire.Region, t.Shape[1])
	for h := range heads {
		heads[h] = r
		heads[h].Base += uint64(h) * uint64(t.Stride[1]) * uint64(t.Element)
		heads[h].Payload = min(r.Stride, t.contiguous(2))
	}
	return heads
}

// Dense returns the size in bytes of the dimensions from `first` on if they fill one piece of memory without gaps, in any order; else
// 0.
func (t *Tensor) Dense(first int) uint64 {
	var axes []int
	for i := first; i < len(t.Shape); i++ {
		if t.Shape[i] > 1 {
			axes = append(axes, i)
		}
	}
	slices.SortFunc(axes, func(a, b int) int { return cmp.Compare(t.Stride[a], t.Stride[b]) })
	n := 1
	for _, i := range axes {
		if t.Stride[i] != n {
			return 0
		}
		n *= t.Shape[i]
	}
	return uint64(n) * uint64(t.Element)
}

// unsliced returns the reason why the tensor's blocks cannot be cut by heads; "" means that they can be cut.
func (t *Tensor) unsliced() string {
	switch {
	case t.Kind != AttentionTensor: // whole on every rank, or never cut by heads
		return ""
	case t.HeadAxis == 0:
		if t.Dense(1) == 0 && len(t.Shape) > 1 {
			return "" // each head becomes a region
		}
		return "which axis counts the KV heads is not known"
	}
	step := t.Stride[t.HeadAxis]
	for i := 1; i < len(t.Shape); i++ {
		if i != t.HeadAxis && t.Shape[i] > 1 && t.Stride[i] >= step {
			return fmt.Sprintf("shape %v, strides %v: the KV heads, axis %d, do not lie one after the other", t.Shape, t.Stride, t.HeadAxis)
		}
	}
	return ""
}

// contiguous returns the size in bytes of the dimensions from `first` on if they lie in one piece in the order of Shape; else 0.
func (t *Tensor) contiguous(first int) uint64 {
	n := t.Element
	for i := len(t.Shape) - 1; i >= first; i-- {
		if t.Shape[i] > 1 && t.Stride[i]*t.Element != n {
			return 0
		}
		n *= t.Shape[i]
	}
	return uint64(n)
}

// headMajor reports whether the tensor lies in memory as [blocks, heads, tokens, size], without gaps inside a block.
func (t *Tensor) headMajor() bool {
	return len(t.Shape) == 4 && t.Stride[2] == t.Shape[3] && t.Stride[1] == t.Shape[2]*t.Shape[3]
}
