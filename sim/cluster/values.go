// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"math"
	"slices"
)

// Limits of Values.
const (
	maxDifferent = 1 << 22 // distinct numbers: 64 MiB
	leastFresh   = 1 << 13 // fewest new numbers that are sorted together
)

// Values counts numbers of at least 0. Each distinct number takes 16 bytes, however often it comes, and 16 more while numbers are
// counted. Up to Most distinct numbers are exact. Beyond that, Values rounds away the last bits of all numbers until at most half of
// Most distinct ones are left.
type Values struct {
	Most int // largest number of distinct numbers; default 2^22

	list  []counted // sorted
	spare []counted
	fresh []float64 // numbers that are not yet in list
	bits  uint      // number of last bits that are rounded away
}

// counted is a number, and how often it came.
type counted struct {
	value float64
	n     int
}

// Add adds a number.
func (v *Values) Add(x float64) {
	if len(v.fresh) >= max(leastFresh, len(v.list)/4) {
		v.merge()
	}
	v.fresh = append(v.fresh, v.round(x))
}

// round returns x with its last bits rounded away. It keeps the order of numbers.
func (v *Values) round(x float64) float64 {
	if v.bits == 0 {
		return x
	}
	half := uint64(1) << (v.bits - 1)
	return math.Float64frombits((math.Float64bits(x) + half) &^ (2*half - 1))
}

// merge adds the new numbers to list.
func (v *Values) merge() {
	if v.Most == 0 {
		v.Most = maxDifferent
	}
	slices.Sort(v.fresh)
	out, list := v.spare[:0], v.list
	put := func(x float64, n int) {
		if last := len(out) - 1; last >= 0 && out[last].value == x {
			out[last].n += n
			return
		}
		out = append(out, counted{x, n})
	}
	for _, x := range v.fresh {
		for len(list) > 0 && list[0].value <= x {
			put(list[0].value, list[0].n)
			list = list[1:]
		}
		put(x, 1)
	}
	for _, c := range list {
		put(c.value, c.n)
	}
	v.list, v.spare, v.fresh = out, v.list, v.fresh[:0]
	for target := v.Most; len(v.list) > target && v.bits < 50; target = v.Most / 2 {
		v.bits++
		kept := v.list[:0]
		for _, c := range v.list {
			c.value = v.round(c.value)
			if last := len(kept) - 1; last >= 0 && kept[last].value == c.value {
				kept[last].n += c.n
			} else {
				kept = append(kept, c)
			}
		}
		v.list = kept
	}
}

// Len returns how many numbers were added.
func (v *Values) Len() (n int) {
	v.merge()
	for _, c := range v.list {
		n += c.n
	}
	return n
}

// Summary returns the mean and the percentiles, as Percentile computes them; zeros if there are no numbers.
func (v *Values) Summary() (mean, median, p95, p99 float64) {
	n := v.Len()
	if n == 0 {
		return 0, 0, 0, 0
	}
	for _, c := range v.list { // adds in the order of a list of all numbers, so that the sum is equal to the last bit
		part := c.value / float64(n)
		for range c.n {
			mean += part
		}
	}
	of := func(percent float64) float64 { return interpolate(n, v.At, percent) }
	return mean, of(50), of(95), of(99)
}

// At returns the i-th of the sorted numbers, from 0. Numbers that were added after the last Len are not counted.
func (v *Values) At(i int) float64 {
	for _, c := range v.list {
		if i -= c.n; i < 0 {
			return c.value
		}
	}
	return v.list[len(v.list)-1].value
}
