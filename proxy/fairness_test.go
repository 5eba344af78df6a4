// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	neturl "net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// crowd is a fleet of mock engines that count their requests by model.
type crowd struct {
	o        proxy.Options
	urls     []string
	p, d     []*tallied
	registry string
}

type tallied struct {
	models string // that it lists
	mu     sync.Mutex
	of     map[string]int // requests by model
}

func (e *tallied) count(model string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if model != "" {
		return e.of[model]
	}
	n := 0
	for _, of := range e.of {
		n += of
	}
	return n
}

// serve starts the mock; each request takes about pause.
func (e *tallied) serve(t testing.TB, pause time.Duration) string {
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) {
		var list []string
		for m := range strings.FieldsSeq(e.models) {
			list = append(list, fmt.Sprintf(`{"id":%q}`, m))
		}
		fmt.Fprintf(w, `{"object":"list","data":[%s]}`, strings.Join(list, ","))
	})
	var legs legs
	mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, r *http.Request) {
		model := legs.note(r)["model"].(string)
		e.mu.Lock()
		e.of[model]++
		e.mu.Unlock()
		time.Sleep(pause)
		fmt.Fprint(w, `{}`)
	})
	return serveMux(t, mux)
}

func newCrowd(t testing.TB, policy proxy.Policy, prefills, others int, pause time.Duration, models string) *crowd {
	c := &crowd{o: proxy.Options{Policy: policy, HealthInterval: time.Hour}} // the first look is at once
	c.registry = mockRegistry(t, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://h:1"}}}}`)
	for range prefills {
		e := &tallied{models: models, of: map[string]int{}}
		c.p = append(c.p, e)
		c.o.Prefill = append(c.o.Prefill, proxy.Prefill{URL: e.serve(t, pause), Registry: c.registry})
		c.urls = append(c.urls, c.o.Prefill[len(c.p)-1].URL)
	}
	for range others {
		e := &tallied{models: models, of: map[string]int{}}
		c.d = append(c.d, e)
		url := e.serve(t, pause)
		c.urls = append(c.urls, url)
		if prefills > 0 {
			c.o.Decode = append(c.o.Decode, url)
		} else {
			c.o.Engines = append(c.o.Engines, url)
		}
	}
	return c
}

func (c *crowd) start(t *testing.T) (string, *proxy.Proxy) {
	url, p := startProxy(t, c.o)
	for _, u := range c.urls {
		testkit.Eventually(t, "all are well", func() bool { return p.Stats().Well[u] == 1 })
	}
	return url, p
}

// spread returns the smallest and the largest count of some engines.
func spread(engines []*tallied, model string) (low, high int) {
	var n []int
	for _, e := range engines {
		n = append(n, e.count(model))
	}
	return slices.Min(n), slices.Max(n)
}

func sum(engines []*tallied) (n int) {
	for _, e := range engines {
		n += e.count("")
	}
	return n
}

// One request after the other goes to the engines of each role in turn, whatever the number of engines, with two models
// in turn and with looks at /health in between.
func TestEnginesOfEachRoleTakeTurns(t *testing.T) {
	f := func(policy proxy.Policy, prefills, others int) {
		t.Helper()
		c := newCrowd(t, policy, prefills, others, 0, "a b")
		url, _ := c.start(t)
		for i := range 36 {
			model := "ab"[i%2 : i%2+1]
			if status, text, _ := post(t, url, fmt.Sprintf(`{"model":%q}`, model)); status != 200 { // no prompt: no marks
				t.Fatal(status, text)
			}
			if i%8 == 0 {
				reach(t, url)
			}
		}
		for _, engines := range [][]*tallied{c.p, c.d} {
			if len(engines) == 0 {
				continue
			}
			testkit.Eventually(t, "each engine has its requests", func() bool { return sum(engines) == 36 }) // P's leg may end after the answer
			for _, model := range []string{"", "a", "b"} {
				bound := 1
				if model == "" {
					bound = 2 // one for each model
				}
				if low, high := spread(engines, model); high-low > bound {
					t.Errorf("%v, %dP %dD, model %q: from %d to %d requests", policy, prefills, others, model, low, high)
				}
			}
		}
	}
	for _, policy := range []proxy.Policy{proxy.RoundRobin, proxy.LeastLoaded, proxy.PrefixAware} {
		for n := 1; n <= 6; n++ {
			f(policy, 0, n)
			f(policy, n, n%3+1)
		}
	}
}

// Many models with a few requests each load the engines alike, in a first round and in
// another one.
func TestEnginesOfManyModelsTakeTurns(t *testing.T) {
	const models = 101
	var names []string
	for i := range models {
		names = append(names, fmt.Sprint("m", i))
	}
	c := newCrowd(t, proxy.RoundRobin, 0, 2, 0, strings.Join(names, " "))
	url, _ := c.start(t)
	for round := 1; round <= 2; round++ {
		for _, model := range names {
			if status, text, _ := post(t, url, fmt.Sprintf(`{"model":%q}`, model)); status != 200 {
				t.Fatal(status, text)
			}
		}
		if low, high := spread(c.d, ""); high-low > 2 {
			t.Errorf("%d requests of each of %d models: from %d to %d requests", round, models, low, high)
		}
	}
}

// Engines of one role that serve different models, or are unwell, do not cost the others their turns.
func TestTurnsCountCandidatesAlone(t *testing.T) {
	c := newCrowd(t, proxy.RoundRobin, 0, 6, 0, "a")
	for i, e := range c.d {
		e.models = []string{"a", "b", "a b"}[i%3]
	}
	url, p := c.start(t)
	dead := &tallied{models: "a b", of: map[string]int{}}
	gone := dead.serve(t, 0)
	admin := func(method, path, body string) {
		t.Helper()
		r := httptest.NewRequest(method, path, strings.NewReader(body))
		r.Header.Set("Authorization", "Bearer t")
		w := httptest.NewRecorder()
		if p.Admin("t").ServeHTTP(w, r); w.Code >= 300 {
			t.Fatal(w.Code, w.Body)
		}
	}
	admin(http.MethodPost, "/engines", fmt.Sprintf(`{"role":"engine","url":%q}`, gone))
	admin(http.MethodPost, "/engines/drain?url="+neturl.QueryEscape(gone), "")
	for i := range 80 {
		if status, text, _ := post(t, url, fmt.Sprintf(`{"model":%q,"prompt":"x"}`, "ab"[i%2:i%2+1])); status != 200 {
			t.Fatal(status, text)
		}
	}
	for model, first := range map[string]int{"a": 0, "b": 1} {
		serving := []*tallied{c.d[first], c.d[2], c.d[first+3], c.d[5]}
		if low, high := spread(serving, model); high-low > 1 {
			t.Errorf("model %s: from %d to %d requests", model, low, high)
		}
	}
	if dead.count("") != 0 {
		t.Error("an engine that drains got a request")
	}
}

// Under load no engine gets more than 1.2 times the mean, with each policy. A busy machine changes the
// mocks' speed, so one of three runs must hold.
func TestNoEngineGetsTooMuch(t *testing.T) {
	requests := max(300, testkit.Volume(600))
	play := func(policy proxy.Policy, prefills, others int) (worst float64) {
		c := newCrowd(t, policy, prefills, others, 2*time.Millisecond, "a")
		url, _ := c.start(t)
		var next atomic.Int64
		var wg sync.WaitGroup
		for range 32 {
			wg.Go(func() {
				for i := next.Add(1); i <= int64(requests); i = next.Add(1) {
					prompt := strings.Repeat(fmt.Sprintf("prompt %d. ", i*7919), 100)
					if status, text, _ := post(t, url, fmt.Sprintf(`{"model":"a","prompt":%q}`, prompt)); status != 200 {
						t.Error(status, text)
					}
				}
			})
		}
		wg.Wait()
		for _, engines := range [][]*tallied{c.p, c.d} {
			if len(engines) > 0 {
				_, high := spread(engines, "")
				worst = max(worst, float64(high)*float64(len(engines))/float64(requests))
			}
		}
		return worst
	}
	f := func(policy proxy.Policy, prefills, others int) {
		t.Helper()
		var runs []float64
		for range 3 {
			if runs = append(runs, play(policy, prefills, others)); slices.Min(runs) <= 1.2 {
				return
			}
		}
		t.Errorf("%v, %dP %dD: the busiest engine got %.2f times the mean", policy, prefills, others, runs)
	}
	for _, policy := range []proxy.Policy{proxy.RoundRobin, proxy.LeastLoaded, proxy.PrefixAware} {
		for n := 1; n <= 6; n++ {
			if testkit.Race && n != 3 {
				continue
			}
			f(policy, 0, n)
			f(policy, n, n)
		}
	}
}
