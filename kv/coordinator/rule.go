// SPDX-License-Identifier: Apache-2.0

package coordinator

// lookup returns the longest hit of spec group i, `bound` tokens at most. The length is a multiple of align. With drop the hit loses the
// group's last block.
func (c *Coordinator) lookup(i int, p Presence, q Query, bound int, drop bool, align int) (found, error) {
	s := &c.sets[i]
	l := lookup{
		spec:   s,
		p:      p,
		series: Series{Groups: s.groups, Set: i, Units: s.units},
		units:  q.Units,
		bound:  bound,
		blocks: bound / s.block,
		usable: q.Units / s.units,
		align:  align,
		drop:   drop,
	}
	l.fine = align < s.block && s.block%align == 0
	switch {
	case s.kind.isFull():
		return l.full(), nil
	case s.kind.isWindow():
		return l.window(c.rules)
	case s.kind == ChunkedLocal:
		return l.chunked(c.rules)
	case s.kind == Mamba:
		return l.mamba()
	default:
		return found{}, ErrCross
	}
}

// lookup is one lookup in one spec group.
type lookup struct {
	spec   *specGroup
	p      Presence
	series Series
	units  int // hash units of the prompt
	bound  int // tokens
	blocks int // whole blocks within bound
	usable int // whole blocks that have a hash
	align  int // tokens
	drop   bool
	fine   bool // align is smaller than a block and divides it: hits may end inside a block
}

// full counts the present blocks from the left up to the first absent one. With partial hits it then looks inside that block.
func (l *lookup) full() found {
	b := l.spec.block
	n := l.p.Prefix(l.series, 0, min(l.blocks, l.usable))
	f := found{blocks: n, tokens: n * b}
	if l.fine {
		k := b / l.align
		lo := n * k
		if hi := min(lo+k-1, l.bound/l.align, l.units); hi > lo {
			if u := l.p.Last(l.fineSeries(), lo, hi, 1); u >= lo {
				f = found{blocks: n + 1, tokens: (u + 1) * l.align}
			}
		}
	}
	if l.drop && f.tokens > 0 {
		f.tokens -= min(l.align, b)
	}
	f.tokens -= f.tokens % l.align
	f.blocks = min(f.blocks, ceilDiv(f.tokens, b))
	return f
}

func (l *lookup) fineSeries() Series {
	s := l.series
	s.Units, s.Fine = 1, true
	return s
}

// blockAlign returns the alignment in blocks; 1 if a hit may end inside a block.
func (l *lookup) blockAlign() int { return max(l.align/l.spec.block, 1) }

// window looks from the right for as many consecutive present blocks as the window needs, or for fewer at the start of the prompt.
func (l *lookup) window(rules rule) (found, error) {
	if l.blocks > l.usable {
		return found{}, ErrIndex
	}
	b, align := l.spec.block, l.blockAlign()
	w := Window{Need: ceilDiv(l.spec.window-1, b), Align: align}
	if !rules.has(oneTokenWindow) {
		w.Need = max(w.Need, 1) // else a hit would end, after a drop, in a block that was not looked up
	}
	if l.drop {
		w.Need, w.Shift = w.Need+1, 1
	}
	w.Need = max(w.Need, 1)
	edge := l.p.Window(l.series, l.blocks, w)
	n, from := edge, max(0, edge-w.Need)
	if edge < w.Need && (rules.has(shortPromptLosesTwo) || !l.drop) {
		// The present blocks are at the start of the prompt, and fewer than the window needs. Under a drop n is aligned so that it fits
		// after the drop (Shift is 1); another cut here would lose a second segment.
		n -= n % align
	}
	if l.drop && n > 0 {
		n--
		n -= n % align
	}
	return found{blocks: n, from: min(from, n), tokens: n * b}, nil
}

// chunked needs the blocks of the attention chunk in which the hit ends. The engine never attends to blocks of earlier chunks again.
func (l *lookup) chunked(rules rule) (found, error) {
	switch b := l.spec.block; {
	case l.drop:
		return found{}, ErrChunkEagle
	case b != l.align:
		return found{}, ErrChunkAlign
	}
	b, chunk := l.spec.block, l.spec.chunk
	for bound := l.bound; ; {
		n := bound / b
		first := bound / chunk * chunk / b
		end := first
		if hi := min(n, l.usable); first < hi {
			end = l.p.Prefix(l.series, first, hi)
		}
		if first < n && n > l.usable && end >= l.usable {
			return found{}, ErrIndex
		}
		f := found{blocks: end, from: first, tokens: end * b}
		// A shorter hit may end in an earlier chunk, which was not looked up.
		if rules.has(unseenChunks) || f.tokens == bound || f.tokens/chunk*chunk/b >= first {
			return f, nil
		}
		bound = f.tokens
	}
}

// mamba needs one state: it looks for the last one that is present.
func (l *lookup) mamba() (found, error) {
	b := l.spec.block
	if l.fine {
		u := l.p.Last(l.fineSeries(), 0, min(l.bound/l.align, l.units), 1)
		if u < 0 {
			return found{}, nil
		}
		i := u / (b / l.align)
		return found{blocks: i + 1, from: i, tokens: (u + 1) * l.align}, nil
	}
	if l.blocks > l.usable {
		return found{}, ErrIndex
	}
	i := l.p.Last(l.series, 0, l.blocks, l.blockAlign())
	if i < 0 {
		return found{}, nil
	}
	return found{blocks: i + 1, from: i, tokens: (i + 1) * b}, nil
}
