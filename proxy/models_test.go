// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// An adapter serves requests as soon as P and D have it: the proxy asks engines again for a name that none lists. A request without a model
// still means the base model. While one role lacks the adapter, the answer is 404 and says which.
func TestAdaptersComeAndGo(t *testing.T) {
	x := deploy(t, 1, 0)
	x.url, x.proxy = startProxy(t, proxy.WithModelLooks(proxy.Options{
		Prefill: []proxy.Prefill{{URL: x.p[0].web.URL, Registry: x.registry}}, Decode: []string{x.d[0].web.URL}, HealthInterval: time.Hour,
	}, time.Nanosecond))
	testkit.Eventually(t, "both are well", func() bool { w := x.proxy.Stats().Well; return w[x.p[0].web.URL]+w[x.d[0].web.URL] == 2 })
	f := func(model string, want int, words string) {
		t.Helper()
		status, text, _ := post(t, x.url, fmt.Sprintf(`{%s"prompt":%q,"max_tokens":3}`, model, strings.Repeat("tell me more ", 30)))
		if status != want || !strings.Contains(text, words) {
			t.Errorf("%s: %d %s, want %d %s", model, status, text, want, words)
		}
	}
	load := func(e *served, what string) {
		t.Helper()
		r, err := http.Post(e.web.URL+"/v1/"+what+"_lora_adapter", "application/json", strings.NewReader(`{"lora_name":"lora","lora_path":"/x"}`))
		if err != nil || r.StatusCode != 200 {
			t.Fatal(err, r)
		}
		r.Body.Close()
	}
	const lora = `"model":"lora",`
	f(lora, 404, "does not exist.")
	load(x.d[0], "load")
	f(lora, 404, "at the prefill engines")
	f("", 200, "")
	load(x.p[0], "load")
	f(lora, 200, "")
	f("", 200, "")
	f(`"model":"m",`, 200, "")
	load(x.d[0], "unload")
	f(lora, 404, "does not exist") // the engine's own words
	x.idle()
}

// A flood of unknown names asks the engines once a second.
func TestUnknownModelsAskEnginesOnceASecond(t *testing.T) {
	var looks atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) {
		looks.Add(1)
		fmt.Fprint(w, `{"data":[{"id":"a","root":"/weights"},{"id":"b","root":"/weights"},{"id":"lora","root":"/lora","parent":"a"}]}`)
	})
	mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	url, _ := startProxy(t, proxy.Options{Engines: []string{serveMux(t, mux)}, HealthInterval: time.Hour})
	reach(t, url)
	began, before := time.Now(), looks.Load()
	for i := range 200 {
		if status, _, _ := post(t, url, fmt.Sprintf(`{"model":"none%d","prompt":"a"}`, i)); status != 404 {
			t.Fatal(status)
		}
	}
	if n, most := looks.Load()-before, int64(time.Since(began)/time.Second)+1; n > most || n == 0 {
		t.Errorf("%d looks, at most %d are wanted", n, most)
	}
	if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 { // two names of one model, and its adapter
		t.Errorf("%d %s", status, text)
	}
}

// P's part has nothing that only the answer needs, on each API; D's has all of it.
func TestPGetsWhatThePromptNeeds(t *testing.T) {
	f := func(path, body string, wantP ...string) {
		t.Helper()
		var ps, ds legs
		engine := func(l *legs) string {
			mux := http.NewServeMux()
			mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
			mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
				l.note(r)
				fmt.Fprint(w, `{"kv_transfer_params":{"a":1}}`)
			})
			return serveMux(t, mux)
		}
		url, _ := startProxy(t, proxy.Options{Dialect: proxy.NIXL, Prefill: []proxy.Prefill{{URL: engine(&ps)}}, Decode: []string{engine(&ds)}, HealthInterval: time.Hour})
		reach(t, url)
		if status := ask(t, url+path, body); status != 200 {
			t.Fatal(path, status)
		}
		p, _ := ps.all()
		d, _ := ds.all()
		delete(p[0], "kv_transfer_params")
		if got := fmt.Sprint(p[0]); got != fmt.Sprint(wantP[0]) {
			t.Errorf("%s: P gets %s\nwant %s", path, got, wantP[0])
		}
		if text, _ := json.Marshal(d[0]); strings.Contains(body, "logprobs") && !strings.Contains(string(text), "logprobs") {
			t.Errorf("%s: D gets %s", path, text)
		}
	}
	const output = `"logprobs":5,"top_logprobs":5,"prompt_logprobs":1,"return_token_ids":true,"stop":["x"],"stop_token_ids":[7],"n":1,"best_of":1,"response_format":{"type":"json_object"},"structured_outputs":{"json":{}},"stream":true,"stream_options":{"include_usage":true}`
	f("/v1/completions", `{"prompt":"a","max_tokens":9,"min_tokens":3,"echo":true,"temperature":0.5,`+output+`}`, "map[ignore_eos:true max_tokens:1 prompt:a stream:false temperature:0.5]")
	f("/v1/chat/completions", `{"messages":[],"max_completion_tokens":9,"tools":[],"tool_choice":"required",`+output+`}`, "map[ignore_eos:true max_completion_tokens:1 max_tokens:1 messages:[] stream:false tool_choice:auto tools:[]]")
	f("/v1/responses", `{"input":"a","max_output_tokens":9,"store":true,"text":{},"tool_choice":{"type":"function"},"stream":true}`, "map[ignore_eos:true input:a max_output_tokens:1 store:false stream:false tool_choice:auto]")
	f("/v1/messages", `{"messages":[],"max_tokens":9,"stop_sequences":["x"],"tool_choice":{"type":"any"},"stream":true}`, "map[max_tokens:1 messages:[] stream:false]")
	f("/inference/v1/generate", `{"token_ids":[1],"sampling_params":{"max_tokens":9,"min_tokens":2,"logprobs":3,"n":1,"temperature":1}}`, "map[sampling_params:map[ignore_eos:true max_tokens:1 temperature:1] token_ids:[1]]")
}

// P computes one token and does not stream, in whatever form the client wrote the number of tokens and the flag stream. D gets the client's
// own values.
func TestPComputesOneTokenOfLaxNumbers(t *testing.T) {
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013} {
		x := &deployment{t: t}
		x.stopAll()
		o := proxy.Options{HealthInterval: 50 * time.Millisecond}
		x.pair(t, pair{model: "m", dialect: dialect, p: 1, d: 1}, &o, 0)
		x.start(o)
		alone := serve(t, "", "", 0)
		defer alone.stop(t)
		asked := int64(0)
		f := func(path, request string) {
			t.Helper()
			_, want, _ := postAndRead(t, alone.web.URL+path, request)
			status, got, err := postAndRead(t, x.url+path, request)
			asked++
			if texts, wants := essence(t, path, got), essence(t, path, want); status != 200 || err != nil || texts != wants {
				t.Errorf("%v %s %s: %d %q %v, want %q", dialect, path, request, status, texts, err, wants)
			}
			x.idle()
			if s := x.p[0].Stats(); s.Generated != asked || s.Finished != asked {
				t.Fatalf("%v %s %.80s: P has generated %d tokens for %d requests", dialect, path, request, s.Generated, asked)
			}
		}
		for i, n := range []string{"7.0", "7e0", `"7"`, `" 7 "`, `"7.0"`} {
			words := strings.Repeat(fmt.Sprint("word", i, " "), 40)
			for _, stream := range []string{"false", "1", `"true"`, "1.0", `"on"`, "0", `"no"`} {
				f("/v1/completions", fmt.Sprintf(`{"prompt":"%s%s","max_tokens":%s,"stream":%s}`, words, strings.Trim(stream, `"`), n, stream))
			}
			f("/v1/completions", fmt.Sprintf(`{"prompt":"min %s","max_tokens":%s,"min_tokens":%s}`, words, n, n))
			f("/v1/completions", fmt.Sprintf(`{"prompt":"usage %s","max_tokens":%s,"stream":"yes","stream_options":{"include_usage":true}}`, words, n))
			chat := `"messages":[{"role":"user","content":"` + words + `"}]`
			f("/v1/chat/completions", fmt.Sprintf(`{%s,"max_completion_tokens":%s,"stream":1}`, chat, n))
			f("/v1/messages", fmt.Sprintf(`{%s,"max_tokens":%s,"stream":"true"}`, chat, n))
			f("/v1/responses", fmt.Sprintf(`{"input":%q,"max_output_tokens":%s,"stream":"true"}`, words, n))
			f("/inference/v1/generate", fmt.Sprintf(`{"token_ids":[%d%s],"sampling_params":{"max_tokens":%s}}`, i, strings.Repeat(",9", 60), n))
		}
		if s := x.proxy.Stats(); s.Retries != 0 {
			t.Errorf("%+v", s)
		}
	}
}

// P's part is valid JSON wherever the keys stand that the proxy removes from it: alone, side by side, at the beginning, at the end.
func TestPGetsJSON(t *testing.T) {
	x := deploy(t, 1, 0)
	alone := serve(t, "", "", 0)
	defer alone.stop(t)
	keys := []string{`"logprobs":1`, `"echo":true`, `"return_token_ids":true`, `"max_tokens":3`, `"min_tokens":1`, `"stream":true`, `"stream_options":{"include_usage":true}`}
	f := func(path, prompt string, keys ...string) {
		t.Helper()
		for turn := range keys {
			for _, at := range []int{0, len(keys) / 2, len(keys)} {
				fields := slices.Insert(slices.Concat(keys[turn:], keys[:turn]), at, prompt)
				request := "{" + strings.Join(fields, ",") + "}"
				_, want, _ := postAndRead(t, alone.web.URL+path, request)
				status, got, err := postAndRead(t, x.url+path, request)
				if status != 200 || err != nil || essence(t, path, got) != essence(t, path, want) {
					t.Errorf("%s: %d %s, %v\nwant %s", request, status, got, err, want)
				}
			}
		}
	}
	f("/v1/completions", `"prompt":"tell me more"`, keys...)
	f("/v1/completions", `"prompt":["tell me more","or less"]`, keys...)
	f("/v1/chat/completions", `"messages":[{"role":"user","content":"tell me more"}]`, `"logprobs":true`, `"top_logprobs":2`, `"max_completion_tokens":4`)
	f("/v1/messages", `"messages":[{"role":"user","content":"tell me more"}]`, `"max_tokens":4`, `"stream":true`)
	x.idle()
}

// With keys, fields of clients reach engines by a list, which the operator adds to. Credentials never do.
func TestHeadersPassByAList(t *testing.T) {
	var es legs
	e := mock(t, func(w http.ResponseWriter, r *http.Request) { es.note(r); fmt.Fprint(w, `{}`) })
	f := func(o proxy.Options, want string) {
		t.Helper()
		o.Engines, o.HealthInterval = []string{e}, time.Hour
		url, _ := startProxy(t, o)
		reach(t, url)
		n := es.count()
		fields := []string{"Authorization", "Bearer s", "X-Mine", "1", "X-Other", "2", "Tracestate", "a=b", "Cookie", "c", "X-Forwarded-For", "h", "Anthropic-Version", "v"}
		if status := ask(t, url+"/v1/completions", `{"prompt":"a"}`, fields...); status != 200 {
			t.Fatal(status)
		}
		_, heads := es.all()
		got := ""
		for i := 0; i < len(fields); i += 2 {
			if v := heads[n].Get(fields[i]); v != "" {
				got += fields[i] + " "
			}
		}
		if got != want {
			t.Errorf("engines get %s, want %s", got, want)
		}
	}
	k := keyFile(t, keyLine("ada", "s", ""))
	f(proxy.Options{Keys: k}, "Tracestate Anthropic-Version ")
	f(proxy.Options{Keys: k, PassHeaders: []string{"x-mine", "Cookie", "Authorization"}}, "X-Mine Tracestate Anthropic-Version ")
	f(proxy.Options{}, "Authorization X-Mine X-Other Tracestate Cookie X-Forwarded-For Anthropic-Version ")
}
