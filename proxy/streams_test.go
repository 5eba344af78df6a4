// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// lastEvents are streams of each API: all but the last event, the last one, and a word of the API's own error event.
var lastEvents = []struct{ path, before, last, lost string }{
	{"/v1/completions", "data: {\"choices\":[]}\n\n", "data: [DONE]\n\n", `"code":502`},
	{"/v1/chat/completions", "data: {\"choices\":[]}\n\n", "data: [DONE]\n\n", `"code":502`},
	{"/v1/responses", "event: response.created\ndata: {\"type\":\"response.created\"}\n\n", "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":\"" + strings.Repeat("long ", 2000) + "\"}}\n\n", "event: error\ndata: {\"code\":\"server_error\""},
	{"/v1/responses", "event: response.created\ndata: {}\n\n", "event: response.incomplete\ndata: {}\n\n", "event: error\n"},
	{"/v1/responses", "event: response.created\ndata: {}\n\n", "event: response.failed\ndata: {}\n\n", "event: error\n"},
	{"/v1/messages", "event: message_start\ndata: {}\n\nevent: content_block_delta\ndata: {}\n\nevent: ping\ndata: {}\n\n", "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n", "event: error\ndata: {\"error\":{\"message\":\"the engine broke off\",\"type\":\"api_error\"}"},
}

// Each API has a last event of its own. A stream that ends with it ends well for the client, and the engine stays well. A
// stream that ends before it gets an error event in the API's own form; the proxy doubts the engine only when the connection broke.
func TestStreamsEndAsTheirAPISays(t *testing.T) {
	for i, api := range slices.Concat(lastEvents, lastEvents[:2]) {
		pd := i >= len(lastEvents) // through P and D, with a usage that is corrected
		t.Run(fmt.Sprint(api.path, pd), func(t *testing.T) {
			var how atomic.Value
			var looks atomic.Int64
			mux := http.NewServeMux()
			mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) { looks.Add(1) })
			mux.HandleFunc(api.path, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
				_, _ = io.WriteString(w, api.before)
				w.(http.Flusher).Flush()
				switch how.Load() {
				case "whole":
					_, _ = io.WriteString(w, api.last[:len(api.last)/2])
					w.(http.Flusher).Flush()
					_, _ = io.WriteString(w, api.last[len(api.last)/2:])
				case "cut":
					panic(http.ErrAbortHandler)
				case "half": // of the last event, and then a clean end
					_, _ = io.WriteString(w, api.last[:len(api.last)/2])
				}
			})
			o := proxy.Options{Engines: []string{serveMux(t, mux)}, HealthInterval: time.Hour, Attempts: 1}
			if pd {
				p := http.NewServeMux()
				p.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
				p.HandleFunc(api.path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
				o.Dialect, o.Engines, o.Decode, o.Prefill = proxy.NIXL, nil, o.Engines, []proxy.Prefill{{URL: serveMux(t, p)}}
			}
			url, p := startProxy(t, o)
			reach(t, url)
			before := looks.Load()
			ask := func(what string) (string, error) {
				how.Store(what)
				r, err := http.Post(url+api.path, "application/json", strings.NewReader(`{"prompt":"a","stream":true,"stream_options":{"include_usage":true}}`))
				if err != nil {
					t.Fatal(err)
				}
				defer r.Body.Close()
				text, err := io.ReadAll(r.Body)
				return string(text), err
			}
			if text, err := ask("whole"); err != nil || text != api.before+api.last {
				t.Errorf("a whole stream: %v %q", err, text)
			}
			for _, clean := range []string{"half", "nothing"} {
				if text, err := ask(clean); err == nil || !strings.Contains(text, api.lost) {
					t.Errorf("a stream without its last event (%s): %v %q", clean, err, text)
				}
			}
			testkit.Eventually(t, "all are counted", func() bool { return p.Stats().Requests["broken_off"] == 2 && p.Stats().Requests["ok"] == 1 })
			if n := looks.Load() - before; n != 0 {
				t.Errorf("an engine that ends its streams in good order is looked at %d times", n)
			}
			if text, err := ask("cut"); err == nil || !strings.Contains(text, api.lost) {
				t.Errorf("a cut stream: %v %q", err, text)
			}
			testkit.Eventually(t, "the engine is looked at", func() bool { return looks.Load() > before })
		})
	}
}

// A stream of a path without a last event of its own ends where HTTP says so.
func TestStreamsOfOtherPaths(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/score", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: 1\n\n")
	})
	url, p := startProxy(t, proxy.Options{Engines: []string{serveMux(t, mux)}, HealthInterval: time.Hour})
	reach(t, url)
	r, err := http.Post(url+"/v1/score", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if text, err := io.ReadAll(r.Body); err != nil || string(text) != "data: 1\n\n" {
		t.Errorf("%v %q", err, text)
	}
	testkit.Eventually(t, "it is counted", func() bool { return p.Stats().Requests["ok"] == 1 })
}

// When an engine ends a stream with its own error, the client gets no second error, and the engine
// stays well.
func TestStreamsThatEndWithAnErrorOfTheEngine(t *testing.T) {
	for path, last := range map[string]string{
		"/v1/completions": "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n",
		"/v1/responses":   "event: error\ndata: {\"type\":\"error\"}\n\n",
		"/v1/messages":    "event: error\ndata: {\"type\":\"error\"}\n\n",
	} {
		mux := http.NewServeMux()
		var looks atomic.Int64
		mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) { looks.Add(1) })
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {}\n\n")
			w.(http.Flusher).Flush()
			fmt.Fprint(w, last)
		})
		url, p := startProxy(t, proxy.Options{Engines: []string{serveMux(t, mux)}, HealthInterval: time.Hour})
		reach(t, url)
		before := looks.Load()
		r, err := http.Post(url+path, "application/json", strings.NewReader(`{"stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || string(text) != "data: {}\n\n"+last {
			t.Errorf("%s: %v %q", path, err, text)
		}
		testkit.Eventually(t, "it is counted", func() bool { return p.Stats().Requests["failed"] == 1 })
		if looks.Load() != before {
			t.Errorf("%s: the engine is doubted", path)
		}
	}
}

// The proxy corrects the usage in a stream through P and D. The rest of the stream is as from one engine, with any line ends and
// comments, any valid end, and events of any length.
func TestStreamsWithUsageComeAsOthers(t *testing.T) {
	var stream atomic.Value
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush() // without a length
		_, _ = io.WriteString(w, stream.Load().(string))
	})
	p := http.NewServeMux()
	p.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	p.HandleFunc("/v1/completions", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`) })
	engine := serveMux(t, mux)
	plain, _ := startProxy(t, proxy.Options{Engines: []string{engine}, HealthInterval: time.Hour, Attempts: 1})
	pd, _ := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Decode: []string{engine}, Prefill: []proxy.Prefill{{URL: serveMux(t, p)}}, HealthInterval: time.Hour, Attempts: 1})
	ask := func(url string) (string, error) {
		t.Helper()
		r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"a","stream":true,"stream_options":{"include_usage":true}}`))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		return string(text), err
	}
	reach(t, plain)
	reach(t, pd)
	f := func(text string) {
		t.Helper()
		stream.Store(text)
		one, err1 := ask(plain)
		two, err2 := ask(pd)
		if (err1 == nil) != (err2 == nil) || err1 == nil && (one != text || two != text) {
			t.Errorf("%.60q, %d bytes: %d bytes, %v; through P and D %d bytes, %v", text, len(text), len(one), err1, len(two), err2)
		}
	}
	for _, text := range []string{"data: {\"choices\":[]}\n\n: a\n\ndata: [DONE]\n\n", "data: {\"choices\":[]}\r\n\r\ndata:[DONE]\r\n\r\n: bye\n"} {
		for n := len(": a") + 1; n <= len(text); n++ {
			f(text[:n])
		}
	}
	long := "data: {\"a\":\"" + strings.Repeat("x", 5<<20) + "\"}\n\n"
	f("data: {}\n\n" + long + "data: {}\n\ndata: [DONE]\n\n")
	f(long)
}
