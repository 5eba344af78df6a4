// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/internal/otlp"
	"github.com/kvasir-kv/kvasir/proxy/limits"
)

// outcomes are the ways in which a request ends.
var outcomes = []string{"ok", "bad_request", "unauthorized", "limited", "client_left", "refused", "no_engine", "failed", "broken_off"}

// maxModels is the largest number of models that have figures of their own; all further models are counted together, as "other".
const maxModels = 64

type counters struct {
	outcomes map[string]*atomic.Int64 // immutable map
	retries  atomic.Int64
	freed    atomic.Int64

	tokenized atomic.Int64
	spared    [len(sparedBy)]atomic.Int64
	handover  *histogram.Histogram

	mu struct {
		sync.Mutex
		models map[string]*modelCounters
	}
}

// spared says why a prompt did not go to P.
type spared uint8

const (
	notSpared   spared = iota
	byDecode           // D lacks little
	byStore            // D can load most of it from the cache server
	byRelay            // a relay has the prompt's KV
	bySequences        // the request has several answers, or prompts that cannot be split; one transfer carries one prompt
)

var sparedBy = [...]string{byDecode: "decode", byStore: "store", byRelay: "relay", bySequences: "sequences"}

type modelCounters struct{ ttft, e2e *histogram.Histogram }

func newCounters() *counters {
	n := &counters{outcomes: make(map[string]*atomic.Int64), handover: histogram.Times()}
	for _, o := range outcomes {
		n.outcomes[o] = new(atomic.Int64)
	}
	n.mu.models = make(map[string]*modelCounters)
	return n
}

func (n *counters) outcome(o string) { n.outcomes[o].Add(1) }

// model returns the counters of a model that an engine serves.
func (n *counters) model(name string) *modelCounters {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := n.mu.models[name]
	if m == nil {
		if len(n.mu.models) >= maxModels {
			name = "other"
			if m = n.mu.models[name]; m != nil {
				return m
			}
		}
		m = &modelCounters{histogram.Times(), histogram.Times()}
		n.mu.models[name] = m
	}
	return m
}

// began counts the first byte of an answer. good means that the status was 200.
func (n *counters) began(e *exchange, good bool) {
	took := time.Since(e.start)
	if good && e.list == nil { // a request of several prompts counts once, not per part
		e.model = n.model(e.want.model)
		e.model.ttft.Took(took)
	}
	if at := e.prefilled.Load(); at > 0 {
		n.handover.Took(took - time.Duration(at))
	}
}

// Stats are the figures of a Proxy: counts since New, and current values.
type Stats struct {
	InFlight  int64            `gauge:"kvasir_proxy_requests_in_flight" help:"Requests in progress, those that wait included."`
	Queued    int64            `gauge:"kvasir_proxy_requests_queued" help:"Requests that wait for room at an engine."`
	Requests  map[string]int64 `counter:"kvasir_proxy_requests_total" label:"outcome" help:"Requests that ended. no_engine, failed and refused are answered 503; broken_off: the engine died in the middle of its answer."`
	Bodies    int64            `gauge:"kvasir_proxy_body_bytes" help:"Memory of request bodies that are being read, bytes."`
	Retries   int64            `counter:"kvasir_proxy_retries_total" help:"Attempts after a first one that failed before the client heard anything."`
	Freed     int64            `counter:"kvasir_proxy_prefills_freed_total" help:"Prompts computed by P that no request wanted any more, whose KV D was asked to take."`
	Spared    map[string]int64 `counter:"kvasir_proxy_prefills_spared_total" label:"by" help:"Answers for which no P was asked: decode, D lacked little; store, the cache server had the beginning; relay, a relay had all; sequences, the request has several answers to a prompt, or prompts that cannot be split."`
	Store     int64            `gauge:"kvasir_proxy_store_well" help:"1 while the cache server of --store answers: what it has, P is not asked for."`
	Well      map[string]int64 `gauge:"kvasir_proxy_engine_well" label:"engine" help:"1 while the engine answers, and its registry knows it."`
	Paused    map[string]int64 `gauge:"kvasir_proxy_engine_paused" label:"engine" help:"1 while the engine gets no requests because it failed five or more in a row, unless no other engine is there."`
	Engine    map[string]int64 `gauge:"kvasir_proxy_engine_requests" label:"engine" help:"Requests in progress at the engine, from this proxy."`
	Others    map[string]int64 `gauge:"kvasir_proxy_engine_other_requests" label:"engine" help:"Requests at the engine that are not from this proxy, by the engine's metrics; with policies that look at them."`
	Blocks    map[string]int64 `gauge:"kvasir_proxy_engine_blocks" label:"engine" help:"KV blocks that the engine has, by its KV events."`
	Chunks    int64            `gauge:"kvasir_proxy_store_chunks" help:"Chunks that the cache server of --store has, by its KV events."`
	Voids     int64            `counter:"kvasir_proxy_kv_events_lost_total" help:"Times that the blocks known by KV events became void: a gap without a replay, a lost connection, an engine that was started again."`
	Tokenized int64            `counter:"kvasir_proxy_prompts_tokenized_total" help:"Prompts that an engine was asked to make tokens of, to know their blocks."`
	Handover  histogram.Counts `histogram:"kvasir_proxy_handover_seconds" help:"From the end of P's answer to the first byte of D's."`

	Spans  otlp.Stats
	Shared limits.Stats

	TTFT map[string]histogram.Counts `histogram:"vllm:time_to_first_token_seconds" label:"model_name" help:"From the request to the first byte of a good answer."`
	E2E  map[string]histogram.Counts `histogram:"vllm:e2e_request_latency_seconds" label:"model_name" help:"From the request to the end of a good answer."`
}

// Stats returns the current figures.
func (p *Proxy) Stats() Stats {
	s := Stats{
		InFlight: p.inFlight.Load(), Queued: p.fleet.queued(), Requests: make(map[string]int64), Retries: p.n.retries.Load(), Freed: p.n.freed.Load(),
		Bodies: p.bodies.bytes(), Handover: p.n.handover.Counts(), Spans: p.o.Spans.Stats(), Shared: p.o.Limits.Stats(), Well: make(map[string]int64), Paused: make(map[string]int64), Engine: make(map[string]int64), Others: make(map[string]int64),
		Spared: make(map[string]int64), Blocks: make(map[string]int64), Tokenized: p.n.tokenized.Load(), TTFT: make(map[string]histogram.Counts), E2E: make(map[string]histogram.Counts),
	}
	for by, name := range sparedBy {
		if name != "" {
			s.Spared[name] = p.n.spared[by].Load()
		}
	}
	if p.fleet.store.well.Load() {
		s.Store = 1
	}
	if f := p.fleet.store.events; f != nil {
		n, _, _ := f.Blocks()
		s.Chunks, s.Voids = int64(n), f.Resets()
	}
	for o, n := range p.n.outcomes {
		s.Requests[o] = n.Load()
	}
	for _, b := range p.fleet.engines() {
		for _, f := range b.events {
			n, _, _ := f.Blocks()
			s.Blocks[b.url] += int64(n)
			s.Voids += f.Resets()
		}
		s.Engine[b.url] += int64(p.fleet.inFlight(b))
		s.Others[b.url] += b.others.Load()
		s.Well[b.url], s.Paused[b.url] = 0, 0
		if p.fleet.paused(b) {
			s.Paused[b.url] = 1
		}
		if b.well.Load() {
			s.Well[b.url] = 1
		}
	}
	p.n.mu.Lock()
	defer p.n.mu.Unlock()
	for name, m := range p.n.mu.models {
		s.TTFT[name], s.E2E[name] = m.ttft.Counts(), m.e2e.Counts()
	}
	return s
}
