// SPDX-License-Identifier: Apache-2.0

// Package kvmem is the KV memory of a simulated engine: real bytes in the layout of a real engine, whose values follow from the tokens.
//
// The KV of a token is a function of all tokens up to it, of the layer and of the KV head. So the tokens determine every byte of a
// block, wherever the block came from, and Check finds a wrong byte in any layer, head or token.
package kvmem

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Geometry is the layout of an engine's KV cache.
type Geometry struct {
	Layers      int
	Heads       int // KV heads of the model, over all ranks
	HeadBytes   int // bytes of K and V of one head and token: a multiple of 8
	BlockTokens int
	Blocks      int // number of blocks, block 0 included
	TPSize      int // number of ranks, each with Heads/TPSize heads; with MLA, each with the only KV

	Layout Layout // default Fused

	// Groups are the KV cache groups; default one of attention. Each group has Layers layers. Layer i of every group lies in the same
	// memory: a block belongs to one group at a time.
	Groups []Group
}

// Group is one KV cache group.
type Group struct {
	State bool // recurrent: a block holds the state after its last token, not the KV of its tokens
}

func (g *Geometry) state(group int) bool { return group < len(g.Groups) && g.Groups[group].State }

// ErrGeometry means that the sizes of a Geometry do not fit each other.
var ErrGeometry = errors.New("kvmem: geometry")

// Validate returns everything that is wrong with g.
func (g *Geometry) Validate() error {
	var errs []error
	f := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("%w: %s", ErrGeometry, fmt.Sprintf(format, args...)))
		}
	}
	f(g.Layers >= 1 && g.Layers <= 1024, "%d layers; 1 to 1024 are possible", g.Layers)
	f(g.Heads >= 1 && g.Heads <= 1024, "%d KV heads; 1 to 1024 are possible", g.Heads)
	f(g.HeadBytes >= 8 && g.HeadBytes <= 1<<16 && g.HeadBytes%8 == 0, "%d bytes per head and token; a multiple of 8 to 64 KiB", g.HeadBytes)
	f(g.BlockTokens >= 1 && g.BlockTokens <= 1<<12, "blocks of %d tokens; 1 to 4096 are possible", g.BlockTokens)
	f(g.Blocks >= 2 && g.Blocks <= 1<<26, "%d blocks; 2 to 2^26 are possible", g.Blocks)
	f(len(g.Groups) <= 64, "%d groups; 64 at most are possible", len(g.Groups))
	if g.Layout == MLA {
		f(g.TPSize >= 1 && g.TPSize <= 1024, "%d ranks; 1 to 1024 are possible", g.TPSize)
		f(g.Heads == 1, "%d KV heads with layout mla, which has one", g.Heads)
	} else {
		f(g.TPSize >= 1 && g.Heads%max(g.TPSize, 1) == 0, "%d KV heads on %d ranks: the ranks must divide the KV heads", g.Heads, g.TPSize)
	}
	f(g.Layout.Planes() == 1 || g.HeadBytes%16 == 0, "%d bytes per head and token; a multiple of 16 with layout %s", g.HeadBytes, g.Layout)
	for _, group := range g.Groups {
		f(!group.State || g.Layout == Fused, "recurrent states need layout %s", Fused)
	}
	if len(errs) == 0 {
		f(g.LayerBytes() <= 1<<40/int64(g.Layers*g.TPSize), "%d bytes of KV; 2^40 at most are possible", g.LayerBytes()*int64(g.Layers*g.TPSize))
	}
	return errors.Join(errs...)
}

// RankHeads returns the number of KV heads of one rank.
func (g *Geometry) RankHeads() int {
	if g.Layout == MLA {
		return g.Heads
	}
	return g.Heads / g.TPSize
}

// BlockBytes returns the size in bytes of a block in one layer of one rank.
func (g *Geometry) BlockBytes() int { return g.RankHeads() * g.BlockTokens * g.HeadBytes }

// LayerBytes returns the size in bytes of one layer of one rank.
func (g *Geometry) LayerBytes() int64 { return int64(g.Blocks) * int64(g.BlockBytes()) }

// TokenBytes returns the size in bytes of the KV of one token in one group, over all layers and ranks.
func (g *Geometry) TokenBytes() int { return g.Layers * g.TPSize * g.RankHeads() * g.HeadBytes }

// Memory is the KV memory of all ranks of an engine. A layer of a rank lies in memory without gaps, in the order that Layout says.
// Concurrent calls must touch different blocks.
type Memory struct {
	Geometry
	ranks [][][]byte // by rank and layer
}

// New creates the memory. alloc returns the bytes of one layer of one rank, which must be zero.
func New(g Geometry, alloc func(rank, layer int, bytes int64) ([]byte, error)) (*Memory, error) {
	if err := g.Validate(); err != nil {
		return nil, err
	}
	m := &Memory{Geometry: g, ranks: make([][][]byte, g.TPSize)}
	for rank := range m.ranks {
		for layer := range g.Layers {
			b, err := alloc(rank, layer, g.LayerBytes())
			if err != nil {
				return nil, err
			}
			m.ranks[rank] = append(m.ranks[rank], b)
		}
	}
	return m, nil
}

// RankLayers returns the memory of each layer of a rank.
func (m *Memory) RankLayers(rank int) [][]byte { return m.ranks[rank] }

// Chain determines the KV of a request's tokens: it has one state per token, which depends on all tokens up to that one.
type Chain []uint64

// Append returns the chain extended by tokens.
func (c Chain) Append(tokens ...uint32) Chain {
	last := uint64(0)
	if len(c) > 0 {
		last = c[len(c)-1]
	}
	for _, t := range tokens {
		last = mix(last + uint64(t)*0x9E3779B97F4A7C15 + 1)
		c = append(c, last)
	}
	return c
}

// mix is the finalizer of splitmix64. Source: Steele, Lea and Flood, Fast Splittable
// Pseudorandom Number Generators, 2014.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

func seed(state uint64, layer, head int) uint64 {
	return mix(state ^ uint64(layer)<<32 ^ uint64(head)<<48)
}

// WrongBytesError says where KV differs from what its tokens determine.
type WrongBytesError struct {
	Token, Group, Layer, Head, Rank int
	Block                           int32
}

func (e *WrongBytesError) Error() string {
	return fmt.Sprintf("kvmem: wrong bytes: token %d, group %d, layer %d, KV head %d (rank %d), block %d", e.Token, e.Group, e.Layer, e.Head, e.Rank, e.Block)
}

// piece is how many bytes Write and Check handle at a time. Both work on a copy, because the race detector then sees one access to the
// memory per piece, and not one per word.
const piece = 512

// fill writes into b the bytes that follow from the seed s; len(b) must be a multiple of 8.
//
//go:norace
func fill(b []byte, s uint64) {
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], mix(s+uint64(i)))
	}
}

// filled reports whether b has the bytes that fill would write.
//
//go:norace
func filled(b []byte, s uint64) bool {
	for i := 0; i < len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) != mix(s+uint64(i)) {
			return false
		}
	}
	return true
}

// Write writes the KV of a request's tokens [from, to) into the blocks of its tables, one table per group.
func (m *Memory) Write(tables [][]int32, c Chain, from, to int) {
	for g, table := range tables {
		m.each(g, table, c, from, to, func(b []byte, s uint64, _ place) bool {
			var p [piece]byte
			for i := 0; i < len(b); i += piece {
				n := min(piece, len(b)-i)
				fill(p[:n], s+uint64(i))
				copy(b[i:], p[:n])
			}
			return true
		})
	}
}

// Check compares the blocks of the tables with the KV of the tokens [from, to), and returns a *WrongBytesError if they differ. Tokens
// in block 0 have no KV and are not compared.
func (m *Memory) Check(tables [][]int32, c Chain, from, to int) error {
	var wrong error
	for g, table := range tables {
		m.each(g, table, c, from, to, func(b []byte, s uint64, at place) bool {
			var p [piece]byte
			for i := 0; i < len(b); i += piece {
				n := copy(p[:], b[i:])
				if !filled(p[:n], s+uint64(i)) {
					wrong = &WrongBytesError{at.token, g, at.layer, at.head, at.rank, table[at.token/m.BlockTokens]}
					return false
				}
			}
			return true
		})
		if wrong != nil {
			break
		}
	}
	return wrong
}

// place says to which token, rank, layer and head some bytes of KV belong.
type place struct{ token, rank, layer, head int }

// each calls f with the bytes of each token, layer and head of a group, one plane after the other, and with the seed from which their
// content follows, until f returns false. A recurrent state belongs to the last token of its block, and fills the block. each reads
// only the geometry, which never changes, so the race detector ignores it.
//
//go:norace
func (m *Memory) each(g int, table []int32, c Chain, from, to int, f func(b []byte, s uint64, at place) bool) {
	heads, n := m.RankHeads(), int64(m.Row())
	state := m.state(g)
	for t := from; t < to; t++ {
		block, slot := table[t/m.BlockTokens], t%m.BlockTokens
		if block == 0 || state && slot != m.BlockTokens-1 && t != to-1 {
			continue
		}
		if state {
			slot, n = 0, int64(m.BlockTokens*m.HeadBytes)
		}
		for rank, layers := range m.ranks {
			first := rank * heads // index, among the model's heads, of the rank's first head
			if m.Layout == MLA {
				first = 0
			}
			for layer, mem := range layers {
				for h := range heads {
					follows := seed(c[t], g*m.Layers+layer, first+h)
					for plane := range m.Layout.Planes() {
						at := m.at(plane, int(block), h, slot)
						if !f(mem[at:at+n:at+n], follows+uint64(plane*m.Row()), place{t, rank, layer, first + h}) {
							return
						}
					}
				}
			}
		}
	}
}
