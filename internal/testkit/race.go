// SPDX-License-Identifier: Apache-2.0

// Package testkit has helpers that tests of several packages share.
package testkit

import "testing"

// Volume returns n, or, in a build with the race detector, a tenth of n (at least 1), because such code is about ten times slower. Use
// it for counts whose size does not change what a test proves.
func Volume(n int) int {
	if Race {
		return max(1, n/raceDivisor)
	}
	return n
}

// LongAlone skips the rest of a test in a build with the race detector. It is for long tests in which no two goroutines share data, and
// that prove nothing with a smaller volume: tests with one goroutine, and tests of many command lines that end before they serve. The
// run without the detector runs them completely.
func LongAlone(t testing.TB) {
	if Race {
		t.Skip("a long test in which no two goroutines meet: it runs without the race detector")
	}
}

const raceDivisor = 10
