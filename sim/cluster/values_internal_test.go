// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// Values gives the mean and percentiles of a sorted list, exactly while at most Most values differ, and then within its rounding error.
func TestValuesAreAList(t *testing.T) {
	f := func(n, different, most int, within float64) {
		t.Helper()
		r := rand.New(rand.NewPCG(uint64(n), uint64(different)))
		v, list := Values{Most: most}, []float64(nil)
		for i := range n {
			x := math.Exp(10*float64(r.IntN(different))/float64(different)) / 3
			v.Add(x)
			if list = append(list, x); i == n/2 && v.Len() != i+1 {
				t.Errorf("%d of %d", v.Len(), i+1)
			}
		}
		slices.Sort(list)
		want := [4]float64{0, Percentile(list, 50), Percentile(list, 95), Percentile(list, 99)}
		for _, x := range list {
			want[0] += x / float64(n)
		}
		var got [4]float64
		got[0], got[1], got[2], got[3] = v.Summary()
		for i := range want {
			if !(math.Abs(got[i]-want[i]) <= within*want[i]) {
				t.Errorf("%d values, %d different, %d kept: %v, want %v", n, different, most, got, want)
			}
		}
		if len(v.list) > max(v.Most, leastFresh) || cap(v.fresh) > 4*leastFresh {
			t.Errorf("%d different values, %d fresh ones are kept", len(v.list), cap(v.fresh))
		}
		for i := 0; i < len(list) && within == 0; i += 1 + len(list)/99 {
			if v.At(i) != list[i] {
				t.Errorf("%v at %d, want %v", v.At(i), i, list[i])
			}
		}
	}
	f(0, 1, 0, 0)
	f(1, 1, 0, 0)
	f(2, 2, 0, 0)
	f(1000, 7, 0, 0)
	f(100_000, 1<<40, 0, 0)
	f(100_000, 500, 500, 0)
	f(200_000, 1<<40, 4000, 0.005)
	f(200_000, 1<<40, 100, 0.15)
}
