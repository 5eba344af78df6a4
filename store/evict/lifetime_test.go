// SPDX-License-Identifier: Apache-2.0

package evict_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/store/evict"
)

const watched, other = 64, 65 // ids

func free(uint32) bool { return false }

// The times of watched chunks are right: of an eviction and of uses, and none of a chunk that was
// removed otherwise.
func TestTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := evict.NewLifetimes()
		p := h.Watch(evict.NewLRU())
		want := func(name string, c histogram.Counts, n uint64, seconds float64) {
			t.Helper()
			if c.Total() != n || float64(c.Sum)*c.Unit != seconds {
				t.Errorf("%s: %d of %v s, want %d of %v", name, c.Total(), float64(c.Sum)*c.Unit, n, seconds)
			}
		}
		evicts := func(slot uint32) {
			t.Helper()
			got, ok, _ := p.Victim(free)
			if !ok || got != slot {
				t.Fatalf("the victim is %d, %v; want %d", got, ok, slot)
			}
			p.Remove(slot)
		}
		p.Add(3, watched, 0, 1)
		p.Add(5, other, 0, 1)
		time.Sleep(10 * time.Second)
		p.Use(3)
		p.Use(5)
		p.Use(9) // is not there
		time.Sleep(20 * time.Second)
		p.Use(3)
		p.Use(5)
		time.Sleep(2 * time.Second)
		evicts(3)
		evicts(5)
		st := h.Stats()
		want("lifetime", st.Life, 1, 32)
		want("idle", st.Idle, 1, 2)
		want("gap", st.Gap, 2, 30)

		p.Add(3, 2*watched, 0, 1) // the same slot again
		time.Sleep(time.Second)
		p.Add(7, 3*watched, 0, 1)
		if got, _, _ := p.Victim(free); got != 3 {
			t.Fatalf("the victim is %d", got)
		}
		p.Remove(7) // was cleared, though 3 was to go
		time.Sleep(time.Second)
		evicts(3)
		st = h.Stats()
		want("lifetime of the second", st.Life, 2, 34)
		want("idle of the second", st.Idle, 2, 4)
		p.Add(3, watched, 0, 1)
		p.Remove(3)
		p.Remove(3)
		if st := h.Stats(); st.Life.Total() != 2 {
			t.Error("what was cleared counts as evicted")
		}
	})
}

// Who watches changes nothing, and one chunk in 64 costs something.
func TestAllocations(t *testing.T) {
	p := evict.NewLifetimes().Watch(evict.NewLRU())
	for slot := range uint32(1 << 12) {
		p.Add(slot, uint64(slot), 0, 1)
	}
	if n := testing.AllocsPerRun(100, func() {
		slot, _, _ := p.Victim(free)
		p.Remove(slot)
		p.Add(slot, uint64(slot), 0, 1)
		p.Use(slot)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkUse(b *testing.B) {
	for name, p := range map[string]evict.Policy{"plain": evict.NewLRU(), "watched": evict.NewLifetimes().Watch(evict.NewLRU())} {
		b.Run(name, func(b *testing.B) {
			for slot := range uint32(1 << 12) {
				p.Add(slot, uint64(slot), 0, 1)
			}
			for i := uint32(0); b.Loop(); i++ {
				p.Use(i & (1<<12 - 1))
			}
		})
	}
}
