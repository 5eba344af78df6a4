// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// sequence is the state of a request in an engine that prefills alone.
type sequence struct {
	computed int // prompt tokens computed
	tokens   int // tokens generated
}

// prefillFirst schedules as SGLang does by default: prompts are computed first and alone, in chunks of at most the token budget.
// Decoding goes on when no prompt waits.
type prefillFirst struct {
	e        *engine
	waiting  []*request
	running  []*request
	step     []*request // requests that get a token in the current step
	reserved int        // tokens of KV that are reserved
}

func (a *prefillFirst) busy() bool { return len(a.waiting)+len(a.running) > 0 }

func (a *prefillFirst) add(q *request) error {
	p := a.e.run.o.Profile
	if room := p.KVBlocks() * p.BlockTokens; q.Input+q.limit > min(room, p.MaxModel) {
		return fmt.Errorf("cluster: %d prompt tokens and %d to generate: the KV memory holds %d tokens, the model's longest sequence %d", q.Input, q.limit, room, p.MaxModel)
	}
	q.alone = sequence{}
	a.waiting = append(a.waiting, q)
	return nil
}

func (a *prefillFirst) begin() (w costmodel.Work, again bool) {
	p := a.e.run.o.Profile
	room := p.KVBlocks()*p.BlockTokens - a.reserved
	a.step = a.step[:0]
	started := len(a.running)
	for budget := p.TokenBudget; budget > 0 && len(a.waiting) > 0 && started < p.MaxSeqs; started++ {
		q := a.waiting[0]
		if q.alone.computed == 0 {
			if q.Input+q.limit > room {
				break
			}
			room -= q.Input + q.limit
			a.reserved += q.Input + q.limit
			a.e.run.begun(a.e, q)
		}
		n := min(budget, q.Input-q.alone.computed)
		last := q.alone.computed+n == q.Input
		w.Add(q.alone.computed, n, last)
		q.alone.computed += n
		budget -= n
		if !last {
			break
		}
		a.waiting = a.waiting[1:]
		a.step = append(a.step, q)
	}
	if w.Tokens > 0 {
		return w, false
	}
	for _, q := range a.running {
		w.Add(q.Input+q.alone.tokens-1, 1, true)
	}
	a.step = append(a.step, a.running...)
	a.running = a.running[:0]
	return w, false
}

func (a *prefillFirst) end(sched.Output) (tokens, ended []*request) {
	for _, q := range a.step {
		q.alone.tokens++
		if tokens = append(tokens, q); q.alone.tokens == q.limit {
			a.reserved -= q.Input + q.limit
			ended = append(ended, q)
		} else {
			a.running = append(a.running, q)
		}
	}
	a.step = a.step[:0]
	return tokens, ended
}
