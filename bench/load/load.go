// SPDX-License-Identifier: Apache-2.0

// Package load sends a workload to an endpoint of the OpenAI API and records when the tokens come, as vllm bench serve does.
//
// Whatever the endpoint does is an outcome of the request: a refusal, a stream that ends in the middle, an invalid event, or more
// tokens than were asked for. Only the caller's context ends a run early.
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
	BaseURL  string // address of the endpoint, for example http://127.0.0.1:8000
	Endpoint string // path of the requests; default /v1/completions, for chats /v1/chat/completions
	Chat     bool   // requests are chats, and prompts are words; otherwise prompts are token ids, or text
	Model    string // name of the model in the requests; if empty, Check sets it

	Header    http.Header                // header fields of every request
	ExtraBody map[string]json.RawMessage // further fields in the body of every request
	IgnoreEOS bool                       // ask engines to generate all tokens, without stopping early

	MaxConcurrency int           // most requests in progress; 0: no limit
	Timeout        time.Duration // limit for one request; default 6 h, as in vLLM
	Vocabulary     int           // token ids are below this number; default 32000, which most models have
	Turns          bool          // send a turn of a conversation only after the turn before it has ended and its Pause is over
	KeepText       bool          // keep the generated text in Samples
	Client         *http.Client  // default: a client that can open as many connections as there are requests
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
	shown  string // BaseURL without its password
	client *http.Client

	total, done, failed, tokens atomic.Int64
	running                     atomic.Int64
	began                       atomic.Int64 // when the run began, in unix ns; 0: not yet
}

// idleTimeout is less than the 5 s after which uvicorn closes an idle connection: a request sent at that moment would fail.
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

// checkTimeout limits one question to the endpoint.
const checkTimeout = 10 * time.Second

// Check asks the endpoint for its models. If Options.Model is empty, it takes the first model. It tries again until wait has passed. If
// Options.Model is set, an endpoint that answers but cannot list models (HTTP 404 or 405) passes, too.
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

// Endpoint returns the endpoint's URL without its password, to be shown to people.
func (g *Generator) Endpoint() string { return g.shown }

// Model returns the name of the model that requests carry.
func (g *Generator) Model() string { return g.o.Model }

func (g *Generator) header() http.Header {
	h := g.o.Header.Clone()
	if h == nil {
		h = make(http.Header)
	}
	h.Set("Content-Type", "application/json")
	return h
}

// Progress says how far a run has come.
type Progress struct {
	Total, Done, Failed, Running int
	Tokens                       int // tokens received
	Elapsed                      time.Duration
}

// Progress returns how far the run has come.
func (g *Generator) Progress() Progress {
	p := Progress{Total: int(g.total.Load()), Done: int(g.done.Load()), Failed: int(g.failed.Load()), Running: int(g.running.Load()), Tokens: int(g.tokens.Load())}
	if at := g.began.Load(); at != 0 {
		p.Elapsed = time.Since(time.Unix(0, at))
	}
	return p
}

// WarmUp sends the first request of a workload n times, within the limit on concurrency, and measures nothing. It returns the first
// failure as an error.
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
	Samples    []bench.Sample // of the requests that have ended, in the order of the workload
	Requests   []int          // for each Sample, the index of its request in the workload
	Began      time.Time
	Seconds    float64 // time to the end of the last Sample
	Unfinished int     // requests that were in progress or not sent when ctx ended, or when the requests ended with an error
	Err        error   // error in the requests of Stream
}

// Limits of the turns that have been read and wait for the turn before them. At the limit, the next request is read only after one of
// these has been sent.
const (
	maxWaiting       = 1 << 16
	maxWaitingBlocks = 1 << 23 // names of their blocks: 64 MiB
)

// Run sends the requests at their arrival times, waits until all have ended, and returns their samples. When ctx ends first, it returns
// the samples of the requests that have ended.
func (g *Generator) Run(ctx context.Context, requests []workload.Request) *Run {
	return g.Stream(ctx, workload.Each(requests), len(requests))
}

// Stream does what Run does, for n requests that come one after another, in the order in which they are sent. It reads a request when
// the request is due, and keeps it until it has ended; after that only its Sample remains. An error in requests ends the run, as the
// end of ctx does, but the requests in progress go on to their end.
func (g *Generator) Stream(ctx context.Context, requests iter.Seq2[workload.Request, error], n int) *Run {
	began := time.Now()
	for _, n := range []*atomic.Int64{&g.done, &g.failed, &g.tokens} {
		n.Store(0) // it may count from an earlier run, or from warm-ups
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
		p.samples[len(run.Requests)] = p.samples[i] // in place, because there may be many samples
		run.Requests = append(run.Requests, i)
	}
	if ended := len(run.Requests); ended > 0 {
		run.Samples = slices.Clip(p.samples[:ended])
	}
	run.Seconds = time.Duration(p.last.Load()).Seconds()
	return run
}

// play is the state of one run.
type play struct {
	g       *Generator
	ctx     context.Context
	began   time.Time
	slots   chan struct{} // one token per request in progress; nil: no limit
	samples []bench.Sample
	ended   []bool
	last    atomic.Int64 // when the last request ended, in ns after began
	waiting waiting
}

// dispatch starts the requests, and returns when all of them have ended.
func (p *play) dispatch(requests iter.Seq2[workload.Request, error]) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer context.AfterFunc(p.ctx, p.waiting.end)()
	var t turns
	read := 0
	for r, err := range requests {
		i := read
		if read++; err == nil && i == len(p.samples) {
			err = fmt.Errorf("load: the workload has more than the %d requests that were to come", i)
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
		return fmt.Errorf("load: the workload has %d requests, and %d were to come", read, len(p.samples))
	}
	return nil
}

// await waits until the turn before a request has ended, which closes `before`, until the request's pause is over, and then for a slot. If
// the turn and the pause end after *due, it sets *due to that moment. It returns false if ctx ends first.
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

// turns holds the last turn of each conversation so far, as a channel that is closed when the turn has ended.
type turns struct {
	last  map[int]chan struct{}
	check int // when there are so many conversations, next replaces the channels of ended turns by closedChannel
}

// closedChannel is a closed channel that stands for all ended turns, so that their own channels can be freed.
var closedChannel = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// next begins the next turn of a conversation. It closes neither channel: before is closed when the turn before it has ended (nil:
// there is no such turn), and the caller closes after when this turn has ended.
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

// waiting counts the requests that wait for the turn before them. While there are too many, add blocks.
type waiting struct {
	most, mostBlocks int

	mu struct {
		sync.Mutex
		requests, blocks int
		ended            bool
	}
	fewer sync.Cond // uses mu
}

// add counts a request, once there is room for it. If none waits, there is always room for one.
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

// end makes add return at once.
func (w *waiting) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.ended = true
	w.fewer.Signal()
}

// pause waits for the duration d. It returns false if ctx ends first.
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

// enter waits for a slot. It returns false if ctx ends first.
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

// play sends one request. due is when it would have been sent without a limit on concurrency.
func (p *play) play(i int, r *workload.Request, due time.Time) {
	g, s := p.g, &p.samples[i]
	s.Cached = -1
	g.running.Add(1)
	began := g.send(p.ctx, r, s, p.began)
	g.running.Add(-1)
	if s.Failed() && p.ctx.Err() != nil {
		return // the request did not fail: the end of ctx ended it
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
