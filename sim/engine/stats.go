// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// counters are the counters of an engine. Only the loop changes them; any goroutine may read them.
type counters struct {
	steps, promptTokens, generated    atomic.Int64
	queries, hits, asked, preemptions atomic.Int64
	finished                          [4]atomic.Int64 // by sched.Reason
	cachedTokens, externalTokens      atomic.Int64
	wrong, failedLoads                atomic.Int64

	queue, prefill, decode, load *histogram.Histogram
}

func (n *counters) open() {
	for _, h := range []**histogram.Histogram{&n.queue, &n.prefill, &n.decode, &n.load} {
		*h = histogram.Times()
	}
}

// began counts a prompt when its first token has been generated.
func (n *counters) began(q *request) {
	n.queue.Took(q.started.Sub(q.arrived))
	n.prefill.Took(q.first.Sub(q.started))
	n.promptTokens.Add(int64(len(q.r.Tokens)))
	n.cachedTokens.Add(int64(q.notComputed()))
	n.externalTokens.Add(int64(q.external))
}

func (n *counters) ended(q *request, why sched.Reason, err error) {
	n.finished[why].Add(1)
	if !q.first.IsZero() {
		n.decode.Took(q.last.Sub(q.first))
	}
	if errors.Is(err, ErrLoad) {
		n.failedLoads.Add(1)
	}
}

// Stats has the counters and the current state of an engine.
type Stats struct {
	Running, Waiting int // numbers of requests
	Kept             int // ended requests whose blocks a connector still needs
	Blocks, Free     int // blocks of the KV memory

	Queries         int64 // prompt tokens looked up in the prefix cache
	Hits            int64 // prompt tokens found there
	ExternalQueries int64 // prompt tokens for which connectors were asked
	Preemptions     int64

	Steps        int64
	PromptTokens int64 // of the requests that got a first token
	CachedTokens int64 // those of PromptTokens that were not computed
	LoadedTokens int64 // those of CachedTokens that came from other engines or a cache server
	Generated    int64
	Finished     int64 // requests that ended at their length, or at a stop token
	Aborted      int64
	Failed       int64
	FailedLoads  int64 // requests that ended because their KV did not arrive
	WrongBytes   int64 // requests that got KV that does not belong to their tokens

	Queue   histogram.Counts // time from a request's arrival to its first step, loads included
	Prefill histogram.Counts // time from its first step to its first token
	Decode  histogram.Counts // time from its first token to its last
	Load    histogram.Counts // time from the allocation of blocks to the arrival of their KV
}

// Stats returns the figures. It waits until the step that is being computed has ended.
func (e *Engine) Stats() Stats {
	n := &e.n
	var s Stats
	_ = e.call(func() { // an engine that has ended runs nothing
		all, _ := e.sched.Waits()
		s = Stats{Running: len(e.sched.Running()), Waiting: all, Kept: len(e.keeps), Free: e.sched.FreeBlocks()}
	})
	s.Blocks = e.o.KV.Blocks - 1
	s.Steps, s.PromptTokens, s.Generated = n.steps.Load(), n.promptTokens.Load(), n.generated.Load()
	s.Queries, s.Hits, s.ExternalQueries, s.Preemptions = n.queries.Load(), n.hits.Load(), n.asked.Load(), n.preemptions.Load()
	s.CachedTokens, s.LoadedTokens = n.cachedTokens.Load(), n.externalTokens.Load()
	s.Finished, s.Aborted, s.Failed = n.finished[sched.Length].Load()+n.finished[sched.Stop].Load(), n.finished[sched.Abort].Load(), n.finished[sched.Error].Load()
	s.FailedLoads, s.WrongBytes = n.failedLoads.Load(), n.wrong.Load()
	s.Queue, s.Prefill, s.Decode, s.Load = n.queue.Counts(), n.prefill.Counts(), n.decode.Counts(), n.load.Counts()
	return s
}
