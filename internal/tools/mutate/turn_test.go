// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"testing"
)

// With -least a package with few mutants is sampled as often as one with many; the rest keeps its order.
func TestEachPackageHasItsTurn(t *testing.T) {
	f := func(least int, want ...string) {
		t.Helper()
		var all []mutant
		for i, dir := range []string{"a", "a", "a", "b", "a", "b"} {
			all = append(all, mutant{dir: dir, line: i})
		}
		inTurn(all, least)
		var got []string
		for _, m := range all {
			got = append(got, fmt.Sprint(m.dir, m.line))
		}
		if !slices.Equal(got, want) {
			t.Errorf("least %d: %v, want %v", least, got, want)
		}
	}
	f(0, "a0", "a1", "a2", "b3", "a4", "b5")
	f(1, "a0", "b3", "a1", "a2", "a4", "b5")
	f(2, "a0", "b3", "a1", "b5", "a2", "a4")
}
