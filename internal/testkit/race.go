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

// LongAlone skips a test in a build with the race detector: one whose volume is what it shows, and that starts no goroutine of
// its own. The run without the detector makes it.
func LongAlone(t testing.TB) {
	if Race {
		t.Skip("a long test of one goroutine: it runs without the race detector")
	}
}

const raceDivisor = 10
