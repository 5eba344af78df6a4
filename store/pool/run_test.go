// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// TestCheapestRunHasNoBusySlot fills a pool, has one of each three slots busy at
// first and then none, and finds what frees two places beside each other.
func TestCheapestRunHasNoBusySlot(t *testing.T) {
	const slots, page = 9, 4096
	p, err := pool.Open(pool.Options{Name: "p", Bytes: slots * page, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	at := map[int64]pool.Slot{}
	for i := range slots {
		slot, err := p.Reserve(&kv.Key{Chunk: kv.Hash{byte(i + 1)}}, page, pool.Writer{})
		if err != nil {
			t.Fatal(err)
		}
		p.Commit(slot)
		at[p.Offset(slot)/page] = slot
	}
	order := func(f func(uint32) bool) {
		for i := range int64(slots) {
			if !f(uint32(at[i])) {
				return
			}
		}
	}
	third := func(slot uint32) bool { return p.Offset(pool.Slot(slot))/page%3 == 2 }
	run, _ := p.CheapestRun(2*page, slots, order, third)
	if len(run.Slots) != 2 || run.Bytes != 2*page || third(uint32(run.Slots[0])) || third(uint32(run.Slots[1])) {
		t.Errorf("%+v", run)
	}
	if p.Offset(run.Slots[1])-p.Offset(run.Slots[0]) != page {
		t.Errorf("no neighbours: %+v", run)
	}
	if run, all := p.CheapestRun(3*page, slots, order, third); run.Bytes >= 0 || !all {
		t.Errorf("three beside each other, with every third busy: %+v", run)
	}
	if run, _ := p.CheapestRun(3*page, slots, order, func(uint32) bool { return false }); run.Bytes != 3*page {
		t.Errorf("three of nine that are idle: %+v", run)
	}
	asked := 0
	run, all := p.CheapestRun(2*page, 1, func(f func(uint32) bool) {
		order(func(slot uint32) bool { asked++; return f(slot) })
	}, func(uint32) bool { return false })
	if all || asked != 2 || run.Bytes != 2*page {
		t.Errorf("one place was to be looked at: %d slots asked, all %v, %+v", asked, all, run)
	}
	p.Drop(at[4])
	if run, _ := p.CheapestRun(2*page, slots, order, func(slot uint32) bool { return slot == uint32(at[3]) }); run.Bytes != page {
		t.Errorf("beside a free place one is enough: %+v", run)
	}
}

// A run may end where free memory ends, or begin where it begins.
func TestRunsBesideFreeMemory(t *testing.T) {
	const page = 4096
	p, err := pool.Open(pool.Options{Name: "p", Bytes: 6 * page, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var slots []pool.Slot
	for i := range 5 { // the last page is free
		slot, err := p.Reserve(&kv.Key{Chunk: kv.Hash{byte(i + 1)}}, page, pool.Writer{})
		if err != nil || p.Offset(slot) != int64(i)*page {
			t.Fatal(p.Offset(slot), err)
		}
		p.Commit(slot)
		slots = append(slots, slot)
	}
	order := func(f func(uint32) bool) {
		for _, s := range slots {
			if !f(uint32(s)) {
				return
			}
		}
	}
	f := func(pages int64, idle, want int) {
		t.Helper()
		run, all := p.CheapestRun(pages*page, 99, order, func(slot uint32) bool { return slot != uint32(slots[idle]) })
		found := len(run.Slots) == 1 && run.Slots[0] == slots[idle] && run.Bytes == page
		if found != (want == 1) || !found && run.Bytes != -1 || !all {
			t.Errorf("%d pages with slot %d idle: %+v, all %v", pages, idle, run, all)
		}
	}
	f(2, 4, 1)
	f(3, 4, 0)
	f(2, 0, 0)
	p.Drop(slots[0])
	slots = slots[1:]
	f(2, 0, 1) // with the free page before it
	f(3, 0, 0)
	f(2, 1, 0)
	f(2, 3, 1)
}
