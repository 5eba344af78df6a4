// SPDX-License-Identifier: Apache-2.0

package load_test

import (
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/bench/load"
)

// engine serves the metrics in lines. Scrape number n returns each value multiplied by n.
func engine(t *testing.T, lines string) string {
	t.Helper()
	var scrapes atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		n := scrapes.Add(1)
		for _, line := range strings.Split(lines, "\n") {
			var name string
			var v float64
			if c, _ := fmt.Sscan(line, &name, &v); c == 2 {
				fmt.Fprintf(w, "# HELP %s x\n%s{engine=\"0\",model_name=\"a } b\"} %v\n%s{engine=\"1\"} 7\n", name, name, v*float64(n), name)
			} else {
				fmt.Fprintln(w, line)
			}
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

const (
	p = `vllm:request_queue_time_seconds_sum 0.2
vllm:request_queue_time_seconds_count 10
vllm:request_prefill_time_seconds_sum 1
vllm:request_prefill_time_seconds_count 10
vllm:request_prefill_time_seconds_bucket 5
vllm:num_requests_running NaN
vllm:prefix_cache_queries_total 100
{} 5
} 3 {
vllm:x
`
	d = `vllm:request_queue_time_seconds_sum 0.5
vllm:request_queue_time_seconds_count 10
vllm:request_prefill_time_seconds_sum 0.1
vllm:request_prefill_time_seconds_count 10
vllm:external_prefix_cache_hits_total 50
`
	told = `kvasir_engine_load_seconds_sum 0.3
kvasir_engine_load_seconds_count 10
`
)

// The time to the first token is divided into stages from the engines' metrics during the run, and the
// rest of the client's mean. When D gets the request together with P, D's wait for P is not counted in
// D's stages.
func TestHandover(t *testing.T) {
	f := func(d string, ttft float64, want ...any) {
		t.Helper()
		g, err := load.New(load.Options{BaseURL: "http://127.0.0.1:1", Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		w := g.Watch(t.Context(), map[string]string{load.Prefill: engine(t, p), load.Decode: engine(t, d) + "/metrics"})
		engines, stages := w.Stop(ttft)
		if len(engines) != 2 || engines[0].Role != "P" || engines[0].Error != "" || engines[0].Queries < 100 || engines[1].Loaded < 50 {
			t.Fatalf("%+v", engines)
		}
		if len(stages) != len(want)/2 {
			t.Fatalf("%+v, want %v", stages, want)
		}
		for i, s := range stages {
			if s.Name != want[2*i] || math.Abs(s.Millis-want[2*i+1].(float64)) > 1e-6 {
				t.Errorf("%+v, want %v %v", s, want[2*i], want[2*i+1])
			}
		}
	}
	f(d, 200, "queue of P", 20.0, "prefill", 100.0, "transfer and queue of D", 50.0, "first decode step", 10.0, "proxy, network, the rest", 20.0)
	f(d+told, 200, "queue of P", 20.0, "prefill", 100.0, "transfer", 30.0, "queue of D", 20.0, "first decode step", 10.0, "proxy, network, the rest", 20.0)
	slow := strings.Replace(d, "sum 0.5", "sum 1.4", 1) // D got the request when P did
	f(slow+told, 160, "queue of P", 20.0, "prefill", 100.0, "transfer", 20.0, "queue of D", 0.0, "first decode step", 10.0, "proxy, network, the rest", 10.0)
	f("vllm:prefix_cache_hits_total 5\nvllm:external_prefix_cache_hits_total 50", 160)
}

// When an engine has no metrics, only its metrics are missing.
func TestEnginesWithoutMetricsCostOnlyTheMetrics(t *testing.T) {
	f := func(serve http.HandlerFunc, want string) {
		t.Helper()
		s := httptest.NewServer(serve)
		defer s.Close()
		g, err := load.New(load.Options{BaseURL: "http://127.0.0.1:1", Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		engines, stages := g.Watch(t.Context(), map[string]string{load.Prefill: s.URL, load.Decode: "http://127.0.0.1:1"}).Stop(100)
		if len(engines) != 2 || !strings.Contains(engines[0].Error, want) || !strings.Contains(engines[1].Error, "refused") || stages != nil {
			t.Errorf("%+v %v, want %q", engines, stages, want)
		}
	}
	f(func(http.ResponseWriter, *http.Request) {}, "no metrics of an engine")
	f(http.NotFound, "HTTP 404")
	f(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Repeat("x", 2<<20)) }, "token too long")
}
