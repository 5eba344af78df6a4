// SPDX-License-Identifier: Apache-2.0

// Package invariant says whether this build checks itself: with -tags
// invariants, memory that went out of use is poisoned, so that whoever still
// reads it is found out.
package invariant

// Poison overwrites b in builds that check themselves.
func Poison(b []byte) {
	if Enabled {
		for i := range b {
			b[i] = 0xff
		}
	}
}
