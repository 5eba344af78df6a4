// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// gone is the address of an engine that is not there.
const gone = "http://127.0.0.1:1"

// held is an engine that keeps its requests until release is closed.
type held struct {
	url     string
	came    chan struct{}
	release chan struct{}
	cut     atomic.Bool // it breaks connections off then
	well    atomic.Int64
}

func startHeld(t *testing.T) *held {
	e := &held{came: make(chan struct{}, 100), release: make(chan struct{})}
	e.well.Store(200)
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(int(e.well.Load())) })
	mux.HandleFunc("POST /v1/", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // else the server does not notice that the proxy has left
		e.came <- struct{}{}
		select {
		case <-e.release:
		case <-r.Context().Done():
		}
		if e.cut.Load() {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprint(w, `{"ok":1}`)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	e.url = s.URL
	return e
}

// send sends a request and returns a channel that gets its status.
func send(t *testing.T, url string) <-chan string {
	out := make(chan string, 1)
	go func() {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(`{"prompt":"x"}`))
		var r *http.Response
		if err == nil {
			r, err = http.DefaultClient.Do(q)
		}
		if err != nil {
			out <- err.Error()
			return
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		out <- fmt.Sprint(r.StatusCode, " ", string(text))
	}()
	return out
}

// Requests wait for an engine that is only full, whichever other engines are unwell.
func TestRequestsWaitForTheFullEngineThatTheyNeed(t *testing.T) {
	t.Parallel()
	f := func(path string, o func(e string, o *proxy.Options)) {
		t.Helper()
		e := startHeld(t)
		options := proxy.Options{
			Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: gone}}, MaxPerEngine: 1, HealthInterval: 20 * time.Millisecond, QueueTimeout: time.Hour,
		}
		o(e.url, &options)
		url, p := startProxy(t, options)
		testkit.Eventually(t, "the engine is well", func() bool { return p.Stats().Well[e.url] == 1 })
		first := send(t, url+path)
		<-e.came
		second := send(t, url+path)
		testkit.Eventually(t, "the second waits or has its answer", func() bool { return p.Stats().Queued == 1 || len(second) == 1 })
		close(e.release)
		if a, b := <-first, <-second; a[:3] != "200" || b[:3] != "200" {
			t.Errorf("%s: %s; %s", path, a, b)
		}
	}
	f("/v1/completions", func(e string, o *proxy.Options) { o.Decode, o.DecodeAlone = []string{e}, true })
	f("/v1/embeddings", func(e string, o *proxy.Options) { o.Decode = []string{e} })
	f("/v1/completions", func(e string, o *proxy.Options) { o.Decode, o.Engines = []string{gone}, []string{e} })
}

// When the engine breaks off a request and is not well then, requests that wait for room are refused, and so is the one that it broke off.
func TestWaitingRequestsLearnThatTheEngineIsGone(t *testing.T) {
	t.Parallel()
	e := startHeld(t)
	url, p := startProxy(t, proxy.Options{Engines: []string{e.url}, MaxPerEngine: 1, HealthInterval: time.Hour, QueueTimeout: time.Hour})
	reach(t, url)
	all := []<-chan string{send(t, url+"/v1/completions")}
	<-e.came
	for i := range 3 {
		all = append(all, send(t, url+"/v1/completions"))
		testkit.Eventually(t, "it waits", func() bool { return p.Stats().Queued == int64(i+1) })
	}
	e.cut.Store(true)
	e.well.Store(500)
	close(e.release)
	late := time.After(20 * time.Second)
	for i, one := range all {
		select {
		case got := <-one:
			if got[:3] != "503" || !strings.Contains(got, "is well") {
				t.Errorf("request %d: %s", i, got)
			}
		case <-late:
			t.Fatalf("request %d still waits for an engine that has gone: %d in the queue", i, p.Stats().Queued)
		}
	}
}

// Requests that wait for the look at an engine are refused at once when that engine is drained or removed, or the proxy is closed.
func TestADoubtEndsWithTheEngine(t *testing.T) {
	t.Parallel()
	admin := func(method, path string) func(p *proxy.Proxy, engine string) {
		return func(p *proxy.Proxy, engine string) {
			w, r := httptest.NewRecorder(), httptest.NewRequest(method, path+"?url="+engine, nil)
			r.Header.Set("Authorization", "Bearer t")
			if p.Admin("t").ServeHTTP(w, r); w.Code != 200 {
				t.Errorf("%s %s: %d", method, path, w.Code)
			}
		}
	}
	for name, end := range map[string]func(p *proxy.Proxy, engine string){
		"drained": admin("POST", "/engines/drain"), "removed": admin("DELETE", "/engines"), "closed": func(p *proxy.Proxy, _ string) { p.Close() },
	} {
		e := startDoubted(t)
		url, p := startProxy(t, proxy.Options{Engines: []string{e.url}, HealthInterval: time.Hour, QueueTimeout: time.Hour})
		reach(t, url)
		first := send(t, url+"/v1/completions")
		<-e.looked
		second := send(t, url+"/v1/completions")
		testkit.Eventually(t, "both wait", func() bool { return p.Stats().Queued == 2 })
		end(p, e.url)
		if n := p.Stats().Queued; n != 0 { // else only the engine's timeout would end it
			t.Errorf("%s: %d wait", name, n)
		}
		if a, b := <-first, <-second; a[:3] != "503" || b[:3] != "503" {
			t.Errorf("%s: %s; %s", name, a, b)
		}
		e.answer <- 200
	}
}

// A request that an engine breaks off after the proxy was closed waits for no look: there will be none.
func TestNoDoubtAfterClose(t *testing.T) {
	t.Parallel()
	e := startHeld(t)
	url, p := startProxy(t, proxy.Options{Engines: []string{e.url}, HealthInterval: time.Hour, QueueTimeout: time.Hour})
	reach(t, url)
	one := send(t, url+"/v1/completions")
	<-e.came
	p.Close()
	e.cut.Store(true)
	close(e.release)
	select {
	case got := <-one:
		if got[:3] != "503" {
			t.Error(got)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits for a look")
	}
}
