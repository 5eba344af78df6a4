// SPDX-License-Identifier: Apache-2.0

package prefix

import "testing"

// In a full row a new entry replaces the least recently used one, also after the clock has wrapped around.
func TestEntryThatWasNotUsedForLongestGivesWay(t *testing.T) {
	for _, clock := range []uint32{0, 1<<32 - 5} {
		x := New(1)
		x.clock.Store(clock)
		mark := func(i int) []Mark { return []Mark{{Hash: uint64(i+1) * shards, End: 10}} } // all in one row
		for i := range ways {
			x.Add(mark(i), 7)
		}
		x.Add(mark(0), 7) // the second one is now the oldest
		x.Add(mark(ways), 7)
		for i := range ways + 1 {
			if found := len(x.Lookup(nil, mark(i))) == 1; found != (i != 1) {
				t.Errorf("clock %d: mark %d is there: %v", clock, i, found)
			}
		}
	}
}
