// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// doubted is an engine that breaks off its first request. Its /health answers after that only when the test sends a status to answer.
type doubted struct {
	url    string
	calls  atomic.Int64
	looked chan struct{} // a look has begun that waits for its answer
	answer chan int      // the status of such a look
}

func startDoubted(t *testing.T) *doubted {
	e := &doubted{looked: make(chan struct{}, 100), answer: make(chan int, 100)}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(w http.ResponseWriter, r *http.Request) {
		if e.calls.Load() == 0 {
			return
		}
		e.looked <- struct{}{}
		select {
		case status := <-e.answer:
			w.WriteHeader(status)
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, _ *http.Request) {
		if e.calls.Add(1) == 1 {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprint(w, `{"ok":1}`)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	e.url = s.URL
	return e
}

// ask sends requests and returns their answers when all have come.
func (e *doubted) ask(t *testing.T, url string, n int) func() (status []int) {
	out := make([]int, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x"}`))
			if err != nil {
				t.Error(err)
				return
			}
			r.Body.Close()
			out[i] = r.StatusCode
		})
	}
	return func() []int { all.Wait(); return out }
}

// A broken connection puts an engine in doubt. Requests without another engine wait for the next look at it. They are
// served if it is well. If it is not, they are refused at once, and not after their time in the queue.
func TestRequestsWaitForTheLookAfterTrouble(t *testing.T) {
	for status, want := range map[int]int{200: 200, 500: 503} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			e := startDoubted(t)
			url, p := startProxy(t, proxy.Options{Engines: []string{e.url}, HealthInterval: time.Hour, QueueTimeout: time.Hour})
			reach(t, url)
			answers := e.ask(t, url, 1)
			<-e.looked
			more := e.ask(t, url, 5)
			testkit.Eventually(t, "all wait", func() bool { return p.Stats().Queued == 6 })
			if r, err := http.Get(url + "/health"); err != nil || r.StatusCode != 200 || r.Body.Close() != nil {
				t.Errorf("a look is under way: %v, %v", r, err)
			}
			e.answer <- status
			for _, got := range append(answers(), more()...) {
				if got != want {
					t.Errorf("status %d, want %d", got, want)
				}
			}
			if s := p.Stats(); s.Queued != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// An engine that was well stays in doubt after one look that fails: requests wait for the next look.
func TestRequestsWaitForTheLookAfterAFailedOne(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]int{200: 200, 500: 503} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			e := &doubted{looked: make(chan struct{}, 100), answer: make(chan int, 100)}
			var armed atomic.Bool
			var looks atomic.Int64 // since
			mux := http.NewServeMux()
			mux.HandleFunc("/health", func(w http.ResponseWriter, r *http.Request) {
				if !armed.Load() {
					return
				}
				switch looks.Add(1) {
				case 1:
					w.WriteHeader(500)
				case 2:
					e.looked <- struct{}{}
					select {
					case status := <-e.answer:
						w.WriteHeader(status)
					case <-r.Context().Done():
					}
				}
			})
			mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"ok":1}`) })
			s := httptest.NewServer(mux)
			t.Cleanup(s.Close)
			url, p := startProxy(t, proxy.Options{Engines: []string{s.URL}, HealthInterval: 5 * time.Second, QueueTimeout: time.Hour})
			reach(t, url)
			armed.Store(true)
			<-e.looked
			answers := e.ask(t, url, 3)
			testkit.Eventually(t, "all wait", func() bool { return p.Stats().Queued == 3 })
			e.answer <- status
			for _, got := range answers() {
				if got != want {
					t.Errorf("status %d, want %d", got, want)
				}
			}
		})
	}
}

// Where D may compute alone, no request waits for a P in doubt.
func TestDecodeAloneDoesNotWaitForADoubt(t *testing.T) {
	e := startDoubted(t)
	d := mock(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	url, p := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: e.url}}, Decode: []string{d}, DecodeAlone: true, HealthInterval: time.Hour, QueueTimeout: time.Hour})
	x := &deployment{t: t, url: url}
	x.well()
	testkit.Eventually(t, "both are well", func() bool { return p.Stats().Well[e.url] == 1 && p.Stats().Well[d] == 1 })
	answers := e.ask(t, url, 1)
	<-e.looked
	if got := append(answers(), e.ask(t, url, 2)()...); got[0] != 200 || got[1] != 200 || got[2] != 200 {
		t.Errorf("statuses %v", got)
	}
	e.answer <- 200
}

// Requests do not wait for a silent engine during a whole look, which lasts up to HealthInterval: they are refused soon.
func TestASilentEngineEndsADoubt(t *testing.T) {
	t.Parallel()
	e := startDoubted(t)
	url, p := startImpatient(t, proxy.Options{Engines: []string{e.url}, HealthInterval: time.Hour, QueueTimeout: time.Hour})
	reach(t, url)
	first := e.ask(t, url, 1)
	<-e.looked
	more := e.ask(t, url, 1)
	all := make(chan []int, 1)
	go func() { all <- append(first(), more()...) }()
	select {
	case got := <-all:
		if got[0] != 503 || got[1] != 503 {
			t.Errorf("statuses %v", got)
		}
	case <-time.After(30 * time.Second):
		t.Error("requests still wait for a silent engine")
	}
	if s := p.Stats(); s.Queued != 0 {
		t.Errorf("%+v", s)
	}
	e.answer <- 200 // it answers at last: the look in progress finds it well
	testkit.Eventually(t, "it is used again", func() bool { return p.Stats().Well[e.url] == 1 })
	if got := e.ask(t, url, 1)(); got[0] != 200 {
		t.Errorf("statuses %v", got)
	}
}
