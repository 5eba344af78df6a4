// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// talk is the n-th turn of a conversation: each begins with all before it.
func talk(who, turns int) string {
	text := fmt.Sprintf("conversation %d. ", who)
	for i := range turns {
		text += strings.Repeat(fmt.Sprintf("w%d-%d ", who, i), 100)
	}
	return fmt.Sprintf(`{"prompt":%q,"max_tokens":2}`, text)
}

// hits returns the share of prompt tokens that the engines had in their caches.
func hits(engines []*served) (share float64) {
	var cached, prompt int64
	for _, e := range engines {
		s := e.Stats()
		cached, prompt = cached+s.CachedTokens, prompt+s.PromptTokens
	}
	return float64(cached) / float64(prompt)
}

// With PrefixAware a conversation stays at the engine that has its beginning, behind one proxy and, turn by turn, behind two
// proxies that share no state. With RoundRobin it does not.
func TestPrefixAware(t *testing.T) {
	play := func(policy proxy.Policy, proxies int) float64 {
		t.Helper()
		x := &deployment{t: t}
		o := proxy.Options{Policy: policy, HealthInterval: time.Hour} // the first look is at once
		x.pair(t, pair{model: "m", d: 4}, &o, 0)
		defer func() {
			http.DefaultClient.CloseIdleConnections()
			for _, s := range x.d {
				s.stop(t)
			}
		}()
		var urls []string
		for range proxies {
			url, s := startProxy(t, o)
			urls = append(urls, url)
			for _, d := range x.d {
				testkit.Eventually(t, "all are well", func() bool { return s.Stats().Well[d.web.URL] == 1 })
			}
		}
		for turn := 1; turn <= 5; turn++ {
			for who := range 7 {
				if status, text, _ := post(t, urls[(turn+who)%proxies], talk(who, turn)); status != 200 {
					t.Fatal(status, text)
				}
			}
		}
		return hits(x.d)
	}
	one, two, none := play(proxy.PrefixAware, 1), play(proxy.PrefixAware, 2), play(proxy.RoundRobin, 1)
	t.Logf("hits: %.2f with one proxy, %.2f with two, %.2f in turn", one, two, none)
	if one < 0.6 || two < one-0.05 || none > one-0.1 {
		t.Errorf("hits: %.2f with one proxy, %.2f with two, %.2f in turn", one, two, none)
	}
}

// One beginning that everybody shares does not pile up at one engine.
func TestASharedBeginningSpreads(t *testing.T) {
	var n [3]atomic.Int64
	var urls []string
	release := make(chan bool)
	for i := range n {
		urls = append(urls, mock(t, func(w http.ResponseWriter, r *http.Request) {
			n[i].Add(1)
			<-release
			fmt.Fprint(w, `{}`)
		}))
	}
	url, s := startProxy(t, proxy.Options{Engines: urls, Policy: proxy.PrefixAware, HealthInterval: 20 * time.Millisecond})
	for _, u := range urls {
		testkit.Eventually(t, "all are well", func() bool { return s.Stats().Well[u] == 1 })
	}
	var wg sync.WaitGroup
	shared := strings.Repeat("you are a helpful assistant ", 300)
	for i := range 30 {
		wg.Go(func() { post(t, url, fmt.Sprintf(`{"prompt":"%s %d"}`, shared, i)) })
	}
	testkit.Eventually(t, "all run", func() bool { return n[0].Load()+n[1].Load()+n[2].Load() == 30 })
	close(release)
	wg.Wait()
	for i := range n {
		if n[i].Load() < 5 {
			t.Errorf("%d %d %d", n[0].Load(), n[1].Load(), n[2].Load())
		}
	}
}

// The proxy chooses the engine with fewer requests. It counts those of other proxies from the engine's metrics.
func TestLeastLoaded(t *testing.T) {
	var n [2]atomic.Int64
	var urls []string
	for i := range n {
		mux := http.NewServeMux()
		mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
		mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, "# HELP x\nvllm:num_requests_running{engine=\"0\"} %d\nvllm:num_requests_running{engine=\"1\"} 1.0\nvllm:num_requests_waiting{engine=\"0\"} NaN\n", 5-5*i)
		})
		mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, _ *http.Request) { n[i].Add(1); fmt.Fprint(w, "{}") })
		urls = append(urls, serveMux(t, mux))
	}
	url, s := startProxy(t, proxy.Options{Engines: urls, Policy: proxy.LeastLoaded, HealthInterval: 20 * time.Millisecond})
	testkit.Eventually(t, "the loads are known", func() bool { return s.Stats().Others[urls[0]] == 6 && s.Stats().Others[urls[1]] == 1 })
	for range 10 {
		if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
			t.Fatal(status, text)
		}
	}
	if n[1].Load() != 10 {
		t.Error(n[0].Load(), n[1].Load())
	}
}

// Short prompts, and those of which D has most, go to D alone; others need P.
func TestSkipPrefill(t *testing.T) {
	f := func(shared bool) {
		t.Helper()
		x := &deployment{t: t}
		o := proxy.Options{SkipPrefill: 600, SharedStore: shared, HealthInterval: 20 * time.Millisecond}
		x.pair(t, pair{model: "m", p: 1, d: 2}, &o, 0)
		defer func() {
			http.DefaultClient.CloseIdleConnections()
			for _, s := range append(x.p, x.d...) {
				s.stop(t)
			}
		}()
		x.start(o)
		for _, d := range x.d {
			testkit.Eventually(t, "all are well", func() bool { return x.proxy.Stats().Well[d.web.URL] == 1 })
		}
		step := func(request string, prefills int64) {
			t.Helper()
			before := x.p[0].Stats().Finished
			if status, text, _ := post(t, x.url, request); status != 200 {
				t.Fatal(status, text)
			}
			if n := x.p[0].Stats().Finished - before; n != prefills {
				t.Errorf("shared %v, %.40s: P was asked %d times, want %d", shared, request, n, prefills)
			}
		}
		step(`{"prompt":"hello there","max_tokens":2}`, 0)
		step(talk(1, 4), 1)
		again := int64(1) // at the other D
		if shared {
			again = 0
		}
		step(talk(1, 4), again)
		step(talk(1, 4), 0)
		step(talk(2, 4), 1)
	}
	f(false)
	f(true)
}

// While no P is well D computes prompts, if that is allowed.
func TestDecodeAlone(t *testing.T) {
	d := serve(t, "", consumer, 0)
	t.Cleanup(func() { d.stop(t) })
	o := proxy.Options{Prefill: []proxy.Prefill{{URL: "http://127.0.0.1:1", Registry: "http://127.0.0.1:1"}}, Decode: []string{d.web.URL}, HealthInterval: 20 * time.Millisecond}
	url, s := startProxy(t, o)
	testkit.Eventually(t, "D is well", func() bool { return s.Stats().Well[d.web.URL] == 1 })
	if status, text, _ := post(t, url, body(1, 3, "")); status != 503 || !strings.Contains(text, "no prefill engine is well") {
		t.Error(status, text)
	}
	o.DecodeAlone = true
	url, s = startProxy(t, o)
	testkit.Eventually(t, "D is well", func() bool { return s.Stats().Well[d.web.URL] == 1 })
	if status, text, _ := post(t, url, body(1, 3, "")); status != 200 {
		t.Error(status, text)
	}
}

// Clients send ten times as many requests as the engines can take. No engine gets more than its limit, requests beyond the
// queue are refused at once, none is lost, and afterwards all is as before.
func TestOverload(t *testing.T) {
	const perEngine, queue, clients, each = 4, 8, 80, 6
	var now, most atomic.Int64
	serve := func(w http.ResponseWriter, _ *http.Request) {
		n := now.Add(1)
		defer now.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		time.Sleep(2 * time.Millisecond)
		fmt.Fprint(w, `{}`)
	}
	urls := []string{mock(t, serve), mock(t, serve)}
	url, s := startProxy(t, proxy.Options{Engines: urls, MaxPerEngine: perEngine, MaxQueue: queue, HealthInterval: 20 * time.Millisecond})
	for _, u := range urls {
		testkit.Eventually(t, "all are well", func() bool { return s.Stats().Well[u] == 1 })
	}
	var ok, refused, waited atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for range each {
				status, text, h := post(t, url, `{"prompt":"a"}`)
				waited.Store(max(waited.Load(), s.Stats().Queued))
				switch {
				case status == 200:
					ok.Add(1)
				case status == 503 && h.Get("Retry-After") != "":
					refused.Add(1)
				default:
					t.Error(status, text)
				}
			}
		})
	}
	wg.Wait()
	if most.Load() > 2*perEngine || waited.Load() > queue || ok.Load()+refused.Load() != clients*each || refused.Load() == 0 || ok.Load() == 0 {
		t.Errorf("%d at once, %d waited, %d served, %d refused", most.Load(), waited.Load(), ok.Load(), refused.Load())
	}
	if st := s.Stats(); st.InFlight+st.Queued+st.Engine[urls[0]]+st.Engine[urls[1]] != 0 || st.Requests["ok"] != ok.Load() || st.Requests["refused"] != refused.Load() {
		t.Errorf("%+v", st)
	}
	if status, text, _ := post(t, url, `{"prompt":"a"}`); status != 200 {
		t.Error(status, text)
	}
}
