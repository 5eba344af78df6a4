// SPDX-License-Identifier: Apache-2.0

// Package testkit has what tests of several packages share.
package testkit

// Volume returns n, or a tenth of it (at least 1) in a build with the race detector, which makes code about ten times
// slower: for counts whose size adds nothing to what a test shows.
func Volume(n int) int {
	if Race {
		return max(1, n/raceDivisor)
	}
	return n
}

const raceDivisor = 10
