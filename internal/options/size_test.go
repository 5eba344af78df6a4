// SPDX-License-Identifier: Apache-2.0

package options

import (
	"strings"
	"testing"
)

// A size with a unit means the same at every flag, and a size without one counts in the flag's unit. A
// printed size is read back as the same size.
func TestSizes(t *testing.T) {
	f := func(text string, shift uint, want int64) {
		t.Helper()
		var n, again int64
		if err := parseSize(&n, []byte(text), shift); err != nil || n != want {
			t.Errorf("%q: %d, %v, want %d", text, n, err, want)
		}
		if err := parseSize(&again, []byte(formatSize(n)), shift); err != nil || again != n {
			t.Errorf("%q is printed as %q, and read back as %d, %v", text, formatSize(n), again, err)
		}
	}
	for _, shift := range []uint{0, 10, 20, 30} {
		f("4GiB", shift, 4<<30)
		f("4GB", shift, 4<<30)
		f("4g", shift, 4<<30)
		f("0.5G", shift, 1<<29)
		f("1.5 KiB", shift, 1536)
		f("100B", shift, 100)
		f("1TiB", shift, 1<<40)
		f("4", shift, 4<<shift)
		f("0", shift, 0)
		f("0.001", shift, int64(0.001*float64(int64(1)<<shift)))
	}
	f("1PiB", 0, maxSize)
	g := func(text, want string) {
		t.Helper()
		n := int64(7)
		if err := parseSize(&n, []byte(text), 30); err == nil || !strings.Contains(err.Error(), want) || n != 7 {
			t.Errorf("%q: %d, %v, want %q", text, n, err, want)
		}
	}
	for _, text := range []string{"", "x", "GiB", "4GG", "4iB", "4XB", "4 5", "--4", "4bk"} {
		g(text, "is no size: want for example 4, 4GiB or 256MiB")
	}
	for _, text := range []string{"-1", "2PiB", "1e300", "inf", "NaN", "-0.5k"} {
		g(text, "is outside 0 to 1 PiB")
	}
}
