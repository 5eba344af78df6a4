// SPDX-License-Identifier: Apache-2.0

package paged

import (
	"fmt"
)

// Layer is the memory of one layer and the geometry of its blocks.
type Layer struct {
	Memory []byte
	View   View
}

// Group is a set of layers that share block ids. A chunk of the group has its bytes in the order plane, layer, kept block, slot, head, row:
// [planes, layers, slots, hidden].
type Group struct {
	Layers   []Layer // not empty; View.Same holds for all
	PerChunk int     // blocks of a chunk
	Keep     int     // the last Keep blocks of a chunk are stored; 1 to PerChunk
	Sparse   bool    // id 0 stands for a block that does not exist
}

// Check returns ErrTensor if the fields of the group do not fit together.
func (g *Group) Check() error {
	if len(g.Layers) == 0 || g.Keep < 1 || g.Keep > g.PerChunk {
		return fmt.Errorf("%w: a group of %d layers, of which a chunk keeps %d of %d blocks: at least one layer is needed, and from 1 to all blocks", ErrTensor, len(g.Layers), g.Keep, g.PerChunk)
	}
	first := &g.Layers[0].View
	size := int64(first.Planes) * int64(len(g.Layers))
	for i := range g.Layers {
		if v := &g.Layers[i].View; !v.Same(first) {
			return fmt.Errorf("%w: layers of one group differ: %s of %d x %d x %d bytes, and %s of %d x %d x %d",
				ErrTensor, first.Form, first.Slots, first.Heads, first.Row, v.Form, v.Slots, v.Heads, v.Row)
		}
	}
	if block := int64(first.BlockBytes()); size > maxSpan/block || int64(g.Keep) > maxSpan/(size*block) {
		return fmt.Errorf("%w: a chunk of %d layers has more than 2^46 bytes", ErrTensor, len(g.Layers))
	}
	return nil
}

// Bytes returns the number of bytes of a chunk of the group.
func (g *Group) Bytes() int64 {
	v := &g.Layers[0].View
	return int64(v.Planes) * int64(len(g.Layers)) * int64(g.Keep) * int64(v.BlockBytes())
}

// Blocks returns the number of blocks that every layer has: ids are in [0, Blocks).
func (g *Group) Blocks() int {
	n := g.Layers[0].View.Blocks
	for i := range g.Layers {
		n = min(n, g.Layers[i].View.Blocks)
	}
	return n
}

// IDs are the block ids of a range of chunks, checked against a group.
type IDs struct {
	ids  []int
	g    *Group
	null bool // id 0 is the null block in this list
}

// IDs checks block ids for `chunks` chunks, PerChunk ids for each. Further ids are ignored; fewer are an error. Each id must be a block,
// and no block may appear twice, except id 0. In a sparse group id 0 is the null block, which stands for an absent block. In other groups
// id 0 is the null block only if it appears more than once (engines never allocate it; other clients use it like any block).
func (g *Group) IDs(ids []int, chunks int) (IDs, error) {
	if chunks < 0 || len(ids)/g.PerChunk < chunks {
		return IDs{}, fmt.Errorf("%w: %d block ids are too few for %d chunks of %d blocks", ErrBlocks, len(ids), chunks, g.PerChunk)
	}
	ids = ids[:chunks*g.PerChunk]
	blocks := g.Blocks()
	out := IDs{ids: ids, g: g, null: g.Sparse}
	seen := newIDSet(blocks)
	for _, id := range ids {
		if id < 0 || id >= blocks {
			return IDs{}, fmt.Errorf("%w: block id %d is outside 0 to %d", ErrBlocks, id, blocks-1)
		}
		if !seen.add(id) {
			if id != 0 {
				return IDs{}, fmt.Errorf("%w: block id %d appears twice", ErrBlocks, id)
			}
			out.null = true
		}
	}
	return out, nil
}

// idSet is a set of block ids. Up to maxBits blocks it is a bitmap. Beyond that it is a map, so that a large number announced by a peer
// does not make it large.
type idSet struct {
	bits []uint64
	ids  map[int]struct{}
}

// maxBits is the number of blocks up to which an idSet is a bitmap.
const maxBits = 1 << 22

func newIDSet(blocks int) idSet {
	if blocks > maxBits {
		return idSet{ids: make(map[int]struct{})}
	}
	return idSet{bits: make([]uint64, (blocks+63)/64)}
}

// add adds id and reports whether it was new.
func (s *idSet) add(id int) bool {
	if s.ids != nil {
		_, old := s.ids[id]
		s.ids[id] = struct{}{}
		return !old
	}
	bit := uint64(1) << (id & 63)
	old := s.bits[id>>6]&bit != 0
	s.bits[id>>6] |= bit
	return !old
}

// of returns the kept blocks of chunk i.
func (d *IDs) of(i int) []int {
	end := (i + 1) * d.g.PerChunk
	return d.ids[end-d.g.Keep : end]
}

// Whole reports whether no kept block of chunk i is the null block. The bytes of a chunk with a null block would mean nothing.
func (d *IDs) Whole(i int) bool {
	if d.null {
		for _, id := range d.of(i) {
			if id == 0 {
				return false
			}
		}
	}
	return true
}

// each copies the blocks [from, to) of ids, in one plane of one layer, into chunk, or with load out of chunk. It leaves out the first
// `skip` slots, counted from the first block of ids.
func (g *Group) each(load bool, chunk []byte, ids []int, null bool, plane, layer, from, to, skip int) {
	l := &g.Layers[layer]
	v := &l.View
	block := v.BlockBytes()
	base := (plane*len(g.Layers) + layer) * len(ids) * block
	for i := from; i < to; i++ {
		first := max(0, skip-i*v.Slots)
		if first >= v.Slots || null && ids[i] == 0 {
			continue
		}
		at := v.offset + int64(plane)*v.plane + int64(ids[i])*v.block
		v.copyBlock(load, l.Memory[at:], chunk[base+i*block:base+(i+1)*block], first)
	}
}

// copyBlock copies one block, from slot `first` on, in pieces that are contiguous both in the layer and in the chunk.
func (v *View) copyBlock(load bool, mem, chunk []byte, first int) {
	slot := v.Heads * v.Row // bytes of a slot in the chunk
	dense := v.Heads == 1 || v.head == int64(v.Row)
	switch {
	case dense && (v.slot == int64(slot) || v.Slots == 1):
		run(load, mem[first*slot:v.Slots*slot], chunk[first*slot:])
	case dense:
		for s := first; s < v.Slots; s++ {
			at := int64(s) * v.slot
			run(load, mem[at:at+int64(slot)], chunk[s*slot:(s+1)*slot])
		}
	default:
		for h := range v.Heads {
			for s := first; s < v.Slots; s++ {
				at, to := int64(h)*v.head+int64(s)*v.slot, s*slot+h*v.Row
				run(load, mem[at:at+int64(v.Row)], chunk[to:to+v.Row])
			}
		}
	}
}

func run(load bool, layer, chunk []byte) {
	if load {
		layer, chunk = chunk, layer
	}
	copy(chunk, layer)
}

// Gather copies the blocks ids of every layer into chunk, in the order that Group describes. Every id must be a block of the group.
func (g *Group) Gather(chunk []byte, ids []int) {
	for plane := range g.Layers[0].View.Planes {
		for layer := range g.Layers {
			g.each(false, chunk, ids, false, plane, layer, 0, len(ids), 0)
		}
	}
}

// Scatter copies chunk into the blocks ids of every layer. It does not write the first `skip` slots, nor the null blocks of a sparse group.
func (g *Group) Scatter(chunk []byte, ids []int, skip int) {
	for plane := range g.Layers[0].View.Planes {
		for layer := range g.Layers {
			g.each(true, chunk, ids, g.Sparse, plane, layer, 0, len(ids), skip)
		}
	}
}
