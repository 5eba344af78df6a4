// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"time"
)

// Result is what a run measured.
type Result struct {
	Records []Record `json:"requests"` // from Stream: only with Options.Records, and without their Gaps

	Unfinished int `json:"-"` // requests that an interrupted run did not finish, including those not sent yet (Options.Total)

	Duration    time.Duration `json:"-"` // from the first request sent to the last token received
	Steps       int           `json:"steps"`
	Preemptions int           `json:"preemptions"`
	MovedBytes  int64         `json:"moved_bytes"`  // bytes from P to D in the model
	LoadedBytes int64         `json:"loaded_bytes"` // bytes from the store in the model
	PrefillBusy float64       `json:"prefill_busy"` // share of the time in which P computes, mean over all P
	DecodeBusy  float64       `json:"decode_busy"`
	Bytes       *Carried      `json:"bytes,omitempty"` // only with Options.Bytes

	sums *sums // from Stream
}

// result returns what the run measured; it includes the requests that have not ended.
func (r *run) result() *Result {
	for q := range r.open {
		r.take(q)
	}
	out := r.out
	out.Preemptions, out.MovedBytes, out.LoadedBytes = r.preemptions, r.moved, r.loaded
	if unread := r.o.Total - r.sent; unread > 0 {
		out.Unfinished += unread
		if out.sums != nil {
			out.sums.failed += unread
		}
	}
	if r.o.Bytes != nil {
		carried := r.carried
		carried.Memory = r.o.memoryBytes()
		out.Bytes = &carried
	}
	if r.last > 0 {
		out.Duration = r.last - r.first
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

// take adds a request to the result.
func (r *run) take(q *request) {
	if q.Last == 0 && q.Error == "" {
		r.out.Unfinished++
	}
	if q.Last > 0 {
		r.first, r.last = min(r.first, q.Sent), max(r.last, q.Last)
	}
	if r.out.sums != nil {
		r.out.sums.add(&q.Record)
	}
	if r.o.Ended != nil {
		r.o.Ended(q.number, &q.Record)
	}
	if q.number < len(r.out.Records) {
		if !r.gaps {
			q.Gaps = nil
		}
		r.out.Records[q.number] = q.Record
	}
}

// Figures has the figures of a run under the keys of vllm bench serve. Times are as the client measured them.
type Figures struct {
	Duration  float64 `json:"duration"` // in seconds
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

// Figures returns the figures as vllm bench serve counts them. Time to first token is measured from the client's send. Time per output
// token is, for each request, the time from the first to the last token divided by the number of tokens after the first; requests with
// one token are left out. Inter-token latency is over all gaps of all requests. Percentiles are interpolated.
func (r *Result) Figures() Figures {
	t := r.sums
	if t == nil {
		t = &sums{}
		for i := range r.Records {
			t.add(&r.Records[i])
		}
	}
	f := Figures{Completed: t.completed, Failed: t.failed, Input: t.input, Output: t.output}
	if s := r.Duration.Seconds(); s > 0 {
		f.Duration = s
		f.RequestThroughput = float64(f.Completed) / s
		f.OutputThroughput = float64(f.Output) / s
		f.TotalThroughput = float64(f.Input+f.Output) / s
	}
	f.MeanTTFT, f.MedianTTFT, f.P95TTFT, f.P99TTFT = t.ttft.Summary()
	f.MeanTPOT, f.MedianTPOT, f.P95TPOT, f.P99TPOT = t.tpot.Summary()
	f.MeanITL, f.MedianITL, f.P95ITL, f.P99ITL = t.itl.Summary()
	f.MeanE2EL, f.MedianE2EL, f.P95E2EL, f.P99E2EL = t.e2el.Summary()
	return f
}

// Cached returns how many prompt tokens were not computed.
func (r *Result) Cached() (n int64) {
	if r.sums != nil {
		return r.sums.cached
	}
	for i := range r.Records {
		n += int64(r.Records[i].Cached)
	}
	return n
}

// sums are the sums and values from which Figures are made, without the requests.
type sums struct {
	completed, failed, input, output int
	cached                           int64
	ttft, tpot, e2el, itl            Values
}

func (t *sums) add(q *Record) {
	t.cached += int64(q.Cached)
	if q.Error != "" || q.Last == 0 {
		t.failed++
		return
	}
	t.completed++
	t.input += q.Input
	t.output += q.Output
	t.ttft.Add(ms(q.First - q.Sent))
	t.e2el.Add(ms(q.Last - q.Sent))
	for _, d := range q.Gaps {
		t.itl.Add(ms(d))
	}
	if q.Output > 1 {
		t.tpot.Add(ms(q.Last-q.First) / float64(q.Output-1))
	}
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

// Percentile returns a percentile of sorted values, interpolated linearly, as numpy does; 0 if there are no values.
func Percentile(sorted []float64, percent float64) float64 {
	return interpolate(len(sorted), func(i int) float64 { return sorted[i] }, percent)
}

// interpolate returns a percentile of n sorted values, of which value returns the i-th.
func interpolate(n int, value func(i int) float64, percent float64) float64 {
	if n == 0 {
		return 0
	}
	at := percent / 100 * float64(n-1)
	i := int(at)
	if i+1 >= n {
		return value(n - 1)
	}
	low := value(i)
	return low + (at-float64(i))*(value(i+1)-low)
}
