// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// role says what an engine computes: prompts, answers, or both.
type role uint8

const (
	both role = iota
	prefill
	decode
)

// engine is one engine. Its scheduler decides each step; the profile says how long the step takes.
type engine struct {
	run    *run
	role   role
	number int
	core   core
	memory *memory // nil: a run without bytes
	busy   bool    // a step is being computed

	out   sched.Output  // outcome of the transfers since the last step ended
	extra time.Duration // time added to the step that is being scheduled, for KV that its requests receive
	link  time.Duration // its network is in use until this time
	met   map[*engine]bool

	load      int // tokens of the requests that it has or will get
	computing time.Duration
	steps     int
}

// core decides what the steps of an engine compute.
type core interface {
	add(q *request) error
	// begin starts a step. A step without tokens computes nothing; its end only reports loads that have arrived. again means that even
	// so the next step may differ, so the engine begins it at once. Otherwise, after a step without tokens and without such reports, it
	// waits for the next event.
	begin() (w costmodel.Work, again bool)
	// end ends the step. It returns the requests that got a token and those that ended.
	end(out sched.Output) (tokens, ended []*request)
	busy() bool
}

// turn begins the next step, unless a step is being computed.
func (e *engine) turn() {
	for !e.busy && e.core.busy() {
		e.extra = 0
		w, again := e.core.begin()
		if w.Tokens == 0 {
			again = again || len(e.out.Arrived) > 0 || len(e.out.Sent) > 0
			e.end()
			if !again {
				return // the next event calls turn again
			}
			continue
		}
		d := e.run.o.Profile.Step(w) + e.extra
		if e.role == prefill {
			d += e.sending(w, d)
		}
		e.busy = true
		e.computing += d
		e.steps++
		e.run.after(d, func() {
			e.busy = false
			e.end()
			e.turn()
		})
	}
}

// sending returns how long P's step lasts beyond its computing because P itself sends KV.
func (e *engine) sending(w costmodel.Work, step time.Duration) (d time.Duration) {
	p := e.run.o.Profile
	if e.run.o.Transport == Push {
		d = p.Push(w.Tokens, step)
	}
	for _, q := range e.core.(*vllm).sampled {
		switch {
		case e.run.o.Transport == Pipe:
			d += p.Pipe(q.Input)
		case e.run.o.Transport == Push && !e.met[q.d]:
			e.met[q.d] = true
			d += p.Setup()
		}
	}
	return d
}

// end ends a step and delivers its tokens.
func (e *engine) end() {
	out := e.out
	e.out = sched.Output{}
	tokens, ended := e.core.end(out)
	for _, q := range tokens {
		e.run.token(e, q)
	}
	for _, q := range ended {
		e.run.ended(e, q)
	}
}

// vllm is a core that uses vLLM's scheduler.
type vllm struct {
	e       *engine
	s       *sched.Scheduler
	sampled []*request // requests that get a token in the current step
}

func newVLLM(e *engine) (*vllm, error) {
	p := e.run.o.Profile
	v := &vllm{e: e}
	var err error
	v.s, err = sched.New(sched.Config{
		BlockTokens: p.BlockTokens, Blocks: p.KVBlocks(), MaxSeqs: p.MaxSeqs, MaxTokens: p.TokenBudget, MaxModel: p.MaxModel,
		NoPrefixCache: e.run.o.NoPrefixCache, Connector: v, Sends: e.role == prefill, Receives: e.role == decode,
	})
	return v, err
}

func (v *vllm) busy() bool { return v.s.Busy() }

func (v *vllm) of(q *request) *sched.Request {
	if v.e.role == prefill {
		return &q.atP
	}
	return &q.atD
}

func (v *vllm) add(q *request) error {
	p, limit := v.e.run.o.Profile, q.limit
	switch {
	case v.e.role == prefill:
		limit = 1
	case v.e.role == decode && v.e.run.o.FirstToken:
		limit = max(limit-1, 1) // the first token is P's
	}
	if room := (p.KVBlocks() - 1) * p.BlockTokens; q.Input+limit > room || q.Input+limit > p.MaxModel {
		return fmt.Errorf("cluster: %d prompt tokens and %d to generate: the KV memory holds %d tokens, the model's longest sequence %d", q.Input, limit, room, p.MaxModel)
	}
	r := v.of(q)
	*r = sched.Request{
		ID: strconv.Itoa(q.number), Prompt: q.Input, MaxTokens: limit, Data: q,
		Hash: func(i int) sched.Hash { return q.hash(p.BlockTokens, i) },
	}
	return v.s.Add(r)
}

func (v *vllm) begin() (w costmodel.Work, again bool) {
	step := v.s.Schedule()
	v.sampled = v.sampled[:0]
	for _, h := range step.Hits {
		if q := h.Request.Data.(*request); v.e.role != decode && h.Request.Preemptions() == 0 {
			q.Cached += h.Tokens
		}
	}
	for i := range step.Rows {
		row := &step.Rows[i]
		w.Add(row.Before, row.Tokens, row.Samples)
		q := row.Request.Data.(*request)
		if row.Kind != sched.RowRunning {
			v.e.run.begun(v.e, q)
		}
		if row.Samples {
			v.sampled = append(v.sampled, q)
		}
	}
	v.e.run.preemptions += len(step.Preempted)
	if v.e.memory != nil {
		v.e.memory.begin(v.s, step.Rows)
	}
	return w, len(step.Preempted) > 0
}

func (v *vllm) end(out sched.Output) (tokens, ended []*request) {
	if v.e.memory != nil {
		v.e.memory.end()
	}
	result := v.s.Process(out)
	for _, r := range result.Tokens {
		q := r.Data.(*request)
		if v.e.role != prefill {
			q.generate()
		}
		tokens = append(tokens, q)
	}
	for _, e := range result.Ended {
		ended = append(ended, e.Request.Data.(*request))
	}
	return tokens, ended
}

// Match implements sched.Connector.
func (v *vllm) Match(r *sched.Request, local int) (external int, async, ok bool) {
	q, run := r.Data.(*request), v.e.run
	switch {
	case v.e.role == decode && q.pulled: // it was preempted: its KV exists nowhere else any more
		return 0, false, true
	case v.e.role == decode && run.o.Transport == Pull:
		return q.Input - local, true, true
	case v.e.role == decode:
		return max(0, q.Input-1-local), false, true
	case run.store != nil:
		n := run.store.match(q, local)
		return n, true, true
	}
	return 0, false, true
}

// Allocated implements sched.Connector.
func (v *vllm) Allocated(r *sched.Request, external int) {
	q, run := r.Data.(*request), v.e.run
	switch {
	case external == 0:
		if v.e.role == decode {
			q.pulled = true
		}
	case v.e.role == decode:
		q.pulled = true
		run.hand(v.e, q, r.Tables()[0], external)
	default:
		q.Cached += external
		run.store.load(v.e, r, external)
	}
}

// Finish implements sched.Connector.
func (v *vllm) Finish(r *sched.Request, why sched.Reason) (keep bool) {
	if run := v.e.run; run.o.Bytes != nil && v.e.role != decode {
		q, table := r.Data.(*request), r.Tables()[0]
		if run.store != nil {
			run.store.real.put(v.e, q, table)
		}
		if v.e.role == prefill && run.o.Transport != Pull {
			v.e.memory.push(q, table)
		}
	}
	return v.e.role == prefill && v.e.run.o.Transport == Pull && why == sched.Length
}
