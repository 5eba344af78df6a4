// SPDX-License-Identifier: Apache-2.0

package container_test

import (
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/container"
)

// A reader at any place gets the values that follow, in pieces of any size, or learns that it lost some.
func TestRingAgainstASlice(t *testing.T) {
	var r container.Ring[int]
	if r.Add(7) || r.Last() != 0 {
		t.Error("a ring that keeps nothing has something")
	}
	r.Keep(5) // 8
	r.Keep(1000)
	var all []int // all[i] has number i+1
	for i := range 30 {
		for after := range len(all) + 2 {
			for _, most := range []int{0, 1, 3, 100} {
				dst := make([]int, most)
				n, lost := r.After(uint64(after), dst)
				first := min(after, len(all))
				want := all[first:min(first+most, len(all))]
				if wantLost := after < len(all)-8; lost != wantLost {
					t.Fatalf("after %d of %d: lost %v", after, len(all), lost)
				} else if lost {
					want = nil
				}
				if !slices.Equal(dst[:n], want) {
					t.Fatalf("after %d of %d, %d at most: %v, want %v", after, len(all), most, dst[:n], want)
				}
			}
		}
		all = append(all, i*i)
		if !r.Add(i*i) || r.Last() != uint64(len(all)) {
			t.Fatal(r.Last())
		}
	}
}
