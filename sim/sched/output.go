// SPDX-License-Identifier: Apache-2.0

package sched

import "slices"

// Output is what became of a step, beside its tokens.
type Output struct {
	Arrived []string  // requests whose load has ended, failed ones included
	Sent    []string  // ended requests whose blocks no connector reads any more
	Bad     []BlockID // blocks that a load did not fill
	Failed  []string  // requests whose load failed as a whole
}

// End is a request that has ended.
type End struct {
	Request *Request
	Reason  Reason
}

// EventKind says what happened to blocks of the prefix cache.
type EventKind uint8

// The kinds of an Event.
const (
	Stored EventKind = iota
	Removed
	Cleared
)

// Event says which blocks have become findable in the prefix cache, or are no longer. A hash that was stored twice is removed twice.
type Event struct {
	Kind   EventKind
	Hashes []Hash
	// Request and Block belong to a Stored event: whose blocks they are, and the index of the first one. The block before it is their
	// parent.
	Request *Request
	Block   int
	Group   int
}

// Result is what follows from the Output of a step.
type Result struct {
	Tokens []*Request // requests that got one more token
	Ended  []End
	Events []Event // events since the last Result
}

// Process handles the output of the oldest step in flight.
func (s *Scheduler) Process(o Output) Result {
	step := s.flight[0]
	s.flight = slices.Delete(s.flight, 0, 1)
	if step.number > 0 {
		s.processed = step.number
	}
	s.freeLate()
	var out Result
	failed := s.loadErrors(step, o)
	for i := range step.Rows {
		s.output(&step.Rows[i], &out)
	}
	for _, r := range s.running {
		r.lost = false
	}
	for _, r := range failed {
		r.lost = false
		if r.status != Ended {
			s.end(r, Error)
			out.Ended = append(out.Ended, End{r, Error})
		}
	}
	for _, id := range o.Arrived {
		switch r := s.requests[id]; {
		case r == nil:
		case r.status == Loading:
			r.arrived = true
		case r.written:
			r.written = false
			s.drop(r)
		}
	}
	for _, id := range o.Sent {
		if r := s.requests[id]; r != nil && r.held {
			r.held = false
			s.drop(r)
		}
	}
	out.Events, s.events = s.events, nil
	return out
}

// freeLate frees those late blocks to which no step in flight writes any more.
func (s *Scheduler) freeLate() {
	for len(s.late) > 0 && s.late[0].step <= s.processed {
		s.pool.release(s.late[0].blocks)
		s.late = s.late[1:]
	}
}

// output handles the token of one row.
func (s *Scheduler) output(row *Row, out *Result) {
	r := row.Request
	r.inFlight -= row.Tokens
	stale := r.stale > 0
	if stale {
		r.stale -= row.Tokens
	}
	if !row.Samples || r.status == Ended || r.lost || stale && r.dropStale {
		return
	}
	r.tokens++
	out.Tokens = append(out.Tokens, r)
	if s.c.Async && !stale {
		r.placeholders--
	}
	if s.c.Async && r.status == Running {
		s.commit(r, r.done-r.placeholders)
	}
	if r.Stops != nil && r.Stops() { // before the length is checked, as in vLLM's check_stop
		s.end(r, Stop)
		out.Ended = append(out.Ended, End{r, Stop})
		return
	}
	if r.tokens >= s.c.MaxModel || r.tokens-r.Prompt >= r.MaxTokens {
		s.end(r, Length)
		out.Ended = append(out.Ended, End{r, Length})
	}
}

// loadErrors takes back the tokens that a failed load did not bring. It returns the requests that end because of that.
func (s *Scheduler) loadErrors(step *Step, o Output) (ended []*Request) {
	if len(o.Bad) == 0 && len(o.Failed) == 0 {
		return nil
	}
	bad := make(map[BlockID]bool, len(o.Bad))
	for _, b := range o.Bad {
		bad[b] = true
	}
	whole := make(map[string]bool, len(o.Failed))
	for _, id := range o.Failed {
		whole[id] = true
	}
	var loading []*Request
	for _, q := range []*queue{&s.holding, &s.waiting} {
		for r := q.first; r != nil; r = r.next {
			if r.status == Loading {
				loading = append(loading, r)
			}
		}
	}
	mark := map[BlockID]bool{}
	for _, r := range loading {
		if first, hit := s.firstBad(r, r.done, bad, whole, mark); hit {
			ended = s.fail(r, first, r.done, ended)
		}
	}
	clear(mark)
	for _, r := range s.running {
		before := r.done
		if i := slices.IndexFunc(step.Rows, func(row Row) bool { return row.Request == r }); i >= 0 {
			before = max(0, before-step.Rows[i].Tokens) // the request may have been preempted and begun again since this step
		}
		if first, hit := s.firstBad(r, before, bad, whole, mark); hit {
			ended = s.fail(r, first, before, ended)
		}
	}
	return ended
}

// firstBad looks for bad blocks among the blocks of r's first n tokens, and adds them to `mark`. first is the index of the first bad
// block that no request before r has marked; -1: there is none. affected is true if r has a bad block, marked or not. `whole` has the ids
// of requests whose load failed as a whole; for them, the results are 0 and true.
func (s *Scheduler) firstBad(r *Request, n int, bad map[BlockID]bool, whole map[string]bool, mark map[BlockID]bool) (first int, affected bool) {
	first = -1
	if whole[r.ID] {
		return 0, true
	}
	for _, table := range r.tables {
		own := -1
		for i, b := range table[:min(s.blocksFor(n), len(table))] {
			if b == 0 || !bad[b] {
				continue
			}
			affected = true
			if mark[b] {
				continue
			}
			mark[b] = true
			if own < 0 {
				own = i
			}
		}
		if own >= 0 && (first < 0 || own < first) {
			first = own
		}
	}
	return first, affected
}

// fail sets r back to its first bad block, number `first` of its blocks, or to its token `before` if first is -1. Without Recompute, or if a
// running r lacks blocks that it attends to there, it appends r to ended instead; a loading r that lacks some is set back to its
// first token. It returns ended.
func (s *Scheduler) fail(r *Request, first, before int, ended []*Request) []*Request {
	if !s.c.Recompute {
		if r.status == Running && first >= 0 {
			for _, table := range r.tables {
				for _, b := range table[min(first, len(table)):] {
					s.pool.forget(b)
				}
			}
		}
		r.lost = r.status == Running
		return append(ended, r)
	}
	at := before
	if first >= 0 {
		at = first * s.c.BlockTokens
	}
	if !s.complete(r, at) {
		if r.status == Running {
			return append(ended, r)
		}
		at = 0
	}
	r.done = at
	if r.status == Loading {
		r.broken = true
	} else {
		r.lost = true
	}
	return ended
}

// complete reports whether r has all blocks to which the token after its first n attends. A group with a window or states has only
// blocks to which the token at the end of the load attends.
func (s *Scheduler) complete(r *Request, n int) bool {
	for g, group := range s.c.Groups {
		if slices.Contains(r.tables[g][group.outside(n, s.c.BlockTokens):s.blocksFor(n)], 0) {
			return false
		}
	}
	return true
}
