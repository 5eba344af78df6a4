// SPDX-License-Identifier: Apache-2.0

package hitcurve

import (
	"math"
	"math/bits"
)

// registerBits is the precision of a sketch: 2^16 registers of a byte, a standard error of 1.04/2^8 = 0.41 %.
const registerBits = 16

// sketch counts distinct 64-bit hashes: HyperLogLog (P. Flajolet et al., AofA 2007) with the estimator of
// O. Ertl, "New cardinality estimation algorithms for HyperLogLog sketches" (2017), which needs no corrections for small and
// large numbers. The sketch of a union is the larger register of each pair.
type sketch [1 << registerBits]uint8

// add adds a hash. The bits of hashes must be uniform.
func (s *sketch) add(hash uint64) {
	rank := uint8(bits.LeadingZeros64(hash<<registerBits|1<<(registerBits-1))) + 1 // 64-registerBits+1 at most
	if r := &s[hash>>(64-registerBits)]; *r < rank {
		*r = rank
	}
}

// merge makes s the sketch of its union with other.
func (s *sketch) merge(other *sketch) {
	for i, rank := range other {
		s[i] = max(s[i], rank)
	}
}

// count estimates how many distinct hashes were added.
func (s *sketch) count() float64 { return countOf(s[:], registerBits) }

// smallBits is the log of the registers of a smallSketch: its standard error is 1.6 %.
const smallBits = 12

// smallSketch is a sketch of 4 KiB.
type smallSketch [1 << smallBits]uint8

func (s *smallSketch) add(hash uint64) {
	rank := uint8(bits.LeadingZeros64(hash<<smallBits|1<<(smallBits-1))) + 1
	if r := &s[hash>>(64-smallBits)]; *r < rank {
		*r = rank
	}
}

func (s *smallSketch) merge(other *smallSketch) {
	for i, rank := range other {
		s[i] = max(s[i], rank)
	}
}

func (s *smallSketch) count() float64 { return countOf(s[:], smallBits) }

// countOf returns the count of a sketch of 1<<log registers.
func countOf(ranks []uint8, log int) float64 {
	registers, most := float64(len(ranks)), 64-log
	var of [64 + 2]float64 // number of registers by rank
	for _, rank := range ranks {
		of[rank]++
	}
	z := registers * tau(1-of[most+1]/registers)
	for k := most; k >= 1; k-- {
		z = (z + of[k]) / 2
	}
	z += registers * sigma(of[0]/registers)
	return registers * registers / (2 * math.Ln2 * z)
}

// sigma and tau are Ertl's corrections for the registers of the lowest and of the highest rank.
func sigma(x float64) float64 {
	if x == 1 {
		return math.Inf(1)
	}
	z, y := x, 1.0
	for {
		x *= x
		before := z
		z += x * y
		y += y
		if z == before {
			return z
		}
	}
}

func tau(x float64) float64 {
	if x == 0 || x == 1 {
		return 0
	}
	z, y := 1-x, 1.0
	for {
		x = math.Sqrt(x)
		before := z
		y /= 2
		z -= (1 - x) * (1 - x) * y
		if z == before {
			return z / 3
		}
	}
}
