// SPDX-License-Identifier: Apache-2.0

package coordinator

import "errors"

// Query asks for the longest hit of one prompt.
type Query struct {
	Units     int // hash units of the prompt
	MaxTokens int // longest hit allowed; callers leave one token for the engine to compute

	// NoEagle keeps the last block in groups flagged for EAGLE. Otherwise a hit in these groups loses its last block, so that the drafter
	// computes it again.
	NoEagle bool
}

// Result is the result of Hit. A caller that uses a Result again saves the allocation of its slice.
type Result struct {
	Tokens int

	// Masks has one mask per group, in the layout's order. The blocks that are set must be loaded. The hit does not need an unset block
	// before a set one. Lengths may differ.
	Masks []Mask

	// Reason says why the hit is empty when the layout's attention kinds cannot be cached
	// together. With a published Release Hit returns it as an error instead.
	Reason error
}

// found is the result of the last lookup in one spec group.
type found struct {
	blocks   int // length of the block list
	from     int // its first block that is not null
	tokens   int
	done     bool // looked up at least once
	verified bool // its EAGLE drop was made, and no lookup without a drop has shortened the hit since
}

// Hit finds the longest prefix that every group can continue from, at most
// q.MaxTokens long, and writes it to r. On an error r is an empty hit.
//
// Follows MooncakeStoreCoordinator.find_longest_cache_hit.
func (c *Coordinator) Hit(r *Result, p Presence, q Query) error {
	r.Tokens, r.Reason = 0, nil
	r.Masks = grow(r.Masks[:0], len(c.layout.Groups))
	if err := c.checkQuery(q); err != nil {
		return err
	}
	var buf [stackSets]found
	sets := grow(buf[:0], len(c.sets))
	tokens, err := c.find(sets, p, q)
	if err == nil && !c.follows(masksOfLastPass) {
		// The last pass may have left a block list that does not end where the hit ends.
		_, err = c.find(sets, everything{}, Query{Units: q.Units, MaxTokens: tokens, NoEagle: true})
	}
	if err != nil {
		if !c.follows(raises) && refusal(err) {
			r.Reason = err
			return nil
		}
		return err
	}
	r.Tokens = tokens
	c.writeMasks(r.Masks, sets)
	return nil
}

// LoadMask appends to dst, per group, the mask of the blocks that a load of a hit of `tokens` tokens moves. The masks depend on the length
// alone. tokens must be a length that Hit returned, so LoadMask does not drop EAGLE blocks again. The prompt's hash units must cover it.
func (c *Coordinator) LoadMask(dst []Mask, units, tokens int) ([]Mask, error) {
	q := Query{Units: units, MaxTokens: tokens, NoEagle: true}
	if err := c.checkQuery(q); err != nil {
		return dst, err
	}
	var buf [stackSets]found
	sets := grow(buf[:0], len(c.sets))
	if _, err := c.find(sets, everything{}, q); err != nil {
		if !c.follows(raises) && refusal(err) {
			return grow(dst, len(c.layout.Groups)), nil
		}
		return dst, err
	}
	n := len(dst)
	dst = grow(dst, len(c.layout.Groups))
	c.writeMasks(dst[n:], sets)
	return dst, nil
}

// stackSets is how many spec groups a lookup handles without an allocation on the heap; no known model has as many.
const stackSets = 16

// grow appends n zero values.
func grow[T any](s []T, n int) []T {
	for range n {
		var zero T
		s = append(s, zero)
	}
	return s
}

func refusal(err error) bool {
	return errors.Is(err, ErrCross) || errors.Is(err, ErrChunkEagle) || errors.Is(err, ErrChunkAlign)
}

func (c *Coordinator) checkQuery(q Query) error {
	switch {
	case q.Units < 0:
		return &Error{CodeNegative, valueError, "a negative number of hash units"}
	case q.MaxTokens < 0:
		return &Error{CodeNegative, valueError, "a negative length"}
	case q.MaxTokens > maxTokens || q.Units > maxTokens/c.layout.HashUnit:
		return limitf("a prompt of more than %d tokens", maxTokens)
	}
	return nil
}

func (c *Coordinator) writeMasks(masks []Mask, sets []found) {
	for g, i := range c.bySet {
		if i >= 0 {
			masks[g] = suffixMask(sets[i].blocks, sets[i].from)
		}
	}
}

// find repeats passes over the spec groups until the hit stays the same, and returns its length in tokens.
func (c *Coordinator) find(sets []found, p Presence, q Query) (int, error) {
	clear(sets)
	switch len(c.sets) {
	case 0:
		if c.follows(emptyLayoutHits) {
			return q.MaxTokens, nil
		}
		return 0, nil
	case 1:
		align := c.align
		if c.follows(ignoresScheduler) {
			align = c.sets[0].block
		}
		drop := !q.NoEagle && c.sets[0].eagle
		f, err := c.lookup(0, p, q, q.MaxTokens, drop, align)
		sets[0] = f
		return f.tokens, err
	}
	hit := q.MaxTokens
	for {
		cur, err := c.pass(sets, p, q, hit)
		if err != nil {
			return 0, err
		}
		if cur >= hit {
			break
		}
		hit = cur
		if c.simple {
			break
		}
	}
	for i := range sets {
		if s := &c.sets[i]; s.kind.isFull() && (i == 0 || !c.follows(longSecondFull)) {
			sets[i].blocks = min(sets[i].blocks, ceilDiv(hit, s.block))
		}
	}
	return hit, nil
}

// pass looks up each spec group once, each bounded by the hit of the groups before it, and
// returns the hit that remains, in tokens.
func (c *Coordinator) pass(sets []found, p Presence, q Query, hit int) (int, error) {
	cur := hit
	for i := range c.sets {
		s := &c.sets[i]
		if s.kind.isFull() && sets[i].done { // full attention: every shorter prefix is a hit of this group, too
			if c.follows(longSecondFull) {
				cur = cur / s.block * s.block
			} else {
				cur = min(cur, sets[i].tokens)
			}
			continue
		}
		drop := !q.NoEagle && s.eagle && !sets[i].verified
		// Without the rule verifiedOnce each pass checks the extra block again: the block after the hit is always present.
		verified := c.follows(verifiedOnce) && (sets[i].verified || drop)
		bound := cur
		if drop {
			bound = c.lookAhead(s, q, cur)
		}
		f, err := c.lookup(i, p, q, bound, drop, c.align)
		if err != nil {
			return 0, err
		}
		sets[i] = f
		sets[i].done, sets[i].verified = true, verified
		if !drop && f.tokens < cur {
			for j := range sets {
				sets[j].verified = false
			}
		}
		cur = f.tokens
	}
	return cur, nil
}

// lookAhead returns the bound, in tokens, for a lookup in a group that drops its last block afterwards. `cur` is the bound of the hit
// itself, in tokens.
func (c *Coordinator) lookAhead(s *specGroup, q Query, cur int) int {
	if c.follows(looksAheadInRequest) {
		return min(cur+s.block, q.MaxTokens)
	}
	if s.kind == Mamba { // Mamba drops no block, so with a larger bound its hit could be longer than those of the other groups
		return cur
	}
	margin := s.block
	if c.layout.Partial && s.kind.isFull() {
		margin = c.layout.HashUnit
	}
	return min(cur+margin, q.Units*c.layout.HashUnit)
}
