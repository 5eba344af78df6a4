// SPDX-License-Identifier: Apache-2.0

package container

// Ring has the last values that were added, numbered from 1. Readers ask by number. The zero Ring keeps none. It has no lock: its owner
// must lock.
type Ring[T any] struct {
	ring []T // a power of two long
	last uint64
}

// Keep sets the ring's capacity to at least most values. Later calls change nothing.
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

// Add adds a value and gives it the next number. It reports false if the ring keeps none.
func (r *Ring[T]) Add(v T) bool {
	if r.ring == nil {
		return false
	}
	r.last++
	r.ring[r.last&uint64(len(r.ring)-1)] = v
	return true
}

// Last returns the number of the newest value, 0 for none.
func (r *Ring[T]) Last() uint64 { return r.last }

// After copies into dst the values that follow a number, oldest first. It returns how many. With lost it copies none,
// because some values after that number are no longer in the ring.
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
