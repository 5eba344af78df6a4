// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

const (
	deadline   = 90 * time.Second // of each request
	grace      = 20 * time.Second // after a fault, in which requests may fail with an error
	slowest    = 20 * time.Second // of a request while only nodes and tiers have faults
	calmAfter  = time.Minute      // after a fault hit rates count again
	maxPrompt  = 2500
	chatsOfRun = 4096

	systemTokens = 1024 // of each chat's beginning that is left out
)

// load sends requests to the proxies and checks each answer.
type load struct {
	s      *soak
	chats  []workload.Request
	alone  *engine.Engine // computes what the answer must be; nil with real engines
	client *http.Client
	next   atomic.Int64
	paused atomic.Bool
	flying atomic.Int64
	strict atomic.Bool // a quiet time: nothing may fail
	// leaving makes half of the clients leave, each at a moment of its own: most while an engine looks up, loads or computes the prompt.
	leaving atomic.Bool
	wg      sync.WaitGroup

	mu     sync.Mutex
	recent [][]uint32 // prompts that were answered last
}

// done remembers a prompt that was answered.
func (l *load) done(tokens []uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.recent = append(l.recent, tokens); len(l.recent) > 12 {
		l.recent = l.recent[1:]
	}
}

func (l *load) lately() [][]uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.recent)
}

func newLoad(s *soak) (*load, error) {
	l := &load{
		s: s, chats: workload.Chats(chatsOfRun, workload.ChatOptions{Seed: s.schedule.Seed, Open: 6, Systems: 2, Turns: 5}),
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8, IdleConnTimeout: 3 * time.Second}},
	}
	if s.o.real != "" {
		return l, nil
	}
	var err error
	l.alone, err = engine.Open(context.Background(), engine.Options{
		Model: "m", KV: kvmem.Geometry{Layers: 1, Heads: 1, HeadBytes: 8, BlockTokens: 16, Blocks: 2000, TPSize: 1}, MaxModel: 8192,
	})
	return l, err
}

func (l *load) start(ctx context.Context, clients int) {
	for i := range clients {
		l.wg.Go(func() {
			rnd := rand.New(rand.NewPCG(l.s.schedule.Seed, uint64(100+i)))
			for ctx.Err() == nil {
				if l.paused.Load() {
					wait(ctx, 50*time.Millisecond)
					continue
				}
				l.flying.Add(1)
				ok := l.one(ctx, rnd, false)
				l.flying.Add(-1)
				pause := 200
				if !ok { // as a client that tries again does
					pause = 1000
				}
				wait(ctx, time.Duration(rnd.IntN(pause))*time.Millisecond)
			}
		})
	}
}

// hurry sends requests of clients who leave, besides the others: most are given up while they are looked up, wait for blocks, load or compute.
func (l *load) hurry(ctx context.Context, d time.Duration, seed uint64) {
	const longest = 300 * time.Millisecond // between two of them
	rnd := rand.New(rand.NewPCG(l.s.schedule.Seed, seed))
	for end := time.Now().Add(d); time.Now().Before(end) && ctx.Err() == nil && !l.paused.Load(); {
		of := rand.New(rand.NewPCG(rnd.Uint64(), seed))
		l.flying.Add(1)
		l.wg.Go(func() {
			defer l.flying.Add(-1)
			l.one(ctx, of, true)
		})
		wait(ctx, time.Duration(rnd.Int64N(int64(longest))))
	}
}

func (l *load) stop() {
	l.wg.Wait()
	if l.alone != nil {
		_ = l.alone.Close()
	}
	l.client.CloseIdleConnections()
}

// drain waits until no request is in flight.
func (l *load) drain(ctx context.Context) {
	l.paused.Store(true)
	for l.flying.Load() > 0 && ctx.Err() == nil {
		wait(ctx, 20*time.Millisecond)
	}
	l.client.CloseIdleConnections()
}

// ask is one request.
type ask struct {
	prompts [][]uint32
	n       int // answers to each prompt
	tokens  int // of each answer
	stream  bool
	salt    string
}

func (r *ask) String() string {
	var lengths []int
	for _, p := range r.prompts {
		lengths = append(lengths, len(p))
	}
	return fmt.Sprintf("prompts of %d tokens, n %d, stream %v, salt %q", lengths, r.n, r.stream, r.salt)
}

// outcome is how a request ended.
type outcome struct {
	kind  string // ok, error (a named one), cut (the connection broke), wrong (anything else)
	text  string // the reason
	texts map[int]string
	// tokens are those of answers that say how likely each token is: of real engines.
	tokens map[int][]chosen
	usage  usage
}

// draw makes request number i.
func (l *load) draw(i int, rnd *rand.Rand) ask {
	chat := &l.chats[i%len(l.chats)]
	tokens := chat.Tokens()
	tokens = tokens[min(systemTokens, len(tokens)/2):] // most of the system prompt is left out: prompts differ
	tokens = tokens[:min(len(tokens), maxPrompt)]
	if l.s.o.real != "" {
		tokens = vocabulary(tokens)
	}
	r := ask{prompts: [][]uint32{tokens}, n: 1, tokens: 1 + i%6, stream: rnd.IntN(2) == 0, salt: []string{"", "team"}[min(1, rnd.IntN(6)/5)]}
	if rnd.IntN(6) == 0 { // a long answer, which faults meet in its middle
		r.tokens = 200 + rnd.IntN(500)
	}
	switch rnd.IntN(8) {
	case 0: // a list: the proxy splits it
		for range 1 + rnd.IntN(3) {
			r.prompts = append(r.prompts, tokens[:1+rnd.IntN(len(tokens))])
		}
	case 1: // several answers to a prompt: D alone; vLLM refuses that without a temperature
		if l.s.o.real == "" {
			r.n = 2
		}
	}
	return r
}

// leaves draws whether a client leaves before its answer, and after how long. Most do so while the prompt is looked up or computed. Some have
// the patience of seconds, and leave while a pull waits for a slow link or an engine that stands still.
func (l *load) leaves(rnd *rand.Rand, hurry bool) (leaves bool, after time.Duration) {
	leaves = rnd.IntN(8) == 0
	latest := 200 * time.Millisecond
	if l.leaving.Load() {
		leaves, latest = leaves || rnd.IntN(2) == 0, 40*time.Millisecond
	}
	if rnd.IntN(2) == 0 {
		latest = 5 * time.Second
	}
	switch {
	case l.s.o.real != "": // vLLM 0.32 ends when a client leaves while its KV arrives
		return false, 0
	case hurry:
		leaves, latest = true, 100*time.Millisecond
	}
	return leaves, time.Duration(rnd.Int64N(int64(latest)))
}

// one sends one request and judges its end. It reports whether there was an answer. In a hurry the client leaves soon, and an
// error is no violation: so many requests at a time may be refused.
func (l *load) one(ctx context.Context, rnd *rand.Rand, hurry bool) bool {
	i := int(l.next.Add(1) - 1)
	r := l.draw(i, rnd)
	leaves, after := l.leaves(rnd, hurry)
	proxy := i % 2
	strict, began := l.strict.Load(), time.Now()
	deadline, slowest, grace := l.s.o.patience(deadline), l.s.o.patience(slowest), l.s.o.patience(grace)
	rctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	if leaves {
		time.AfterFunc(after, cancel)
	}
	got := l.send(rctx, i, proxy, &r)
	took := time.Since(began)
	if ctx.Err() != nil {
		return true
	}
	if leaves && rctx.Err() != nil {
		l.count("left")
		return true
	}
	id := fmt.Sprintf("request %d (proxy%d, %v, began %s, took %v)", i, proxy+1, &r, began.UTC().Format("15:04:05.000"), took.Round(time.Millisecond))
	ends := time.Now()
	switch {
	case took >= deadline:
		l.s.violation("%s did not end within %v: %s", id, deadline, got.text)
	case got.kind == "wrong":
		l.s.violation("%s: %s", id, got.text)
	case got.kind == "ok":
		if what := l.differs(ctx, i, &r, &got); what != "" && ctx.Err() == nil {
			l.s.violation("%s: %s", id, what)
		}
	case hurry:
	case strict && !l.engineEnded(ctx, began, ends):
		l.s.violation("%s failed in a quiet time: %s: %s", id, got.kind, got.text)
	case got.kind == "cut":
		name := fmt.Sprintf("proxy%d", proxy+1)
		if !l.s.windows.during(began, ends, 2*time.Second, func(f fault) bool { return f.Target == name }) {
			l.s.violation("%s: the connection broke without a fault of %s: %s", id, name, got.text)
		}
	case !l.s.windows.during(began, ends, grace, fault.hurts):
		l.s.violation("%s failed without a fault: %s", id, got.text)
	}
	if got.kind == "ok" && took > slowest && !l.s.windows.during(began, ends, grace, fault.hurts) {
		l.s.violation("%s: only nodes and tiers had faults, at most %v is allowed", id, slowest)
	}
	switch {
	case got.kind != "ok" && !hurry:
		l.s.logf("%s: %s: %.300s", id, got.kind, got.text)
	case got.kind == "ok":
		if r.salt == "" && r.n == 1 {
			l.done(r.prompts[0])
		}
		l.hit(got.usage, !l.s.windows.during(began, ends, calmAfter, nil))
	}
	l.count(got.kind)
	return got.kind == "ok"
}

// hit adds to the hit rate of the run. calm says that no fault was near the request.
func (l *load) hit(u usage, calm bool) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	l.s.record.Hits.add(u)
	if calm {
		l.s.record.CalmHits.add(u)
	}
}

func (l *load) count(kind string) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	l.s.record.Requests[kind]++
}

// differs names the first answer that is not what an engine without peers gives.
func (l *load) differs(ctx context.Context, i int, r *ask, o *outcome) string {
	if l.s.o.real != "" {
		return l.differsFromReal(ctx, r, o.tokens)
	}
	got := o.texts
	if len(got) != len(r.prompts)*r.n {
		return fmt.Sprintf("%d answers, want %d", len(got), len(r.prompts)*r.n)
	}
	for j, prompt := range r.prompts {
		want := l.want(ctx, fmt.Sprint(i, ".", j), prompt, r.tokens)
		for k := range r.n {
			if text := got[j*r.n+k]; text != want {
				return fmt.Sprintf("answer %d is %q, want %q", j*r.n+k, text, want)
			}
		}
	}
	return ""
}

// want computes an answer with an engine that has no peers.
func (l *load) want(ctx context.Context, id string, tokens []uint32, n int) string {
	st, err := l.alone.Submit(ctx, engine.Request{ID: id, Tokens: tokens, MaxTokens: n})
	if err != nil {
		return err.Error()
	}
	out, _, err := st.Wait(ctx)
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, t := range out {
		b.WriteString(" ~" + strconv.FormatUint(uint64(t), 36))
	}
	return b.String()
}

func (l *load) send(ctx context.Context, i, proxy int, r *ask) outcome {
	fields := map[string]any{"model": "m", "prompt": r.prompts, "max_tokens": r.tokens, "stream": r.stream}
	if len(r.prompts) == 1 {
		fields["prompt"] = r.prompts[0]
	}
	if r.n > 1 {
		fields["n"] = r.n
	}
	if r.stream {
		fields["stream_options"] = map[string]bool{"include_usage": true}
	}
	if l.s.o.real != "" {
		realFields(fields)
	}
	if r.salt != "" {
		fields["cache_salt"] = r.salt
	}
	body, err := json.Marshal(fields)
	if err != nil {
		return outcome{kind: "wrong", text: err.Error()}
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://%s:%d/v1/completions", bridgeAddr, 8000+proxy), bytes.NewReader(body))
	if err != nil {
		return outcome{kind: "wrong", text: err.Error()}
	}
	q.Header.Set("Content-Type", "application/json")
	q.Header.Set("X-Request-Id", fmt.Sprintf("soak-%d", i))
	a, err := l.client.Do(q)
	if err != nil {
		return outcome{kind: "cut", text: err.Error()}
	}
	defer a.Body.Close()
	if r.stream && a.StatusCode == http.StatusOK {
		return readStream(a.Body)
	}
	b, err := io.ReadAll(a.Body)
	if err != nil {
		return outcome{kind: "cut", text: err.Error()}
	}
	return judge(a.StatusCode, b)
}

type answer struct {
	Choices []struct {
		Index  int
		Text   string
		Reason string `json:"finish_reason"`
		Likely *struct {
			Tokens []string
			LogP   []float64 `json:"token_logprobs"`
		} `json:"logprobs"`
	}
	Usage *usage
	Error *struct{ Message string }
}

// usage is what an answer says of its prompt, in tokens.
type usage struct {
	Prompt  int64 `json:"prompt_tokens"`
	Details struct {
		Cached int64 `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// hits are the prompt tokens of answered requests, and those of them that P or D had cached.
type hits struct{ Prompt, Cached int64 }

func (h *hits) add(u usage) {
	h.Prompt += u.Prompt
	h.Cached += u.Details.Cached
}

// percent is the hit rate.
func (h hits) percent() float64 { return 100 * float64(h.Cached) / float64(max(1, h.Prompt)) }

func (a *answer) of() usage {
	if a.Usage == nil {
		return usage{}
	}
	return *a.Usage
}

// aborted is the reason with which vLLM ends the requests that it has not finished when it ends. The proxy passes it on where a part of
// the answer is there, or no other engine.
const aborted = "abort"

// take adds what an answer, or an event of a stream, has of each choice. It reports whether none was aborted.
func (o *outcome) take(a *answer) bool {
	if o.texts == nil {
		o.texts, o.tokens = map[int]string{}, map[int][]chosen{}
	}
	for _, c := range a.Choices {
		if c.Reason == aborted {
			return false
		}
		o.texts[c.Index] += c.Text
		if c.Likely == nil {
			continue
		}
		for i := range min(len(c.Likely.Tokens), len(c.Likely.LogP)) {
			o.tokens[c.Index] = append(o.tokens[c.Index], chosen{c.Likely.Tokens[i], c.Likely.LogP[i]})
		}
	}
	return true
}

// judge reads an answer that is no stream.
func judge(status int, body []byte) outcome {
	var a answer
	err := json.Unmarshal(body, &a)
	shown := body[:min(len(body), 300)]
	switch {
	case err != nil:
		return outcome{kind: "wrong", text: fmt.Sprintf("status %d, and the body is no JSON: %q", status, shown)}
	case status == http.StatusOK && len(a.Choices) > 0 && a.Error == nil:
		o := outcome{kind: "ok", usage: a.of()}
		if !o.take(&a) {
			return outcome{kind: "error", text: "the engine aborted it"}
		}
		return o
	case status >= 400 && a.Error != nil && a.Error.Message != "":
		return outcome{kind: "error", text: fmt.Sprintf("status %d: %s", status, a.Error.Message)}
	}
	return outcome{kind: "wrong", text: fmt.Sprintf("status %d: %q", status, shown)}
}

// readStream reads server-sent events up to [DONE] or an error event.
func readStream(r io.Reader) outcome {
	o := outcome{kind: "ok"}
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		switch {
		case !ok:
			continue
		case data == "[DONE]":
			return o
		}
		var a answer
		if err := json.Unmarshal([]byte(data), &a); err != nil {
			return outcome{kind: "wrong", text: fmt.Sprintf("an event is no JSON: %q", data)}
		}
		if a.Error != nil {
			return outcome{kind: "error", text: "event: " + a.Error.Message}
		}
		if a.Usage != nil {
			o.usage = *a.Usage
		}
		if !o.take(&a) {
			return outcome{kind: "error", text: "the engine aborted it"}
		}
	}
	if err := sc.Err(); err != nil {
		return outcome{kind: "cut", text: err.Error()}
	}
	return outcome{kind: "wrong", text: "the stream ended without [DONE] and without an error event"}
}
