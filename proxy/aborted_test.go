// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
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

// An engine that ends aborts its requests with status 200 and no token: another engine answers them. Where there is no other engine, or the
// client already has a part of the answer, the client gets the engine's own answer.
func TestRequestOfAnEngineThatEndsIsAnsweredByAnother(t *testing.T) {
	aborted := map[string]string{
		"/v1/completions":      `{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}`,
		"/v1/chat/completions": `{"choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"abort"}]}`,
		"stream":               "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n",
		"part":                 `{"choices":[{"index":0,"text":" half","finish_reason":"abort"}]}`,
	}
	for what, text := range aborted {
		path, body, kind := what, `{"model":"m","prompt":"a"}`, "application/json"
		if !strings.HasPrefix(path, "/") {
			path = "/v1/completions"
		}
		if what == "stream" {
			body, kind = `{"model":"m","prompt":"a","stream":true}`, "text/event-stream"
		}
		var ends atomic.Int64
		ending := mock(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			ends.Add(1)
			w.Header().Set("Content-Type", kind)
			fmt.Fprint(w, text)
		})
		well := mock(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", kind)
			fmt.Fprint(w, strings.NewReplacer(`"abort"`, `"stop"`, `"text":""`, `"text":" whole"`, `"content":""`, `"content":" whole"`).Replace(text))
		})
		ask := func(engines ...string) (answers []string) {
			url, s := startProxy(t, proxy.Options{Engines: engines, HealthInterval: time.Hour})
			testkit.Eventually(t, "all are well", func() bool {
				well := s.Stats().Well
				for _, e := range engines {
					if well[e] == 0 {
						return false
					}
				}
				return true
			})
			for range 6 {
				r, err := http.Post(url+path, "application/json", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(r.Body)
				r.Body.Close()
				if err != nil || r.StatusCode != http.StatusOK {
					t.Errorf("%s: %d %s %v", what, r.StatusCode, b, err)
				}
				answers = append(answers, string(b))
			}
			return answers
		}
		both := strings.Join(ask(ending, well), "\n")
		if ends.Load() == 0 {
			t.Fatalf("%s: the engine that ends was not asked", what)
		}
		if got := strings.Contains(both, `"abort"`); got != (what == "part") {
			t.Errorf("%s: of two engines: %s", what, both)
		}
		for _, one := range ask(ending) {
			if !strings.Contains(one, `"abort"`) {
				t.Errorf("%s: of one engine: %s", what, one)
			}
		}
	}
}
