// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
)

// Measure returns the result in the form of a client's benchmark, with the time from P to D divided into stages. r must have Records
// with their Gaps.
func (r *Result) Measure(o bench.Options) *bench.Result {
	samples := make([]bench.Sample, len(r.Records))
	for i := range r.Records {
		samples[i] = r.Records[i].sample()
		if s := &samples[i]; !s.Failed() {
			for _, d := range r.Records[i].Gaps {
				s.ITL = append(s.ITL, d.Seconds())
			}
		}
	}
	out := bench.Measure(samples, r.Duration.Seconds(), o)
	out.Stages = r.stages()
	return out
}

// errUnfinished is the error of a request that had not ended when the run ended.
var errUnfinished = errors.New("the run ended before this request did")

// sample returns the request as its client measured it, without its ITL.
func (q *Record) sample() bench.Sample {
	s := bench.Sample{Start: q.Sent.Seconds(), Input: q.Input, Output: q.Output, Cached: q.Cached, Error: q.Error}
	if q.Last == 0 && s.Error == "" {
		s.Error = errUnfinished.Error()
	}
	if s.Failed() {
		return s
	}
	s.TTFT, s.Latency = (q.First - q.Sent).Seconds(), (q.Last - q.Sent).Seconds()
	return s
}

// Meets reports whether the request succeeded and met all SLOs.
func (q *Record) Meets(slos []bench.SLO) bool {
	s := q.sample()
	return !s.Failed() && s.Meets(slos)
}

// stages returns the mean durations of the stages before the first token.
func (r *Result) stages() []bench.Stage {
	list := []bench.Stage{{Name: "queue of P"}, {Name: "prefill"}, {Name: "hand-over to D"}, {Name: "queue of D"}, {Name: "transfer"}, {Name: "D's step in progress"}, {Name: "first decode"}}
	n := 0
	for i := range r.Records {
		q := &r.Records[i]
		if q.Prefill < 0 || q.Error != "" || q.First == 0 {
			continue
		}
		n++
		for k, d := range []time.Duration{
			q.Started - q.Queued, q.Prefilled - q.Started, q.Dispatched - q.Prefilled, max(q.Loading-q.Dispatched, 0), q.Loaded - q.Loading,
			max(q.Decoding-max(q.Loaded, q.Dispatched), 0), max(q.First-max(q.Decoding, q.Loaded), 0),
		} {
			list[k].Millis += ms(d)
		}
	}
	if n == 0 {
		return nil
	}
	for k := range list {
		list[k].Millis /= float64(n)
	}
	return list
}
