// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// answering is an engine that answers each request with a status and a text, and counts them.
type answering struct {
	url    string
	asked  atomic.Int64
	status atomic.Int64
}

func startAnswering(t testing.TB, status int) *answering {
	t.Helper()
	a := &answering{}
	a.status.Store(int64(status))
	a.url = mock(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		a.asked.Add(1)
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(int(a.status.Load()))
		fmt.Fprintf(w, `{"kv_transfer_params":{"a":1},"error":{"message":"status %d"}}`, a.status.Load())
	})
	return a
}

// When an engine answers that it has no room, the request goes to another one. No client gets 429 or 503 while an engine is idle, P is
// asked once for each request, and the full engine stays well. Without another engine the client gets the first answer, with its Retry-After.
func TestNoRoomMeansAnotherEngine(t *testing.T) {
	for _, status := range []int{429, 503} {
		full, idle, p := startAnswering(t, status), startAnswering(t, 200), startAnswering(t, 200)
		for _, o := range []proxy.Options{
			{Engines: []string{full.url, idle.url}},
			{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: p.url}}, Decode: []string{full.url, idle.url}},
			{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: full.url}, {URL: p.url}}, Decode: []string{idle.url}},
		} {
			o.HealthInterval = time.Hour
			url, s := startProxy(t, o)
			reach(t, url)
			testkit.Eventually(t, "all are well", func() bool {
				for _, well := range s.Stats().Well {
					if well == 0 {
						return false
					}
				}
				return true
			})
			p.asked.Store(0)
			const requests = 40 // more retries than the budget has
			for range requests {
				if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
					t.Fatal(status, text)
				}
			}
			if n := p.asked.Load(); len(o.Prefill) == 1 && n != requests || s.Stats().Paused[full.url] != 0 {
				t.Errorf("P was asked %d times, %+v", n, s.Stats())
			}
		}
		url, s := startProxy(t, proxy.Options{Engines: []string{full.url}, HealthInterval: time.Hour})
		reach(t, url)
		full.asked.Store(0)
		got, text, h := post(t, url, `{"prompt":"a"}`)
		if got != status || h.Get("Retry-After") != "7" || !strings.Contains(text, fmt.Sprint("status ", status)) || full.asked.Load() != 1 || s.Stats().Requests["refused"] != 1 {
			t.Errorf("%d %s %v, asked %d times", got, text, h, full.asked.Load())
		}
	}
}

// When two engines fail a request in the same way, the client gets that failure after two attempts, and neither engine is paused.
func TestFailuresAlikeArePassedOn(t *testing.T) {
	for _, status := range []int64{500, 501, 502, 504} {
		a, b, c := startAnswering(t, int(status)), startAnswering(t, int(status)), startAnswering(t, int(status))
		url, s := startProxy(t, proxy.Options{Engines: []string{a.url, b.url, c.url}, HealthInterval: time.Hour})
		reach(t, url)
		testkit.Eventually(t, "all are well", func() bool { w := s.Stats().Well; return w[a.url]+w[b.url]+w[c.url] == 3 })
		for i := range int64(8) { // more than the budget would have
			got, text, _ := post(t, url, `{"prompt":"a"}`)
			if n := a.asked.Load() + b.asked.Load() + c.asked.Load(); int64(got) != status || !strings.Contains(text, "status 5") || n != 2*(i+1) {
				t.Fatalf("%d %s, %d attempts for %d requests", got, text, n, i+1)
			}
		}
		if w := s.Stats(); w.Paused[a.url]+w.Paused[b.url]+w.Paused[c.url] != 0 || w.Requests["failed"] != 8 {
			t.Errorf("%+v", w)
		}
	}
}

// An engine that fails one request after the other gets none for a growing pause, then one at a time until it succeeds.
func TestCircuit(t *testing.T) {
	bad, good := startAnswering(t, 500), startAnswering(t, 200)
	url, s := startProxy(t, proxy.Options{Engines: []string{bad.url, good.url}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	testkit.Eventually(t, "both are well", func() bool { w := s.Stats().Well; return w[bad.url]+w[good.url] == 2 })
	send := func(n int) {
		t.Helper()
		for range n {
			if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
				t.Fatal(status, text)
			}
		}
	}
	began := time.Now()
	send(60)
	if n := bad.asked.Load(); time.Since(began) < time.Second && (n != 5 || s.Stats().Paused[bad.url] != 1) {
		t.Errorf("the engine that fails was asked %d times", n)
	}
	testkit.Eventually(t, "the pause ends", func() bool { return s.Stats().Paused[bad.url] == 0 })
	asked := bad.asked.Load()
	began = time.Now()
	send(20)
	if n := bad.asked.Load() - asked; time.Since(began) < time.Second && n != 1 {
		t.Errorf("%d requests probed the engine", n)
	}
	bad.status.Store(200)
	testkit.Eventually(t, "the second pause ends", func() bool { return s.Stats().Paused[bad.url] == 0 })
	if took := time.Since(began); took < 2*time.Second { // the pause began after that moment, and lasts twice as long as the first one
		t.Errorf("the second pause was %v", took)
	}
	asked = bad.asked.Load()
	send(20)
	if n := bad.asked.Load() - asked; n != 10 {
		t.Errorf("an engine that has recovered gets %d of 20 requests", n)
	}
}

// A probe whose client leaves has no result: the next request probes the engine.
func TestProbeOfAClientThatLeaves(t *testing.T) {
	var probing atomic.Bool
	var asked atomic.Int64 // since
	bad := mock(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		switch {
		case !probing.Load():
			http.Error(w, "{}", 500)
		case asked.Add(1) == 1:
			<-r.Context().Done()
		default:
			fmt.Fprint(w, `{}`)
		}
	})
	good := startAnswering(t, 200)
	url, s := startProxy(t, proxy.Options{Engines: []string{bad, good.url}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	testkit.Eventually(t, "both are well", func() bool { w := s.Stats().Well; return w[bad]+w[good.url] == 2 })
	testkit.Eventually(t, "the engine is paused", func() bool { post(t, url, `{"prompt":"a"}`); return s.Stats().Paused[bad] == 1 })
	testkit.Eventually(t, "the pause ends", func() bool { return s.Stats().Paused[bad] == 0 })
	probing.Store(true)
	for asked.Load() == 0 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"a"}`))
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
		}
		cancel()
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
	for range 4 {
		post(t, url, `{"prompt":"a"}`)
	}
	if n := asked.Load(); n < 3 {
		t.Errorf("the engine was asked %d times", n)
	}
}

// Requests that engines broke off are tried again ten times a minute at least, and not for more than a tenth of all.
func TestRetryBudget(t *testing.T) {
	var bad atomic.Int64
	lost := func() string {
		return mock(t, func(http.ResponseWriter, *http.Request) { bad.Add(1); panic(http.ErrAbortHandler) })
	}
	url, s := startProxy(t, proxy.Options{Engines: []string{lost(), lost()}, HealthInterval: 10 * time.Millisecond})
	reach(t, url)
	const requests = 40
	for range requests {
		if status, _, _ := post(t, url, `{"prompt":"a"}`); status != 503 {
			t.Fatal(status)
		}
	}
	if n := s.Stats().Retries; n != 10 || bad.Load() > requests+10 {
		t.Errorf("%d retries, %d attempts", n, bad.Load())
	}
}

// An answer that takes longer than --answer-timeout is not computed again: 504, or an error event, and P's KV is freed.
func TestAnswerTimeout(t *testing.T) {
	slow := streaming(t, func(write func(string), r *http.Request) {
		for r.Context().Err() == nil {
			if r.Header.Get("X-Silent") == "" {
				write(token)
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	url, s := startProxy(t, proxy.Options{Engines: []string{slow}, AnswerTimeout: time.Second, HealthInterval: time.Hour})
	reach(t, url)
	if _, text, err := postAndRead(t, url+"/v1/completions", `{"prompt":"a","stream":true}`); err == nil || !strings.Contains(text, token) || !strings.Contains(text, `"error"`) {
		t.Errorf("%q %v", text[max(0, len(text)-200):], err)
	}
	if status := ask(t, url+"/v1/completions", `{"prompt":"a"}`, "X-Silent", "1"); status != 504 {
		t.Errorf("%d", status)
	}
	if n := s.Stats(); n.Retries != 0 || n.Well[slow] != 1 {
		t.Errorf("%+v", n)
	}
}
