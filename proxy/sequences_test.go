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

// One transfer carries one prompt. A request for several answers, or with prompts that the proxy cannot split, goes to D alone in every
// dialect, without parameters of a transfer, also when the client sent some. A request of one prompt goes through P.
func TestSeveralSequencesGoToDAlone(t *testing.T) {
	f := func(dialect proxy.Dialect, path, body string, throughP bool) {
		t.Helper()
		var ps, ds legs
		answer := func(l *legs) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				l.note(r)
				fmt.Fprint(w, `{"choices":[{"text":"a"}],"kv_transfer_params":{"remote_host":"h"}}`)
			}
		}
		engine := func(l *legs) string {
			mux := http.NewServeMux()
			mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
			mux.HandleFunc("/v1/completions", answer(l))
			mux.HandleFunc("/v1/chat/completions", answer(l))
			return serveMux(t, mux)
		}
		prefill := proxy.Prefill{URL: engine(&ps)}
		if dialect == proxy.Mooncake {
			prefill.Registry = mockRegistry(t, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://h:1"}}}}`)
		}
		url, p := startProxy(t, proxy.Options{Dialect: dialect, Prefill: []proxy.Prefill{prefill}, Decode: []string{engine(&ds)}, HealthInterval: time.Hour})
		reach(t, url)
		r, err := http.Post(url+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != 200 {
			t.Fatal(r.StatusCode)
		}
		if throughP {
			testkit.Eventually(t, "P has its part", func() bool { return ps.count() == 1 })
		}
		bodies, _ := ds.all()
		_, params := bodies[0]["kv_transfer_params"]
		spared := p.Stats().Spared["sequences"]
		if n := ps.count(); (n == 1) != throughP || params != throughP || spared == 1 != !throughP || len(bodies) != 1 {
			t.Errorf("%v %s %s: P has %d requests, D has %v, %d counted", dialect, path, body, n, bodies, spared)
		}
	}
	for _, dialect := range []proxy.Dialect{proxy.Mooncake, proxy.Mooncake013, proxy.NIXL} {
		const c, chat = "/v1/completions", "/v1/chat/completions"
		f(dialect, c, `{"prompt":["a",[1]],"kv_transfer_params":{"do_remote_prefill":true}}`, false)
		f(dialect, c, `{"prompt":["a","b"],"n":2}`, false)
		f(dialect, c, `{"prompt":"a","n":2}`, false)
		f(dialect, c, `{"prompt":"a","best_of":3}`, false)
		f(dialect, c, `{"prompt":"a","use_beam_search":true}`, false)
		f(dialect, c, `{"prompt_embeds":["AA==","AA=="]}`, false)
		f(dialect, chat, `{"messages":[{"role":"user","content":"a"}],"n":3}`, false)
		f(dialect, c, `{"prompt":[1,2,3]}`, true)
		f(dialect, c, `{"prompt":["a"],"n":1}`, true)
		f(dialect, chat, `{"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]}`, true)
	}
}
