// SPDX-License-Identifier: Apache-2.0

package coordinator

import (
	"fmt"
	"slices"
)

// Kind is the attention kind of a group.
type Kind uint8

// The kinds. Full to HiddenState are the kinds of full attention: they share a hit rule, and a lookup begins with them. Two groups of
// different kinds never share a spec group.
const (
	Full Kind = iota + 1
	MLA
	Sink
	RSWA
	HiddenState
	SlidingWindow
	SlidingWindowMLA
	ChunkedLocal
	Mamba
	Cross
	Circular        // scratch memory of one request, never shared
	HiSparseHot     // HiSparse's own host tier does the caching
	HiSparseSpilled // as HiSparseHot ("resident")
)

var kindNames = [...]string{
	Full: "full", MLA: "mla", Sink: "sink", RSWA: "rswa", HiddenState: "hidden",
	SlidingWindow: "swa", SlidingWindowMLA: "swamla", ChunkedLocal: "chunk", Mamba: "mamba", Cross: "cross",
	Circular: "circular", HiSparseHot: "hisparse-hot", HiSparseSpilled: "hisparse-resident",
}

// String returns the kind's name in the layout JSON.
func (k Kind) String() string {
	if int(k) < len(kindNames) && kindNames[k] != "" {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

func (k Kind) isFull() bool    { return k >= Full && k <= HiddenState }
func (k Kind) isWindow() bool  { return k == SlidingWindow || k == SlidingWindowMLA }
func (k Kind) isScratch() bool { return k >= Circular && k <= HiSparseSpilled }

// MambaMode is the cache mode of a Mamba group. Lookups are the same in all modes. Groups
// with different modes never share a spec group. Engines cache prefixes in MambaAlign only.
type MambaMode uint8

// The Mamba cache modes.
const (
	MambaAlign MambaMode = iota
	MambaNone
	MambaAll
)

var modeNames = [...]string{MambaAlign: "align", MambaNone: "none", MambaAll: "all"}

// String returns the mode's name in the layout JSON.
func (m MambaMode) String() string {
	if int(m) < len(modeNames) {
		return modeNames[m]
	}
	return fmt.Sprintf("mode %d", uint8(m))
}

// Group describes the layers that share one block table. Sizes are in tokens.
type Group struct {
	Kind   Kind
	Block  int       // tokens per block
	Heads  int       // KV heads; takes part in equality only; 0 means 1
	Window int       // SlidingWindow, SlidingWindowMLA: tokens, at least 1
	Extra  int       // SlidingWindow: tokens kept beyond the window
	Chunk  int       // ChunkedLocal: attention chunk, tokens, at least 1
	Mode   MambaMode // Mamba
	Eagle  bool      // has layers of a draft model

	// Uniform marks a wrapper of several layer specs. The other fields then
	// describe its first layer; hits depend on no other layer.
	Uniform bool

	// Variant is any other difference between two specs (head size, dtype …). It
	// takes part in equality only.
	Variant string
}

// Layout is a model's KV cache groups in the engine's order.
type Layout struct {
	Groups    []Group
	Scheduler int  // scheduler block, tokens: hits are multiples of it
	HashUnit  int  // tokens per hash
	Eagle     bool // the engine drafts with EAGLE; flags all groups if none is

	// Retention reduces the blocks of window groups that StoreMask keeps to one tail per Retention tokens; if it is 0, to the tail at the
	// prompt's end. It counts only with HasRetention.
	Retention    int
	HasRetention bool

	// Partial allows a hit to end at any hash unit, also inside a block.
	Partial bool
}

// Limits of a Layout and of the lengths in queries; beyond them New and the queries return an Error of CodeLimit. They keep every sum and
// product in this package far from overflow.
const (
	maxGroups      = 1024
	maxSize        = 1 << 31 // tokens of one block, window or chunk
	maxTokens      = 1 << 48 // tokens of one prompt
	maxVariantSize = 256     // bytes of a Variant
)

// spec is the part of a Group that decides whether two groups are equal.
type spec struct {
	kind    Kind
	block   int
	heads   int
	window  int
	extra   int
	chunk   int
	mode    MambaMode
	variant string
}

// unwrap returns the spec by which groups are compared. A sink group needs no length of its own: its sink is one block.
func (g *Group) unwrap(rules rule) spec {
	s := spec{kind: g.Kind, block: g.Block, heads: max(g.Heads, 1), variant: g.Variant}
	switch {
	case g.Kind.isWindow():
		s.window, s.extra = g.Window, g.Extra
		if !rules.has(splitsWindows) { // only the sum of window and extra matters
			s.window, s.extra = g.Window+g.Extra, 0
		}
	case g.Kind == ChunkedLocal:
		s.chunk = g.Chunk
	case g.Kind == Mamba:
		s.heads, s.mode = 0, g.Mode
	}
	return s
}

// specGroup is a set of groups with equal specs. A block of it is present if it is present for every member.
type specGroup struct {
	spec
	groups []int // members, rising
	eagle  bool  // any member is flagged
	units  int   // hash units per block
}

// fold joins groups of equal specs. Full attention comes first; otherwise the order is that of the first members.
func fold(l *Layout, rules rule) []specGroup {
	var out []specGroup
	for i := range l.Groups {
		g := &l.Groups[i]
		if g.Kind.isScratch() {
			continue
		}
		s := g.unwrap(rules)
		at := slices.IndexFunc(out, func(x specGroup) bool { return x.spec == s })
		if at < 0 {
			out = append(out, specGroup{spec: s, units: s.block / l.HashUnit})
			at = len(out) - 1
		}
		out[at].groups = append(out[at].groups, i)
		out[at].eagle = out[at].eagle || g.Eagle
	}
	slices.SortStableFunc(out, func(a, b specGroup) int {
		return rank(a.kind) - rank(b.kind)
	})
	if l.Eagle && !slices.ContainsFunc(out, func(s specGroup) bool { return s.eagle }) {
		for i := range out {
			out[i].eagle = true
		}
	}
	return out
}

func rank(k Kind) int {
	if k.isFull() {
		return 0
	}
	return 1
}
