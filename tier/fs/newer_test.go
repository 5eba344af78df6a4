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

// A file whose attribute is of a later version, as long as the present one or longer, is a miss: this build does not know what its bytes
// mean. The tier does not take it for a file of another server, which has no attribute, and a write leaves it as it is.
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
		b2, m := tiertest.Object(1, n)
		if err := d.Write(t.Context(), tiertest.Key(1), m, b2); !errors.Is(err, tier.ErrNotKept) || !errors.Is(err, tier.ErrNewer) {
			t.Errorf("%d bytes: a write answers %v", length, err)
		}
		got := make([]byte, 400)
		if k, err := unix.Getxattr(pathOf(dir, 1), "user.kvasir.x3", got); err != nil || k != length || got[0] != 3 {
			t.Errorf("%d bytes: the attribute has %d bytes, %v", length, k, err)
		}
	}
}
