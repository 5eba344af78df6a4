// SPDX-License-Identifier: Apache-2.0

// Package invariant says whether this build checks itself. With -tags invariants, memory is overwritten after its last use, so that
// tests find code that still reads it.
package invariant

import "bytes"

var poison = bytes.Repeat([]byte{0xff}, 4096)

// Poison overwrites b in builds with -tags invariants; in others it does nothing. It uses copy, because the race detector checks a copy
// once, but a loop once per byte.
func Poison(b []byte) {
	if !Enabled {
		return
	}
	for len(b) > 0 {
		b = b[copy(b, poison):]
	}
}
