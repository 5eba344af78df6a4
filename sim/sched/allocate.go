// SPDX-License-Identifier: Apache-2.0

package sched

import "slices"

// blocksFor returns how many blocks are needed for n tokens.
func (s *Scheduler) blocksFor(n int) int { return (n + s.c.BlockTokens - 1) / s.c.BlockTokens }

// groupHash returns the hash of a block in one group: groups hold different KV for the same tokens.
func groupHash(h Hash, group int) Hash {
	h[len(h)-1] ^= byte(group)
	return h
}

// hit returns the longest prefix of r that every group has in the cache, in tokens, and its blocks; block 0 stands for blocks that no
// layer reads. At least one token is left to compute.
func (s *Scheduler) hit(r *Request) (blocks [][]BlockID, tokens int) {
	for g := range s.hits {
		s.hits[g] = s.hits[g][:0]
	}
	if s.c.NoPrefixCache || r.SkipCache {
		return s.hits, 0
	}
	n := (r.tokens - 1) / s.c.BlockTokens
	for g, group := range s.c.Groups {
		for i := 0; i < n && group.tail(s.c.BlockTokens) == 0; i++ {
			b, ok := s.pool.find(groupHash(r.Hash(i), g))
			if !ok {
				n = i
				break
			}
			s.hits[g] = append(s.hits[g], b)
		}
	}
	for again := true; again; {
		again = false
		for g, group := range s.c.Groups {
			if tail := group.tail(s.c.BlockTokens); tail > 0 {
				m := s.tailHit(r, g, tail, n)
				again = again || m < n && len(s.c.Groups) > 1
				n = m
			}
		}
	}
	for g := range s.hits {
		s.hits[g] = s.hits[g][:n]
	}
	return s.hits, n * s.c.BlockTokens
}

// tailHit looks for a hit of a window or state group g among the first n blocks: from the right, it looks for `tail` cached blocks in a
// row, as many as a hit of the group needs, or for fewer only at the very start. It returns the end of that run, 0 if there is none.
func (s *Scheduler) tailHit(r *Request, g, tail, n int) int {
	list := slices.Grow(s.hits[g][:0], n)[:n]
	clear(list)
	s.hits[g] = list
	run := 0
	for i := n - 1; i >= 0; i-- {
		b, ok := s.pool.find(groupHash(r.Hash(i), g))
		if !ok {
			run = 0
			continue
		}
		list[i] = b
		if run++; run == tail {
			clear(list[:i])
			return i + run
		}
	}
	return run
}

// need returns how many free blocks r needs to hold x tokens together with `hit`, the blocks of a hit by group, or nil. Blocks to which
// the token at position `total` does not attend are not needed. bounded means that blocks that leave a window meanwhile count as freed.
func (s *Scheduler) need(r *Request, x, total int, hit [][]BlockID, bounded bool) (n int) {
	for g, group := range s.c.Groups {
		var own []BlockID
		if hit != nil {
			own = hit[g]
		}
		n += s.groupNeed(r.tables[g], group, x, total, own, bounded)
	}
	return n
}

// groupNeed is need for one group; `table` has the request's blocks in the group, and `hit` those of the hit.
func (s *Scheduler) groupNeed(table []BlockID, group Group, x, total int, hit []BlockID, bounded bool) int {
	blocks := s.blocksFor(x)
	have, from := len(table)+len(hit), 0
	if group.tail(s.c.BlockTokens) > 0 {
		if bounded {
			flight := s.c.MaxTokens
			if s.c.Async {
				flight *= 2
			}
			blocks = min(blocks, s.blocksFor(min(max(group.Window, 1)-1+flight, s.c.MaxModel))+1)
		}
		out := group.outside(total, s.c.BlockTokens)
		have = max(have, out)
		from = max(0, out-len(table))
	}
	n := max(0, blocks-have)
	for i := from; i < len(hit); i++ {
		if b := hit[i]; b != 0 && s.pool.blocks[b].users == 0 {
			n++ // it also leaves the free queue
		}
	}
	return n
}

// allocate gives r the blocks for n more tokens, after a hit of `local` tokens and `external` tokens that are loaded. admission means
// that r is waiting. For an asynchronous load, n is 0, and the blocks cannot be found in the cache yet. If allocate returns false, it
// has only freed blocks that left a window.
func (s *Scheduler) allocate(r *Request, n int, hit [][]BlockID, local, external int, admission, async bool) bool {
	total := min(r.done+local+external, s.c.MaxModel)
	upto := min(total+n, s.c.MaxModel)
	looks := total // position of the next token to compute: tokens that it does not attend to need no blocks
	if async && total == r.tokens {
		looks-- // the last token is computed in any case
	}
	mark, reserved := 0, 0
	if admission {
		if len(s.running) > 0 {
			mark = int(s.c.Watermark * float64(s.c.Blocks))
		}
		if !s.c.NoReserve && s.need(r, min(r.tokens, s.c.MaxModel), looks, hit, true)+mark > s.pool.free {
			return false
		}
	}
	if async {
		for o := range s.prefills {
			reserved += s.need(o, min(o.tokens, s.c.MaxModel), o.done, nil, true)
		}
	}
	for g := range r.tables {
		s.leaveWindow(r, g, looks)
	}
	if needed := s.need(r, upto, looks, hit, false) + mark; needed > s.pool.free-reserved && (needed > s.pool.free || !s.onlyReservationsBlock(r)) {
		return false
	}
	for g, group := range s.c.Groups {
		out := group.outside(looks, s.c.BlockTokens)
		if hit != nil && local > 0 {
			s.adopt(r, g, hit[g], out)
		}
		for len(r.tables[g]) < min(out, s.blocksFor(total)) {
			r.tables[g] = append(r.tables[g], 0) // no layer reads this block, so it is not loaded
		}
	}
	for _, tokens := range []int{total, upto} {
		for g, table := range r.tables {
			r.tables[g] = s.pool.take(max(0, s.blocksFor(tokens)-len(table)), table)
		}
	}
	if !async {
		s.commit(r, min(total+n, r.tokens))
	}
	return true
}

// onlyReservationsBlock reports whether only reservations, r's own among them, keep r from loading, while nothing is in progress that
// would end one. vLLM 0.32 counts a request whose load failed as a prefill in flight: the request must fit in beside its own
// reservation, and if it does not, it stays at the head of the queue for ever.
func (s *Scheduler) onlyReservationsBlock(r *Request) bool {
	if !r.prefill || len(s.running) > 0 || len(s.late) > 0 {
		return false
	}
	for _, o := range s.requests { // requests that this pass has skipped are in no queue
		if o.status == Loading && !o.arrived {
			return false
		}
	}
	return true
}

// adopt puts the blocks of a hit into r's table, except the first `out` blocks, for which it puts 0.
func (s *Scheduler) adopt(r *Request, g int, hit []BlockID, out int) {
	for i, b := range hit {
		if i < out {
			b = 0
		}
		if b != 0 {
			s.pool.use(b)
		}
		r.tables[g] = append(r.tables[g], b)
	}
	r.cached[g] = len(r.tables[g])
}

// leaveWindow frees those blocks of r in group g to which no token from position `total` on attends, nor a token of a step in flight.
func (s *Scheduler) leaveWindow(r *Request, g, total int) {
	var list []BlockID
	table := r.tables[g]
	for i := min(s.c.Groups[g].outside(total-r.inFlight, s.c.BlockTokens), len(table)) - 1; i >= 0 && table[i] != 0; i-- {
		list = append(list, table[i])
		table[i] = 0
	}
	if len(list) > 0 {
		s.pool.release(list)
	}
}

// commit makes the full blocks of r's first n tokens findable in the cache. Their KV may not exist yet: a step or a load will write it.
func (s *Scheduler) commit(r *Request, n int) {
	full := n / s.c.BlockTokens
	if s.c.NoPrefixCache {
		return
	}
	for g, table := range r.tables {
		if full <= r.cached[g] {
			continue
		}
		e := Event{Kind: Stored, Request: r, Block: r.cached[g], Group: g}
		for i := r.cached[g]; i < full; i++ {
			if b := table[i]; b != 0 {
				h := groupHash(r.Hash(i), g)
				s.pool.register(b, h)
				e.Hashes = append(e.Hashes, h)
			}
		}
		r.cached[g] = full
		if s.c.Events && len(e.Hashes) > 0 {
			s.events = append(s.events, e)
		}
	}
}
