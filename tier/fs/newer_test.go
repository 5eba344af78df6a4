// SPDX-License-Identifier: Apache-2.0

package fs_test

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// A file whose attribute is of a later version, as long as today's or longer, is a miss: what its bytes mean is not known.
// It is not taken for one of another server, which has no attribute.
func TestAttributesOfALaterVersionAreMisses(t *testing.T) {
	const n = 5000
	for _, length := range []int{1, 41, 60, 300} {
		dir := folder(t)
		b, _ := tiertest.Object(1, n)
		if err := os.WriteFile(pathOf(dir, 1), b, 0o600); err != nil {
			t.Fatal(err)
		}
		attr := make([]byte, length)
		attr[0] = 3
		if err := unix.Setxattr(pathOf(dir, 1), "user.kvasir.x3", attr, 0); err != nil {
			t.Fatal(err)
		}
		d := open(t, fs.Options{Path: dir})
		if got := stat(t, d, 1); got.Len != 0 {
			t.Errorf("%d bytes: %+v", length, got)
		}
		if _, err := d.Read(t.Context(), tiertest.Key(1), make([]byte, n)); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("%d bytes: %v", length, err)
		}
	}
}
