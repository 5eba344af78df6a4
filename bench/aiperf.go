// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"io"
	"math"
	"slices"
	"time"
)

// aiperfStats has the statistics of one metric in AIPerf's export.
type aiperfStats struct {
	Unit  string   `json:"unit"`
	Avg   float64  `json:"avg"`
	Min   *float64 `json:"min,omitempty"`
	Max   *float64 `json:"max,omitempty"`
	P1    *float64 `json:"p1,omitempty"`
	P5    *float64 `json:"p5,omitempty"`
	P10   *float64 `json:"p10,omitempty"`
	P25   *float64 `json:"p25,omitempty"`
	P50   *float64 `json:"p50,omitempty"`
	P75   *float64 `json:"p75,omitempty"`
	P90   *float64 `json:"p90,omitempty"`
	P95   *float64 `json:"p95,omitempty"`
	P99   *float64 `json:"p99,omitempty"`
	Std   *float64 `json:"std,omitempty"` // standard deviation of a sample
	Count int      `json:"count,omitempty"`
	Sum   *float64 `json:"sum,omitempty"`
}

// WriteAIPerf writes the result as AIPerf's profile_export_aiperf.json (schema 1.1). There, inter_token_latency is the TPOT of a
// request; the gaps are inter_chunk_latency.
func (r *Result) WriteAIPerf(w io.Writer) error {
	out := map[string]any{"schema_version": "1.1", "was_cancelled": r.Interrupted, "error_summary": r.aiperfErrors()}
	one := func(name, unit string, v float64) { out[name] = aiperfStats{Unit: unit, Avg: v} }
	all := func(name, unit string, scale float64, get func(s *Sample) []float64) {
		var v []float64
		for i := range r.samples {
			if s := &r.samples[i]; !s.Failed() {
				v = append(v, get(s)...)
			}
		}
		if len(v) > 0 {
			out[name] = newAIPerfStats(unit, v, scale)
		}
	}
	if start, err := time.ParseInLocation("20060102-150405", r.Date, time.Local); err == nil {
		out["start_time"] = start.UTC()
		out["end_time"] = start.Add(time.Duration(min(r.Duration, 1e9) * float64(time.Second))).UTC()
	}
	out["input_config"] = map[string]any{"model": r.Model, "request_rate": r.Rate, "concurrency": r.MaxConcurrency, "request_count": r.NumPrompts}
	one("request_count", "requests", float64(r.Completed))
	one("error_request_count", "requests", float64(r.Failed))
	one("request_throughput", "requests/sec", r.RequestThroughput)
	one("output_token_throughput", "tokens/sec", r.OutputThroughput)
	one("total_token_throughput", "tokens/sec", r.TotalThroughput)
	one("total_isl", "tokens", float64(r.TotalInput))
	one("total_osl", "tokens", float64(r.TotalOutput))
	one("benchmark_duration", "sec", r.Duration)
	if r.RequestGoodput != nil {
		one("goodput", "requests/sec", *r.RequestGoodput)
	}
	single := func(f func(s *Sample) float64) func(s *Sample) []float64 {
		return func(s *Sample) []float64 { return []float64{f(s)} }
	}
	all("time_to_first_token", "ms", 1000, single(func(s *Sample) float64 { return s.TTFT }))
	all("time_to_second_token", "ms", 1000, func(s *Sample) []float64 { return s.ITL[:min(1, len(s.ITL))] })
	all("request_latency", "ms", 1000, single(func(s *Sample) float64 { return s.Latency }))
	all("inter_token_latency", "ms", 1000, tpots)
	all("inter_chunk_latency", "ms", 1000, func(s *Sample) []float64 { return s.ITL })
	all("output_token_throughput_per_user", "tokens/sec/user", 1, func(s *Sample) []float64 {
		v := tpots(s)
		if len(v) == 0 || v[0] == 0 {
			return nil
		}
		return []float64{1 / v[0]}
	})
	all("input_sequence_length", "tokens", 1, single(func(s *Sample) float64 { return float64(s.Input) }))
	all("output_sequence_length", "tokens", 1, single(func(s *Sample) float64 { return float64(s.Output) }))
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(out)
}

func tpots(s *Sample) []float64 {
	if v, ok := s.TPOT(); ok {
		return []float64{v}
	}
	return nil
}

func (r *Result) aiperfErrors() []map[string]any {
	out := []map[string]any{}
	for text, n := range r.Errors {
		out = append(out, map[string]any{"error_details": map[string]any{"message": text}, "count": n})
	}
	return out
}

func newAIPerfStats(unit string, v []float64, scale float64) aiperfStats {
	slices.Sort(v)
	n, sum := len(v), 0.0
	for i := range v {
		v[i] *= scale
		sum += v[i]
	}
	at := func(p float64) *float64 { x := Quantile(v, p); return &x }
	std := 0.0
	if n > 1 {
		std = deviation(v) * math.Sqrt(float64(n)/float64(n-1))
	}
	return aiperfStats{
		Unit: unit, Avg: sum / float64(n), Min: &v[0], Max: &v[n-1], P1: at(1), P5: at(5), P10: at(10), P25: at(25), P50: at(50), P75: at(75),
		P90: at(90), P95: at(95), P99: at(99), Std: &std, Count: n, Sum: &sum,
	}
}
