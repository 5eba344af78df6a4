// SPDX-License-Identifier: Apache-2.0

package coordinator

import "math/bits"

// words is a set of bits.
type words []uint64

// maxBits bounds words, 32 MiB; bits beyond it stay unset.
const maxBits = 1 << 28

func (w words) set(i int) words {
	if i < 0 || i >= maxBits {
		return w
	}
	for i>>6 >= len(w) {
		w = append(w, 0)
	}
	w[i>>6] |= 1 << (i & 63)
	return w
}

func (w words) has(i int) bool {
	return i>>6 < len(w) && w[i>>6]&(1<<(i&63)) != 0
}

func (w words) clear(i int) {
	if i >= 0 && i>>6 < len(w) {
		w[i>>6] &^= 1 << (i & 63)
	}
}

// firstZero returns the first unset bit of [lo, hi), or hi.
func (w words) firstZero(lo, hi int) int {
	for i := lo; i < hi; i = (i | 63) + 1 {
		if i>>6 >= len(w) {
			return i
		}
		if rest := ^w[i>>6] >> (i & 63); rest != 0 {
			return min(i+bits.TrailingZeros64(rest), hi)
		}
	}
	return hi
}

// last returns the last bit of [lo, hi) that is set (with flip 0) or unset (with flip all ones), or lo-1 if there is none.
func (w words) last(lo, hi int, flip uint64) int {
	for i := hi - 1; i >= lo; i = (i &^ 63) - 1 {
		v := flip
		if i>>6 < len(w) {
			v ^= w[i>>6]
		} else if flip == 0 { // no bit is set beyond the slice
			i = min(i, len(w)<<6)
			continue
		}
		if v <<= 63 - i&63; v != 0 {
			return max(i-bits.LeadingZeros64(v), lo-1)
		}
	}
	return lo - 1
}
