// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"math"
	"slices"
	"time"
)

// Result is what a run measured.
type Result struct {
	Records []Record `json:"requests"`

	Duration    time.Duration `json:"-"` // first request sent to last token received
	Steps       int           `json:"steps"`
	Preemptions int           `json:"preemptions"`
	MovedBytes  int64         `json:"moved_bytes"`  // from P to D, as modelled
	LoadedBytes int64         `json:"loaded_bytes"` // from the store, as modelled
	PrefillBusy float64       `json:"prefill_busy"` // share of the time that P computes, mean
	DecodeBusy  float64       `json:"decode_busy"`
	Bytes       *Carried      `json:"bytes,omitempty"` // with Options.Bytes
}

func (r *run) result() *Result {
	out := &Result{Records: make([]Record, len(r.requests)), Preemptions: r.preemptions, MovedBytes: r.moved, LoadedBytes: r.loaded}
	if r.o.Bytes != nil {
		carried := r.carried
		carried.Memory = r.o.memoryBytes()
		out.Bytes = &carried
	}
	first := time.Duration(math.MaxInt64)
	for i := range r.requests {
		q := &r.requests[i].Record
		out.Records[i] = *q
		if q.Last > 0 {
			first = min(first, q.Sent)
			out.Duration = max(out.Duration, q.Last)
		}
	}
	if out.Duration > 0 {
		out.Duration -= first
	}
	busy := func(list []*engine) (share float64) {
		for _, e := range list {
			out.Steps += e.steps
			share += e.computing.Seconds()
		}
		return share / max(out.Duration.Seconds(), 1e-9) / float64(max(len(list), 1))
	}
	out.PrefillBusy, out.DecodeBusy = busy(r.prefills), busy(r.decodes)
	return out
}

// Figures are the figures of a run under the keys of vllm bench serve. Times are those of the
// client.
type Figures struct {
	Duration  float64 `json:"duration"` // seconds
	Completed int     `json:"completed"`
	Failed    int     `json:"failed"`

	Input  int `json:"total_input_tokens"`
	Output int `json:"total_output_tokens"`

	RequestThroughput float64 `json:"request_throughput"`
	OutputThroughput  float64 `json:"output_throughput"`
	TotalThroughput   float64 `json:"total_token_throughput"`

	MeanTTFT   float64 `json:"mean_ttft_ms"`
	MedianTTFT float64 `json:"median_ttft_ms"`
	P95TTFT    float64 `json:"p95_ttft_ms"`
	P99TTFT    float64 `json:"p99_ttft_ms"`
	MeanTPOT   float64 `json:"mean_tpot_ms"`
	MedianTPOT float64 `json:"median_tpot_ms"`
	P95TPOT    float64 `json:"p95_tpot_ms"`
	P99TPOT    float64 `json:"p99_tpot_ms"`
	MeanITL    float64 `json:"mean_itl_ms"`
	MedianITL  float64 `json:"median_itl_ms"`
	P95ITL     float64 `json:"p95_itl_ms"`
	P99ITL     float64 `json:"p99_itl_ms"`
	MeanE2EL   float64 `json:"mean_e2el_ms"`
	MedianE2EL float64 `json:"median_e2el_ms"`
	P95E2EL    float64 `json:"p95_e2el_ms"`
	P99E2EL    float64 `json:"p99_e2el_ms"`
}

// Figures counts as vllm bench serve does. Time to first token: from the client's send. Time
// per output token: of each request the time from first to last token by the tokens after the
// first; requests of one token are left out. Inter-token latency: all gaps in one pool.
// Percentiles are interpolated.
func (r *Result) Figures() Figures {
	var f Figures
	var ttft, tpot, e2el, itl []float64
	for i := range r.Records {
		q := &r.Records[i]
		if q.Error != "" || q.Last == 0 {
			f.Failed++
			continue
		}
		f.Completed++
		f.Input += q.Input
		f.Output += q.Output
		ttft = append(ttft, ms(q.First-q.Sent))
		e2el = append(e2el, ms(q.Last-q.Sent))
		for _, d := range q.Gaps {
			itl = append(itl, ms(d))
		}
		if q.Output > 1 {
			tpot = append(tpot, ms(q.Last-q.First)/float64(q.Output-1))
		}
	}
	if s := r.Duration.Seconds(); s > 0 {
		f.Duration = s
		f.RequestThroughput = float64(f.Completed) / s
		f.OutputThroughput = float64(f.Output) / s
		f.TotalThroughput = float64(f.Input+f.Output) / s
	}
	f.MeanTTFT, f.MedianTTFT, f.P95TTFT, f.P99TTFT = summary(ttft)
	f.MeanTPOT, f.MedianTPOT, f.P95TPOT, f.P99TPOT = summary(tpot)
	f.MeanITL, f.MedianITL, f.P95ITL, f.P99ITL = summary(itl)
	f.MeanE2EL, f.MedianE2EL, f.P95E2EL, f.P99E2EL = summary(e2el)
	return f
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

func summary(v []float64) (mean, median, p95, p99 float64) {
	slices.Sort(v)
	for _, x := range v {
		mean += x / float64(len(v))
	}
	return mean, Percentile(v, 50), Percentile(v, 95), Percentile(v, 99)
}

// Percentile interpolates linearly in sorted values, as numpy does; 0 of none.
func Percentile(sorted []float64, percent float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := percent / 100 * float64(len(sorted)-1)
	i := int(at)
	if i+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}
