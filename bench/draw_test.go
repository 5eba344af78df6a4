// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// draw returns the mean and percentiles of the list of all values of the drawn requests.
func TestDrawEqualsDistributionOfExpandedValues(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	points := []float64{-1, 0, 12.5, 50, 99, 99.9, 100}
	for range 300 {
		samples := make([]Sample, 1+rnd.IntN(6))
		for i := range samples {
			for range rnd.IntN(5) {
				samples[i].ITL = append(samples[i].ITL, float64(rnd.IntN(8)))
			}
		}
		p := newPopulation(samples, "itl")
		times, got := make([]int, len(samples)), make([]float64, len(points))
		ok := p.draw(rnd, times, points, got)
		var all []float64
		for i := range samples {
			for range times[i] {
				all = append(all, samples[i].ITL...)
			}
		}
		if slices.Sort(all); ok != (len(all) > 0) {
			t.Fatalf("%v of %v: %v", times, samples, ok)
		}
		for i, at := range points {
			if !ok {
				continue
			}
			want := mean(all)
			if at >= 0 {
				want = Quantile(all, at)
			}
			if math.Abs(got[i]-want) > 1e-12 {
				t.Fatalf("point %v of %v is %v, want %v", at, all, got[i], want)
			}
		}
	}
}
