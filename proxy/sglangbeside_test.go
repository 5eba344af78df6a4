// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// What P and D of SGLang cannot serve goes, whole, to the engines of the model beside them.
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
		if alone == sglang {
			f("/generate", `{"input_embeds":[[[0.5]],[[0.25]]]}`)
			f("/generate", `{"text":null,"input_ids":null,"input_embeds":[[[0.5]],[[0.25]]]}`)
		}
		if n := len(pair.all()); n != ofPair {
			t.Errorf("the pair got %d requests", n-ofPair)
		}
		if status, answer := askSGLang(t, url, "/v1/completions", `{"prompt":["x","y"]}`); status != 200 && status != 502 || len(pair.all()) == ofPair {
			t.Errorf("a list of prompts: %d %s, the pair got nothing", status, answer)
		}
		ofPair = len(pair.all())
		testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
	}
}

// Without such engines they are refused with the reason; embeddings that may be several prompts never get one room.
func TestSGLangRequestsWithoutRoomsAreRefused(t *testing.T) {
	var legs sglLegs
	url, _ := startMockedPair(t, oneRankSGLang, proxy.Options{}, func(_ http.ResponseWriter, r *http.Request) { legs.take(r) }, func(_ http.ResponseWriter, r *http.Request) { legs.take(r) })
	for _, body := range []string{
		`{"input_embeds":[[[0.5]],[[0.25]]]}`, `{"text":null,"input_embeds":[[[0.5]],[[0.25]]]}`, `{"text":null,"input_ids":null,"input_embeds":[[[0.5]],[[0.25]]]}`,
	} {
		if status, answer := askSGLang(t, url, "/generate", body); status != 400 || len(legs.all()) > 0 {
			t.Errorf("%s: %d %s; %v", body, status, answer, legs.all())
		}
	}
}
