// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// An abort reaches all engines that may have the request, although one of them is silent. It also reaches an engine that is stopping but still
// finishes its requests.
func TestSGLangAbortReachesAllEngines(t *testing.T) {
	var mu sync.Mutex
	ended := map[string]int{}
	engine := func(name string, silent bool, ready *atomic.Bool) string {
		mux := http.NewServeMux()
		mux.HandleFunc("/ready", func(w http.ResponseWriter, _ *http.Request) {
			if ready != nil && !ready.Load() {
				w.WriteHeader(503)
			}
		})
		mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"disaggregation_mode":"null"}`) })
		mux.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"disaggregation_mode":"null"}`) })
		mux.HandleFunc("/abort_request", func(_ http.ResponseWriter, r *http.Request) {
			if silent {
				hangs(nil, r)
				return
			}
			text, _ := io.ReadAll(r.Body)
			mu.Lock()
			defer mu.Unlock()
			if string(text) == `{"rid":"r"}` {
				ended[name]++
			}
		})
		return serveMux(t, mux)
	}
	var ready atomic.Bool
	ready.Store(true)
	o := proxy.Options{Detect: true, HealthInterval: 20 * time.Millisecond}
	o.Engines = []string{engine("silent", true, nil), engine("second", false, nil), engine("stops", false, &ready)}
	url, p := startProxy(t, o)
	testkit.Eventually(t, "all are well", func() bool {
		w := p.Stats().Well
		return w[o.Engines[0]]+w[o.Engines[1]]+w[o.Engines[2]] == 3
	})
	ready.Store(false)
	testkit.Eventually(t, "one stops", func() bool { return p.Stats().Well[o.Engines[2]] == 0 })
	ctx, cancel := context.WithCancel(t.Context())
	var client sync.WaitGroup
	client.Go(func() {
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/abort_request", strings.NewReader(`{"rid":"r"}`))
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
		}
	})
	testkit.Eventually(t, "the other engines have ended it", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return ended["second"] == 1 && ended["stops"] == 1
	})
	cancel()
	client.Wait()
}

// While one engine is too busy to answer /server_info, another one answers it.
func TestSGLangServerInfoOfAnotherEngine(t *testing.T) {
	var busy atomic.Bool
	engine := func(version string, mayBeBusy bool) string {
		mux := http.NewServeMux()
		mux.HandleFunc("/ready", func(http.ResponseWriter, *http.Request) {})
		mux.HandleFunc("/model_info", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"disaggregation_mode":"null"}`) })
		mux.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) {
			if mayBeBusy && busy.Load() {
				w.WriteHeader(500)
				return
			}
			fmt.Fprintf(w, `{"disaggregation_mode":"null","version":%q}`, version)
		})
		return serveMux(t, mux)
	}
	o := proxy.Options{Detect: true, HealthInterval: 20 * time.Millisecond, Engines: []string{engine("1", true), engine("2", false)}}
	url, p := startProxy(t, o)
	testkit.Eventually(t, "both are well", func() bool { w := p.Stats().Well; return w[o.Engines[0]]+w[o.Engines[1]] == 2 })
	busy.Store(true)
	if status, answer, _ := do(t, http.MethodGet, url+"/server_info", "", ""); status != 200 || !strings.Contains(answer, `"version":"2"`) {
		t.Errorf("%d %s", status, answer)
	}
}
