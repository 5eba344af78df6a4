package worker

import (
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/kv"
)

// Form is the order of a paged layer's dimensions.
type Form uint8

// The forms, row-major. Tokens of a block follow each other (NHD).
const (
	PlanesFirst Form = iota // [2, blocks, blockTokens, heads, headSize]: all K, then all V
	BlocksFirst             // [blocks, 2, blockTokens, heads, headSize]: K and V of each block
	SinglePlane             // [blocks, blockTokens, heads, headSize]: MLA, or K and V fused in a head
)

// ErrPaged means that a Paged, or block ids for it, do not fit together.
var ErrPaged = errors.New("worker: bad paged KV")

// Paged is an engine's KV cache in host memory: one buffer per layer, paged by
// block id. The engine owns the buffers; a transfer reads or writes the blocks of
// its operation until it ends, and no others.
type Paged struct {
	Form        Form
	Layers      [][]byte
	Blocks      int
	BlockTokens int
	Heads       int // KV heads of this worker
	HeadSize    int
	DType       string // torch name
}

// Layout returns the layout of a chunk of chunkTokens tokens, after checking p.
func (p *Paged) Layout(chunkTokens int) (kv.Layout, error) {
	const limit = 1 << 40
	l := kv.Layout{SinglePlane: p.Form == SinglePlane, Layers: len(p.Layers), Slots: chunkTokens, Hidden: p.Heads * p.HeadSize, DType: p.DType}
	if p.Form > SinglePlane || p.Blocks < 1 || p.BlockTokens < 1 || p.Heads < 1 || p.HeadSize < 1 || p.Heads > limit/p.HeadSize {
		return l, fmt.Errorf("%w: form %d, %d blocks of %d tokens, %d heads of %d", ErrPaged, p.Form, p.Blocks, p.BlockTokens, p.Heads, p.HeadSize)
	}
	if chunkTokens < 1 || chunkTokens%p.BlockTokens != 0 {
		return l, fmt.Errorf("%w: a chunk of %d tokens is not made of blocks of %d", ErrPaged, chunkTokens, p.BlockTokens)
	}
	if _, err := l.Bytes(); err != nil {
		return l, err
	}
	block := int64(p.blockBytes()) // below a chunk's limit
	if int64(p.Blocks) > limit/block {
		return l, fmt.Errorf("%w: %d blocks", ErrPaged, p.Blocks)
	}
	for i, b := range p.Layers {
		if want := block * int64(p.Blocks) * int64(p.planes()); int64(len(b)) != want {
			return l, fmt.Errorf("%w: layer %d has %d bytes, %d blocks take %d", ErrPaged, i, len(b), p.Blocks, want)
		}
	}
	return l, nil
}

func (p *Paged) planes() int {
	if p.Form == SinglePlane {
		return 1
	}
	return 2
}

func (p *Paged) tokenBytes() int { return p.Heads * p.HeadSize * kv.DTypeBytes(p.DType) }
func (p *Paged) blockBytes() int { return p.BlockTokens * p.tokenBytes() }

// CheckIDs reports ids that are no blocks of p.
func (p *Paged) CheckIDs(ids []int) error {
	for _, id := range ids {
		if id < 0 || id >= p.Blocks {
			return fmt.Errorf("%w: block %d of %d", ErrPaged, id, p.Blocks)
		}
	}
	return nil
}

// Gather copies the blocks ids into chunk, whose layout is Layout's for as many
// tokens. The ids passed CheckIDs.
func (p *Paged) Gather(ids []int, chunk []byte) {
	p.each(ids, func(block, part []byte) { copy(part, block) }, chunk, 0)
}

// Scatter copies chunk into the blocks ids but for the first skipTokens tokens,
// which stay as they are.
func (p *Paged) Scatter(ids []int, chunk []byte, skipTokens int) {
	p.each(ids, func(block, part []byte) { copy(block, part) }, chunk, skipTokens)
}

// each calls f with every run of tokens of one block, plane and layer, and its
// place in chunk, from token skip on.
func (p *Paged) each(ids []int, f func(block, part []byte), chunk []byte, skip int) {
	size, token := p.blockBytes(), p.tokenBytes()
	for plane := range p.planes() {
		for layer, buf := range p.Layers {
			at := (plane*len(p.Layers) + layer) * len(ids) * size
			for i, id := range ids {
				from := max(0, skip-i*p.BlockTokens) * token
				if from >= size {
					continue
				}
				b := p.block(buf, plane, id)
				part := chunk[at+i*size : at+(i+1)*size]
				f(b[from:], part[from:])
			}
		}
	}
}

// block returns the bytes of one block of one plane.
func (p *Paged) block(layer []byte, plane, id int) []byte {
	n := id
	switch p.Form {
	case PlanesFirst:
		n = plane*p.Blocks + id
	case BlocksFirst:
		n = 2*id + plane
	}
	size := p.blockBytes()
	return layer[n*size : (n+1)*size : (n+1)*size]
}
