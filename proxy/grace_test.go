// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// A P that never answers loses its leg once D has answered, refused, or lost its client, and the grace is over. A client whose usage
// needs P's answer gets D's number then.
func TestLegOfASilentPEnds(t *testing.T) {
	const usage = `{"usage":{"prompt_tokens_details":{"cached_tokens":900}}}`
	for name, c := range map[string]struct {
		dialect proxy.Dialect
		status  int    // D's; 0: the client leaves while P computes
		answer  string // D's
	}{
		"answer":          {proxy.Mooncake, 200, usage},
		"answer, SGLang":  {proxy.SGLang, 200, `{"text":"a","meta_info":{"cached_tokens":900}}`},
		"refusal":         {proxy.Mooncake, 400, `{"error":{"message":"no"}}`},
		"no client":       {proxy.Mooncake, 0, ""},
		"no client, NIXL": {proxy.NIXL, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			begun, ended, over := make(chan struct{}, 1), make(chan struct{}, 1), make(chan struct{})
			silent := func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body) // so that the server sees that the leg ends
				begun <- struct{}{}
				select {
				case <-r.Context().Done():
					ended <- struct{}{}
				case <-over:
				}
			}
			d := func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				if c.status == 0 {
					<-r.Context().Done()
					return
				}
				<-begun
				w.WriteHeader(c.status)
				fmt.Fprint(w, c.answer)
			}
			o := proxy.Options{Dialect: c.dialect, HealthInterval: 20 * time.Millisecond}
			path := "/v1/completions"
			if c.dialect == proxy.SGLang {
				p := mockSGLang(t, "prefill", map[string]string{"/route": oneRankSGLang}, silent)
				o.Prefill, o.Decode, path = []proxy.Prefill{{URL: p, Registry: p}}, []string{mockSGLang(t, "decode", nil, d)}, "/generate"
			} else {
				o.Prefill, o.Decode = []proxy.Prefill{{URL: mock(t, silent)}}, []string{mock(t, d)}
			}
			if c.dialect == proxy.Mooncake {
				o.Prefill[0].Registry = mockRegistry(t, oneRank)
			}
			url, s := startImpatient(t, proxy.WithPatience(proxy.WithPrefillGrace(o, 100*time.Millisecond), time.Minute))
			t.Cleanup(func() { close(over) })
			reach(t, url)
			ctx, leave := context.WithTimeout(t.Context(), 30*time.Second)
			defer leave()
			if c.status == 0 {
				go func() { <-begun; leave() }()
			}
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, strings.NewReader(`{"prompt":"a","text":"a"}`))
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Content-Type", "application/json")
			if a, err := http.DefaultClient.Do(r); err == nil {
				text, _ := io.ReadAll(a.Body)
				a.Body.Close()
				if a.StatusCode != c.status || c.status == 200 && string(text) != c.answer {
					t.Errorf("%d %s", a.StatusCode, text)
				}
			} else if c.status != 0 {
				t.Fatal(err)
			}
			select {
			case <-ended:
			case <-time.After(30 * time.Second):
				t.Fatal("P's leg goes on")
			}
			testkit.Eventually(t, "no place is taken", func() bool { return s.Taken() == "" })
		})
	}
}
