// SPDX-License-Identifier: Apache-2.0

package store

import (
	"testing"
	"time"
)

// TestSuspectsAreComparedLastUsedFirst notes four, of which one is trusted meanwhile and
// one is compared by somebody else, who gives up.
func TestSuspectsAreComparedLastUsedFirst(t *testing.T) {
	var b checksumQueue
	for _, slot := range []uint32{7, 1, 9, 3} {
		b.Suspect(slot)
	}
	b.Trust(9)
	b.Trust(100) // of nobody
	taken := func(slot uint32) bool { return slot == 3 }
	var got []uint32
	for slot, ok := b.NextSuspect(taken); ok; slot, ok = b.NextSuspect(taken) {
		got = append(got, slot)
	}
	if len(got) != 2 || got[0] != 1 || got[1] != 7 {
		t.Errorf("compared are %v", got)
	}
	b.Return(3)
	if slot, ok := b.NextSuspect(func(uint32) bool { return false }); !ok || slot != 3 {
		t.Errorf("given up and never compared: %d, %v", slot, ok)
	}
	if !b.Suspected(3) || b.Suspected(9) || b.Suspected(2) {
		t.Error("only what was compared is trusted")
	}
}

// TestChecksumsAreDueInTheirTime has two objects of one slot.
func TestChecksumsAreDueInTheirTime(t *testing.T) {
	var b checksumQueue
	now := time.Unix(1e9, 0)
	b.Sum(1, 5, now)
	b.Sum(1, 6, now.Add(time.Second))
	if slot, generation, ok := b.NextDue(now); !ok || slot != 1 || generation != 5 {
		t.Errorf("%d, %d, %v", slot, generation, ok)
	}
	if _, _, ok := b.NextDue(now); ok {
		t.Error("the second is due later")
	}
	if _, generation, ok := b.NextDue(now.Add(time.Second)); !ok || generation != 6 {
		t.Errorf("the second: %d, %v", generation, ok)
	}
}
