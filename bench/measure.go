// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"regexp"
	"slices"
	"sync"
	"time"
)

// Options says what Measure computes.
type Options struct {
	Percentiles    []float64 // 0 to 100; nil: 99
	SLOs           []SLO
	MaxConcurrency int     // most requests of the client at a time; 0: no limit
	Rate           float64 // requests per second; 0 or +Inf: all at the start
	GPUs           GPUs
}

// GPUs says how many GPUs the engines behind an endpoint have; zeros: unknown.
type GPUs struct {
	Prefill, Decode int // of P and of D; if the engines do both, one of the two is 0
}

// Distribution has the statistics of a population of times, in ms.
type Distribution struct {
	Mean, Median, Std float64
	Percentiles       []Percentile
}

// Percentile is one percentile of a Distribution.
type Percentile struct{ P, Millis float64 }

// At returns percentile p; ok is false if it was not computed.
func (d *Distribution) At(p float64) (millis float64, ok bool) {
	for _, x := range d.Percentiles {
		if x.P == p {
			return x.Millis, true
		}
	}
	return 0, false
}

// maxErrors is the largest number of distinct texts that a Result counts. Failures with further texts are not in Errors.
const maxErrors = 100

// numbers matches a number in the text of a failure. An HTTP status matches together with the word HTTP.
var numbers = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`HTTP \d+|\d+`) })

// kindOf returns what failures of one kind have in common: their text with every number replaced, except an HTTP status.
func kindOf(text string) string {
	return numbers().ReplaceAllStringFunc(text, func(s string) string {
		if s[0] == 'H' {
			return s
		}
		return "N"
	})
}

// Measure computes the figures of samples, which must be in the order in which they were sent. seconds is the time from the first
// request's turn to the end of the last request.
func Measure(samples []Sample, seconds float64, o Options) *Result {
	if o.Percentiles == nil {
		o.Percentiles = []float64{99}
	}
	r := &Result{NumPrompts: len(samples), Rate: Rate(o.Rate), Burstiness: 1, Duration: seconds, samples: samples}
	if o.Rate == 0 {
		r.Rate = Rate(math.Inf(1))
	}
	if o.MaxConcurrency > 0 {
		r.MaxConcurrency = &o.MaxConcurrency
	}
	var ttft, tpot, itl, e2el, queue, whole []float64
	good := 0
	for i := range samples {
		s := &samples[i]
		r.Latencies = append(r.Latencies, s.Latency)
		r.QueueTimes = append(r.QueueTimes, s.Queue)
		if s.Failed() {
			r.Failed++
			if r.Errors == nil {
				r.Errors = make(map[string]int)
			}
			if kind := kindOf(s.Error); len(r.Errors) < maxErrors || r.Errors[kind] > 0 {
				r.Errors[kind]++
			}
			continue
		}
		r.Completed++
		r.TotalInput += s.Input
		r.TotalOutput += s.Output
		ttft, e2el = append(ttft, s.TTFT), append(e2el, s.Latency)
		itl = append(itl, s.ITL...)
		queue, whole = append(queue, s.Queue), append(whole, s.Queue+s.Latency)
		if v, ok := s.TPOT(); ok {
			tpot = append(tpot, v)
		}
		if s.Meets(o.SLOs) {
			good++
		}
	}
	per := func(n int) float64 {
		if !(seconds > 0) {
			return 0
		}
		return float64(n) / seconds
	}
	r.RequestThroughput, r.OutputThroughput, r.TotalThroughput = per(r.Completed), per(r.TotalOutput), per(r.TotalInput+r.TotalOutput)
	if len(o.SLOs) > 0 {
		v := per(good)
		r.RequestGoodput = &v
		r.SLOs = o.SLOs
	}
	r.PeakOutput, r.PeakConcurrent = peaks(samples)
	r.TTFT, r.TPOT, r.ITL, r.E2EL = distribution(ttft, o.Percentiles), distribution(tpot, o.Percentiles), distribution(itl, o.Percentiles), distribution(e2el, o.Percentiles)
	if o.MaxConcurrency > 0 {
		r.ClientQueue = distribution(queue, o.Percentiles)
		if r.limited() {
			r.E2ELWithQueue = distribution(whole, o.Percentiles)
		}
	}
	r.perGPU(o.GPUs)
	return r
}

// distribution returns the statistics of values in seconds, which it sorts. Without values, every figure is 0, as in vLLM.
func distribution(seconds, percentiles []float64) *Distribution {
	if len(seconds) == 0 {
		seconds = []float64{0}
	}
	slices.Sort(seconds)
	d := &Distribution{Mean: mean(seconds) * 1000, Median: Quantile(seconds, 50) * 1000, Std: deviation(seconds) * 1000}
	for _, p := range percentiles {
		d.Percentiles = append(d.Percentiles, Percentile{p, Quantile(seconds, p) * 1000})
	}
	return d
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

func deviation(v []float64) float64 {
	m, sum := mean(v), 0.0
	for _, x := range v {
		sum += (x - m) * (x - m)
	}
	return math.Sqrt(sum / float64(len(v)))
}

// Quantile returns percentile p of sorted values, of which there must be at least one, interpolated linearly between the two nearest
// values.
func Quantile(sorted []float64, p float64) float64 {
	at := min(max(p, 0), 100) / 100 * float64(len(sorted)-1)
	low := int(at)
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return between(sorted[low], sorted[low+1], at-float64(low))
}

// between interpolates between a and b. From the middle on it computes from b, as numpy does, so that b is met exactly.
func between(a, b, t float64) float64 {
	if t >= 0.5 {
		return b - (b-a)*(1-t)
	}
	return a + (b-a)*t
}

// maxSeconds is the longest run, in seconds, for which peaks computes something. For a longer one it returns 0.
const maxSeconds = 1 << 22

// peaks returns the most tokens received in one second, and the most requests in progress in one second, both in whole seconds after
// the first request was sent. If a request got several tokens per event, as with speculative decoding, each of its events counts for
// the mean number; vLLM counts one token per event. Both results are 0 if no request succeeded, or if they took longer than maxSeconds.
func peaks(samples []Sample) (tokens float64, concurrent int) {
	first, last := math.Inf(1), math.Inf(-1)
	for i := range samples {
		if s := &samples[i]; !s.Failed() {
			first, last = min(first, s.Start), max(last, s.Start+s.Latency)
		}
	}
	if !(last >= first && last-first < maxSeconds) {
		return 0, 0
	}
	n := int(math.Ceil(last-first)) + 1
	received, running := make([]float64, n), make([]int, n+1)
	for i := range samples {
		s := &samples[i]
		if s.Failed() {
			continue
		}
		at := s.Start + s.TTFT
		events := len(s.ITL) + 1
		tokens := max(1, float64(s.Output)/float64(events)) // an event may have no token: the event with the role of a chat
		for i := range events {
			if i > 0 {
				at += s.ITL[i-1]
			}
			if second := int(at - first); second < n {
				received[second] += tokens
			}
		}
		running[int(s.Start-first)]++
		running[int(s.Start+s.Latency-first)+1]--
	}
	now := 0
	for i := range n {
		now += running[i]
		concurrent = max(concurrent, now)
	}
	return slices.Max(received), concurrent
}

// perGPU computes InferenceX's figures: throughputs per GPU, and interactivity, which is the tokens per second that one user gets.
func (r *Result) perGPU(g GPUs) {
	if r.TPOT.Mean > 0 {
		r.Interactivity = 1000 / r.TPOT.Mean
	}
	all := g.Prefill + g.Decode
	if all == 0 {
		return
	}
	prefill, decode := g.Prefill, g.Decode
	if prefill == 0 || decode == 0 { // one kind of engine does both
		prefill, decode = all, all
	}
	r.PrefillGPUs, r.DecodeGPUs = g.Prefill, g.Decode
	r.TotalPerGPU = r.TotalThroughput / float64(all)
	r.OutputPerGPU = r.OutputThroughput / float64(decode)
	r.InputPerGPU = (r.TotalThroughput - r.OutputThroughput) / float64(prefill)
}

// Stamp returns a time in the form that results have.
func Stamp(t time.Time) string { return t.Format("20060102-150405") }
