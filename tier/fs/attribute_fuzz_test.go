// SPDX-License-Identifier: Apache-2.0

package fs

import (
	"bytes"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
)

// FuzzAttribute: an attribute of this version that was read can be written with the same bytes. No attribute is both readable and of a
// later release.
func FuzzAttribute(f *testing.F) {
	f.Add(attr{kv.Namespace{1}, 7, 8, 9, true}.bytes())
	f.Add(append([]byte{1}, make([]byte, unboundBytes-1)...))
	f.Add([]byte{3})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, ok := parseAttr(b)
		later := isLater(func(to []byte) (int, error) { return copy(to, b), nil })
		if ok && later {
			t.Fatalf("%x is read, and of a later release", b)
		}
		if ok && a.bound && !bytes.Equal(a.bytes(), b) {
			t.Fatalf("%x becomes %x", b, a.bytes())
		}
	})
}
