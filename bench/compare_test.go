// SPDX-License-Identifier: Apache-2.0

package bench_test

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
)

// run makes n requests of gaps+1 tokens whose times are scaled.
func run(n, gaps int, scale float64, seed uint64) *bench.Result {
	rnd := rand.New(rand.NewPCG(seed, 7))
	samples := make([]bench.Sample, n)
	for i := range samples {
		s := &samples[i]
		*s = bench.Sample{Start: float64(i) / 10, TTFT: scale * (0.2 + rnd.ExpFloat64()/10), Output: gaps + 1, Input: 100, Cached: 50}
		s.Latency = s.TTFT
		for range gaps {
			gap := scale * (0.02 + rnd.ExpFloat64()/100)
			s.ITL, s.Latency = append(s.ITL, gap), s.Latency+gap
		}
	}
	return bench.Measure(samples, float64(n)/10, bench.Options{Percentiles: []float64{90, 99}})
}

// The interval of two runs of the same engine includes 1 and is narrow. When one run is a fifth
// slower, it includes 1.2 and not 1.
func TestIntervalsHoldTheTruth(t *testing.T) {
	f := func(scale float64, verdict string) {
		t.Helper()
		held, judged := 0, 0
		const runs = 8
		for seed := range uint64(runs) {
			for _, r := range bench.Compare(run(80, 1, 1, 100+seed), run(80, 1, scale, seed)) {
				if r.Figure != "mean_ttft_ms" {
					continue
				}
				if r.Low > r.Ratio || r.High < r.Ratio || r.High-r.Low > 0.6 {
					t.Errorf("%+v", r)
				}
				if r.Low <= scale && scale <= r.High {
					held++
				}
				if r.Verdict() == verdict {
					judged++
				}
			}
		}
		if held < runs*7/10 || judged < runs*7/10 {
			t.Errorf("scale %v: the truth is in %d of %d intervals, %q said %d times", scale, held, runs, verdict, judged)
		}
	}
	f(1, "no difference shown")
	f(1.2, "b is worse")
	f(0.8, "b is better")
}

// A run compared with itself has ratios of 1. Throughputs have no interval. The same results
// give the same intervals.
func TestEveryFigureHasItsInterval(t *testing.T) {
	a := run(80, 5, 1, 1)
	for _, r := range bench.Compare(a, a) {
		throughput := strings.HasSuffix(r.Figure, "throughput")
		if r.Ratio != 1 || throughput != (r.High == 0) || !throughput && (r.Low > 1 || r.High < 1) {
			t.Errorf("%+v", r)
		}
	}
	one, two := bench.Compare(a, run(60, 5, 2, 2)), bench.Compare(a, run(60, 5, 2, 2))
	for i := range one {
		if one[i] != two[i] {
			t.Errorf("%+v, then %+v", one[i], two[i])
		}
	}
}

// Results without single requests are compared without intervals, and the text says what is missing. A run
// without a successful request has no ratios.
func TestCompareWithoutRequests(t *testing.T) {
	var text bytes.Buffer
	if err := run(30, 5, 1, 1).WriteJSON(&text, false); err != nil {
		t.Fatal(err)
	}
	plain, err := bench.ReadJSON(&text)
	if err != nil {
		t.Fatal(err)
	}
	none := bench.Measure([]bench.Sample{{Error: "refused"}}, 1, bench.Options{})
	f := func(a, b *bench.Result, ratios bool) {
		t.Helper()
		got := bench.Compare(a, b)
		if len(got) < 10 {
			t.Fatalf("%d figures", len(got))
		}
		for _, r := range got {
			if r.High != 0 || (r.Ratio > 0) != ratios {
				t.Errorf("%+v", r)
			}
		}
		var out bytes.Buffer
		if err := bench.WriteRatios(&out, got); err != nil || !strings.Contains(out.String(), "--save-detailed") {
			t.Error(err, out.String())
		}
		if _, err := json.Marshal(got); err != nil {
			t.Error(err)
		}
	}
	f(plain, run(30, 5, 1, 1), true)
	f(plain, none, false)
	f(none, run(30, 5, 1, 1), false)
	f(none, none, false)
}

// AIPerf's inter_token_latency is a request's TPOT.
func TestAIPerfsNames(t *testing.T) {
	var text bytes.Buffer
	r := run(50, 19, 1, 3)
	r.Date = "20260102-030405"
	if err := r.WriteAIPerf(&text); err != nil {
		t.Fatal(err)
	}
	var got map[string]struct {
		Unit          string
		Avg, P90, Max float64
		Count         int
	}
	var whole map[string]any
	if err := json.Unmarshal(text.Bytes(), &whole); err != nil || whole["schema_version"] != "1.1" || whole["was_cancelled"] != false {
		t.Fatal(err, whole)
	}
	for k := range whole {
		if v, ok := whole[k].(map[string]any); !ok || v["unit"] == nil {
			delete(whole, k)
		}
	}
	stats, _ := json.Marshal(whole)
	if err := json.Unmarshal(stats, &got); err != nil {
		t.Fatal(err)
	}
	tpot := got["inter_token_latency"]
	if !alike(tpot.Avg, r.TPOT.Mean) || tpot.Count != 50 || tpot.Unit != "ms" || !alike(tpot.P90, r.TPOT.Percentiles[0].Millis) {
		t.Errorf("%+v, %+v", tpot, r.TPOT)
	}
	if chunks := got["inter_chunk_latency"]; chunks.Count != 50*19 || !alike(chunks.Avg, r.ITL.Mean) {
		t.Errorf("%+v", chunks)
	}
	if got["request_count"].Avg != 50 || got["request_count"].Count != 0 || got["time_to_second_token"].Count != 50 {
		t.Errorf("%+v", got)
	}
}
