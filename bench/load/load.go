// SPDX-License-Identifier: Apache-2.0

// Package load sends a workload to an endpoint of the OpenAI API and notes when the tokens
// come, as vllm bench serve does.
//
// Whatever the endpoint does is an outcome of the request: a refusal, a stream that ends in
// the middle, an event that is none, more tokens than were asked for. Only the caller's
// context ends a run early.
package load

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/options"
)

// Options configures a Generator. A zero field means its default.
type Options struct {
	BaseURL  string // of the endpoint, as http://127.0.0.1:8000
	Endpoint string // path of the requests; default /v1/completions, of chats /v1/chat/completions
	Chat     bool   // requests are chats, prompts then words; else prompts are token ids, or text
	Model    string // in the requests; Check finds it out

	Header    http.Header                // of every request
	ExtraBody map[string]json.RawMessage // fields of every request
	IgnoreEOS bool                       // engines are to generate all tokens that are asked for

	MaxConcurrency int           // requests in progress; 0: no limit
	Timeout        time.Duration // of a request; default 6 h, as vLLM's
	Vocabulary     int           // token ids are below it; default 32000, which most models have
	Turns          bool          // a turn of a conversation is sent after the turn before it has ended, and its Pause is over
	KeepText       bool          // Samples have the generated text
	Client         *http.Client  // default: one with as many connections as there are requests
}

// Validate reports every field that cannot be used.
func (o *Options) Validate() error {
	var c options.Checks
	u, err := url.Parse(o.BaseURL)
	c.That(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "", "BaseURL", "%q is no http URL", o.BaseURL)
	c.That(o.Endpoint == "" || strings.HasPrefix(o.Endpoint, "/"), "Endpoint", "%q does not begin with /", o.Endpoint)
	c.That(o.MaxConcurrency >= 0, "MaxConcurrency", "%d is below 0", o.MaxConcurrency)
	c.That(o.Timeout >= 0, "Timeout", "%v is below 0", o.Timeout)
	c.That(o.Vocabulary >= 0, "Vocabulary", "%d is below 0", o.Vocabulary)
	return c.Err()
}

// Generator sends workloads to one endpoint.
type Generator struct {
	o      Options
	url    string
	shown  string // BaseURL without a password
	client *http.Client

	total, done, failed, tokens atomic.Int64
	running                     atomic.Int64
	began                       atomic.Int64 // unix ns; 0: not yet
}

// idleTimeout is below the 5 s after which uvicorn closes an idle connection: a request that
// is sent at that moment would fail.
const idleTimeout = 4 * time.Second

// New returns a Generator. It sends nothing yet.
func New(o Options) (*Generator, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.BaseURL = strings.TrimRight(o.BaseURL, "/")
	o.Endpoint = cmp.Or(o.Endpoint, map[bool]string{true: "/v1/chat/completions", false: "/v1/completions"}[o.Chat])
	o.Timeout = cmp.Or(o.Timeout, 6*time.Hour)
	o.Vocabulary = cmp.Or(o.Vocabulary, 32000)
	u, err := url.Parse(o.BaseURL)
	if err != nil {
		return nil, err
	}
	g := &Generator{o: o, url: o.BaseURL + o.Endpoint, shown: u.Redacted(), client: o.Client}
	if g.client == nil {
		g.client = &http.Client{Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: 30 * time.Second}).DialContext,
			MaxIdleConns: 0, MaxIdleConnsPerHost: 1 << 16, IdleConnTimeout: idleTimeout, DisableCompression: true,
			TLSHandshakeTimeout: 30 * time.Second,
		}}
	}
	return g, nil
}

// Close closes idle connections.
func (g *Generator) Close() { g.client.CloseIdleConnections() }

// checkTimeout bounds one look at the endpoint.
const checkTimeout = 10 * time.Second

// Check asks the endpoint for its models, and takes the first one if Options.Model is
// empty. Within wait it tries again. If Options.Model is set, an endpoint that answers but
// does not list models (HTTP 404 or 405) passes too.
func (g *Generator) Check(ctx context.Context, wait time.Duration) error {
	until := time.Now().Add(wait)
	for {
		err := g.check(ctx)
		if err == nil || ctx.Err() != nil || !time.Now().Before(until) {
			return err
		}
		t := time.NewTimer(time.Second)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
}

func (g *Generator) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, g.o.BaseURL+"/v1/models", nil)
	if err != nil {
		return err
	}
	req.Header = g.header()
	res, err := g.client.Do(req)
	if err != nil {
		return fmt.Errorf("no endpoint at %s: %s", g.shown, reason(err))
	}
	defer res.Body.Close()
	var list struct{ Data []struct{ ID string } }
	text := head(res.Body, 1<<20)
	switch {
	case res.StatusCode == http.StatusUnauthorized || res.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%s demands an API key: HTTP %d (OPENAI_API_KEY, or --header Authorization=...)", g.shown, res.StatusCode)
	case g.o.Model != "" && (res.StatusCode == 200 || res.StatusCode == 404 || res.StatusCode == 405):
		return nil
	case res.StatusCode != 200:
		return fmt.Errorf("%s/v1/models: HTTP %d: %s", g.shown, res.StatusCode, message(text))
	case json.Unmarshal(text, &list) != nil || len(list.Data) == 0 || list.Data[0].ID == "":
		return fmt.Errorf("%s/v1/models names no model: is this an OpenAI API? (--model sets one)", g.shown)
	case clean(list.Data[0].ID) != list.Data[0].ID:
		return fmt.Errorf("%s/v1/models names a model that cannot be printed (--model sets one)", g.shown)
	}
	g.o.Model = list.Data[0].ID
	return nil
}

// Endpoint returns the endpoint's URL for people, without a password.
func (g *Generator) Endpoint() string { return g.shown }

// Model returns the model's name in requests.
func (g *Generator) Model() string { return g.o.Model }

func (g *Generator) header() http.Header {
	h := g.o.Header.Clone()
	if h == nil {
		h = make(http.Header)
	}
	h.Set("Content-Type", "application/json")
	return h
}

// Progress is how far a run is.
type Progress struct {
	Total, Done, Failed, Running int
	Tokens                       int // received
	Elapsed                      time.Duration
}

// Progress returns how far the run is.
func (g *Generator) Progress() Progress {
	p := Progress{Total: int(g.total.Load()), Done: int(g.done.Load()), Failed: int(g.failed.Load()), Running: int(g.running.Load()), Tokens: int(g.tokens.Load())}
	if at := g.began.Load(); at != 0 {
		p.Elapsed = time.Since(time.Unix(0, at))
	}
	return p
}

// WarmUp sends the first request of a workload n times, with the limit on concurrency, and
// measures nothing. The first failure is its error.
func (g *Generator) WarmUp(ctx context.Context, requests []workload.Request, n int) error {
	slots := make(chan struct{}, cmp.Or(g.o.MaxConcurrency, n))
	var wg sync.WaitGroup
	var first atomic.Pointer[string]
	for range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			s := bench.Sample{Cached: -1}
			g.send(ctx, &requests[0], &s, time.Now())
			if s.Failed() {
				first.CompareAndSwap(nil, &s.Error)
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if text := first.Load(); text != nil {
		return errors.New("warm-up: " + *text)
	}
	return nil
}

// Run is the result of a run.
type Run struct {
	Samples    []bench.Sample // of requests that ended, in the order of the workload
	Requests   []int          // which request of the workload each Sample is
	Began      time.Time
	Seconds    float64 // to the end of the last Sample
	Unfinished int     // in progress or not sent when ctx ended, or when the requests ended with an error
	Err        error   // of the requests of Stream
}

// Limits of turns that were read and wait for the turn before them. Beyond them the next request is read when one of these is sent.
const (
	maxWaiting       = 1 << 16
	maxWaitingBlocks = 1 << 23 // names of their blocks: 64 MiB
)

// Run sends the requests at their arrivals, waits for all of them, and returns their
// samples. When ctx ends, it returns those of the requests that have ended.
func (g *Generator) Run(ctx context.Context, requests []workload.Request) *Run {
	return g.Stream(ctx, workload.Each(requests), len(requests))
}

// Stream is Run for n requests that come one after another, in the order in which they are sent. A request is read when it is due, and kept
// until it has ended; of each one a Sample remains. An error of the requests ends the run as ctx does, but what is in progress goes on to its end.
func (g *Generator) Stream(ctx context.Context, requests iter.Seq2[workload.Request, error], n int) *Run {
	began := time.Now()
	for _, n := range []*atomic.Int64{&g.done, &g.failed, &g.tokens} {
		n.Store(0) // of a run before, and of warm-ups
	}
	g.total.Store(int64(n))
	g.began.Store(began.UnixNano())
	p := &play{g: g, ctx: ctx, began: began, samples: make([]bench.Sample, n), ended: make([]bool, n)}
	p.waiting.most, p.waiting.mostBlocks = maxWaiting, maxWaitingBlocks
	if g.o.MaxConcurrency > 0 {
		p.slots = make(chan struct{}, g.o.MaxConcurrency)
	}
	run := &Run{Began: began, Err: p.dispatch(requests)}
	for i := range n {
		if !p.ended[i] {
			run.Unfinished++
			continue
		}
		p.samples[len(run.Requests)] = p.samples[i] // in place: there may be many
		run.Requests = append(run.Requests, i)
	}
	if ended := len(run.Requests); ended > 0 {
		run.Samples = slices.Clip(p.samples[:ended])
	}
	run.Seconds = time.Duration(p.last.Load()).Seconds()
	return run
}

// play is one run.
type play struct {
	g       *Generator
	ctx     context.Context
	began   time.Time
	slots   chan struct{} // nil: no limit
	samples []bench.Sample
	ended   []bool
	last    atomic.Int64 // ns after began at which a request ended
	waiting waiting
}

// dispatch starts requests and returns when all have ended.
func (p *play) dispatch(requests iter.Seq2[workload.Request, error]) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer context.AfterFunc(p.ctx, p.waiting.end)()
	var t turns
	read := 0
	for r, err := range requests {
		i := read
		if read++; err == nil && i == len(p.samples) {
			err = fmt.Errorf("load: there are more than %d requests", i)
		}
		if err != nil {
			return err
		}
		if wait := time.Until(p.began.Add(r.Arrival)); wait > 0 {
			select {
			case <-time.After(wait):
			case <-p.ctx.Done():
			}
		}
		if p.ctx.Err() != nil {
			return nil
		}
		due := p.began.Add(r.Arrival)
		var before, after chan struct{}
		if p.g.o.Turns {
			before, after = t.next(r.Conversation)
		}
		if before == nil && !p.enter() {
			return nil
		}
		if before != nil {
			p.waiting.add(len(r.Blocks))
		}
		wg.Go(func() {
			if after != nil {
				defer close(after)
			}
			if before != nil && !p.await(before, &r, &due) {
				return
			}
			p.play(i, &r, due)
			p.leave()
		})
	}
	if read < len(p.samples) {
		return fmt.Errorf("load: there are %d requests, and %d were to come", read, len(p.samples))
	}
	return nil
}

// await waits for the turn before a request, its pause and a slot. It reports false when ctx ended first.
func (p *play) await(before chan struct{}, r *workload.Request, due *time.Time) bool {
	defer p.waiting.remove(len(r.Blocks))
	select {
	case <-before:
	case <-p.ctx.Done():
		return false
	}
	if r.Pause > 0 && !p.pause(r.Pause) {
		return false
	}
	if now := time.Now(); now.After(*due) {
		*due = now
	}
	return p.enter()
}

// turns are the last turns of conversations so far: each has a channel that is closed when the turn has ended.
type turns struct {
	last  map[int]chan struct{}
	check int // number of conversations at which next replaces the channels of ended turns by closedChannel
}

// closedChannel is one closed channel for all ended turns, so that their own channels can be freed.
var closedChannel = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// next returns the channel of the turn before the next one of a conversation, nil for none, and that of the next one.
func (t *turns) next(conversation int) (before, after chan struct{}) {
	if t.last == nil {
		t.last, t.check = make(map[int]chan struct{}), 1024
	}
	if len(t.last) >= t.check {
		t.check = 2 * len(t.last)
		for id, c := range t.last {
			select {
			case <-c:
				t.last[id] = closedChannel
			default:
			}
		}
	}
	after = make(chan struct{})
	before, t.last[conversation] = t.last[conversation], after
	return before, after
}

// waiting counts requests that wait for the turn before them; add blocks while there are too many.
type waiting struct {
	most, mostBlocks int

	mu struct {
		sync.Mutex
		requests, blocks int
		ended            bool
	}
	fewer sync.Cond // uses mu
}

// add counts a request once there is room for it. There is always room for one.
func (w *waiting) add(blocks int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fewer.L = &w.mu
	for w.mu.requests > 0 && (w.mu.requests >= w.most || w.mu.blocks+blocks > w.mostBlocks) && !w.mu.ended {
		w.fewer.Wait()
	}
	w.mu.requests++
	w.mu.blocks += blocks
}

func (w *waiting) remove(blocks int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.requests--
	w.mu.blocks -= blocks
	w.fewer.Signal()
}

// end lets add return at once.
func (w *waiting) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.ended = true
	w.fewer.Signal()
}

// pause waits, and reports false when ctx ended first.
func (p *play) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// enter waits for a slot.
func (p *play) enter() bool {
	if p.slots == nil {
		return p.ctx.Err() == nil
	}
	select {
	case p.slots <- struct{}{}:
		return true
	case <-p.ctx.Done():
		return false
	}
}

func (p *play) leave() {
	if p.slots != nil {
		<-p.slots
	}
}

// play sends one request. due is when it would have been sent without a limit.
func (p *play) play(i int, r *workload.Request, due time.Time) {
	g, s := p.g, &p.samples[i]
	s.Cached = -1
	g.running.Add(1)
	began := g.send(p.ctx, r, s, p.began)
	g.running.Add(-1)
	if s.Failed() && p.ctx.Err() != nil {
		return // it did not fail: we ended it
	}
	s.Queue = max(0, began.Sub(due).Seconds())
	p.ended[i] = true
	now := int64(time.Since(p.began))
	for {
		last := p.last.Load()
		if now <= last || p.last.CompareAndSwap(last, now) {
			break
		}
	}
	if s.Failed() {
		g.failed.Add(1)
	}
	g.done.Add(1)
}
