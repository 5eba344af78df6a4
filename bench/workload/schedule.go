// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"time"
)

// Arrivals say when requests arrive, as vllm bench serve does it.
type Arrivals struct {
	Rate       float64 // requests per second; +Inf: all at once
	Burstiness float64 // as of Arrive; +Inf: equal gaps
	Seed       uint64

	// RampUp changes the rate from Start to End over the requests, linear or exponential;
	// empty: the rate is Rate.
	RampUp     string
	Start, End float64
}

// rate is the rate at which request i of n arrives.
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

// Schedule sets the arrivals of requests. Each gap, the one before the first request
// included, is drawn from a gamma distribution with the mean of the rate then. Without a ramp
// the gaps are scaled so that the last request arrives when the rate says, and not one or
// two per cent beside it.
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

// Scheduled is Schedule for n requests that come one after another. The sequence ends with its first error.
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
				err = fmt.Errorf("workload: there are more than %d requests", n)
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

// times returns what gives the times of n requests, in seconds, before they are scaled.
func (a *Arrivals) times(n int) func() float64 {
	rnd, last, i := rand.New(rand.NewPCG(a.Seed, 5)), 0.0, 0
	return func() float64 {
		gap := 1 / a.rate(i, n) // of an infinite rate 0
		if !math.IsInf(a.Burstiness, 1) {
			gap *= gamma(rnd, a.Burstiness) / a.Burstiness
		}
		last += gap
		i++
		return last
	}
}

// scale returns what the times of n requests are multiplied by.
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
		return 0, fmt.Errorf("workload: no ramp %q, want linear or exponential", a.RampUp)
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
		return 0, fmt.Errorf("workload: the last request would arrive after %.3g s", last*scale)
	}
	return scale, nil
}
