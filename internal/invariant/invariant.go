// SPDX-License-Identifier: Apache-2.0

// Package invariant says whether this build checks itself: with -tags
// invariants, memory that went out of use is poisoned, so that whoever still
// reads it is found out.
package invariant

import "bytes"

var poison = bytes.Repeat([]byte{0xff}, 4096)

// Poison overwrites b in builds that check themselves. It copies: the race
// detector looks at a copy once, at a loop once a byte.
func Poison(b []byte) {
	if !Enabled {
		return
	}
	for len(b) > 0 {
		b = b[copy(b, poison):]
	}
}
