// SPDX-License-Identifier: Apache-2.0

// Package testkit has what tests of several packages share.
package testkit

import "testing"

// Volume returns n, or a tenth of it (at least 1) in a build with the race detector, which makes code about ten times
// slower: for counts whose size adds nothing to what a test shows.
func Volume(n int) int {
	if Race {
		return max(1, n/raceDivisor)
	}
	return n
}

// LongAlone skips the rest of a test in a build with the race detector. It is for long tests in which no two goroutines meet, and
// that show nothing with a smaller volume: those of one goroutine, and those of many command lines that end before they
// serve. The run without the detector runs them whole.
func LongAlone(t testing.TB) {
	if Race {
		t.Skip("a long test in which no two goroutines meet: it runs without the race detector")
	}
}

const raceDivisor = 10
