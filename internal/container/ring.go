// SPDX-License-Identifier: Apache-2.0

package container

// Ring keeps the last values that were added, numbered from 1. Readers ask for the values after a number. The zero Ring keeps no
// values. It has no lock: its owner must lock.
type Ring[T any] struct {
	ring []T // its length is a power of two
	last uint64
}

// Keep sets the ring's capacity to at least `most` values. Only the first call has an effect.
func (r *Ring[T]) Keep(most int) {
	if r.ring != nil {
		return
	}
	n := 1
	for n < most {
		n *= 2
	}
	r.ring = make([]T, n)
}

// Add adds a value and gives it the next number. It returns false if the ring has no capacity.
func (r *Ring[T]) Add(v T) bool {
	if r.ring == nil {
		return false
	}
	r.last++
	r.ring[r.last&uint64(len(r.ring)-1)] = v
	return true
}

// Last returns the number of the newest value; 0: none was added.
func (r *Ring[T]) Last() uint64 { return r.last }

// After copies into dst the values after a number, oldest first, and returns how many; values beyond the length of dst stay for the next
// call. If some of the values after that number are no longer in the ring, After copies none, and `lost` is true.
func (r *Ring[T]) After(number uint64, dst []T) (n int, lost bool) {
	if kept := uint64(len(r.ring)); r.last > kept && number < r.last-kept {
		return 0, true
	}
	for number < r.last && n < len(dst) {
		number++
		dst[n] = r.ring[number&uint64(len(r.ring)-1)]
		n++
	}
	return n, false
}
