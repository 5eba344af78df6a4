// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
)

// What its owner must never do to a slot is a panic, and nothing has changed.
func TestMisuseOfASlotPanics(t *testing.T) {
	p, err := Open(Options{Name: "p", Bytes: 4 * 4096, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	reserve := func(n byte) Slot {
		s, err := p.Reserve(&kv.Key{Chunk: kv.Hash{n}}, 4096, Writer{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	staged, resident, free := reserve(1), reserve(2), reserve(3)
	p.Commit(resident)
	p.Drop(free)
	p.Unhold(free)
	before := p.Usage()
	f := func(what string, misuse func()) {
		t.Helper()
		defer func() {
			t.Helper()
			if v := recover(); v == nil {
				t.Errorf("%s is no panic", what)
			}
			if got := p.Usage(); got != before {
				t.Errorf("%s changed %+v to %+v", what, before, got)
			}
		}()
		misuse()
	}
	f("a commit of what is resident", func() { p.Commit(resident) })
	f("a commit of what is free", func() { p.Commit(free) })
	f("a checksum of what is staged", func() { p.SetSum(staged, 1) })
	f("a place below of what is staged", func() { p.SetBelow(staged, 1) })
	f("a drop of what is free", func() { p.Drop(free) })
	f("a hold on what is free", func() { p.Hold(free) })
	f("the end of a hold that is none", func() { p.Unhold(resident) })
	if _, ok := p.Sum(staged); ok || p.Below(staged) != 0 {
		t.Error("what is staged has a checksum")
	}
	p.Drop(staged) // condemned: held still
	f("a second drop", func() { defer func() { before = p.Usage(); panic(recover()) }(); p.Drop(staged) })
}

// Chunks hash to places that a peer cannot foretell, the same while a table grows.
func TestTableIsSeeded(t *testing.T) {
	seeds := map[uint64]bool{}
	for range 2 {
		p, err := Open(Options{Name: "p", Bytes: 256 * 64, Align: 64, Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		for n := range uint32(200) {
			if _, err := p.Reserve(tableKey(n), 64, Writer{}); err != nil {
				t.Fatal(err)
			}
			seeds[p.table.seed] = true
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(seeds) != 2 || seeds[0] {
		t.Errorf("two pools have the seeds %v", seeds)
	}
}
