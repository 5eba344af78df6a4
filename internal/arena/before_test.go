// SPDX-License-Identifier: Apache-2.0

package arena_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/arena"
)

// FreeBefore sees the free range that ends at an offset, and no other.
func TestFreeBefore(t *testing.T) {
	a := arena.New(100, 10)
	for _, off := range []int64{0, 30, 60} {
		if !a.Take(off, 10) {
			t.Fatal(off)
		}
	}
	for off, want := range map[int64]int64{0: 0, 10: 0, 20: 10, 30: 20, 40: 0, 60: 20, 70: 0, 100: 30} {
		if got := a.FreeBefore(off); got != want {
			t.Errorf("FreeBefore(%d) = %d, want %d", off, got, want)
		}
	}
}
