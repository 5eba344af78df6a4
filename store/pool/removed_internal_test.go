// SPDX-License-Identifier: Apache-2.0

package pool

import "testing"

// A key that is removed while the table grows is gone, wherever its entry was, and may
// come again.
func TestRemovedWhileTheTableGrows(t *testing.T) {
	const keys = 49 // the last one makes the table grow: nearly all entries are to be moved
	for victim := range uint32(keys) {
		p, err := Open(Options{Name: "p", Bytes: 128 * 64, Align: 64, Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		reserve := func(n uint32) Slot {
			t.Helper()
			s, err := p.Reserve(tableKey(n), 64, Writer{})
			if err != nil {
				t.Fatalf("key %d after %d was removed: %v", n, victim, err)
			}
			return s
		}
		slots := map[uint32]Slot{}
		for n := range uint32(keys) {
			slots[n] = reserve(n)
		}
		if p.table.former.len == 0 {
			t.Fatal("the table does not grow: the test shows nothing")
		}
		p.Drop(slots[victim])
		p.Unhold(slots[victim])
		if s, st := p.Find(tableKey(victim)); st != Free {
			t.Errorf("key %d was removed and is in slot %d, state %d", victim, s, st)
		}
		slots[victim] = reserve(victim)
		for n := uint32(keys); n < keys+40; n++ { // all entries move
			slots[n] = reserve(n)
		}
		for n, want := range slots {
			if s, st := p.Find(tableKey(n)); st != Staged || s != want {
				t.Errorf("after key %d was removed, key %d is in slot %d, state %d, want %d", victim, n, s, st, want)
			}
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
