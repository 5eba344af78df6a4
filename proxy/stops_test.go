// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// An answer whose first token is a stop token comes at once, as from one engine. If P itself stopped at that token, it would keep no KV
// and D would wait for it.
func TestFirstTokenIsAStopToken(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		x := &deployment{t: t}
		x.stopAll()
		o := proxy.Options{HealthInterval: 50 * time.Millisecond, AnswerTimeout: 20 * time.Second}
		x.pair(t, pair{model: "m", dialect: dialect, p: 1, d: 1}, &o, 0)
		x.start(o)
		alone := serve(t, "", "", 0)
		defer alone.stop(t)
		before, asked := fmt.Sprint(x.free()), int64(0)
		// f sends a request with %s for the stop tokens, and one without them to learn the first token.
		f := func(path, format, stops string) {
			t.Helper()
			_, text, _ := postAndRead(t, alone.web.URL+path, fmt.Sprintf(format, `"return_token_ids":true`))
			var whole struct {
				Choices []struct {
					Tokens []uint32 `json:"token_ids"`
				}
			}
			if err := json.Unmarshal([]byte(text), &whole); err != nil || len(whole.Choices) == 0 || len(whole.Choices[0].Tokens) < 2 {
				t.Fatal(text, err)
			}
			for _, stream := range []string{"", `,"stream":true`} {
				if stream != "" && path == "/inference/v1/generate" {
					continue
				}
				salt := fmt.Sprintf(`,"cache_salt":"%d"`, asked) // D has nothing of it
				request := strings.TrimSuffix(fmt.Sprintf(format, fmt.Sprintf(stops, whole.Choices[0].Tokens[0])), "}") + salt + stream + "}"
				_, want, _ := postAndRead(t, alone.web.URL+path, request)
				status, got, err := postAndRead(t, x.url+path, request)
				if asked++; status != 200 || err != nil || essence(t, path, got) != essence(t, path, want) || !strings.Contains(got, `"finish_reason":"stop"`) {
					t.Errorf("%v %s: %d %q %v\nwant %q", dialect, request, status, got, err, want)
				}
			}
		}
		long := strings.Repeat("tell me more ", 30)
		const ids = `"stop_token_ids":[3,%d]`
		f("/v1/completions", `{"prompt":"c `+long+`","max_tokens":5,%s}`, ids)
		f("/v1/completions", `{"prompt":["l `+long+`"],"max_tokens":5,%s}`, ids+`,"min_tokens":1`)
		f("/v1/chat/completions", `{"messages":[{"role":"user","content":"h `+long+`"}],"max_tokens":5,%s}`, ids)
		f("/inference/v1/generate", `{"token_ids":[2`+strings.Repeat(",8", 70)+`],"sampling_params":{"max_tokens":5,%s}}`, ids)
		x.idle()
		if n := x.d[0].Stats().LoadedTokens; n < asked*60 {
			t.Errorf("%v: D has loaded %d tokens for %d requests", dialect, n, asked)
		}
		if s := x.proxy.Stats(); s.Requests["ok"] != asked || s.Retries != 0 || x.p[0].Stats().Finished != asked || fmt.Sprint(x.free()) != before {
			t.Errorf("%v: P has ended %d of %d requests, %+v", dialect, x.p[0].Stats().Finished, asked, s)
		}
	}
}

// Where P stops nevertheless, D computes the prompt, without transfer parameters and with its own cached tokens. P is not asked again for this
// request, but for the next one.
func TestPStopsAllTheSame(t *testing.T) {
	f := func(dialect proxy.Dialect, path, answer, request string, together bool) {
		t.Helper()
		var ps, ds legs
		engine := func(h http.HandlerFunc) string {
			mux := http.NewServeMux()
			mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
			mux.HandleFunc("POST "+path, h)
			return serveMux(t, mux)
		}
		p := engine(func(w http.ResponseWriter, r *http.Request) { ps.note(r); fmt.Fprint(w, answer) })
		d := engine(func(w http.ResponseWriter, r *http.Request) {
			if m := ds.note(r); m["kv_transfer_params"] != nil {
				<-r.Context().Done() // as vLLM's D: for P's limit
				return
			}
			fmt.Fprint(w, `{"usage":{"prompt_tokens_details":{"cached_tokens":64}}}`)
		})
		o := proxy.Options{Dialect: dialect, Prefill: []proxy.Prefill{{URL: p}}, Decode: []string{d}, HealthInterval: time.Hour, Attempts: 1, AnswerTimeout: 20 * time.Second}
		if dialect == proxy.Mooncake {
			o.Prefill[0].Registry = mockRegistry(t, oneRank)
		}
		url, s := startProxy(t, o)
		reach(t, url)
		for i := range 2 {
			status, text, err := postAndRead(t, url+path, request)
			if status != 200 || err != nil || !strings.Contains(text, `"cached_tokens":64`) {
				t.Errorf("%v %s: %d %s %v", dialect, path, status, text, err)
			}
			bodies, _ := ds.all()
			alone := 0
			for _, m := range bodies {
				if m["kv_transfer_params"] == nil {
					alone++
				}
			}
			if alone != i+1 || !together && len(bodies) != i+1 || ps.count() != i+1 { // together: P may answer before D is asked, or after
				t.Errorf("%v %s: D was asked %d times, %d without parameters, P %d times", dialect, path, len(bodies), alone, ps.count())
			}
		}
		testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
		if n := s.Stats(); n.Requests["ok"] != 2 || n.Freed != 0 || n.Retries != 0 {
			t.Errorf("%v %s: %+v", dialect, path, n)
		}
	}
	const stopped = `{"choices":[{"index":0,"finish_reason":"stop","stop_reason":null}],"usage":{"prompt_tokens_details":{"cached_tokens":2}}}`
	const turn = `{"type":"message","stop_reason":"end_turn","usage":{"cache_read_input_tokens":2}}`
	const completed = `{"object":"response","status":"completed","usage":{"input_tokens_details":{"cached_tokens":2}}}`
	for dialect, together := range map[proxy.Dialect]bool{proxy.Mooncake: true, proxy.Mooncake013: false, proxy.NIXL: false} {
		f(dialect, "/v1/completions", stopped, `{"prompt":"a"}`, together)
		f(dialect, "/v1/chat/completions", stopped, `{"messages":[]}`, together)
		f(dialect, "/inference/v1/generate", stopped, `{"token_ids":[1]}`, together)
		f(dialect, "/v1/responses", completed, `{"input":"a"}`, together)
		f(dialect, "/v1/messages", turn, `{"messages":[],"max_tokens":5}`, false)
	}
}
