// SPDX-License-Identifier: Apache-2.0

package load_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/bench/load"
	"github.com/kvasir-kv/kvasir/bench/workload"
)

// clockwork answers requests in virtual time: the first token after first, the others after
// gap each, the usage after late.
type clockwork struct {
	first, gap, late time.Duration
	tokens           int

	mu struct {
		sync.Mutex
		bodies      []map[string]any
		now, atOnce int
	}
}

func (c *clockwork) RoundTrip(r *http.Request) (*http.Response, error) {
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	var body map[string]any
	if err := json.Unmarshal(text, &body); err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.mu.bodies = append(c.mu.bodies, body)
	c.mu.now++
	c.mu.atOnce = max(c.mu.atOnce, c.mu.now)
	c.mu.Unlock()
	read, write := io.Pipe()
	go func() {
		defer func() {
			c.mu.Lock()
			c.mu.now--
			c.mu.Unlock()
		}()
		wait := func(d time.Duration) bool {
			select {
			case <-time.After(d):
				return true
			case <-r.Context().Done():
				write.CloseWithError(r.Context().Err())
				return false
			}
		}
		for i := range c.tokens {
			d := c.gap
			if i == 0 {
				d = c.first
			}
			if !wait(d) {
				return
			}
			reason := "null"
			if i == c.tokens-1 {
				reason = `"length"`
			}
			if _, err := fmt.Fprintf(write, ": ping\n\ndata: {\"choices\":[{\"text\":\" a\",\"delta\":{\"content\":\" b\"},\"finish_reason\":%s}],\"usage\":null}\n\n", reason); err != nil {
				return
			}
		}
		if wait(c.late) {
			fmt.Fprintf(write, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":77,\"completion_tokens\":%d,\"prompt_tokens_details\":{\"cached_tokens\":16}}}\n\ndata: [DONE]\n\n", c.tokens)
			write.Close()
		}
	}()
	return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: read, Request: r}, nil
}

func generator(t *testing.T, c *clockwork, o load.Options) *load.Generator {
	t.Helper()
	o.BaseURL, o.Model, o.Client = "http://engine.test", "m", &http.Client{Transport: c}
	g, err := load.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-6 }

func prompts(t *testing.T, n int) []workload.Request {
	t.Helper()
	r, err := workload.Random(n, 20, 5, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Times are those of the events with a choice: not of pings, not of the usage behind them.
func TestTimesOfOneRequest(t *testing.T) {
	f := func(chat bool) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			c := &clockwork{first: 300 * time.Millisecond, gap: 20 * time.Millisecond, late: time.Second, tokens: 5}
			g := generator(t, c, load.Options{Chat: chat, IgnoreEOS: true, KeepText: true, Vocabulary: 50, ExtraBody: map[string]json.RawMessage{"top_k": []byte("3")}})
			run := g.Run(t.Context(), prompts(t, 1))
			s := run.Samples[0]
			if s.Failed() || !near(s.TTFT, 0.3) || !near(s.Latency, 0.38) || len(s.ITL) != 4 || !near(s.ITL[0], 0.02) || !near(s.ITL[3], 0.02) {
				t.Errorf("%+v", s)
			}
			if s.Input != 77 || s.Output != 5 || s.Cached != 16 || len(s.Text) != 20 || !near(run.Seconds, 1.38) {
				t.Errorf("%+v, %v s", s, run.Seconds)
			}
			body := c.mu.bodies[0]
			limit, prompt := "max_tokens", body["prompt"]
			if chat {
				limit = "max_completion_tokens"
				prompt = body["messages"].([]any)[0].(map[string]any)["content"]
			}
			if body[limit] != 5.0 || body["stream"] != true || body["ignore_eos"] != true || body["top_k"] != 3.0 || body["model"] != "m" || prompt == nil {
				t.Errorf("%v", body)
			}
			if ids, ok := body["prompt"].([]any); !chat && (!ok || len(ids) != 20 || ids[0].(float64) >= 50) {
				t.Errorf("%v", body["prompt"])
			}
			if p := g.Progress(); p.Done != 1 || p.Total != 1 || p.Tokens != 5 || p.Running != 0 {
				t.Errorf("%+v", p)
			}
		})
	}
	f(false)
	f(true)
}

// A limit on concurrency delays requests in their order, and each delay is the request's queue
// time. Without a limit all are sent at their arrivals.
func TestConcurrencyAndArrivals(t *testing.T) {
	f := func(limit int, arrivals, starts, queues []float64) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			c := &clockwork{first: time.Second, tokens: 1}
			g := generator(t, c, load.Options{MaxConcurrency: limit})
			r := prompts(t, len(arrivals))
			for i := range r {
				r[i].Arrival = time.Duration(arrivals[i] * float64(time.Second))
			}
			run := g.Run(t.Context(), r)
			for i, s := range run.Samples {
				if !near(s.Start, starts[i]) || !near(s.Queue, queues[i]) || !near(s.TTFT, 1) {
					t.Errorf("request %d started at %v after %v in the queue, want %v, %v", i, s.Start, s.Queue, starts[i], queues[i])
				}
			}
			if limit > 0 && c.mu.atOnce > limit || run.Unfinished != 0 || len(run.Samples) != len(r) {
				t.Errorf("%d at once, %d of %d ended", c.mu.atOnce, len(run.Samples), len(r))
			}
		})
	}
	f(0, []float64{0, 0.25, 0.5, 3}, []float64{0, 0.25, 0.5, 3}, []float64{0, 0, 0, 0})
	f(2, []float64{0, 0, 0, 0, 0}, []float64{0, 0, 1, 1, 2}, []float64{0, 0, 1, 1, 2})
	f(1, []float64{0, 0.5, 4}, []float64{0, 1, 4}, []float64{0, 0.5, 0})
}

// A turn waits for the turn before it, and only for that.
func TestTurnsWaitForTheirConversation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &clockwork{first: time.Second, tokens: 1}
		g := generator(t, c, load.Options{Turns: true, MaxConcurrency: 8})
		r := prompts(t, 5)
		for i, conversation := range []int{0, 0, 1, 0, 1} {
			r[i].Conversation = conversation
		}
		run := g.Run(t.Context(), r)
		for i, want := range []float64{0, 1, 0, 2, 1} {
			if s := run.Samples[i]; !near(s.Start, want) || !near(s.Queue, 0) {
				t.Errorf("request %d: %+v, want a start at %v", i, s, want)
			}
		}
	})
}

// An interrupted run has the requests that have ended until then. The others count neither as success nor
// as failure.
func TestInterruptedAtAnyMoment(t *testing.T) {
	f := func(after time.Duration, ended int, turns bool) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			c := &clockwork{first: time.Second, gap: time.Second, tokens: 2}
			g := generator(t, c, load.Options{MaxConcurrency: 2, Turns: turns})
			ctx, cancel := context.WithTimeout(t.Context(), after)
			defer cancel()
			r := prompts(t, 7)
			r[6].Arrival = time.Hour
			if turns {
				r[1].Conversation, r[2].Conversation = 0, 0
			}
			run := g.Run(ctx, r)
			if len(run.Samples) != ended || run.Unfinished != 7-ended || run.Seconds > after.Seconds() {
				t.Errorf("after %v: %d ended, %d not, %v s", after, len(run.Samples), run.Unfinished, run.Seconds)
			}
			for i, s := range run.Samples {
				if s.Failed() || len(s.ITL) != 1 || run.Requests[i] > 5 {
					t.Errorf("%d: %+v", run.Requests[i], s)
				}
			}
		})
	}
	f(time.Nanosecond, 0, false)
	f(500*time.Millisecond, 0, false)
	f(1500*time.Millisecond, 0, false)
	f(2500*time.Millisecond, 2, false)
	f(5*time.Second, 4, false)
	f(30*time.Minute, 6, false)
	f(3*time.Second, 2, true)
}

// A request that takes too long fails alone.
func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &clockwork{first: time.Second, gap: time.Second, tokens: 100}
		run := generator(t, c, load.Options{Timeout: 10500 * time.Millisecond}).Run(t.Context(), prompts(t, 2))
		for _, s := range run.Samples {
			if s.Error != "timeout" || !near(s.TTFT, 1) {
				t.Errorf("%+v", s)
			}
		}
		if len(run.Samples) != 2 {
			t.Errorf("%+v", run)
		}
	})
}

// refusing refuses the first requests.
type refusing struct{ left int }

func (r *refusing) RoundTrip(req *http.Request) (*http.Response, error) {
	if r.left--; r.left >= 0 {
		return nil, errors.New("connection refused")
	}
	body := `{"data":[{"id":"first"},{"id":"second"}]}`
	return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}, Request: req}, nil
}

// An endpoint that comes up within the wait is good.
func TestCheckWaits(t *testing.T) {
	f := func(refusals int, wait time.Duration, good bool) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			g, err := load.New(load.Options{BaseURL: "http://engine.test/", Client: &http.Client{Transport: &refusing{left: refusals}}})
			if err != nil {
				t.Fatal(err)
			}
			err = g.Check(t.Context(), wait)
			if (err == nil) != good || good && g.Model() != "first" || !good && err.Error() != "no endpoint at http://engine.test: connection refused" {
				t.Errorf("%v, model %q", err, g.Model())
			}
		})
	}
	f(0, 0, true)
	f(1, 0, false)
	f(3, time.Minute, true)
	f(100, time.Minute, false)
}
