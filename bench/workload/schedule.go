// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"time"
)

// Arrivals says when requests arrive, with the rules of vllm bench serve.
type Arrivals struct {
	Rate       float64 // requests per second; +Inf: all at the start
	Burstiness float64 // as in Arrive; +Inf: equal gaps
	Seed       uint64

	// RampUp says how the rate changes from Start to End over the requests: linear or exponential. Empty: the rate is always Rate.
	RampUp     string
	Start, End float64
}

// rate returns the rate when request i of n arrives.
func (a *Arrivals) rate(i, n int) float64 {
	done := float64(i) / float64(max(n-1, 1))
	switch a.RampUp {
	case "linear":
		return a.Start + (a.End-a.Start)*done
	case "exponential":
		return a.Start * math.Pow(a.End/a.Start, done)
	}
	return a.Rate
}

// Schedule sets the arrivals of requests. Each gap, including the one before the first request, is drawn from a gamma distribution
// whose mean follows from the rate at that point. Without a ramp, the gaps are scaled so that the last request arrives exactly when the
// rate demands, and not one or two percent earlier or later.
func Schedule(requests []Request, a Arrivals) error {
	i := 0
	for q, err := range Scheduled(Each(requests), len(requests), a) {
		if err != nil {
			return err
		}
		requests[i].Arrival = q.Arrival
		i++
	}
	return nil
}

// Scheduled does what Schedule does, for n requests that come one after another. The sequence ends with its first error.
func Scheduled(requests iter.Seq2[Request, error], n int, a Arrivals) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		scale, err := a.scale(n)
		if err != nil {
			yield(Request{}, err)
			return
		}
		next, i := a.times(n), 0
		for q, err := range requests {
			if err == nil && i == n {
				err = fmt.Errorf("workload: there are more than the %d requests that were to come", n)
			}
			if err == nil {
				q.Arrival = time.Duration(next() * scale * float64(time.Second))
			}
			if i++; !yield(q, err) || err != nil {
				return
			}
		}
	}
}

// times returns a function that returns the arrival times of n requests one after another, in seconds, before they are scaled.
func (a *Arrivals) times(n int) func() float64 {
	rnd, last, i := rand.New(rand.NewPCG(a.Seed, 5)), 0.0, 0
	return func() float64 {
		gap := 1 / a.rate(i, n) // 0 for an infinite rate
		if !math.IsInf(a.Burstiness, 1) {
			gap *= gamma(rnd, a.Burstiness) / a.Burstiness
		}
		last += gap
		i++
		return last
	}
}

// scale returns the factor by which the arrival times of n requests are multiplied.
func (a *Arrivals) scale(n int) (float64, error) {
	switch a.RampUp {
	case "":
		if !(a.Rate > 0) {
			return 0, fmt.Errorf("workload: %v requests per second are not above 0", a.Rate)
		}
	case "linear", "exponential":
		if !(a.Start > 0) || !(a.End > 0) || math.IsInf(a.Start+a.End, 0) {
			return 0, fmt.Errorf("workload: a ramp from %v to %v requests per second: both must be above 0", a.Start, a.End)
		}
	default:
		return 0, fmt.Errorf("workload: the ramp %q is unknown, want linear or exponential", a.RampUp)
	}
	if !(a.Burstiness > 0) {
		return 0, fmt.Errorf("workload: burstiness %v is not above 0", a.Burstiness)
	}
	next, last := a.times(n), 0.0
	for range n {
		last = next()
	}
	scale := 1.0
	if a.RampUp == "" && last > 0 {
		scale = float64(n) / a.Rate / last
	}
	if !(last*scale < float64(math.MaxInt64)/1e9) {
		return 0, fmt.Errorf("workload: the last request would arrive after %.3g s, which is more than 292 years", last*scale)
	}
	return scale, nil
}
