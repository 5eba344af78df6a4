// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"errors"
	"fmt"
	"math"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/paged"
)

// ErrPaged means that the fields of a Paged, or block ids for it, do not fit together.
var ErrPaged = errors.New("connector: bad paged KV")

// Paged is an engine's KV cache in host memory: one buffer per layer, divided into blocks. The engine owns the buffers. A transfer reads or
// writes the blocks of its operation, and no others, until it ends.
type Paged struct {
	Form        paged.Form
	Layers      [][]byte
	Blocks      int
	BlockTokens int
	Heads       int // KV heads of this worker
	HeadSize    int
	DType       string // torch name
}

// Layout returns the layout of a chunk of chunkTokens tokens. It checks that the fields of p fit together and returns ErrPaged or
// kv.ErrLayout if not.
func (p *Paged) Layout(chunkTokens int) (kv.Layout, error) {
	l := kv.Layout{Layers: len(p.Layers), Slots: chunkTokens, Hidden: p.Heads * p.HeadSize, DType: p.DType}
	if chunkTokens < 1 || p.BlockTokens < 1 || chunkTokens%p.BlockTokens != 0 {
		return l, fmt.Errorf("%w: a chunk of %d tokens is not made of blocks of %d", ErrPaged, chunkTokens, p.BlockTokens)
	}
	view, size, err := p.view()
	if err != nil {
		return l, fmt.Errorf("%w: %w", ErrPaged, err)
	}
	for i, b := range p.Layers {
		if int64(len(b)) != size {
			return l, fmt.Errorf("%w: layer %d has %d bytes, %d blocks take %d", ErrPaged, i, len(b), p.Blocks, size)
		}
	}
	l.SinglePlane = view.Planes == 1
	_, err = l.Bytes()
	return l, err
}

// view returns the geometry of a layer, and its length in bytes.
func (p *Paged) view() (paged.View, int64, error) {
	size := kv.DTypeBytes(p.DType)
	if size > 0 && p.HeadSize > math.MaxInt/size {
		size = 0
	}
	return paged.Dense(p.Form, p.Blocks, p.BlockTokens, p.Heads, p.HeadSize*size)
}

// CheckIDs returns ErrPaged if an id is not a block of p.
func (p *Paged) CheckIDs(ids []int) error {
	for _, id := range ids {
		if id < 0 || id >= p.Blocks {
			return fmt.Errorf("%w: block id %d is outside 0 to %d", ErrPaged, id, p.Blocks-1)
		}
	}
	return nil
}

// group returns the layers as a paged.Group. p must have passed Layout.
func (p *Paged) group() *paged.Group {
	view, _, err := p.view()
	if err != nil {
		panic("BUG: connector: " + err.Error())
	}
	g := &paged.Group{Layers: make([]paged.Layer, len(p.Layers))}
	for i, b := range p.Layers {
		g.Layers[i] = paged.Layer{Memory: b, View: view}
	}
	return g
}

// Gather copies the blocks ids into chunk, which must have the layout that Layout returns for their number of tokens. The ids must have
// passed CheckIDs.
func (p *Paged) Gather(ids []int, chunk []byte) { p.group().Gather(chunk, ids) }

// Scatter copies chunk into the blocks ids. It does not overwrite the first skipTokens tokens.
func (p *Paged) Scatter(ids []int, chunk []byte, skipTokens int) {
	p.group().Scatter(chunk, ids, skipTokens)
}
