// SPDX-License-Identifier: Apache-2.0

package coordinator

import "fmt"

// StoreQuery asks which blocks of a stored prefix are worth keeping.
type StoreQuery struct {
	Tokens int // length of the prefix; a multiple of the hit alignment

	// Start leaves out the blocks that begin before this token, because they are stored already. The masks then begin at the first block
	// that is not left out.
	Start int

	// Prompt is the prompt's length. Under a retention interval StoreMask also keeps the
	// tails at which a repeat of the prompt, or a longer prompt, could resume. Prompt counts
	// only with HasPrompt.
	Prompt    int
	HasPrompt bool
}

// StoreMask appends to dst, per group, which blocks to store so that a later hit
// can use them. Windows keep the tail of each segment a hit can end on. Mamba
// groups keep none: engines hand states over by another path.
//
// Follows MooncakeStoreCoordinator.store_mask.
func (c *Coordinator) StoreMask(dst []Mask, q StoreQuery) ([]Mask, error) {
	switch {
	case !c.follows(repeatsMasks):
		return c.reachable(dst, q, true)
	case q.Start != 0 || q.HasPrompt:
		return dst, ErrRelease
	}
	if q.Tokens%c.layout.Scheduler != 0 {
		return dst, &Error{CodeUnaligned, assertion, fmt.Sprintf(
			"aligned_token_len (%d) must be a multiple of lcm_block_size (%d)", q.Tokens, c.layout.Scheduler)}
	}
	if q.Tokens < 0 || q.Tokens > maxTokens {
		return dst, lengthError(q.Tokens)
	}
	return c.repeated(dst, q.Tokens)
}

// LookupMask appends to dst, per group, the mask of the blocks of a prefix of `tokens` tokens at which a hit can end: the blocks that
// StoreMask keeps without a retention interval, and every Mamba block.
//
// Follows MooncakeStoreCoordinator.lookup_mask. VLLM023 has no lookup masks: the error is ErrRelease.
func (c *Coordinator) LookupMask(dst []Mask, tokens int) ([]Mask, error) {
	if c.follows(repeatsMasks) {
		return dst, ErrRelease
	}
	return c.reachable(dst, StoreQuery{Tokens: tokens}, false)
}

func lengthError(n int) *Error {
	if n < 0 {
		return &Error{CodeNegative, valueError, fmt.Sprintf("a negative length (%d)", n)}
	}
	return limitf("a prompt of more than %d tokens", maxTokens)
}

// reachable returns store masks (store) or lookup masks.
func (c *Coordinator) reachable(dst []Mask, q StoreQuery, store bool) ([]Mask, error) {
	if q.Tokens%c.align != 0 {
		return dst, &Error{CodeUnaligned, assertion, fmt.Sprintf(
			"aligned_token_len (%d) must be a multiple of %d", q.Tokens, c.align)}
	}
	for _, n := range [...]int{q.Tokens, q.Start, q.Prompt} {
		if n < 0 || n > maxTokens {
			return dst, lengthError(n)
		}
	}
	bounds, n := c.boundaries(q)
	if !store {
		n = 0
	}
	at := len(dst)
	dst = grow(dst, len(c.layout.Groups))
	for g := range c.layout.Groups {
		m := &dst[at+g]
		b := c.layout.Groups[g].Block
		end := q.Tokens / b
		start := min(end, ceilDiv(q.Start, b))
		switch kind := c.layout.Groups[g].Kind; {
		case kind.isWindow():
			*m = c.windowMask(g, start, end, store, bounds[:n])
		case kind == Mamba && store:
			*m = Mask{length: end - start}
		default:
			*m = allMask(end - start)
		}
	}
	return dst, nil
}

// boundaries returns, in rising order, the n lengths at which a repeat of the prompt, or a longer prompt, can resume.
func (c *Coordinator) boundaries(q StoreQuery) (at [2]int, n int) {
	if !q.HasPrompt {
		return at, 0
	}
	eagle := false
	for i := range c.sets {
		eagle = eagle || c.sets[i].eagle
	}
	if !eagle { // -1 for an empty prompt: windowMask skips it
		return [2]int{q.Prompt - 1}, 1
	}
	l := c.layout.Scheduler
	at = [2]int{max((q.Prompt-1)/l*l-l, 0), max(q.Prompt/l*l-l, 0)}
	if at[0] == at[1] {
		return at, 1
	}
	return at, 2
}

// allMask returns a mask of n blocks, all set, for which All is true.
func allMask(n int) Mask {
	return Mask{length: n, all: true, runs: [2]Run{{0, n}}}
}

// windowMask returns the mask of the blocks [start, end) of group g: the tail that a hit at the end of each segment needs. For a store mask
// (store) under a retention interval, segments have the length of that interval, and the tails at the boundaries `bounds`, in tokens, are
// set, too; a boundary below 0 is none.
func (c *Coordinator) windowMask(g, start, end int, store bool, bounds []int) Mask {
	s := &c.sets[c.bySet[g]]
	need, shift := ceilDiv(s.window-1, s.block), 0
	if !c.follows(oneTokenWindow) {
		need = max(need, 1)
	}
	if c.flagged[g] { // the tail ends one block later, because a hit drops that block
		need, shift = need+1, 1
	}
	sparse := store && c.layout.HasRetention
	segment := c.layout.Scheduler
	if sparse {
		segment = c.layout.Retention
	}
	m := Mask{length: end - start}
	if segment > 0 {
		period := segment / s.block
		if need >= period {
			return allMask(end - start)
		}
		m.phase, m.period, m.tail = start-shift, period, need
	}
	if !sparse {
		return m
	}
	for i, b := range bounds {
		if b < 0 {
			continue
		}
		e := b/c.layout.Scheduler*c.layout.Scheduler/s.block + shift
		m.runs[i] = Run{max(start, e-need) - start, max(min(end, e), start) - start}
		if m.runs[i].Start >= m.runs[i].End {
			m.runs[i] = Run{}
		}
	}
	return m
}

// repeated returns the store mask of VLLM023: the load mask of one segment, under EAGLE without its last block, repeated for each segment.
func (c *Coordinator) repeated(dst []Mask, tokens int) ([]Mask, error) {
	at := len(dst)
	if c.dense || tokens == 0 {
		dst = grow(dst, len(c.layout.Groups))
		for g := range c.layout.Groups {
			dst[at+g] = suffixMask(tokens/c.layout.Groups[g].Block, 0)
		}
		return dst, nil
	}
	var buf [stackSets]found
	sets := grow(buf[:0], len(c.sets))
	l := c.layout.Scheduler
	q := Query{Units: l / c.layout.HashUnit, MaxTokens: l}
	if _, err := c.find(sets, everything{}, q); err != nil {
		if !c.follows(raises) && refusal(err) {
			return grow(dst, len(c.layout.Groups)), nil
		}
		return dst, err
	}
	dst = grow(dst, len(c.layout.Groups))
	for g, i := range c.bySet {
		dst[at+g] = repeat(sets[i].blocks, sets[i].from, tokens/l)
	}
	return dst, nil
}

// repeat returns a mask of n blocks, set from block `from` on, repeated `times` times.
func repeat(n, from, times int) Mask {
	m := Mask{length: n * times}
	switch {
	case from <= 0:
		m.runs[0] = Run{0, m.length}
	case from < n:
		m.period, m.tail = n, n-from
	}
	return m
}
