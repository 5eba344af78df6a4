// SPDX-License-Identifier: Apache-2.0

package coordinator

import "errors"

// Query asks for the longest hit of one prompt.
type Query struct {
	Units     int // hash units of the prompt
	MaxTokens int // limit of the hit; callers leave one token to compute

	// NoEagle keeps the block that flagged groups otherwise drop so that the
	// drafter computes it again.
	NoEagle bool
}

// Result is the answer to a Query. Used again, it keeps its slice, and Hit
// allocates nothing.
type Result struct {
	Tokens int

	// Masks has one mask per group, in the layout's order. A set block is to be
	// loaded; an unset one before it is not needed. Lengths may differ.
	Masks []Mask

	// Reason is why the hit is empty where attention kinds cannot be cached
	// together. A published Release returns it as an error.
	Reason error
}

// found is what one spec group's last lookup answered.
type found struct {
	blocks   int // length of the block list
	from     int // its first block that is not null
	tokens   int
	done     bool // looked up at least once
	verified bool // its EAGLE drop is made and still stands
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
		// A list from the last pass may end elsewhere than the hit.
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

// LoadMask appends to dst, per group, the blocks that a load of a hit of tokens
// tokens moves. It depends on the length alone: tokens is what Hit answered, so
// no EAGLE block is dropped again. The prompt's hash units must cover tokens.
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

// stackSets spec groups need no heap; no known model has as many.
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

// find runs the fixed point over the spec groups and returns its length.
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

// pass asks each spec group once, each within what those before it left, and
// returns what remains.
func (c *Coordinator) pass(sets []found, p Presence, q Query, hit int) (int, error) {
	cur := hit
	for i := range c.sets {
		s := &c.sets[i]
		if s.kind.isFull() && sets[i].done { // prefix-closed: no need to ask again
			if c.follows(longSecondFull) {
				cur = cur / s.block * s.block
			} else {
				cur = min(cur, sets[i].tokens)
			}
			continue
		}
		drop := !q.NoEagle && s.eagle && !sets[i].verified
		// Verified every time, the block after the hit is always present.
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

// lookAhead returns how far a group may match that then drops a block.
func (c *Coordinator) lookAhead(s *specGroup, q Query, cur int) int {
	if c.follows(looksAheadInRequest) {
		return min(cur+s.block, q.MaxTokens)
	}
	if s.kind == Mamba { // drops nothing: it would match beyond the others
		return cur
	}
	margin := s.block
	if c.layout.Partial && s.kind.isFull() {
		margin = c.layout.HashUnit
	}
	return min(cur+margin, q.Units*c.layout.HashUnit)
}
