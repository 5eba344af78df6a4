// SPDX-License-Identifier: Apache-2.0

package load_test

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/load"
)

const token = "data: {\"choices\":[{\"text\":\" a\",\"finish_reason\":null}]}\n\n"

// hostile has faulty endpoints, and the text of the error that each one causes.
var hostile = map[string]struct {
	serve func(w http.ResponseWriter, r *http.Request)
	want  string
}{
	"empty":      {func(http.ResponseWriter, *http.Request) {}, "no token came: HTTP 200"},
	"no stream":  {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"choices":[{"text":"a"}]}`) }, "the stream was cut after 0 events"},
	"only done":  {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "data: [DONE]\n\n") }, "no token came"},
	"garbage":    {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, token+"data: \x00\x1b[31m{\n\n") }, "event 2 is no JSON"},
	"other JSON": {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, token+`data: {"choices":"x"}`+"\n\n") }, "event 2 is no JSON"},
	"error event": {func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, token+`data: {"error":{"message":"out\nof\u001b memory","code":500}}`+"\n\ndata: [DONE]\n\n")
	}, "out of  memory"},
	"ends early":    {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, token+token) }, "the stream ended before its last token"},
	"half an event": {func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, token+`data: {"cho`) }, "the stream was cut after 1 events"},
	"never ends":    {func(w http.ResponseWriter, r *http.Request) { endless(w, r, token) }, "more than"},
	"a long event":  {func(w http.ResponseWriter, r *http.Request) { endless(w, r, strings.Repeat("x", 1<<16)) }, "event too long"},
	"busy": {func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, `{"error":{"message":"try later"}}`, http.StatusServiceUnavailable)
	}, "HTTP 503: try later"},
	"error text":     {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, strings.Repeat("no", 5000), 500) }, "HTTP 500: nono"},
	"error, no text": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(404) }, "HTTP 404: no text"},
	"elsewhere": {func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, r.URL.Path, http.StatusTemporaryRedirect)
	}, "10 redirects"},
	"cut": {cut, "the stream was cut after 1 events"},
}

func endless(w http.ResponseWriter, r *http.Request, text string) {
	for r.Context().Err() == nil {
		if _, err := fmt.Fprint(w, text); err != nil {
			return
		}
	}
}

// cut closes the connection in the middle of a chunked answer.
func cut(w http.ResponseWriter, _ *http.Request) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n", len(token), token)
	_ = conn.Close()
}

// Each outcome is a failure of its request with one line that says why; the request before
// and the one after succeed.
func TestEndpointFaultsFailOneRequest(t *testing.T) {
	for name, h := range hostile {
		var n atomic.Int64
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if at := n.Add(1); at == 1 || at > 2 && name != "elsewhere" || at > 12 {
				fmt.Fprint(w, token+strings.Replace(token, "null", `"length"`, 1))
				return
			}
			h.serve(w, r)
		}))
		g, err := load.New(load.Options{BaseURL: s.URL, Model: "m", MaxConcurrency: 1, Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		run := g.Run(t.Context(), prompts(t, 3))
		if len(run.Samples) != 3 || run.Unfinished != 0 {
			t.Fatalf("%s: %+v", name, run)
		}
		for i, s := range run.Samples {
			if i != 1 && (s.Failed() || s.Output != 2) {
				t.Errorf("%s: request %d: %+v", name, i, s)
			}
		}
		if bad := run.Samples[1].Error; !strings.Contains(bad, h.want) || len(bad) > 300 || strings.ContainsAny(bad, "\n\x1b\x00") {
			t.Errorf("%s: %q, want %q", name, bad, h.want)
		}
		if p := g.Progress(); p.Failed != 1 || p.Done != 3 {
			t.Errorf("%s: %+v", name, p)
		}
		g.Close()
		s.Close()
	}
}

// When an engine dies in the middle of a run, its running requests fail, and so do those that
// come while it is down. Earlier results are kept.
func TestEngineDiesInTheMiddle(t *testing.T) {
	var n atomic.Int64
	var s *httptest.Server
	dead := make(chan struct{})
	s = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 4 {
			fmt.Fprint(w, token)
			w.(http.Flusher).Flush()
			go func() {
				s.Listener.Close()
				s.CloseClientConnections()
				close(dead)
			}()
			<-r.Context().Done()
			return
		}
		fmt.Fprint(w, token+"data: [DONE]\n\n")
	}))
	g, err := load.New(load.Options{BaseURL: s.URL, Model: "m", MaxConcurrency: 1})
	if err != nil {
		t.Fatal(err)
	}
	run := g.Run(t.Context(), prompts(t, 10))
	<-dead
	for i, s := range run.Samples {
		if s.Failed() != (i >= 3) {
			t.Errorf("request %d: %q", i, s.Error)
		}
	}
	if got := run.Samples[9].Error; len(run.Samples) != 10 || !strings.Contains(got, "refused") || strings.Contains(got, "127.0.0.1") {
		t.Errorf("%d ended; the last: %q", len(run.Samples), got)
	}
	g.Close()
	s.Close()
}

// Check reports in one line that an address is no endpoint.
func TestCheck(t *testing.T) {
	f := func(model string, serve http.HandlerFunc, want string) {
		t.Helper()
		s := httptest.NewServer(serve)
		defer s.Close()
		g, err := load.New(load.Options{BaseURL: s.URL, Model: model})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		err = g.Check(t.Context(), 0)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n")) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	text := func(code int, s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code); fmt.Fprint(w, s) }
	}
	f("", text(200, `{"data":[{"id":"x"}]}`), "")
	f("m", text(404, ""), "")
	f("", text(404, "nothing here"), "/v1/models: HTTP 404: nothing here")
	f("", text(200, "<html>"), "names no model")
	f("", text(200, `{"data":[]}`), "names no model")
	f("", text(200, `{"data":[{"id":"\u001b[31mx"}]}`), "cannot be printed")
	f("m", text(401, ""), "demands an API key")
	f("m", text(500, `{"message":"bad\nday"}`), "HTTP 500: bad day")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	g, err := load.New(load.Options{BaseURL: "http://" + address})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Check(t.Context(), 0); err == nil || err.Error() != "no endpoint at http://"+address+": dial: connect: connection refused" {
		t.Error(err)
	}
	secret, err := load.New(load.Options{BaseURL: "http://me:secret@" + address})
	if err != nil {
		t.Fatal(err)
	}
	if err := secret.Check(t.Context(), 0); err == nil || strings.Contains(err.Error(), "secret") || strings.Contains(secret.Endpoint(), "secret") {
		t.Errorf("a password is told: %v", err)
	}
	for _, bad := range []load.Options{{}, {BaseURL: "ftp://x"}, {BaseURL: "http://"}, {BaseURL: "http://x", Endpoint: "v1"}, {BaseURL: "http://x", MaxConcurrency: -1}} {
		if _, err := load.New(bad); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

// Warm-ups are sent and not measured; one that fails ends the command before its run.
func TestWarmUp(t *testing.T) {
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if n.Add(1) > 5 {
			http.Error(w, "full", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, token+"data: [DONE]\n\n")
	}))
	defer s.Close()
	g, err := load.New(load.Options{BaseURL: s.URL, Model: "m", MaxConcurrency: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.WarmUp(t.Context(), prompts(t, 2), 5); err != nil || g.Progress().Done != 0 || n.Load() != 5 {
		t.Fatal(err, n.Load())
	}
	if err := g.WarmUp(t.Context(), prompts(t, 2), 2); err == nil || err.Error() != "warm-up: HTTP 503: full" {
		t.Fatal(err)
	}
}
