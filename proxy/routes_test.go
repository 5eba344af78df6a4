// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/proxy"
)

// texts returns the generated text, or tokens, of an answer of Responses, Messages or generate, whole or streamed.
func texts(answer string) (out string) {
	for line := range strings.Lines(answer) {
		var e struct {
			Delta   json.RawMessage
			Content []struct{ Text string }
			Output  []struct {
				Content []struct{ Text string }
			}
			Choices []struct {
				Tokens []int `json:"token_ids"`
			}
		}
		if json.Unmarshal([]byte(strings.TrimPrefix(strings.TrimSpace(line), "data: ")), &e) != nil {
			continue
		}
		var text string
		var inner struct{ Text string }
		if json.Unmarshal(e.Delta, &text) == nil || json.Unmarshal(e.Delta, &inner) == nil {
			out += text + inner.Text
		}
		for _, c := range e.Content {
			out += c.Text
		}
		for _, o := range e.Output {
			out += o.Content[0].Text
		}
		for _, c := range e.Choices {
			out += fmt.Sprint(c.Tokens)
		}
	}
	return out
}

// Responses, Messages and token-in generate go through P and D: each P computes once, D has its KV, the answers are those of one engine,
// and cached tokens are P's.
func TestOtherAPIsGoThroughPAndD(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		x := &deployment{t: t}
		x.stopAll()
		o := proxy.Options{HealthInterval: 50 * time.Millisecond}
		x.pair(t, pair{model: "m", dialect: dialect, p: 1, d: 1}, &o, 0)
		x.start(o)
		alone := serve(t, "", "", 0)
		defer alone.stop(t)
		asked := int64(0)
		f := func(path, body string) {
			t.Helper()
			_, want, _ := postAndRead(t, alone.web.URL+path, body)
			status, got, err := postAndRead(t, x.url+path, body)
			if asked++; status != 200 || err != nil || texts(got) == "" || texts(got) != texts(want) {
				t.Errorf("%v %s %s: %d %s %v\nwant %s", dialect, path, body[:20], status, got, err, want)
			}
			if strings.Contains(got, `"cached_tokens":1`) || strings.Contains(got, `"cache_read_input_tokens":1`) {
				t.Errorf("%s: D's cached tokens are shown: %s", path, got)
			}
			x.idle()
			if n := x.p[0].Stats().Finished; n != asked {
				t.Errorf("%v %s: P was asked %d times, want %d", dialect, path, n, asked)
				asked = n
			}
		}
		long := strings.Repeat("tell me more ", 40)
		for _, stream := range []bool{false, true} {
			f("/v1/responses", fmt.Sprintf(`{"input":"%v r %s","max_output_tokens":5,"stream":%v}`, stream, long, stream))
			f("/v1/messages", fmt.Sprintf(`{"messages":[{"role":"user","content":"%v m %s"}],"max_tokens":5,"stream":%v}`, stream, long, stream))
		}
		ids, _ := json.Marshal(make([]int, 100))
		f("/inference/v1/generate", fmt.Sprintf(`{"token_ids":%s,"sampling_params":{"max_tokens":5,"min_tokens":2}}`, ids))
		if s := x.proxy.Stats(); s.Requests["ok"] != 5 || x.d[0].Stats().LoadedTokens < 400 {
			t.Errorf("%+v", s)
		}
	}
}

// When P's answer on an API lacks the KV's location and D needs that, P gets no more requests of that API.
func TestPWithoutParamsOnAnAPI(t *testing.T) {
	var ps atomic.Int64
	engine := func(n *atomic.Int64) string {
		mux := http.NewServeMux()
		mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
		mux.HandleFunc("POST /v1/messages", func(w http.ResponseWriter, r *http.Request) { n.Add(1); fmt.Fprint(w, `{}`) })
		return serveMux(t, mux)
	}
	var ds atomic.Int64
	url, _ := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: engine(&ps)}}, Decode: []string{engine(&ds)}, HealthInterval: time.Hour})
	reach(t, url)
	for range 3 {
		if status := ask(t, url+"/v1/messages", `{"messages":[],"max_tokens":1}`); status != 200 {
			t.Fatal(status)
		}
	}
	if ps.Load() != 1 || ds.Load() != 3 {
		t.Errorf("P was asked %d times, D %d times", ps.Load(), ds.Load())
	}
}

// A conversation continues at the engine that has its last response. The response can be read and cancelled there, but not with another key.
func TestResponsesStayAtTheirEngine(t *testing.T) {
	x := &deployment{t: t}
	x.stopAll()
	o := proxy.Options{HealthInterval: 50 * time.Millisecond, Keys: keyFile(t, keyLine("ada", "s1", ""), keyLine("bob", "s2", ""))}
	x.pair(t, pair{model: "m", p: 0, d: 3}, &o, 0)
	x.start(o)
	for i := range 6 {
		stream := i%2 == 0
		status, text, _ := do(t, http.MethodPost, x.url+"/v1/responses", "s1", fmt.Sprintf(`{"input":"a b %d","max_output_tokens":3,"stream":%v}`, i, stream))
		m := regexp.MustCompile(`"id":"(resp_[^"]*)"`).FindStringSubmatch(text)
		if status != 200 || m == nil {
			t.Fatal(status, text)
		}
		f := func(method, path, key, body string, want int) {
			t.Helper()
			if status, text, _ := do(t, method, x.url+path, key, body); status != want {
				t.Errorf("%s %s %s: %d %s", method, path, key, status, text)
			}
		}
		next := fmt.Sprintf(`{"input":"c","max_output_tokens":3,"previous_response_id":%q}`, m[1])
		f(http.MethodGet, "/v1/responses/"+m[1], "s1", "", 200)
		f(http.MethodPost, "/v1/responses/"+m[1]+"/cancel", "s1", "", 400) // the engine's own answer
		f(http.MethodPost, "/v1/responses", "s1", next, 200)
		f(http.MethodGet, "/v1/responses/"+m[1], "s2", "", 404)
		f(http.MethodPost, "/v1/responses", "s2", next, 404)
		f(http.MethodGet, "/v1/responses/"+m[1], "", "", 401)
		f(http.MethodDelete, "/v1/responses/"+m[1], "s1", "", 405)
		f(http.MethodGet, "/v1/responses/resp_none", "s1", "", 404)
		f(http.MethodGet, "/v1/responses/a/b", "s1", "", 404)
	}
}

// Each path of vLLM is served, or refused with its reason; any other is 404 and reaches no engine.
func TestRoutes(t *testing.T) {
	var asked atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[{"id":"m"}]}`) })
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.Header().Set("Access-Control-Allow-Origin", "*")
		_, _ = io.Copy(w, r.Body)
	})
	url, _ := startProxy(t, proxy.Options{Engines: []string{serveMux(t, mux)}, HealthInterval: time.Hour})
	reach(t, url)
	f := func(method, path, kind, body string, want, reaches int64) {
		t.Helper()
		before := asked.Load()
		r, _ := http.NewRequest(method, url+path, strings.NewReader(body))
		r.Header.Set("Content-Type", kind)
		r.Header.Set("Origin", "http://page")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		if n := asked.Load() - before; int64(resp.StatusCode) != want || n != reaches || want == 200 && string(text) != body || resp.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s %s: %d %s, the engine was asked %d times", method, path, resp.StatusCode, text, n)
		}
	}
	for _, path := range []string{
		"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/inference/v1/generate",
		"/v1/embeddings", "/v2/embed", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling", "/classify", "/tokenize", "/detokenize", "/invocations",
		"/v1/completions/render", "/v1/chat/completions/render", "/v1/completions/derender", "/v1/chat/completions/derender",
	} {
		f(http.MethodPost, path, "application/json", `{"model":"m"}`, 200, 1)
		f(http.MethodPost, path, "application/json", `{"model":"other"}`, 404, 0)
		f(http.MethodGet, path, "", "", 405, 0)
	}
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	_ = w.WriteField("model", "m")
	part, _ := w.CreateFormFile("file", "a.wav")
	_, _ = part.Write([]byte{0, 1, 2, 255})
	_ = w.Close()
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		f(http.MethodPost, path, w.FormDataContentType(), form.String(), 200, 1)
		f(http.MethodPost, path, w.FormDataContentType(), strings.Replace(form.String(), "\r\nm\r\n", "\r\nx\r\n", 1), 404, 0)
		f(http.MethodPost, path, "application/json", `{}`, 400, 0)
	}
	f(http.MethodGet, "/version", "", "", 200, 1)
	f(http.MethodPost, "/version", "", "", 405, 0)
	f(http.MethodPost, "/v1/realtime", "", "", 501, 0)
	for _, path := range []string{
		"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache", "/pause", "/metrics", "/", "/v1", "/v1/models/m",
		"/v1/completions/", "//v1/completions", "/v1/./completions", "/v1/responses/", "/docs", "/server_info",
	} {
		f(http.MethodPost, path, "application/json", `{"model":"m"}`, 404, 0)
		f(http.MethodGet, path, "", "", 404, 0)
	}
}

// A multipart form reaches a decode engine byte for byte where P and D are separate engines, with and without API keys.
func TestFormsReachDecodeEngines(t *testing.T) {
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	_ = w.WriteField("model", "m")
	_ = w.WriteField("stream", "true")
	part, _ := w.CreateFormFile("file", "a.wav")
	_, _ = part.Write([]byte{0, 1, 2, 255})
	_ = w.Close()
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013, proxy.NIXL} {
		for _, o := range []proxy.Options{{}, {Keys: keyFile(t, keyLine("ada", "s", ""))}, {EngineKey: "k", Policy: proxy.PrefixAware}} {
			mux := http.NewServeMux()
			mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
			mux.HandleFunc("/v1/audio/", func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
				_, _ = io.Copy(w, r.Body)
			})
			d := serveMux(t, mux)
			o.Dialect, o.HealthInterval, o.Decode = dialect, time.Hour, []string{d}
			o.Prefill = []proxy.Prefill{{URL: mock(t, func(http.ResponseWriter, *http.Request) { t.Error("P is asked") })}}
			if dialect == proxy.Mooncake {
				o.Prefill[0].Registry = mockRegistry(t, oneRank)
			}
			url, _ := startProxy(t, o)
			reach(t, url)
			for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
				r, _ := http.NewRequest(http.MethodPost, url+path, bytes.NewReader(form.Bytes()))
				r.Header.Set("Content-Type", w.FormDataContentType())
				r.Header.Set("Authorization", "Bearer s")
				resp, err := http.DefaultClient.Do(r)
				if err != nil {
					t.Fatal(err)
				}
				got, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if resp.StatusCode != 200 || !bytes.Equal(got, form.Bytes()) || resp.Header.Get("Content-Type") != w.FormDataContentType() {
					t.Errorf("%v %s: %d, D has %q", dialect, path, resp.StatusCode, got)
				}
			}
		}
	}
}

// Pages of browsers may use the API where the operator allows their origins, and nowhere else.
func TestCORS(t *testing.T) {
	e := mock(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{}`) })
	f := func(c proxy.CORS, method, origin, wants, headers string, status int, allowed string) {
		t.Helper()
		url, _ := startProxy(t, proxy.Options{Engines: []string{e}, HealthInterval: time.Hour, CORS: c})
		reach(t, url)
		r, _ := http.NewRequest(method, url+"/v1/completions", strings.NewReader(`{"prompt":"a"}`))
		r.Header.Set("Origin", origin)
		r.Header.Set("Access-Control-Request-Method", wants)
		r.Header.Set("Access-Control-Request-Headers", headers)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := resp.Header.Get("Access-Control-Allow-Origin"); resp.StatusCode != status || got != allowed {
			t.Errorf("%+v %s %s: %d, allowed %q", c, method, origin, resp.StatusCode, got)
		}
	}
	one := proxy.CORS{Origins: []string{"http://a"}, Methods: []string{"POST"}, Headers: []string{"content-type", "authorization"}}
	const post, options = http.MethodPost, http.MethodOptions
	f(proxy.CORS{}, post, "http://a", "", "", 200, "")
	f(proxy.CORS{}, options, "http://a", post, "", 405, "")
	f(one, post, "http://a", "", "", 200, "http://a")
	f(one, post, "http://b", "", "", 200, "")
	f(one, options, "http://a", post, "Content-Type, Authorization", 200, "http://a")
	f(one, options, "http://a", post, "X-Other", 400, "")
	f(one, options, "http://a", "PUT", "", 400, "")
	f(one, options, "http://b", post, "", 400, "")
	f(proxy.CORS{Origins: []string{"*"}}, options, "http://b", post, "X-Any", 200, "*")
	f(proxy.CORS{Origins: []string{"*"}, Credentials: true}, post, "http://b", "", "", 200, "http://b")
}
