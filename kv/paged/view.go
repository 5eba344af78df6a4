// SPDX-License-Identifier: Apache-2.0

// Package paged copies between paged KV tensors and chunks: gather for a store,
// scatter for a load. It works on byte slices and strides and does no I/O. NewView and NewViewOf
// check what a peer announced, and Group.IDs checks block ids before a copy is
// planned, so that no index leaves its slice.
package paged

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
)

// Form is the order of a layer's dimensions in memory.
type Form uint8

// The forms, row-major. A slot is one token of a block. A fused row has K and V of a head, or MLA's latent.
const (
	PlanesNHD Form = iota // [2, blocks, slots, heads, size]: all K, then all V
	BlocksNHD             // [blocks, 2, slots, heads, size]: K and V of each block
	FusedNHD              // [blocks, slots, heads, size]: one plane
	PlanesHND             // [2, blocks, heads, slots, size]
	BlocksHND             // [blocks, 2, heads, slots, size]
	FusedHND              // [blocks, heads, slots, size]
	MLA                   // [blocks, slots, size]: one plane, one head

	numForms
)

var formNames = [numForms]string{
	"[2, blocks, tokens, heads, size]", "[blocks, 2, tokens, heads, size]", "[blocks, tokens, heads, size]",
	"[2, blocks, heads, tokens, size]", "[blocks, 2, heads, tokens, size]", "[blocks, heads, tokens, size]",
	"[blocks, tokens, size]",
}

func (f Form) String() string {
	if f < numForms {
		return formNames[f]
	}
	return fmt.Sprintf("Form(%d)", uint8(f))
}

// axes returns the index of plane, block, slot, head and element among the dimensions; -1 for one that the form does not have.
func (f Form) axes() (a [5]int, rank int) {
	return [numForms][5]int{
		PlanesNHD: {0, 1, 2, 3, 4}, BlocksNHD: {1, 0, 2, 3, 4}, FusedNHD: {-1, 0, 1, 2, 3},
		PlanesHND: {0, 1, 3, 2, 4}, BlocksHND: {1, 0, 3, 2, 4}, FusedHND: {-1, 0, 2, 1, 3},
		MLA: {-1, 0, 1, -1, 2},
	}[f], [numForms]int{5, 5, 4, 5, 5, 4, 3}[f]
}

var (
	// ErrTensor means that a tensor's shape, strides, offset and memory do not
	// fit together.
	ErrTensor = errors.New("paged: bad tensor")
	// ErrBlocks means that block ids do not fit the tensors or the range.
	ErrBlocks = errors.New("paged: bad block ids")
)

// Tensor is one layer's KV as a peer describes it, in elements.
type Tensor struct {
	Shape, Stride []int64
	Offset        int64 // of element 0, from the start of the memory
	ElementBytes  int
}

// View is the geometry of a layer in bytes. Every block of a View lies within the memory that it was made for.
type View struct {
	Form   Form
	Planes int
	Blocks int
	Slots  int // per block
	Heads  int
	Row    int // bytes of one head of one slot, contiguous

	offset                   int64
	plane, block, slot, head int64 // strides
}

// maxSpan bounds the bytes of a layer: 2^46. Products of checked numbers below it do not overflow.
const maxSpan = 1 << 46

// NewView returns the geometry of t in memory of the given size. A shape does not show
// whether heads (HND) or tokens (NHD) come first; hnd decides. NewView sorts the
// dimensions of a permuted tensor into their order in memory,
// with the rule of LMCache 0.5.6 (dimensions by falling stride, those of size 1
// last among equals; K and V where a first or second dimension is 2).
func NewView(t Tensor, hnd bool, memory int64) (View, error) {
	if len(t.Shape) < 3 || len(t.Shape) > 5 || len(t.Stride) != len(t.Shape) {
		return View{}, fmt.Errorf("%w: shape %v with strides %v: it must have 3 to 5 dimensions with a stride each", ErrTensor, t.Shape, t.Stride)
	}
	order := make([]int, len(t.Shape))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case t.Stride[a] != t.Stride[b]:
			if t.Stride[a] > t.Stride[b] {
				return -1
			}
			return 1
		case t.Shape[a] != 1 && t.Shape[b] == 1:
			return -1
		case t.Shape[a] == 1 && t.Shape[b] != 1:
			return 1
		}
		return 0
	})
	sorted := Tensor{Offset: t.Offset, ElementBytes: t.ElementBytes}
	for _, i := range order {
		sorted.Shape = append(sorted.Shape, t.Shape[i])
		sorted.Stride = append(sorted.Stride, t.Stride[i])
	}
	form, ok := formOf(sorted.Shape, hnd)
	if !ok {
		return View{}, fmt.Errorf("%w: shape %v: neither its first nor its second dimension in memory is 2, for K and V", ErrTensor, t.Shape)
	}
	return sorted.view(form, memory)
}

// NewViewOf is NewView for a tensor whose dimensions are in the order of `form`.
func NewViewOf(form Form, t Tensor, memory int64) (View, error) {
	if form >= numForms {
		return View{}, fmt.Errorf("%w: form %d is unknown", ErrTensor, form)
	}
	if _, rank := form.axes(); len(t.Shape) != rank || len(t.Stride) != rank {
		return View{}, fmt.Errorf("%w: shape %v with strides %v, want %v", ErrTensor, t.Shape, t.Stride, form)
	}
	return t.view(form, memory)
}

func formOf(shape []int64, hnd bool) (Form, bool) {
	pick := func(nhd, h Form) (Form, bool) {
		if hnd {
			return h, true
		}
		return nhd, true
	}
	switch {
	case len(shape) == 3:
		return MLA, true
	case len(shape) == 4:
		return pick(FusedNHD, FusedHND)
	case shape[0] == 2:
		return pick(PlanesNHD, PlanesHND)
	case shape[1] == 2:
		return pick(BlocksNHD, BlocksHND)
	}
	return 0, false
}

// Dense returns the geometry of a layer without gaps, and the layer's length in bytes.
func Dense(form Form, blocks, slots, heads, row int) (View, int64, error) {
	if form >= numForms {
		return View{}, 0, fmt.Errorf("%w: form %d is unknown", ErrTensor, form)
	}
	dims := [5]int64{2, int64(blocks), int64(slots), int64(heads), int64(row)}
	if form == MLA {
		dims[4] = 0
		if hi, lo := bits.Mul64(uint64(heads), uint64(row)); heads > 0 && row > 0 && hi == 0 && lo <= maxSpan {
			dims[4] = int64(lo) // one head
		}
	}
	axes, rank := form.axes()
	t := Tensor{Shape: make([]int64, rank), Stride: make([]int64, rank), ElementBytes: 1}
	for i, at := range axes {
		if at >= 0 {
			t.Shape[at] = dims[i]
		}
	}
	size := int64(1)
	for i := rank - 1; i >= 0; i-- {
		t.Stride[i] = size
		if t.Shape[i] < 1 || t.Shape[i] > maxSpan/size {
			return View{}, 0, fmt.Errorf("%w: a dimension of shape %v is below 1 or too large", ErrTensor, t.Shape)
		}
		size *= t.Shape[i]
	}
	v, err := t.view(form, size)
	return v, size, err
}

// view checks t, whose dimensions are in the order of form, against the length of its memory.
func (t *Tensor) view(form Form, memory int64) (View, error) {
	bad := func(why string, args ...any) (View, error) {
		return View{}, fmt.Errorf("%w: shape %v, strides %v, offset %d: %s", ErrTensor, t.Shape, t.Stride, t.Offset, fmt.Sprintf(why, args...))
	}
	axes, rank := form.axes()
	if t.ElementBytes < 1 || t.ElementBytes > 16 || memory < 0 || memory > maxSpan {
		return bad("memory of %d bytes in elements of %d: elements of 1 to 16 bytes are possible", memory, t.ElementBytes)
	}
	last, outer := int64(0), int64(maxSpan) // the offset of the last element; the stride of the next outer dimension
	elements := memory / int64(t.ElementBytes)
	if t.Offset < 0 || t.Offset >= elements {
		return bad("it begins outside its memory of %d bytes", memory)
	}
	for i := range rank {
		n, stride := t.Shape[i], t.Stride[i]
		if n < 1 || stride < 0 || n > elements || stride > elements || n > 1 && stride > (elements-1-last)/(n-1) {
			return bad("it does not fit into its memory of %d bytes", memory)
		}
		last += (n - 1) * stride
		if n == 1 {
			continue
		}
		if stride < 1 || outer < n*stride {
			return bad("dimension %d overlaps another", i)
		}
		outer = stride
	}
	if last >= elements-t.Offset {
		return bad("it does not fit into its memory of %d bytes", memory)
	}
	if t.Stride[rank-1] != 1 && t.Shape[rank-1] != 1 {
		return bad("the elements of a row are not contiguous")
	}
	size := func(i, none int) int {
		if axes[i] < 0 {
			return none
		}
		return int(t.Shape[axes[i]])
	}
	stride := func(i int) int64 {
		if axes[i] < 0 {
			return 0
		}
		return t.Stride[axes[i]] * int64(t.ElementBytes)
	}
	return View{
		Form: form, Planes: size(0, 1), Blocks: size(1, 1), Slots: size(2, 1), Heads: size(3, 1), Row: size(4, 1) * t.ElementBytes,
		offset: t.Offset * int64(t.ElementBytes), plane: stride(0), block: stride(1), slot: stride(2), head: stride(3),
	}, nil
}

// BlockBytes is the number of bytes of one block in one plane.
func (v *View) BlockBytes() int { return v.Slots * v.Heads * v.Row }

// Same reports whether the blocks of two layers have the same shape, so that the layers can share a group.
func (v *View) Same(w *View) bool {
	return v.Planes == w.Planes && v.Slots == w.Slots && v.Heads == w.Heads && v.Row == w.Row
}

// Rows calls f with the bytes of one plane of a block, one row (one head of one slot) at a time, in the order in which they lie in memory.
// plane and block must be in range, and memory must be that for which the View was made.
func (v *View) Rows(memory []byte, plane, block int, f func(row []byte)) {
	outer, inner := v.Slots, v.Heads
	far, near := v.slot, v.head
	if v.Form == PlanesHND || v.Form == BlocksHND || v.Form == FusedHND {
		outer, inner, far, near = inner, outer, near, far
	}
	at := v.offset + int64(plane)*v.plane + int64(block)*v.block
	for i := range int64(outer) {
		for j := range int64(inner) {
			from := at + i*far + j*near
			f(memory[from : from+int64(v.Row)])
		}
	}
}

// BlocksFirst reports whether the planes of a block lie next to each other.
func (v *View) BlocksFirst() bool { return v.Form == BlocksNHD || v.Form == BlocksHND }
