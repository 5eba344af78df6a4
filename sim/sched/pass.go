// SPDX-License-Identifier: Apache-2.0

package sched

import "slices"

// RowKind says how a request came to be in a step.
type RowKind uint8

// The kinds of rows.
const (
	RowRunning RowKind = iota // it was running before
	RowNew
	RowResumed // it runs again after a preemption
)

// Row is the part of one request in a step.
type Row struct {
	Request *Request
	Tokens  int // tokens to compute
	Before  int // tokens that have KV already
	Kind    RowKind
	// Blocks are, by group, the new blocks of a request that goes on, or the whole table of any other.
	Blocks [][]BlockID
	// Samples means that the step produces the request's next token.
	Samples bool
}

// Hit is a request with the number of its tokens that were in the prefix cache.
type Hit struct {
	Request *Request
	Tokens  int
}

// Step says what the worker must compute.
type Step struct {
	Rows      []Row
	Hits      []Hit      // requests that were admitted, or began to load; also those with 0 tokens
	Preempted []*Request // victims, in the order of their preemption
	Reset     []*Request // requests that resets have preempted since the last step
	Ended     []*Request // requests that have ended since the last step

	number int64 // counts the steps with tokens; 0: the step has none
}

// Schedule decides the next step. A step without rows may still list ended requests, and its Output may report loads.
func (s *Scheduler) Schedule() *Step {
	p := pass{Scheduler: s, step: &Step{}, budget: s.c.MaxTokens, cap: s.c.MaxTokens}
	if n := len(s.running) + s.waiting.n + s.holding.n; n > 1 && s.c.LongPrefill > 0 {
		p.cap = s.c.LongPrefill
		if s.c.Adaptive {
			p.cap = max(p.cap, s.c.MaxTokens/n)
		}
	}
	p.continueRunning()
	if len(p.step.Preempted) == 0 {
		p.admitWaiting()
	}
	step := p.step
	step.Rows = append(step.Rows, p.admitted...)
	for i := range step.Rows {
		s.scheduled(&step.Rows[i])
	}
	step.Reset, s.resets = s.resets, nil
	step.Ended, s.ended = s.ended, nil
	if len(step.Rows) > 0 {
		s.newest++
		step.number = s.newest
		for i := range step.Rows {
			step.Rows[i].Request.lastStep = s.newest
		}
	}
	s.flight = append(s.flight, step)
	return step
}

// scheduled records that the tokens of a row are being computed, and sets in row whether that produces a new token.
func (s *Scheduler) scheduled(row *Row) {
	r := row.Request
	r.done += row.Tokens
	r.inFlight += row.Tokens
	if row.Samples = r.done >= r.tokens+r.placeholders; row.Samples {
		delete(s.prefills, r)
		r.prefill = false
		if s.c.Async {
			r.placeholders++
		}
	}
}

// pass is the state of one call of Schedule.
type pass struct {
	*Scheduler
	step     *Step
	admitted []Row
	budget   int
	cap      int // most tokens of one request
}

func (p *pass) continueRunning() {
	s := p.Scheduler
	for i := 0; i < len(s.running) && p.budget > 0; i++ {
		r := s.running[i]
		if s.c.Async && r.placeholders > 0 && r.done+2-r.placeholders >= r.Prompt+r.MaxTokens {
			continue // its last token is being computed
		}
		n := min(r.tokens+r.placeholders-r.done, p.cap, p.budget, s.c.MaxModel-1-r.done)
		if n <= 0 {
			continue
		}
		owned := len(r.tables[0])
		for !s.allocate(r, n, nil, 0, 0, false, false) {
			v := s.victim()
			if s.mustWait(v) {
				return
			}
			at := slices.Index(s.running, v)
			s.running = slices.Delete(s.running, at, at+1)
			if at < i {
				i--
			}
			if row := slices.IndexFunc(p.step.Rows, func(row Row) bool { return row.Request == v }); row >= 0 {
				p.budget += p.step.Rows[row].Tokens
				p.step.Rows = slices.Delete(p.step.Rows, row, row+1)
			}
			s.preempt(v, false)
			p.step.Preempted = append(p.step.Preempted, v)
			if v == r {
				return
			}
		}
		p.budget -= n
		p.step.Rows = append(p.step.Rows, Row{Request: r, Tokens: n, Before: r.done, Blocks: copyTables(r.tables, owned)})
	}
}

// copyTables copies the tables, beginning with block `from`; all groups have the same number of blocks.
func copyTables(tables [][]BlockID, from int) [][]BlockID {
	out := make([][]BlockID, len(tables))
	for g := range tables {
		out[g] = slices.Clone(tables[g][from:])
	}
	return out
}

// victim returns the running request that shall be preempted next.
func (s *Scheduler) victim() *Request {
	v := s.running[len(s.running)-1]
	if s.c.Priority {
		for _, r := range s.running {
			if v.before(r) {
				v = r
			}
		}
	}
	return v
}

func (p *pass) admitWaiting() {
	s := p.Scheduler
	var skipped []*Request
	for p.budget > 0 && len(s.running) < s.c.MaxActive {
		q := &s.holding
		if q.first == nil {
			q = &s.waiting
		}
		r := q.first
		if r == nil {
			break
		}
		skip, ok := p.admit(r)
		if !ok {
			break
		}
		if skip {
			r.queued.remove(r)
			skipped = append(skipped, r)
		}
	}
	for _, r := range slices.Backward(skipped) {
		if r.status == Loading || r.done > 0 {
			s.holding.pushFront(r)
		} else {
			s.waiting.pushFront(r)
		}
	}
}

// admit admits the request at the head of the queue, or lets it begin to load. skip means that the request waits, and requests behind
// it may overtake it. If ok is false, this step admits no more requests.
func (p *pass) admit(r *Request) (skip, ok bool) {
	s := p.Scheduler
	if r.status == Loading {
		if !r.arrived {
			return true, true
		}
		s.endLoad(r)
	}
	if r.stale > 0 && !r.dropStale {
		return true, true
	}
	var hit [][]BlockID
	local, external, async := 0, 0, false
	if r.done == 0 && len(r.tables[0]) == 0 { // a prompt of one token may be loaded although nothing is computed
		hit, local = s.hit(r)
		if s.c.Connector != nil {
			n, later, known := s.c.Connector.Match(r, local)
			switch {
			case r.SkipCache: // the connector is asked even so
			case !known:
				return true, true
			default:
				external, async = n, later && n > 0
			}
		}
	}
	begin := r.done + local + external
	n := 0
	if !async {
		n = min(r.tokens-begin, p.cap)
		if s.c.NoChunks && n > p.budget {
			return false, false
		}
		n = min(n, p.budget)
	}
	fresh := r.done == 0
	if !s.allocate(r, n, hit, local, external, true, async) {
		return false, false
	}
	if fresh {
		p.step.Hits = append(p.step.Hits, Hit{r, local})
	}
	if s.c.Connector != nil {
		s.c.Connector.Allocated(r, external)
	}
	r.done = begin
	if async {
		r.status = Loading
		s.join(r)
		return true, true
	}
	kind := RowNew
	if r.status == Preempted {
		kind = RowResumed
	}
	r.queued.remove(r)
	r.status = Running
	s.running = append(s.running, r)
	p.budget -= n
	if begin+n < r.tokens {
		s.join(r)
	}
	p.admitted = append(p.admitted, Row{Request: r, Tokens: n, Before: begin, Kind: kind, Blocks: copyTables(r.tables, 0)})
	return false, true
}

func (s *Scheduler) join(r *Request) {
	r.prefill = true
	s.prefills[r] = struct{}{}
}

// endLoad ends r's load: the tokens that came count as computed, and r can be scheduled. If none came, it frees r's blocks.
func (s *Scheduler) endLoad(r *Request) {
	switch {
	case !r.broken:
		s.commit(r, r.done)
		if r.done == r.tokens {
			r.done-- // at least one token must be computed
		}
	case r.done > 0:
		s.commit(r, r.done)
	default:
		s.free(r)
	}
	r.arrived, r.broken = false, false
	if r.status = Waiting; r.preemptions > 0 {
		r.status = Preempted
	}
}
