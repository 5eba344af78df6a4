// SPDX-License-Identifier: Apache-2.0

package sched_test

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/sim/sched"
)

// chainOf returns a value for each token of a prompt and its outputs; value makes KV of it. Prompts of one
// base are equal up to the token split.
func chainOf(base, variant uint64, split, n int) []uint64 {
	out := make([]uint64, n)
	h := base
	for i := range out {
		x := h*0x9E3779B97F4A7C15 + uint64(i) + 3
		if i >= split {
			x += (variant + 1) << 40
		}
		x ^= x >> 29
		h = x*0xBF58476D1CE4E5B9 | 2 // never the value of garbage
		out[i] = h
	}
	return out
}

const garbage = 1

// kvBlock is the content of one block: the KV of each token, or in slot 0 the state after a token.
type kvBlock struct {
	group int
	slots []uint64
}

// kvLoad is KV on its way into the blocks that a request had when the load began.
type kvLoad struct {
	id     string
	r      *simRequest
	tables [][]sched.BlockID
	from   int // first token that is loaded
	to     int
	bad    map[sched.BlockID]bool
	whole  bool
}

type simRequest struct {
	sched.Request
	chain []uint64
	ended bool
	kept  [][]sched.BlockID // tables that a reader needs until Sent; nil: there is no reader
	reads int               // tokens that the reader wants
}

// simStep is a step for the worker, with a copy of the tables as they were when it was scheduled.
type simStep struct {
	step     *sched.Step
	tables   [][][]sched.BlockID
	computed bool
}

// world is an engine: a scheduler, a worker, and loads and readers that run at random times. Its
// memory has the real content of each block.
type world struct {
	t      *rapid.T
	c      sched.Config
	s      *sched.Scheduler
	memory []kvBlock
	live   map[string]*simRequest
	loads  []*kvLoad
	sends  []string // ended requests with a reader
	steps  []*simStep
	bad    []sched.BlockID
	failed []string
	came   []string
	sent   []string
	next   int
	rested bool // no new work

	hits, loaded, failures, preemptions int
}

func (w *world) Match(r *sched.Request, local int) (int, bool, bool) {
	if w.rested || rapid.IntRange(0, 2).Draw(w.t, "elsewhere") > 0 {
		return 0, false, true
	}
	if rapid.IntRange(0, 3).Draw(w.t, "known") == 0 {
		return 0, false, false
	}
	most := r.Tokens() - local
	for _, g := range w.c.Groups {
		if g.State {
			most = r.Tokens() - 1 - local // a state cannot go back one token
		}
	}
	if most <= 0 {
		return 0, false, true
	}
	return rapid.IntRange(1, most).Draw(w.t, "external"), true, true
}

func tablesOf(r *sched.Request) [][]sched.BlockID {
	var out [][]sched.BlockID
	for _, table := range r.Tables() {
		out = append(out, slices.Clone(table))
	}
	return out
}

func (w *world) Allocated(r *sched.Request, external int) {
	if external > 0 {
		// The scheduler sets r.Computed later. The tables begin with the blocks that are there already.
		w.loads = append(w.loads, &kvLoad{id: r.ID, r: r.Data.(*simRequest), tables: tablesOf(r), from: -external, bad: map[sched.BlockID]bool{}})
	}
}

func (w *world) Finish(r *sched.Request, why sched.Reason) bool {
	q := r.Data.(*simRequest)
	q.ended = true
	if rapid.IntRange(0, 1).Draw(w.t, "keep") == 0 {
		return false
	}
	// A request that was preempted while its last token was in flight has no KV, or is past its end.
	if why == sched.Length && r.Computed() == r.Tokens()-1 && len(r.Tables()[0]) > 0 {
		// A worker computes the last step before it reads; KV of the last token does not exist.
		q.kept, q.reads = tablesOf(r), r.Tokens()-1
	}
	w.sends = append(w.sends, r.ID)
	return true
}

func (w *world) value(q *simRequest, g, token int) uint64 { return q.chain[token] + uint64(g) }

// put writes the KV of a token into block b. Block 0 stands for blocks that are not kept: put ignores it.
func (w *world) put(b sched.BlockID, g, token int, v uint64) {
	if b == 0 {
		return
	}
	m, size := &w.memory[b], w.c.BlockTokens
	m.group = g
	if w.c.Groups[g].State {
		m.slots[0] = v
	} else {
		m.slots[token%size] = v
	}
}

// needs checks that tables have all KV that computing the token after the first n of q reads.
func (w *world) needs(who string, q *simRequest, tables [][]sched.BlockID, n int) {
	size := w.c.BlockTokens
	for g, group := range w.c.Groups {
		from := 0
		if group.Window > 0 {
			from = max(0, n-group.Window+1)
		}
		if group.State {
			from = max(0, n-1)
		}
		for t := from; t < n; t++ {
			b, slot := tables[g][t/size], t%size
			if group.State {
				slot = 0
			}
			if b == 0 {
				w.t.Fatalf("%s: %s with %d tokens: group %d has no block for token %d: %v", who, q.ID, n, g, t, tables[g])
			}
			if got := w.memory[b].slots[slot]; got != w.value(q, g, t) {
				w.t.Fatalf("%s: %s with %d tokens: group %d, token %d: block %d holds something else (garbage: %v)", who, q.ID, n, g, t, b, got == garbage)
			}
		}
	}
}

// compute does the oldest step that is not computed.
func (w *world) compute() {
	for _, p := range w.steps {
		if p.computed {
			continue
		}
		p.computed = true
		for i := range p.step.Rows {
			row, tables := &p.step.Rows[i], p.tables[i]
			q := row.Request.Data.(*simRequest)
			w.needs("step", q, tables, row.Before)
			for g := range w.c.Groups {
				for t := row.Before; t < row.Before+row.Tokens; t++ {
					w.put(tables[g][t/w.c.BlockTokens], g, t, w.value(q, g, t))
				}
			}
		}
		return
	}
}

func (w *world) schedule() {
	n := len(w.loads)
	step := w.s.Schedule()
	for _, l := range w.loads[n:] {
		l.to = l.r.Computed()
		l.from += l.to
		switch kind := rapid.IntRange(0, 5).Draw(w.t, "fate"); kind {
		case 0:
			l.whole = true
		case 1, 2:
			for g, table := range l.tables {
				for i := l.from / w.c.BlockTokens; i*w.c.BlockTokens < l.to; i++ {
					if b := table[i]; b != 0 && (i+1)*w.c.BlockTokens > l.from && i*w.c.BlockTokens >= l.from && rapid.IntRange(0, 2).Draw(w.t, fmt.Sprint("bad", g)) == 0 {
						l.bad[b] = true
					}
				}
			}
		}
	}
	p := &simStep{step: step}
	for _, row := range step.Rows {
		p.tables = append(p.tables, tablesOf(row.Request))
	}
	for _, h := range step.Hits {
		w.hits += h.Tokens
	}
	w.preemptions += len(step.Preempted)
	w.steps = append(w.steps, p)
}

// deliver writes KV of a load. With end it also reports the end of the load to the scheduler.
func (w *world) deliver(i int, end bool) {
	l := w.loads[i]
	size := w.c.BlockTokens
	for g, table := range l.tables {
		for t := l.from; t < l.to; t++ {
			b, v := table[t/size], w.value(l.r, g, t)
			if l.whole || l.bad[b] {
				v = garbage
			}
			if !w.c.Groups[g].State || t == l.to-1 || t%size == size-1 {
				w.put(b, g, t, v)
			}
		}
	}
	if !end {
		return
	}
	w.loads = slices.Delete(w.loads, i, i+1)
	w.came = append(w.came, l.id)
	if l.whole {
		w.failed = append(w.failed, l.id)
	}
	for b := range l.bad {
		w.bad = append(w.bad, b)
	}
	slices.Sort(w.bad)
	if l.whole || len(l.bad) > 0 {
		w.failures++
	} else {
		w.loaded++
	}
}

// read ends a reader's use of a request's blocks, which hold its KV up to now.
func (w *world) read(i int) {
	q := w.live[w.sends[i]]
	if q.kept != nil {
		for len(w.steps) > 0 && slices.ContainsFunc(w.steps, func(p *simStep) bool { return !p.computed }) {
			w.compute()
		}
		w.needs("reader", q, q.kept, q.reads)
	}
	w.sent = append(w.sent, w.sends[i])
	w.sends = slices.Delete(w.sends, i, i+1)
}

func (w *world) process() {
	for !w.steps[0].computed {
		w.compute()
	}
	w.steps = w.steps[1:]
	w.s.Process(sched.Output{Arrived: w.came, Sent: w.sent, Bad: w.bad, Failed: w.failed})
	w.came, w.sent, w.bad, w.failed = nil, nil, nil, nil
}

func (w *world) add() {
	n := rapid.IntRange(1, w.c.MaxModel-1).Draw(w.t, "prompt")
	if rapid.Bool().Draw(w.t, "short") {
		n = min(n, 3*w.c.BlockTokens)
	}
	q := &simRequest{chain: chainOf(uint64(rapid.IntRange(1, 2).Draw(w.t, "base")), uint64(rapid.IntRange(0, 2).Draw(w.t, "variant")), rapid.IntRange(0, 40).Draw(w.t, "split"), w.c.MaxModel+1)}
	q.Request = sched.Request{
		ID: fmt.Sprint("r", w.next), Prompt: n, MaxTokens: rapid.IntRange(1, 12).Draw(w.t, "outputs"), Priority: rapid.IntRange(0, 2).Draw(w.t, "priority"),
		SkipCache: rapid.IntRange(0, 9).Draw(w.t, "skip") == 0, Data: q,
	}
	q.Hash = func(i int) (h sched.Hash) {
		last := (i+1)*w.c.BlockTokens - 1
		if last >= q.Tokens() {
			w.t.Fatalf("%s: the name of block %d is asked for; %d tokens are known", q.ID, i, q.Tokens())
		}
		binary.LittleEndian.PutUint64(h[:], q.chain[last])
		return h
	}
	w.next++
	if err := w.s.Add(&q.Request); err != nil {
		w.t.Fatal(err)
	}
	w.live[q.ID] = q
}

// check compares the free queue with the tables of all requests.
func (w *world) check() {
	free, _ := w.s.Pool()
	isFree := make(map[sched.BlockID]bool, len(free))
	for _, b := range free {
		if b == 0 || isFree[b] {
			w.t.Fatalf("the free queue has block %d twice: %v", b, free)
		}
		isFree[b] = true
	}
	if len(free) != w.s.FreeBlocks() {
		w.t.Fatalf("%d free blocks, the queue has %d", w.s.FreeBlocks(), len(free))
	}
	for id, q := range w.live {
		if !w.s.Known(id) {
			delete(w.live, id)
			continue
		}
		for g, table := range q.Tables() {
			for _, b := range table {
				if isFree[b] {
					w.t.Fatalf("%s, group %d: block %d is free and in use", id, g, b)
				}
			}
		}
	}
}

func drawConfig(t *rapid.T) sched.Config {
	size := rapid.SampledFrom([]int{1, 2, 4, 5}).Draw(t, "block")
	c := sched.Config{
		BlockTokens: size, MaxSeqs: rapid.IntRange(1, 6).Draw(t, "seqs"), MaxTokens: rapid.IntRange(1, 40).Draw(t, "budget"), MaxModel: rapid.IntRange(2, 60).Draw(t, "model"),
		Groups: rapid.SampledFrom([][]sched.Group{
			{{}}, {{Window: 7}}, {{State: true}}, {{}, {Window: 7}}, {{}, {State: true}}, {{Window: 2}, {}, {State: true}}, {{}, {}}, {{Window: 9}, {Window: 3}},
		}).Draw(t, "groups"),
		Priority: rapid.Bool().Draw(t, "by priority"), NoReserve: rapid.IntRange(0, 3).Draw(t, "reserve") == 0, Async: rapid.Bool().Draw(t, "async"),
		Recompute: rapid.Bool().Draw(t, "recompute"), Events: true, Sends: true, Receives: true,
		NoPrefixCache: rapid.IntRange(0, 9).Draw(t, "no cache") == 0,
	}
	// A request that is preempted in the pass that scheduled it keeps its blocks in the prefix cache, as in vLLM,
	// although they are not computed. Only priorities choose such a victim.
	c.Priority = c.Priority && c.NoPrefixCache
	whole := (c.MaxModel+size-1)/size + 1
	c.Blocks = whole*len(c.Groups) + 2 + rapid.IntRange(0, 2*whole).Draw(t, "blocks")
	if rapid.IntRange(0, 4).Draw(t, "long") == 0 {
		c.LongPrefill = rapid.IntRange(1, 10).Draw(t, "long prefill")
	}
	return c
}

// Requests are preempted, loaded late or in part, reset and aborted in any order. The KV that
// a step reads is always there, a reader's blocks stay until it has read them, no block is lost, and the
// engine comes to rest.
func TestBlocksInUseKeepTheirContent(t *testing.T) {
	var hits, loaded, failures, preemptions int
	rapid.Check(t, func(t *rapid.T) {
		w := &world{t: t, c: drawConfig(t), live: map[string]*simRequest{}}
		w.c.Connector = w
		var err error
		if w.s, err = sched.New(w.c); err != nil {
			t.Fatal(err)
		}
		for range w.c.Blocks {
			w.memory = append(w.memory, kvBlock{slots: make([]uint64, w.c.BlockTokens)})
		}
		inFlight := 1
		if w.c.Async {
			inFlight = 2
		}
		for range rapid.IntRange(10, 120).Draw(t, "operations") {
			switch op := rapid.IntRange(0, 19).Draw(t, "operation"); {
			case op < 4 && len(w.live) < 12:
				w.add()
			case op == 4:
				w.s.Abort(fmt.Sprint("r", rapid.IntRange(0, max(0, w.next-1)).Draw(t, "abort")))
			case op == 5 && (w.c.Async || len(w.steps) == 0):
				w.s.Reset(rapid.Bool().Draw(t, "running"))
			case op < 8 && len(w.loads) > 0:
				w.deliver(rapid.IntRange(0, len(w.loads)-1).Draw(t, "load"), rapid.Bool().Draw(t, "end"))
			case op == 8 && len(w.sends) > 0:
				w.read(rapid.IntRange(0, len(w.sends)-1).Draw(t, "send"))
			case op == 9:
				w.compute()
			case op < 15 && len(w.steps) < inFlight:
				w.schedule()
			case len(w.steps) > 0:
				w.process()
			}
			w.check()
		}
		w.rested = true
		for turn := 0; w.s.Busy(); turn++ {
			if turn > 2000 {
				free, _ := w.s.Pool()
				t.Fatalf("the engine does not come to rest: %d requests, %d running, %d free of %d", len(w.live), len(w.s.Running()), len(free), w.c.Blocks-1)
			}
			for len(w.loads) > 0 {
				w.deliver(0, true)
			}
			for len(w.sends) > 0 {
				w.read(0)
			}
			w.schedule()
			for len(w.steps) >= inFlight || len(w.steps) > 0 && len(w.live) == 0 {
				w.process()
				w.check()
			}
		}
		if w.s.FreeBlocks() != w.c.Blocks-1 {
			t.Fatalf("%d blocks are free of %d", w.s.FreeBlocks(), w.c.Blocks-1)
		}
		hits, loaded, failures, preemptions = hits+w.hits, loaded+w.loaded, failures+w.failures, preemptions+w.preemptions
	})
	if !t.Failed() && (hits == 0 || loaded == 0 || failures == 0 || preemptions == 0) {
		t.Fatalf("%d hit tokens, %d loads, %d failed ones, %d preemptions", hits, loaded, failures, preemptions)
	}
}
