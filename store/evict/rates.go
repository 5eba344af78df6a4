// SPDX-License-Identifier: Apache-2.0

package evict

import (
	"math"
	"math/bits"
)

// How the reuse of a class is estimated: its rate of reuse at an age is the rate of its family (ends of prompts, or forks) at that age,
// times a factor. The factor is that of the reuses that were seen in the class, drawn towards the product of the factors of its turn,
// length and size. So a class with few prompts is judged by similar classes. Factors of near ages are drawn towards each other.
const (
	spanBuckets = 4 // number of age buckets that have one factor
	spans       = buckets / spanBuckets

	nextSpan = 0.7 // weight of what was seen in the next span, relative to its own span

	// classPrior and featurePrior are how many expected reuses a class, or a feature, must see before its own observations count half.
	classPrior   = 8
	featurePrior = 8
)

// factors are the factors of the features, in one span of ages.
type factors struct {
	turn   [turns]float64
	length [lengths]float64
	size   [sizes]float64
}

func (f *factors) init() {
	for _, of := range [][]float64{f.turn[:], f.length[:], f.size[:]} {
		for i := range of {
			of[i] = 1
		}
	}
}

// lower has the lowest age of each bucket.
var lower = func() (l [buckets + 1]float64) {
	for b := range l {
		l[b] = math.Exp2(float64(b/2)) * (1 + 0.5*float64(b%2))
	}
	l[0] = 0
	return l
}()

func bucketOf(age uint64) int {
	if age < 2 {
		return int(age) / 2
	}
	exponent := bits.Len64(age) - 1
	return min(2*exponent+int(age>>(exponent-1)&1), buckets-1)
}

// reindex computes the index of a class at each age: the largest ratio, over all later ages, of the part that is used again until then to
// the time that it takes up room until then. The index may rise with age.
func (h *LeafHazard) reindex(c int) {
	rate, top := h.measure(c)
	var left, spent [buckets + 1]float64 // by age: the part that is not used again until then; the time until then
	left[0] = 1
	factor := 0.0
	for b := range top {
		if g := b / spanBuckets; b%spanBuckets == 0 {
			factor = (h.seen[c][g] + classPrior*h.fit(c, g)) / (h.expected[c][g] + classPrior)
		}
		width := lower[b+1] - lower[b]
		left[b+1] = left[b] * math.Exp(-rate[b]*factor*width)
		spent[b+1] = spent[b] + width*(left[b]+left[b+1])/2
	}
	slope := func(from, to int) float64 {
		if spent[to] <= spent[from] {
			return 0
		}
		return (left[from] - left[to]) / (spent[to] - spent[from])
	}
	h.index[c] = [buckets]float64{}
	hull := [buckets + 1]int{top} // ages at which the lower convex hull of left over spent has its corners, the youngest last
	n := 1
	for a := top - 1; a >= 0; a-- {
		for n > 1 && slope(a, hull[n-1]) <= slope(hull[n-1], hull[n-2]) {
			n--
		}
		h.index[c][a] = slope(a, hull[n-1])
		hull[n] = a
		n++
	}
}

// measure sets, for class c, the reuses that were seen and those that average prompts would have had. It returns the rate of reuse of the
// class's family by age, and the number of ages that are known.
func (h *LeafHazard) measure(c int) (rate [buckets]float64, top int) {
	family := &h.families[familyOf(c)]
	seen, expected := &h.seen[c], &h.expected[c]
	*seen, *expected = [spans]float64{}, [spans]float64{}
	for b := range buckets {
		own := h.spentIn(c, b)
		family.spent[b] += own - h.spent[c][b]
		h.spent[c][b] = own
		if family.spent[b] > 0 {
			rate[b] = family.events[b] / family.spent[b]
			expected[b/spanBuckets] += own * rate[b]
			top = b + 1
		}
		seen[b/spanBuckets] += h.events[c][b]
	}
	spread(seen)
	spread(expected)
	return rate, top
}

// spread adds to each span the values of the other spans, with less weight the farther away they are.
func spread(x *[spans]float64) {
	var older, younger float64
	var sum [spans]float64
	for g := range spans {
		younger = younger*nextSpan + x[g]
		sum[g] += younger
	}
	for g := spans - 1; g >= 0; g-- {
		sum[g] += older
		older = (older + x[g]) * nextSpan
	}
	*x = sum
}

// fit computes, for the span g of ages, the factors of the turn, length and size of class c again, each with the others unchanged. It
// returns their product; 1 for a class of forks, which has no such features.
func (h *LeafHazard) fit(c, g int) float64 {
	if c >= forkClass {
		return 1
	}
	f := &h.factors[g]
	turn, length, size := c/sizes/lengths, c/sizes%lengths, c%sizes
	part := func(of, rest, restStride, features, stride int, a, b []float64) float64 {
		s, e := float64(featurePrior), float64(featurePrior)
		for i := range rest {
			for j := range features {
				k := of + i*restStride + j*stride
				s += h.seen[k][g]
				e += h.expected[k][g] * a[i] * b[j]
			}
		}
		return s / e
	}
	f.turn[turn] = part(turn*lengths*sizes, lengths, sizes, sizes, 1, f.length[:], f.size[:])
	f.length[length] = part(length*sizes, turns, lengths*sizes, sizes, 1, f.turn[:], f.size[:])
	f.size[size] = part(size, turns, lengths*sizes, lengths, sizes, f.turn[:], f.length[:])
	return f.turn[turn] * f.length[length] * f.size[size]
}
