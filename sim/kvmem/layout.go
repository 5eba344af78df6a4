// SPDX-License-Identifier: Apache-2.0

package kvmem

import (
	"fmt"
	"strings"

	"github.com/kvasir-kv/kvasir/kv/paged"
)

// Layout is the order in which the KV of a layer lies in memory.
type Layout uint8

// The layouts, under the names of vLLM's backends.
const (
	Fused      Layout = iota // [blocks, heads, tokens, K and V]
	NHD                      // [2, blocks, tokens, heads, size]: all K, then all V
	HND                      // [2, blocks, heads, tokens, size]
	FlashInfer               // [blocks, 2, tokens, heads, size]
	MLA                      // [blocks, tokens, size]: one KV for all heads, the same on every rank
)

var layoutNames = []string{"fused", "nhd", "hnd", "flashinfer", "mla"}

func (l Layout) String() string { return layoutNames[l] }

// ParseLayout returns the layout of that name.
func ParseLayout(name string) (Layout, error) {
	for i, known := range layoutNames {
		if name == known {
			return Layout(i), nil
		}
	}
	return 0, fmt.Errorf("%w: layout %.64q: one of %s", ErrGeometry, name, strings.Join(layoutNames, ", "))
}

// Form returns the layout under the name that package paged has for it.
func (l Layout) Form() paged.Form {
	return []paged.Form{Fused: paged.FusedHND, NHD: paged.PlanesNHD, HND: paged.PlanesHND, FlashInfer: paged.BlocksNHD, MLA: paged.MLA}[l]
}

// Planes returns into how many pieces the K and V of a head and token are divided.
func (l Layout) Planes() int {
	if l == Fused || l == MLA {
		return 1
	}
	return 2
}

// Split reports whether all K lie before all V, so that a block consists of two pieces of memory.
func (l Layout) Split() bool { return l == NHD || l == HND }

// Row returns the size in bytes of one head and token in one plane.
func (g *Geometry) Row() int { return g.HeadBytes / g.Layout.Planes() }

// Shape returns the dimensions of a rank's layer in the order in which they lie in memory; the last one is in bytes.
func (g *Geometry) Shape() []int {
	blocks, tokens, heads, row := g.Blocks, g.BlockTokens, g.RankHeads(), g.Row()
	switch g.Layout {
	case NHD:
		return []int{2, blocks, tokens, heads, row}
	case HND:
		return []int{2, blocks, heads, tokens, row}
	case FlashInfer:
		return []int{blocks, 2, tokens, heads, row}
	case MLA:
		return []int{blocks, tokens, row}
	}
	return []int{blocks, heads, tokens, row}
}

// at returns the offset, in a layer, of one plane of a head and token.
//
//go:norace
func (g *Geometry) at(plane, block, head, slot int) int64 {
	size := int64(g.BlockBytes())
	inner := head*g.BlockTokens + slot
	if g.Layout == NHD || g.Layout == FlashInfer {
		inner = slot*g.RankHeads() + head
	}
	at := int64(inner * g.Row())
	switch half := size / 2; {
	case g.Layout.Split():
		return int64(plane*g.Blocks)*half + int64(block)*half + at
	case g.Layout == FlashInfer:
		return int64(block)*size + int64(plane)*half + at
	}
	return int64(block)*size + at
}

// BlockParts appends to parts the pieces of memory of a block in one layer.
func (g *Geometry) BlockParts(parts [][]byte, layer []byte, block int) [][]byte {
	n := int64(g.BlockBytes())
	if !g.Layout.Split() {
		at := int64(block) * n
		return append(parts, layer[at:at+n:at+n])
	}
	n /= 2
	for plane := range 2 {
		at := g.at(plane, block, 0, 0)
		parts = append(parts, layer[at:at+n:at+n])
	}
	return parts
}
