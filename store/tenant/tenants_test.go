// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// highest is a policy that notes the largest number of a slot.
type highest struct {
	evict.Policy
	slot uint32
}

func (h *highest) Add(slot uint32, id, parent uint64, weight int64) {
	h.slot = max(h.slot, slot)
	h.Policy.Add(slot, id, parent, weight)
}

// table has tenants a and b, each of a namespace, with policies in the order of the quotas.
func table(quotas ...int64) (*tenant.Table, []*highest) {
	var made []*highest
	t := tenant.New(1<<20, evict.NewLRU(), func(int64) evict.Policy {
		made = append(made, &highest{Policy: evict.NewLRU()})
		return made[len(made)-1]
	}, func(uint32) bool { return false }, func(uint32) int64 { return 10 })
	for i, q := range quotas {
		salt := string(rune('a' + i))
		if err := t.SetQuota(salt, q); err != nil {
			panic(err)
		}
		t.Name(kv.Namespace{byte(1 + i)}, []byte(salt))
	}
	return t, made
}

// The policy of a tenant numbers its own slots: its memory follows what the tenant has, not
// the pool, however long slots come and go.
func TestPolicyOfATenantIsAsLargeAsTheTenant(t *testing.T) {
	tab, made := table(100, 100)
	for i := range uint32(10_000) {
		slot := 1_000_000 + i%7
		tab.Stage(slot, kv.Namespace{1})
		tab.Add(slot, kv.Namespace{1}, uint64(i), 0)
		tab.Use(slot)
		tab.Remove(slot, tenant.Evicted)
		other := 2_000_000 + i
		if i < 3 {
			tab.Add(other, kv.Namespace{2}, uint64(i), 0)
		}
	}
	if made[0].slot != 0 || made[1].slot != 2 {
		t.Errorf("numbers up to %d and %d for 1 slot and 3", made[0].slot, made[1].slot)
	}
	got := tab.List()
	if got[0].Bytes != 0 || got[0].Objects != 0 || got[0].Evicted != 10_000 || got[0].EvictedBytes != 100_000 || got[1].Bytes != 30 {
		t.Errorf("%+v", got)
	}
}

// Of those above their quotas the farthest goes first, then who has none, then the writer's own.
func TestOrderOfVictims(t *testing.T) {
	tab, _ := table(10, 20, 40)
	for slot, space := range []byte{1, 1, 2, 2, 2, 2, 3, 9} { // a 20 of 10, b 40 of 20, c 10 of 40, one of nobody
		tab.Add(uint32(slot), kv.Namespace{space}, uint64(slot), 0)
	}
	tab.For(kv.Namespace{3}, 10)
	var order []uint32
	for {
		slot, ok, _ := tab.Victim()
		if !ok {
			break
		}
		order = append(order, slot)
		tab.Remove(slot, tenant.Evicted)
	}
	want := []uint32{2, 0, 3, 7, 6}
	if !slices.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
	tab.For(kv.Namespace{9}, 10) // what is left is within its quota
	if slot, ok, _ := tab.Victim(); ok {
		t.Errorf("slot %d goes for somebody without a quota", slot)
	}
	if !tab.Spared(1) || !tab.Spared(4) {
		t.Error("what is within its quota is not spared")
	}
}

// Without a quota the table costs nothing beside the common policy.
func TestWithoutQuotasNothingIsAllocated(t *testing.T) {
	tab, _ := table()
	tab.Add(5, kv.Namespace{1}, 1, 0)
	if n := testing.AllocsPerRun(100, func() {
		tab.Remove(5, tenant.Other)
		tab.Add(5, kv.Namespace{1}, 1, 0)
		tab.Use(5)
		if slot, ok, _ := tab.Victim(); slot != 5 || !ok {
			t.Fatal("no victim")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A slot that is committed after its tenant's quota was dropped, and before it is released, is in
// the common policy once.
func TestCommitBetweenDropAndRelease(t *testing.T) {
	f := func(quotas ...int64) {
		t.Helper()
		tab, _ := table(quotas...)
		tab.Stage(5, kv.Namespace{1})
		d, ok := tab.DropQuota("a")
		if !ok {
			t.Fatal("no quota")
		}
		tab.Add(5, kv.Namespace{1}, 1, 0)
		tab.Release(d, 5, true, 1, 0)
		seen := 0
		tab.Ascend(func(slot uint32) bool { seen++; return seen < 10 })
		tab.Remove(5, tenant.Other)
		slot, left, _ := tab.Victim()
		if seen != 1 || left {
			t.Errorf("%d quotas: the slot is there %d times, after its removal slot %d is (%v)", len(quotas), seen, slot, left)
		}
	}
	f(100)      // the last quota
	f(100, 100) // others are left
}
