// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// No public key of kvasir curve-key begins with "-": --curve-server KEY would take it for a flag. One random key in 85 does.
func TestCurveKeysAreNoFlags(t *testing.T) {
	for range 2000 {
		if public := newCurveKey().Public().Z85(); strings.HasPrefix(public, "-") {
			t.Fatalf("%s begins with -", public)
		}
	}
}
