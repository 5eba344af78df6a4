// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
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
	maxPrompt  = 2500
	chatsOfRun = 4096

	systemTokens = 1024 // of each chat's beginning that is left out
)

// load sends requests to the proxies and checks each answer.
type load struct {
	s      *soak
	chats  []workload.Request
	alone  *engine.Engine // computes what the answer must be
	client *http.Client
	next   atomic.Int64
	paused atomic.Bool
	flying atomic.Int64
	strict atomic.Bool // a quiet time: nothing may fail
	wg     sync.WaitGroup

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
	alone, err := engine.Open(context.Background(), engine.Options{
		Model: "m", KV: kvmem.Geometry{Layers: 1, Heads: 1, HeadBytes: 8, BlockTokens: 16, Blocks: 2000, TPSize: 1}, MaxModel: 8192,
	})
	if err != nil {
		return nil, err
	}
	return &load{
		s: s, alone: alone, chats: workload.Chats(chatsOfRun, workload.ChatOptions{Seed: s.schedule.Seed, Open: 6, Systems: 2, Turns: 5}),
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8, IdleConnTimeout: 3 * time.Second}},
	}, nil
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
				ok := l.one(ctx, rnd)
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

func (l *load) stop() {
	l.wg.Wait()
	_ = l.alone.Close()
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

// outcome is how a request ended.
type outcome struct {
	kind string // ok, error (a named one), cut (the connection broke), wrong (anything else)
	text string // the answer's text, or the reason
}

// one sends one request and judges its end. It reports whether there was an answer.
func (l *load) one(ctx context.Context, rnd *rand.Rand) bool {
	i := int(l.next.Add(1) - 1)
	chat := &l.chats[i%len(l.chats)]
	tokens, n := chat.Tokens(), 1+i%6
	tokens = tokens[min(systemTokens, len(tokens)/2):] // most of the system prompt is left out: prompts differ
	tokens = tokens[:min(len(tokens), maxPrompt)]
	proxy, stream, leaves := i%2, rnd.IntN(2) == 0, rnd.IntN(20) == 0
	strict, began := l.strict.Load(), time.Now()
	rctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	if leaves {
		time.AfterFunc(time.Duration(rnd.IntN(200))*time.Millisecond, cancel)
	}
	got := l.send(rctx, i, proxy, tokens, n, stream)
	took := time.Since(began)
	if ctx.Err() != nil {
		return true
	}
	if leaves && rctx.Err() != nil {
		l.count("left")
		return true
	}
	id := fmt.Sprintf("request %d (proxy%d, %d tokens, stream %v, began %s, took %v)", i, proxy+1, len(tokens), stream, began.UTC().Format("15:04:05.000"), took.Round(time.Millisecond))
	ends := time.Now()
	switch {
	case took >= deadline:
		l.s.violation("%s did not end within %v: %s", id, deadline, got.text)
	case got.kind == "wrong":
		l.s.violation("%s: %s", id, got.text)
	case got.kind == "ok":
		if want := l.want(ctx, i, tokens, n); want != got.text && ctx.Err() == nil {
			l.s.violation("%s: the answer is %q, want %q", id, got.text, want)
		}
	case strict:
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
	if got.kind != "ok" {
		l.s.logf("%s: %s: %.300s", id, got.kind, got.text)
	} else {
		l.done(tokens)
	}
	l.count(got.kind)
	return got.kind == "ok"
}

func (l *load) count(kind string) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	l.s.record.Requests[kind]++
}

// want computes the answer with an engine that has no peers.
func (l *load) want(ctx context.Context, i int, tokens []uint32, n int) string {
	st, err := l.alone.Submit(ctx, engine.Request{ID: strconv.Itoa(i), Tokens: tokens, MaxTokens: n})
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

func (l *load) send(ctx context.Context, i, proxy int, tokens []uint32, n int, stream bool) outcome {
	body, err := json.Marshal(map[string]any{"model": "m", "prompt": tokens, "max_tokens": n, "stream": stream})
	if err != nil {
		return outcome{"wrong", err.Error()}
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://%s:%d/v1/completions", bridgeAddr, 8000+proxy), bytes.NewReader(body))
	if err != nil {
		return outcome{"wrong", err.Error()}
	}
	q.Header.Set("Content-Type", "application/json")
	q.Header.Set("X-Request-Id", fmt.Sprintf("soak-%d", i))
	r, err := l.client.Do(q)
	if err != nil {
		return outcome{"cut", err.Error()}
	}
	defer r.Body.Close()
	if stream && r.StatusCode == http.StatusOK {
		return readStream(r.Body)
	}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return outcome{"cut", err.Error()}
	}
	return judge(r.StatusCode, b)
}

type answer struct {
	Choices []struct{ Text string }
	Error   *struct{ Message string }
}

// judge reads an answer that is no stream.
func judge(status int, body []byte) outcome {
	var a answer
	err := json.Unmarshal(body, &a)
	shown := body[:min(len(body), 300)]
	switch {
	case err != nil:
		return outcome{"wrong", fmt.Sprintf("status %d, and the body is no JSON: %q", status, shown)}
	case status == http.StatusOK && len(a.Choices) == 1 && a.Error == nil:
		return outcome{"ok", a.Choices[0].Text}
	case status >= 400 && a.Error != nil && a.Error.Message != "":
		return outcome{"error", fmt.Sprintf("status %d: %s", status, a.Error.Message)}
	}
	return outcome{"wrong", fmt.Sprintf("status %d: %q", status, shown)}
}

// readStream reads server-sent events up to [DONE] or an error event.
func readStream(r io.Reader) outcome {
	var text strings.Builder
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		switch {
		case !ok:
			continue
		case data == "[DONE]":
			return outcome{"ok", text.String()}
		}
		var a answer
		if err := json.Unmarshal([]byte(data), &a); err != nil {
			return outcome{"wrong", fmt.Sprintf("an event is no JSON: %q", data)}
		}
		if a.Error != nil {
			return outcome{"error", "event: " + a.Error.Message}
		}
		for _, c := range a.Choices {
			text.WriteString(c.Text)
		}
	}
	err := sc.Err()
	if err == nil {
		err = errors.New("the stream ended without [DONE] and without an error event")
		return outcome{"wrong", err.Error()}
	}
	return outcome{"cut", err.Error()}
}
