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

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// streamOf answers with a stream.
func streamOf(events string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, events)
	}
}

// hangs answers nothing until the request ends.
func hangs(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

// SGLang answers an invalid streamed request of /generate with an error event without a code. The client gets 400, as without a stream. No
// other engine is asked, and the engine stays well.
func TestSGLangNativeStreamsAtFault(t *testing.T) {
	fault := streamOf(`data: {"error":{"message":"The input (9 tokens) is longer than the model's context length"}}` + "\n\ndata: [DONE]\n\n")
	var asked atomic.Int64
	engine := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/generate" {
			asked.Add(1)
		}
		fault(w, r)
	}
	a, b := mockSGLang(t, "null", nil, engine), mockSGLang(t, "null", nil, engine)
	url, p := startProxy(t, proxy.Options{Dialect: proxy.SGLang, Engines: []string{a, b}, HealthInterval: 20 * time.Millisecond})
	testkit.Eventually(t, "both are well", func() bool { w := p.Stats().Well; return w[a] == 1 && w[b] == 1 })
	const requests = 12
	for range requests {
		if status, answer := askSGLang(t, url, "/generate", `{"text":"x","stream":true}`); status != 400 || !strings.Contains(answer, "context length") {
			t.Fatalf("%d %s", status, answer)
		}
	}
	if n := asked.Load(); n != requests {
		t.Errorf("%d requests reached the engines %d times", requests, n)
	}
	paired, s := startMockedPair(t, oneRankSGLang, proxy.Options{}, hangs, fault)
	for _, body := range []string{`{"text":"x","stream":true}`, `{"text":["x","y"],"stream":true}`, `{"text":"x","stream":true,"sampling_params":{"n":2}}`} {
		if status, answer := askSGLang(t, paired, "/generate", body); status != 400 || !strings.Contains(answer, "context length") {
			t.Errorf("%s: %d %s", body, status, answer)
		}
		testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
	}
	if n := s.Stats().Retries; n != 0 {
		t.Errorf("%d further attempts", n)
	}
}

// An engine of SGLang that has no room says so in a stream as an event with code 503. The proxy treats it like any 503: the engine is asked
// once and does not count as failing, and the client gets its text.
func TestSGLangFullEnginesOfStreams(t *testing.T) {
	for path, event := range map[string]string{
		"/generate":            `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"The request queue is full.","status_code":503}}}`,
		"/v1/chat/completions": `{"error":{"object":"error","message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","code":503}}`,
	} {
		opening := ""
		if path != "/generate" {
			opening = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
		}
		for _, before := range []string{"", opening} {
			var asked atomic.Int64
			answer := streamOf(before + "data: " + event + "\n\ndata: [DONE]\n\n")
			e := mockSGLang(t, "null", nil, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == path {
					asked.Add(1)
				}
				answer(w, r)
			})
			url, p := startProxy(t, proxy.Options{Dialect: proxy.SGLang, Engines: []string{e}, HealthInterval: 20 * time.Millisecond})
			reach(t, url)
			const requests = 3
			for range requests {
				status, text := askSGLang(t, url, path, `{"text":"x","messages":[],"stream":true}`)
				if status != 503 || !strings.Contains(text, "queue is full") {
					t.Errorf("%s: %d %s", path, status, text)
				}
			}
			if n := asked.Load(); n != requests || p.Stats().Requests["refused"] != requests {
				t.Errorf("%s: %d requests reached the engine %d times, outcomes %v", path, requests, n, p.Stats().Requests)
			}
		}
	}
}

// Each event of a stream of /generate has the number of cached tokens. A P whose answer is late holds none of D's tokens back; the last event
// has P's number.
func TestSGLangLateAnswerOfPHoldsNoTokens(t *testing.T) {
	got, release := make(chan struct{}), make(chan struct{})
	url, s := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-release:
		case <-r.Context().Done():
		}
		fmt.Fprint(w, `{"text":"a","meta_info":{"cached_tokens":7}}`)
	}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		for i, reason := range []string{"null", "null", "null", `{"type":"length"}`} {
			fmt.Fprintf(w, "data: {\"text\":\"%d, \\\"finish_reason\\\"\",\"meta_info\":{\"finish_reason\":%s,\"cached_tokens\":0}}\n\n", i, reason)
			if i == 3 {
				fmt.Fprint(w, "data: [DONE]\n\n")
				return
			}
			_ = http.NewResponseController(w).Flush()
			select {
			case <-got:
			case <-r.Context().Done():
				return
			}
		}
	})
	start := time.Now()
	r, err := http.Post(url+"/generate", "application/json", strings.NewReader(`{"text":"x","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	events := bufio.NewReader(r.Body)
	for i := 0; i < 3; {
		line, err := events.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(line, "data: ") {
			i++
			got <- struct{}{}
		}
	}
	if took := time.Since(start); took > 30*time.Second { // one wait for P's answer takes a minute here
		t.Errorf("three tokens took %v", took)
	}
	close(release)
	if rest, err := io.ReadAll(events); err != nil || !strings.Contains(string(rest), `"cached_tokens":7`) || !strings.Contains(string(rest), "[DONE]") {
		t.Errorf("%s, %v", rest, err)
	}
	testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
}

// SGLang sends extra data of an answer in an event of its own, without choices. For several prompts the client gets that event once, as with
// one engine. The usage is joined separately.
func TestSGLangExtrasOfLists(t *testing.T) {
	d := func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		events := `data: {"id":"i","choices":[{"index":0,"text":"a"}],"usage":null}` + "\n\n" +
			`data: {"id":"i","choices":[],"usage":null,"sglext":{"routed_experts":"abc"}}` + "\n\n"
		if strings.Contains(string(text), "include_usage") {
			events += `data: {"id":"i","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3}}` + "\n\n"
		}
		streamOf(events+"data: [DONE]\n\n")(w, r)
	}
	url, _ := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) }, d)
	for more, usage := range map[string]int{"": 0, `,"stream_options":{"include_usage":true}`: 1} {
		for _, body := range []string{`{"prompt":["x","y"],"stream":true`, `{"prompt":"x","n":3,"stream":true`} {
			status, answer := askSGLang(t, url, "/v1/completions", body+more+"}")
			if status != 200 || strings.Count(answer, "routed_experts") != 1 || strings.Count(answer, `"prompt_tokens":`) != usage || !strings.HasSuffix(answer, "data: [DONE]\n\n") {
				t.Errorf("%s%s: %d %s", body, more, status, answer)
			}
		}
	}
}
