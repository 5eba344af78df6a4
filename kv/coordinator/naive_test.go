// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"slices"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// naive decides hits as the protocol document describes: it walks over lists of bools, block by
// block. It is slow, and so simple that an error in it is unlikely.
type naive struct {
	l       coordinator.Layout
	release coordinator.Release
	has     func(group, unit int) bool
	units   int
	sets    []naiveSet
}

type naiveSet struct {
	g      coordinator.Group
	groups []int
	eagle  bool
}

type naiveHit struct {
	list   []bool
	tokens int
	known  bool
}

func isFull(k coordinator.Kind) bool {
	return k == coordinator.Full || k == coordinator.MLA || k == coordinator.Sink
}

func isWindow(k coordinator.Kind) bool {
	return k == coordinator.SlidingWindow || k == coordinator.SlidingWindowMLA
}

func newNaive(l coordinator.Layout, d coordinator.Release, units int, has func(g, u int) bool) *naive {
	n := &naive{l: l, release: d, has: has, units: units}
	var full, other []naiveSet
	for i, g := range l.Groups {
		eagle := g.Eagle
		g.Eagle, g.Uniform, g.Heads = false, false, max(g.Heads, 1)
		if d != coordinator.VLLM023 {
			g.Window, g.Extra = g.Window+g.Extra, 0
		}
		list := &other
		if isFull(g.Kind) {
			list = &full
		}
		at := slices.IndexFunc(*list, func(s naiveSet) bool { return s.g == g })
		if at < 0 {
			*list = append(*list, naiveSet{g: g})
			at = len(*list) - 1
		}
		s := &(*list)[at]
		s.groups = append(s.groups, i)
		s.eagle = s.eagle || eagle
	}
	n.sets = append(full, other...)
	any := slices.ContainsFunc(n.sets, func(s naiveSet) bool { return s.eagle })
	for i := range n.sets {
		n.sets[i].eagle = n.sets[i].eagle || l.Eagle && !any
	}
	return n
}

func (n *naive) unit(s *naiveSet, u int) bool {
	for _, g := range s.groups {
		if !n.has(g, u) {
			return false
		}
	}
	return true
}

func (n *naive) block(s *naiveSet, i int) bool {
	return n.unit(s, (i+1)*(s.g.Block/n.l.HashUnit)-1)
}

func (n *naive) rule(s *naiveSet, max int, drop bool, align int) naiveHit {
	b := s.g.Block
	fine := n.release != coordinator.VLLM023 && align < b
	switch {
	case isFull(s.g.Kind):
		return n.full(s, max, drop, fine, align)
	case isWindow(s.g.Kind):
		return n.window(s, max, drop, align)
	case fine:
		for u := min(max/align, n.units) - 1; u >= 0; u-- {
			if n.unit(s, u) {
				return naiveHit{list: append(make([]bool, u*align/b), true), tokens: (u + 1) * align}
			}
		}
	default:
		for i := max/b - 1; i >= 0; i-- {
			if n.block(s, i) && (i+1)*b%align == 0 {
				return naiveHit{list: append(make([]bool, i), true), tokens: (i + 1) * b}
			}
		}
	}
	return naiveHit{}
}

func (n *naive) full(s *naiveSet, max int, drop, fine bool, align int) naiveHit {
	b := s.g.Block
	var h naiveHit
	for i := 0; i < min(max/b, n.units*n.l.HashUnit/b) && n.block(s, i); i++ {
		h.list = append(h.list, true)
	}
	h.tokens = len(h.list) * b
	if fine {
		first := len(h.list) * (b / align)
		for u := min(first+b/align-1, max/align, n.units) - 1; u >= first; u-- {
			if n.unit(s, u) {
				h.list, h.tokens = append(h.list, true), (u+1)*align
				break
			}
		}
	}
	if drop && h.tokens > 0 {
		h.tokens -= min(align, b)
	}
	h.tokens -= h.tokens % align
	h.list = h.list[:min(len(h.list), (h.tokens+b-1)/b)]
	return h
}

func (n *naive) window(s *naiveSet, max int, drop bool, align int) naiveHit {
	b := s.g.Block
	shift := 0
	if drop {
		shift = 1
	}
	need := (s.g.Window-1+b-1)/b + shift
	list := make([]bool, max/b)
	run, match := 0, false
	for i := len(list) - 1; i >= 0 && !match; i-- {
		switch {
		case !n.block(s, i):
			run = 0
		case run == 0 && (i+1-shift)*b%align != 0:
		default:
			list[i] = true
			if run++; run >= need {
				list, match = list[:i+run], true
			}
		}
	}
	pop := func() {
		for len(list)*b%align != 0 {
			list = list[:len(list)-1]
		}
	}
	if !match {
		list = list[:run]
		pop()
	}
	if drop && len(list) > 0 {
		list = list[:len(list)-1]
		pop()
	}
	return naiveHit{list: list, tokens: len(list) * b}
}

// find returns the hit and a list per group. It does not know chunked and cross
// groups.
func (n *naive) find(maxTokens int, eagle bool) (int, [][]bool) {
	current := n.release != coordinator.VLLM023
	align := n.l.Scheduler
	if current && n.l.Partial {
		align = n.l.HashUnit
	}
	got := make([]naiveHit, len(n.sets))
	hit := maxTokens
	if len(n.sets) == 1 {
		if !current {
			align = n.sets[0].g.Block
		}
		got[0] = n.rule(&n.sets[0], maxTokens, eagle && n.sets[0].eagle, align)
		return got[0].tokens, n.lists(got)
	}
	verified := map[int]bool{}
	for {
		cur := hit
		for k := range n.sets {
			s := &n.sets[k]
			if isFull(s.g.Kind) && got[k].known {
				if current {
					cur = min(cur, got[k].tokens)
				} else {
					cur -= cur % s.g.Block
				}
				continue
			}
			drop := eagle && s.eagle && !verified[k]
			bound := cur
			switch {
			case drop && !current:
				bound = min(cur+s.g.Block, maxTokens)
			case drop && s.g.Kind != coordinator.Mamba:
				margin := s.g.Block
				if n.l.Partial && isFull(s.g.Kind) {
					margin = n.l.HashUnit
				}
				bound = min(cur+margin, n.units*n.l.HashUnit)
			}
			got[k] = n.rule(s, bound, drop, align)
			got[k].known = true
			if drop {
				verified[k] = true
			} else if got[k].tokens < cur {
				clear(verified)
			}
			cur = got[k].tokens
		}
		if cur >= hit {
			break
		}
		hit = cur
		if len(n.sets) == 2 && isFull(n.sets[0].g.Kind) {
			break
		}
	}
	for k, s := range n.sets {
		if isFull(s.g.Kind) && (current || k == 0) {
			got[k].list = got[k].list[:min(len(got[k].list), (hit+s.g.Block-1)/s.g.Block)]
		}
	}
	return hit, n.lists(got)
}

func (n *naive) lists(got []naiveHit) [][]bool {
	out := make([][]bool, len(n.l.Groups))
	for k, s := range n.sets {
		for _, g := range s.groups {
			out[g] = got[k].list
		}
	}
	return out
}

// canEnd reports whether a group can continue after so many tokens. It looks at the blocks
// that attention reads there, and uses no search.
func (n *naive) canEnd(g, tokens int) bool {
	s := &naiveSet{g: n.l.Groups[g], groups: []int{g}}
	b := s.g.Block
	lo, hi := 0, tokens/b
	switch {
	case tokens == 0:
		return true
	case isWindow(s.g.Kind):
		w := s.g.Window + s.g.Extra
		lo = max(0, hi-max((w-1+b-1)/b, 1))
	case s.g.Kind == coordinator.Mamba:
		lo = hi - 1
	case s.g.Kind == coordinator.ChunkedLocal:
		lo = tokens / s.g.Chunk * s.g.Chunk / b
	}
	for i := lo; i < hi; i++ {
		if !n.block(s, i) {
			return false
		}
	}
	return true
}
