// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	neturl "net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// Requests that P and D of SGLang cannot serve go unsplit to the other engines of the same model.
func TestSGLangRequestsWithoutRooms(t *testing.T) {
	var pair, beside sglLegs
	leg := func(w http.ResponseWriter, r *http.Request) { pair.take(r); fmt.Fprint(w, `{"text":"a"}`) }
	p := mockSGLang(t, "prefill", map[string]string{"/route": oneRankSGLang}, leg)
	d := mockSGLang(t, "decode", nil, leg)
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	for _, path := range []string{"/v1/", "/inference/"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) { beside.take(r); fmt.Fprint(w, `{"id":"x"}`) })
	}
	mux.Handle("/v1/models", http.NotFoundHandler())
	vllm := serveMux(t, mux)
	sglang := mockSGLang(t, "null", nil, func(w http.ResponseWriter, r *http.Request) { beside.take(r); fmt.Fprint(w, `{"id":"x"}`) })
	ofPair := 0
	for _, alone := range []string{vllm, sglang} {
		o := proxy.Options{Detect: true, HealthInterval: 20 * time.Millisecond, Prefill: []proxy.Prefill{{URL: p, Registry: p}}, Decode: []string{d}, Engines: []string{alone}}
		url, s := startProxy(t, o)
		testkit.Eventually(t, "all are well", func() bool { w := s.Stats().Well; return w[p]+w[d]+w[alone] == 3 })
		f := func(path, body string) {
			t.Helper()
			before := len(beside.all())
			status, answer := askSGLang(t, url, path, body)
			got := beside.all()
			if status != 200 || len(got) != before+1 || strings.Contains(got[len(got)-1], "bootstrap") {
				t.Errorf("%s %s: %d %s, %d requests more", path, body, status, answer, len(got)-before)
			}
		}
		f("/v1/messages", `{"messages":[{"role":"user","content":"x"}],"max_tokens":4}`)
		f("/inference/v1/generate", `{"token_ids":[1,2],"sampling_params":{"n":2}}`)
		f("/v1/responses", `{"input":"x","background":true}`)
		f("/v1/completions", `{"prompt":["x","y"],"n":2,"use_beam_search":true}`)
		f("/v1/completions", `{"prompt":"x","best_of":3}`)
		f("/v1/completions", `{"prompt_embeds":["eA==","eQ=="]}`)
		f("/v1/score", `{"query":"x","items":["y"]}`)
		f("/v1/embeddings", `{"input":"x"}`)
		if alone == sglang {
			f("/encode", `{"text":"x"}`)
			f("/invocations", `{"messages":[{"role":"user","content":"x"}]}`)
			f("/generate", `{"input_embeds":[[[0.5]],[[0.25]]]}`)
			f("/generate", `{"text":null,"input_ids":null,"input_embeds":[[[0.5]],[[0.25]]]}`)
		}
		if n := len(pair.all()); n != ofPair {
			t.Errorf("the pair got %d requests", n-ofPair)
		}
		if status, answer := askSGLang(t, url, "/generate", `{"text":["x","y"]}`); status != 200 {
			t.Errorf("a list of prompts: %d %s", status, answer)
		}
		testkit.Eventually(t, "P and D have both prompts", func() bool { return len(pair.all()) == ofPair+4 })
		testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
		ofPair = len(pair.all())
	}
}

// Without such engines these requests are refused with the reason. Embeddings that may be several prompts never share one room.
func TestSGLangRequestsWithoutRoomsAreRefused(t *testing.T) {
	var legs sglLegs
	url, _ := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(_ http.ResponseWriter, r *http.Request) { legs.take(r) }, func(w http.ResponseWriter, r *http.Request) { legs.take(r); fmt.Fprint(w, `{}`) })
	for _, path := range []string{"/invocations", "/v1/score", "/v1/embeddings", "/v1/classify", "/encode", "/v1/messages", "/v1/chat/completions/batch"} {
		if status, answer := askSGLang(t, url, path, `{"text":"x"}`); status != 501 || len(legs.all()) > 0 {
			t.Errorf("%s: %d %s; %v", path, status, answer, legs.all())
		}
	}
	for _, body := range []string{
		`{"input_embeds":[[[0.5]],[[0.25]]]}`, `{"text":null,"input_embeds":[[[0.5]],[[0.25]]]}`, `{"text":null,"input_ids":null,"input_embeds":[[[0.5]],[[0.25]]]}`,
	} {
		if status, answer := askSGLang(t, url, "/generate", body); status != 400 || len(legs.all()) > 0 {
			t.Errorf("%s: %d %s; %v", body, status, answer, legs.all())
		}
	}
	for n, path := range []string{"/tokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"} { // D serves these
		if _, answer := askSGLang(t, url, path, `{"prompt":"x"}`); len(legs.all()) != n+1 {
			t.Errorf("%s: %s", path, answer)
		}
	}
}

// Engines without SGLang's path do not change its requests: an engine that has no room is asked once.
func TestSGLangPathsAmongOtherEngines(t *testing.T) {
	var asked atomic.Int64
	full := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/generate" {
			asked.Add(1)
		}
		w.WriteHeader(503)
	}
	sglang := mockSGLang(t, "null", nil, full)
	o := proxy.Options{Detect: true, HealthInterval: 20 * time.Millisecond, Engines: []string{sglang}, Policy: proxy.PrefixAware}
	for range 4 {
		mux := http.NewServeMux()
		mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
		mux.Handle("/v1/models", http.NotFoundHandler())
		o.Engines = append(o.Engines, serveMux(t, mux))
	}
	url, s := startProxy(t, o)
	testkit.Eventually(t, "all are well", func() bool {
		n := 0.0
		for _, well := range s.Stats().Well {
			n += float64(well)
		}
		return n == 5
	})
	if status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 503 || asked.Load() != 1 {
		t.Errorf("%d %s, the engine was asked %d times", status, answer, asked.Load())
	}
}

// The proxy does not use an engine of an early SGLang release without /ready, and reports the reason.
func TestSGLangWithoutReady(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"disaggregation_mode":"null"}`) })
	early := serveMux(t, mux)
	_, s := startProxy(t, proxy.Options{Dialect: proxy.SGLang, HealthInterval: 20 * time.Millisecond, Engines: []string{early}})
	testkit.Eventually(t, "the reason is known", func() bool { return strings.Contains(s.Problem(early), "/ready") })
}

// A compressed body is refused with its header's name.
func TestCompressedBodies(t *testing.T) {
	url, _ := startProxy(t, proxy.Options{Engines: []string{mock(t, func(http.ResponseWriter, *http.Request) {})}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	for name, value := range map[string]string{"Content-Encoding": "gzip", "X-Body-Compressed": "zstd"} {
		r, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", strings.NewReader("\x1f\x8b\x08 \x28\xb5\x2f\xfd"))
		r.Header.Set(name, value)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		if resp.Body.Close(); resp.StatusCode != 415 || !strings.Contains(string(text), name) {
			t.Errorf("%s: %d %s", name, resp.StatusCode, text)
		}
	}
}

// P refuses with an error of SGLang's OpenAI routes. The client gets that error also when its stream has begun, with a list of prompts or
// with comments.
func TestSGLangRefusalsInStreams(t *testing.T) {
	began := make(chan struct{})   // closed once D streams the answer to the short prompt
	streams := make(chan struct{}) // has a value once the client's stream has begun: then P refuses
	url, _ := startMockedPair(t, oneRankSGLang, proxy.Options{KeepAlive: 5 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		if strings.Contains(string(text), `"long"`) {
			select {
			case <-streams:
			case <-r.Context().Done():
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(400)
			fmt.Fprint(w, `{"object":"error","message":"The input is too long","type":"BadRequest","param":null,"code":400}`)
			return
		}
		fmt.Fprint(w, `{"choices":[]}`)
	}, func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		if strings.Contains(string(text), `"long"`) {
			<-r.Context().Done()
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range 40 { // more than is held back
			fmt.Fprintf(w, "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"text\":%q}]}\n\n", strings.Repeat("a", 32<<10))
		}
		_ = http.NewResponseController(w).Flush()
		close(began)
		<-r.Context().Done()
	})
	client := &http.Client{Timeout: time.Minute}
	for _, body := range []string{`{"prompt":"long","stream":true}`, `{"prompt":["short","long"],"stream":true}`} {
		r, err := client.Post(url+"/v1/completions", "application/json", strings.NewReader(body)) // returns with the first comment
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			if strings.Contains(body, "short") {
				<-began
			}
			select {
			case streams <- struct{}{}:
			case <-t.Context().Done():
			}
		}()
		text, _ := io.ReadAll(r.Body) // a stream that ends with an error is cut
		r.Body.Close()
		if answer := string(text); r.StatusCode != 200 || !strings.Contains(answer, `"message":"The input is too long"`) || !strings.Contains(answer, `"code":400`) {
			t.Errorf("%s: %d %.200s … %s", body, r.StatusCode, answer, answer[max(0, len(answer)-300):])
		}
	}
}

// A P of SGLang that an operator adds, or that a name in DNS finds, without the port of its bootstrap server reports the port itself. GET
// /engines shows the kind of each engine, and why one gets no requests.
func TestSGLangAdded(t *testing.T) {
	var ports sglLegs
	ok := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"text":"a"}`) }
	boot := serveMux(t, func() *http.ServeMux {
		mux := http.NewServeMux()
		mux.HandleFunc("/route", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, oneRankSGLang) })
		return mux
	}())
	of, _ := neturl.Parse(boot)
	p := func() string {
		mux := http.NewServeMux()
		mux.HandleFunc("/ready", func(http.ResponseWriter, *http.Request) {})
		mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
		mux.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"disaggregation_mode":"prefill","disaggregation_bootstrap_port":%s}`, of.Port())
		})
		mux.HandleFunc("/generate", func(w http.ResponseWriter, r *http.Request) { ports.take(r); ok(w, r) })
		return serveMux(t, mux)
	}()
	d, wrong := mockSGLang(t, "decode", nil, ok), mockSGLang(t, "prefill", nil, ok)
	for _, by := range []string{"admin", "dns"} {
		o := proxy.Options{Detect: true, HealthInterval: 20 * time.Millisecond}
		api, _ := neturl.Parse(p)
		if by == "dns" {
			o.Decode = []string{d}
			o.Sources = []proxy.Source{{Role: "prefill", URL: "dns+http://engines.test:" + api.Port(), Registry: 8998, Guessed: true}}
			o = proxy.WithResolver(o, func(context.Context, string) ([]string, error) { return []string{"127.0.0.1"}, nil })
		}
		url, s := startProxy(t, o)
		admin := httptest.NewServer(s.Admin("token"))
		defer admin.Close()
		if by == "admin" {
			for role, e := range map[string]string{"prefill": p, "decode": d, "engine": wrong} {
				if status, text, _ := do(t, http.MethodPost, admin.URL+"/engines", "token", fmt.Sprintf(`{"url":%q,"role":%q}`, e, role)); status != 201 {
					t.Fatalf("%s: %d %s", role, status, text)
				}
			}
			testkit.Eventually(t, "the reason is known", func() bool { return s.Problem(wrong) != "" })
		}
		reachSome(t, url)
		before := len(ports.all())
		status, answer := askSGLang(t, url, "/generate", `{"text":"x"}`)
		testkit.Eventually(t, "P has the request", func() bool { return len(ports.all()) > before })
		if got := ports.all()[before]; status != 200 || portOf(got) != of.Port() {
			t.Errorf("%s: %d %s, P got %s", by, status, answer, got)
		}
		_, list, _ := do(t, http.MethodGet, admin.URL+"/engines", "token", "")
		if !strings.Contains(list, `"registry":"`+boot+`"`) || strings.Count(list, `"engine":"sglang"`) < 2 || strings.Contains(list, `"reason":"its disaggregation mode is`) != (by == "admin") {
			t.Errorf("%s: %s", by, list)
		}
	}
}

// An engine that answers that it is not ready keeps its running requests. SGLang answers so from SIGTERM until its requests have ended.
func TestRequestsOfAnEngineThatStops(t *testing.T) {
	for _, sglang := range []bool{true, false} {
		var looks atomic.Int64
		stopping := make(chan struct{})
		mux := http.NewServeMux()
		look := func(w http.ResponseWriter, _ *http.Request) {
			select {
			case <-stopping:
				looks.Add(1)
				w.WriteHeader(503)
			default:
			}
		}
		if sglang {
			mux.HandleFunc("/ready", look)
			mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"disaggregation_mode":"null"}`) })
		} else {
			mux.HandleFunc("/health", look)
		}
		mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n")
			_ = http.NewResponseController(w).Flush()
			close(stopping)
			for looks.Load() < 25 && r.Context().Err() == nil { // more looks than the proxy needs to take it for silent
				time.Sleep(time.Millisecond)
			}
			fmt.Fprint(w, "data: [DONE]\n\n")
		})
		url, s := startProxy(t, proxy.Options{Detect: true, HealthInterval: 5 * time.Millisecond, Engines: []string{serveMux(t, mux)}})
		reach(t, url)
		if status, answer := askSGLang(t, url, "/v1/completions", `{"prompt":"x","stream":true}`); status != 200 || !strings.HasSuffix(answer, "data: [DONE]\n\n") {
			t.Errorf("SGLang %v: %d %s", sglang, status, answer)
		}
		if status, answer := askSGLang(t, url, "/v1/completions", `{"prompt":"x"}`); status != 503 {
			t.Errorf("SGLang %v: a request after that: %d %s", sglang, status, answer)
		}
		testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
	}
}

// A client with a key cannot continue a session of an engine of SGLang: its prompt may be another client's.
func TestSGLangSessionsOfKeys(t *testing.T) {
	var ps, ds sglLegs
	for _, keyed := range []bool{true, false} {
		o := proxy.Options{}
		if keyed {
			o.Keys = keyFile(t, keyLine("ada", "s", ""))
		}
		url, _ := startMockedPair(t, oneRankSGLang, o, func(w http.ResponseWriter, r *http.Request) { ps.take(r); fmt.Fprint(w, `{}`) }, func(w http.ResponseWriter, r *http.Request) { ds.take(r); fmt.Fprint(w, `{}`) })
		before := len(ds.all())
		for path, body := range map[string]string{"/generate": `{"text":"x","session_params":{"id":"a"}}`, "/v1/completions": `{"prompt":"x","session\u005fparams":{"id":"a"}}`} {
			status, answer, _ := do(t, http.MethodPost, url+path, "s", body)
			if want := map[bool]int{true: 400, false: 200}[keyed]; status != want || strings.Contains(answer, "session_params") != keyed {
				t.Errorf("keys %v, %s: %d %s", keyed, path, status, answer)
			}
		}
		if n := len(ds.all()) - before; n != map[bool]int{true: 0, false: 2}[keyed] {
			t.Errorf("keys %v: D got %d requests", keyed, n)
		}
		if status, answer, _ := do(t, http.MethodPost, url+"/generate", "s", `{"text":"x","session_params":null}`); status != 200 {
			t.Errorf("keys %v: %d %s", keyed, status, answer)
		}
	}
}
