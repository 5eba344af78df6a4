// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// A request that only one kind of engine can take waits for room there, and other requests do not wait behind it. This holds in a fleet of a
// vLLM and a SGLang, and for the engine that has the response from which a request continues.
func TestRequestsWaitForTheirOwnEngines(t *testing.T) {
	release := make(chan struct{})
	holding := func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		if strings.Contains(string(text), "hold") {
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		fmt.Fprint(w, `{"id":"x"}`)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.Handle("/v1/models", http.NotFoundHandler())
	mux.HandleFunc("/v1/", holding)
	vllm, sglang := serveMux(t, mux), mockSGLang(t, "null", nil, holding)
	o := proxy.Options{Detect: true, Engines: []string{vllm, sglang}, HealthInterval: 20 * time.Millisecond, MaxPerEngine: 1, QueueTimeout: 20 * time.Second}
	url, p := startProxy(t, o)
	testkit.Eventually(t, "both are well", func() bool { w := p.Stats().Well; return w[vllm] == 1 && w[sglang] == 1 })
	var clients sync.WaitGroup
	for range 2 {
		clients.Go(func() {
			if status, answer := askSGLang(t, url, "/generate", `{"text":"hold"}`); status != 200 {
				t.Errorf("%d %s", status, answer)
			}
		})
	}
	testkit.Eventually(t, "one waits", func() bool { return p.Stats().Queued == 1 })
	for range 3 {
		status, answer := askSGLang(t, url, "/v1/completions", `{"prompt":"x"}`)
		if status != 200 || p.Stats().Queued != 1 {
			t.Errorf("behind a request for another engine: %d %s, %d wait", status, answer, p.Stats().Queued)
		}
	}
	close(release)
	clients.Wait()
	testkit.Eventually(t, "no place is taken", func() bool { return p.Taken() == "" })
}

// SGLang's own paths name no model: beside a vLLM of another model they mean that of the SGLang.
func TestSGLangPathsMeanItsModel(t *testing.T) {
	var got sglLegs
	answer := func(w http.ResponseWriter, r *http.Request) { got.take(r); fmt.Fprint(w, `{"text":"a"}`) }
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"data":[{"id":"a","root":"/a"}]}`) })
	vllm, sglang := serveMux(t, mux), mockSGLang(t, "null", map[string]string{"/v1/models": `{"data":[{"id":"b","root":"b"},{"id":"l","root":"x","parent":"b"}]}`}, answer)
	url, p := startProxy(t, proxy.Options{Detect: true, Engines: []string{vllm, sglang}, HealthInterval: 20 * time.Millisecond})
	testkit.Eventually(t, "both are well", func() bool { w := p.Stats().Well; return w[vllm] == 1 && w[sglang] == 1 })
	if status, text := askSGLang(t, url, "/generate", `{"text":"x"}`); status != 200 || len(got.all()) != 1 {
		t.Errorf("%d %s", status, text)
	}
	if status, text := askSGLang(t, url, "/v1/completions", `{"prompt":"x"}`); status != 400 || !strings.Contains(text, "more than one") {
		t.Errorf("%d %s", status, text)
	}
}

// The proxy splits a request for many answers into parts. Only the parts at engines and the next part have a body, so the request takes little
// memory while engines are full.
func TestPartsThatWaitHaveNoBody(t *testing.T) {
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	var held atomic.Int64
	hold := func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		held.Add(1)
		<-r.Context().Done()
	}
	url, p := startMockedPair(t, oneRankSGLang, proxy.Options{MaxPerEngine: 2}, hold, hold)
	body := `{"n":100,"messages":[{"role":"user","content":"` + strings.Repeat("x", 512<<10) + `"}]}`
	before := heap()
	ctx, cancel := context.WithCancel(t.Context())
	var client sync.WaitGroup
	client.Go(func() {
		r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
		if resp, err := http.DefaultClient.Do(r); err == nil {
			resp.Body.Close()
		}
	})
	testkit.Eventually(t, "two parts are at the engines, and one waits", func() bool { return held.Load() == 4 && p.Stats().Queued == 1 })
	if n := heap() - before; n > 16<<20 {
		t.Errorf("100 answers to a body of %d bytes hold %d bytes", len(body), n)
	}
	cancel()
	client.Wait()
	testkit.Eventually(t, "no place is taken", func() bool { return p.Taken() == "" })
}
