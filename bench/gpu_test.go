// SPDX-License-Identifier: Apache-2.0

package bench_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
)

// Output tokens are divided by the GPUs that decode, prompts by those that prefill, both by
// all where one kind of engine does both; a user's tokens per second are 1000 ÷ TPOT.
func TestFiguresPerGPUAndUser(t *testing.T) {
	samples := []bench.Sample{
		{TTFT: 0.5, Latency: 2.5, ITL: []float64{1, 1}, Input: 600, Output: 3, Cached: 150},
		{TTFT: 0.5, Latency: 0.5, Input: 200, Output: 1, Cached: -1},
		{Input: 900, Output: 7, Cached: 900, Error: "failed"},
	}
	f := func(g bench.GPUs, all, out, in float64) {
		t.Helper()
		r := bench.Measure(samples, 4, bench.Options{GPUs: g})
		if r.TotalPerGPU != all || r.OutputPerGPU != out || r.InputPerGPU != in || r.Interactivity != 1 {
			t.Errorf("%+v: %v, %v, %v, %v", g, r.TotalPerGPU, r.OutputPerGPU, r.InputPerGPU, r.Interactivity)
		}
		if rate, ok := r.HitRate(); !ok || rate != 150.0/800 {
			t.Errorf("hit rate %v, %v", rate, ok)
		}
		var text bytes.Buffer
		var keys map[string]any
		if err := r.WriteJSON(&text, false); err != nil || json.Unmarshal(text.Bytes(), &keys) != nil {
			t.Fatal(err)
		}
		if _, told := keys["tput_per_gpu"]; told != (all > 0) || keys["intvty"] != 1.0 || keys["ttfts"] != nil || keys["error_summary"].(map[string]any)["failed"] != 1.0 {
			t.Errorf("%v", keys)
		}
	}
	f(bench.GPUs{}, 0, 0, 0)
	f(bench.GPUs{Prefill: 2, Decode: 4}, 201.0/6, 0.25, 100)
	f(bench.GPUs{Prefill: 2}, 100.5, 0.5, 100)
}

// Failures that differ only in a number are of one kind. Different HTTP statuses are different kinds.
func TestFailuresAreCountedByKind(t *testing.T) {
	var samples []bench.Sample
	for i := range 300 {
		samples = append(samples, bench.Sample{Error: fmt.Sprintf("HTTP %d: token %d is out of vocabulary", 400+i%2, 1000+i)})
	}
	r := bench.Measure(samples, 1, bench.Options{})
	if len(r.Errors) != 2 || r.Errors["HTTP 400: token N is out of vocabulary"] != 150 {
		t.Errorf("%v", r.Errors)
	}
}

// More prints the figures that vLLM's table does not have. It names the most frequent failures
// and the number of the others.
func TestMore(t *testing.T) {
	var samples []bench.Sample
	for i := range 9 {
		for range 9 - i {
			samples = append(samples, bench.Sample{Error: "reason " + string(rune('a'+i)), Cached: -1})
		}
	}
	r := bench.Measure(samples, 1, bench.Options{})
	r.Interrupted, r.Unfinished = true, 4
	r.Stages = []bench.Stage{{Name: "queue of P", Millis: 1.5}}
	r.Engines = []bench.Engine{{Role: "D", Error: "HTTP 404"}}
	var text bytes.Buffer
	if err := r.More(&text); err != nil {
		t.Fatal(err)
	}
	want := `Interrupted; requests not finished:      4
----------- From prompt to first token -----------
Mean queue of P (ms):                    1.50
D reports no figures: HTTP 404
9 failed: reason a
8 failed: reason b
7 failed: reason c
6 failed: reason d
5 failed: reason e
and 4 other errors
`
	if text.String() != want || strings.Contains(text.String(), "Interactivity") {
		t.Errorf("%s", text.String())
	}
}
