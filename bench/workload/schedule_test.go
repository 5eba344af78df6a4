// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"math"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// At a constant rate the last request arrives at the time that the rate gives, whatever gaps were drawn. The gaps
// vary as the burstiness says. One seed gives one schedule.
func TestScheduleAtARate(t *testing.T) {
	f := func(rate, burstiness, variation float64) {
		t.Helper()
		r, again := make([]workload.Request, 5000), make([]workload.Request, 5000)
		for _, r := range [][]workload.Request{r, again} {
			if err := workload.Schedule(r, workload.Arrivals{Rate: rate, Burstiness: burstiness, Seed: 9}); err != nil {
				t.Fatal(err)
			}
		}
		var sum, squares, before float64
		for i := range r {
			gap := r[i].Arrival.Seconds() - before
			if before = r[i].Arrival.Seconds(); gap < 0 || again[i].Arrival != r[i].Arrival {
				t.Fatalf("request %d: %v after %v", i, r[i].Arrival, again[i].Arrival)
			}
			sum, squares = sum+gap, squares+gap*gap
		}
		n := float64(len(r))
		if last := r[len(r)-1].Arrival.Seconds(); math.Abs(last*rate/n-1) > 1e-6 {
			t.Errorf("rate %v: the last request arrives at %v s", rate, last)
		}
		if got := math.Sqrt(max(0, squares/n-sum/n*sum/n)) / (sum / n); math.Abs(got-variation) > 0.1*max(variation, 0.1) {
			t.Errorf("burstiness %v: variation %v, want %v", burstiness, got, variation)
		}
	}
	f(7, 1, 1)
	f(7, 0.25, 2)
	f(1000, 100, 0.1)
	f(3, math.Inf(1), 0)
}

// A ramp goes from one rate to the other.
func TestScheduleRamps(t *testing.T) {
	for _, ramp := range []string{"linear", "exponential"} {
		r := make([]workload.Request, 1001)
		if err := workload.Schedule(r, workload.Arrivals{RampUp: ramp, Start: 10, End: 40, Burstiness: math.Inf(1)}); err != nil {
			t.Fatal(err)
		}
		middle := map[string]float64{"linear": 25, "exponential": 20}[ramp]
		for _, c := range []struct {
			at   int
			rate float64
		}{{0, 10}, {500, middle}, {1000, 40}} {
			gap := r[c.at].Arrival
			if c.at > 0 {
				gap -= r[c.at-1].Arrival
			}
			if got := 1 / gap.Seconds(); math.Abs(got/c.rate-1) > 0.001 {
				t.Errorf("%s: rate %v at request %d, want %v", ramp, got, c.at, c.rate)
			}
		}
	}
}

// An infinite rate sends all requests at once. Meaningless rates are refused.
func TestScheduleRefuses(t *testing.T) {
	r := []workload.Request{{Arrival: time.Hour}, {Arrival: time.Hour}}
	if err := workload.Schedule(r, workload.Arrivals{Rate: math.Inf(1), Burstiness: 1}); err != nil || r[1].Arrival != 0 {
		t.Fatal(r, err)
	}
	if err := workload.Schedule(nil, workload.Arrivals{Rate: 1, Burstiness: 1}); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []workload.Arrivals{
		{Burstiness: 1},
		{Rate: -1, Burstiness: 1},
		{Rate: math.NaN(), Burstiness: 1},
		{Rate: 1},
		{Rate: 1, Burstiness: math.NaN()},
		{Rate: 1e-300, Burstiness: 1},
		{RampUp: "linear", Burstiness: 1, Start: 1},
		{RampUp: "linear", Burstiness: 1, Start: 1, End: math.Inf(1)},
		{RampUp: "exponential", Burstiness: 1, Start: -1, End: 1},
		{RampUp: "sudden", Burstiness: 1, Start: 1, End: 1},
	} {
		if workload.Schedule(r, bad) == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}
