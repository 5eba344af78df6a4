// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/proxy"
)

// streaming is an engine that streams what f writes, on every API.
func streaming(t testing.TB, f func(write func(string), r *http.Request)) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /v1/", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // a client that leaves is noticed behind it
		w.Header().Set("Content-Type", "text/event-stream")
		rc := http.NewResponseController(w)
		f(func(s string) { fmt.Fprint(w, s); _ = rc.Flush() }, r)
	})
	return serveMux(t, mux)
}

// postAndRead posts a request and returns what comes until the answer ends.
func postAndRead(t testing.TB, url, body string) (status int, text string, err error) {
	t.Helper()
	return hearFirst(t, url, body, func() {})
}

// hearFirst is hear, and calls begun when the answer has begun.
func hearFirst(t testing.TB, url, body string, begun func()) (status int, text string, err error) {
	t.Helper()
	r, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	begun()
	all, err := io.ReadAll(r.Body)
	return r.StatusCode, string(all), err
}

const (
	ping  = ": keep-alive\n\n"
	token = "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n"
	done  = "data: [DONE]\n\n"
)

// Comments of D are no answer: P's failure still sends the request to other engines, and the client hears the comments, then their
// answer.
func TestPFailsBehindComments(t *testing.T) {
	var computed atomic.Bool // the good P has computed: D sends tokens
	heard := make(chan bool, 1)
	p := mock(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-heard: // the client has a comment
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler)
	})
	good := mock(t, func(w http.ResponseWriter, r *http.Request) {
		computed.Store(true)
		fmt.Fprint(w, `{}`)
	})
	d := streaming(t, func(write func(string), r *http.Request) {
		for r.Context().Err() == nil && !computed.Load() {
			write(ping)
			time.Sleep(5 * time.Millisecond)
		}
		write(token + done)
	})
	registry := mockRegistry(t, oneRank)
	url, s := startProxy(t, proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: registry}, {URL: good, Registry: registry}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	retried := false
	for range 4 { // the P that fails has its turn in the first two
		computed.Store(false)
		select {
		case <-heard: // left by a request that went to the good P
		default:
		}
		status, text, err := hearFirst(t, url+"/v1/completions", `{"prompt":"a","stream":true}`, func() {
			heard <- true
		})
		if status != 200 || err != nil || !strings.HasSuffix(text, token+done) && !strings.Contains(text, `"error"`) {
			t.Fatalf("%d %q %v", status, text, err)
		}
		if s.Stats().Retries > 0 {
			retried = strings.HasPrefix(text, ping) && strings.HasSuffix(text, token+done)
			break
		}
	}
	if !retried {
		t.Errorf("no request was tried again behind comments: %+v", s.Stats())
	}
}

// An engine opens a stream without a token and then sends an error. The request goes to another engine, and the client gets one opening.
func TestErrorsBehindAnOpening(t *testing.T) {
	f := func(path, opening, failure, good string) {
		t.Helper()
		pings := "" // each engine's pass
		if strings.Contains(opening, "ping") {
			pings = opening
		}
		var asked atomic.Int64
		answer := func(write func(string), _ *http.Request) {
			if write(ping + opening); asked.Add(1) == 1 {
				if failure == "" {
					panic(http.ErrAbortHandler)
				}
				write(failure)
				return
			}
			write(good)
		}
		url, s := startProxy(t, proxy.Options{Engines: []string{streaming(t, answer), streaming(t, answer)}, HealthInterval: time.Hour})
		reach(t, url)
		status, text, err := postAndRead(t, url+path, `{"prompt":"a","input":"a","messages":[],"stream":true}`)
		if n := s.Stats(); status != 200 || err != nil || strings.Replace(strings.ReplaceAll(text, ping, ""), pings, "", 1) != opening+good || n.Retries != 1 || n.Requests["ok"] != 1 {
			t.Errorf("%s %q %q: %d %q %v, %d retries", path, opening, failure, status, text, err, n.Retries)
		}
	}
	const role = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n"
	const created = "event: response.created\ndata: {\"type\":\"response.created\"}\n\n"
	const part = "data: {\"type\":\"response.output_item.added\",\"item\":{\"type\":\"message\",\"content\":[]}}\n\n"
	const begun = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[]}}\n\n"
	const block = "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n"
	const completed = "event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n"
	const stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	for _, failure := range []string{"", "data: {\"error\":{\"code\":500,\"message\":\"no\"}}\n\n"} {
		f("/v1/completions", "", failure, token+done)
		f("/v1/chat/completions", role, failure, token+done)
	}
	for _, failure := range []string{"", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\"}}\n\n"} {
		f("/v1/responses", created, failure, completed)
		f("/v1/responses", created+part, failure, completed)
		f("/v1/messages", "", failure, stop)
		f("/v1/messages", begun, failure, stop)
		f("/v1/messages", begun+block, failure, stop)
	}
	f("/v1/messages", "event: ping\ndata: {\"type\": \"ping\"}\n\n", "", stop)
}

// A ping behind the opening of an answer keeps its place, and a comment keeps the client until there is data.
func TestPingsStayBehindTheOpening(t *testing.T) {
	const begun, pinged = "event: message_start\ndata: {}\n\n", "event: ping\ndata: {}\n\n"
	const rest = "event: content_block_delta\ndata: {}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	e := streaming(t, func(write func(string), _ *http.Request) { write(begun + pinged); write(rest) })
	url, _ := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: time.Hour})
	reach(t, url)
	status, text, err := postAndRead(t, url+"/v1/messages", `{"messages":[],"stream":true}`)
	if status != 200 || err != nil || text != ": ping\n\n"+begun+pinged+rest {
		t.Errorf("%d %q %v", status, text, err)
	}
}

// The limits for the first byte and for a stall count tokens. A stream of comments, pings or empty events alone ends at both limits.
func TestCommentsAreNoTokens(t *testing.T) {
	for _, idle := range []string{ping, "event: ping\ndata: {\"type\":\"ping\"}\n\n", "data:\n\n", "\n"} {
		f := func(tokens int, request string, want ...string) {
			t.Helper()
			e := streaming(t, func(write func(string), r *http.Request) {
				for range tokens {
					write(token)
				}
				for r.Context().Err() == nil {
					write(idle)
					time.Sleep(5 * time.Millisecond)
				}
			})
			first := time.Hour
			if tokens == 0 {
				first = 100 * time.Millisecond
			}
			url, s := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: time.Hour, Stall: 100 * time.Millisecond, FirstByte: first})
			reach(t, url)
			_, text, _ := postAndRead(t, url+"/v1/completions", request)
			for _, w := range want {
				if !strings.Contains(text, w) {
					t.Errorf("%q after %d tokens: %q, want %s", idle, tokens, text[max(0, len(text)-200):], w)
				}
			}
			if n := s.Stats(); n.Requests["ok"] != 0 || tokens == 0 && n.TTFT["m"].Sum+n.TTFT[""].Sum != 0 {
				t.Errorf("%+v", n)
			}
		}
		f(0, `{"prompt":"a","stream":true}`, `"error"`, "504")
		f(1, `{"prompt":"a","stream":true}`, "broke off", "502")
		f(1, `{"prompt":"a","stream":true,"stream_options":{"include_usage":true}}`, "broke off", "502")
	}
}

// With KeepAlive a client that asked for a stream gets the proxy's own comments while its request waits. The result, also an error, is then
// an event.
func TestKeepAlive(t *testing.T) {
	proceed := make(chan struct{}, 1)
	e := mock(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-proceed:
		case <-r.Context().Done():
		}
		switch {
		case r.Header.Get("X-Refuse") != "":
			http.Error(w, `{"error":{"message":"too long","type":"BadRequestError","code":400}}`, 400)
		case strings.Contains(r.Header.Get("Accept"), "event"):
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, token+done)
		default:
			fmt.Fprint(w, `{"id":1}`)
		}
	})
	url, s := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: time.Hour, KeepAlive: 10 * time.Millisecond})
	reach(t, url)
	f := func(body, field, prefix, suffix string, comments int) {
		t.Helper()
		if comments == 0 {
			proceed <- struct{}{}
		}
		began := time.Now()
		r, _ := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(body))
		r.Header.Set(field, "text/event-stream")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text := ""
		lines := bufio.NewReader(resp.Body)
		for strings.Count(text, ping) < comments {
			line, err := lines.ReadString('\n')
			if err != nil {
				t.Fatalf("%s %s: %q, %v", body, field, text, err)
			}
			text += line
		}
		if comments > 0 {
			proceed <- struct{}{}
		}
		rest, err := io.ReadAll(lines)
		if text += string(rest); err != nil || !strings.HasPrefix(text, prefix) || !strings.HasSuffix(text, suffix) || comments == 0 && strings.Contains(text, ping) {
			t.Errorf("%s %s: %q, %v", body, field, text, err)
		}
		if n, took := strings.Count(text, ping), time.Since(began); n > 1+int(took/(10*time.Millisecond)) {
			t.Errorf("%s %s: %d comments in %v", body, field, n, took)
		}
	}
	f(`{"prompt":"a","stream":true}`, "Accept", ping, token+done, 3)
	f(`{"prompt":"a","stream":true}`, "X-Refuse", ping, `"too long","param":null,"type":"BadRequestError"}}`+"\n\n"+done, 3)
	f(`{"prompt":"a"}`, "X-None", `{"id":1}`, `{"id":1}`, 0)
	if n := s.Stats().Requests; n["ok"] != 2 || n["bad_request"] != 1 {
		t.Errorf("%v", n)
	}
}
