// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

func spaceOf(i int) kv.Namespace { return kv.Namespace{9, byte(i), byte(i >> 8), byte(i >> 16)} }

// A table that has seen as many namespaces as it keeps forgets those without a slot, and goes on. Where each has a slot, the slots of a
// further namespace have no tenant until one is empty again.
func TestNamespacesWithoutSlotsMakeRoom(t *testing.T) {
	const most = 1 << 14
	tab, _ := table(1 << 20)
	if err := tab.SetTTL("a", time.Hour); err != nil {
		t.Fatal(err)
	}
	for i := range 3 * most {
		if !tab.Name(spaceOf(i), []byte("a")) || tab.Name(spaceOf(i), []byte("a")) {
			t.Fatalf("namespace %d is not news once", i)
		}
	}
	for i := range most {
		tab.Name(spaceOf(i), []byte("a"))
		tab.Add(uint32(i), spaceOf(i), uint64(i), 0)
	}
	if got := tab.List()[0]; got.Objects != most {
		t.Fatalf("%d of %d slots are the tenant's", got.Objects, most)
	}
	if tab.Name(spaceOf(most), []byte("a")) {
		t.Error("a namespace beyond the limit is known while all others have slots")
	}
	tab.Add(most, spaceOf(most), 1, 0)
	if got := tab.List()[0]; got.Objects != most {
		t.Errorf("%d slots are the tenant's", got.Objects)
	}
	tab.Remove(7, tenant.Other)
	if !tab.Name(spaceOf(most), []byte("a")) {
		t.Error("a namespace without slots makes no room")
	}
	tab.Adopt(most, spaceOf(most), true, 1, 0)
	if got := tab.List()[0]; got.Objects != most {
		t.Errorf("%d slots are the tenant's", got.Objects)
	}
	if _, ok := tab.DropQuota("a"); !ok || !tab.DropTTL("a") || tab.Named() {
		t.Error("something of the tenant is left")
	}
}

// Random tenants, TTLs, uses and pins against plain maps.
func TestLivesAndPinsAgainstMaps(t *testing.T) {
	f := func(seed uint64) {
		t.Helper()
		r := rand.New(rand.NewPCG(seed, 1))
		tab := tenant.New(1000, evict.NewLRU(), func(int64) evict.Policy { return evict.NewLRU() }, func(uint32) bool { return false }, func(uint32) int64 { return 10 })
		type slot struct {
			space, used int
			pinned      int // until
		}
		var (
			slots  = map[uint32]*slot{}
			ttls   = map[int]int{} // by tenant, seconds; 0: for ever
			named  = map[int]bool{}
			common int
			now    int
			on     = -1 // since when
			limits = map[int]int64{}
		)
		const people = 3
		salt := func(of int) string { return fmt.Sprint("t", of) }
		turn := func() {
			switch {
			case common == 0 && len(ttls) == 0:
				on = -1
			case on < 0:
				on = now
			}
		}
		pinnedOf := func(of int) (n int64) {
			for _, s := range slots {
				if s.space == of && s.pinned > 0 {
					n += 10
				}
			}
			return n
		}
		for range 3000 {
			of, n := r.IntN(people), uint32(r.IntN(12))
			s := slots[n]
			switch r.IntN(11) {
			case 0:
				now += r.IntN(5)
				tab.Tick(time.Duration(now) * time.Second)
			case 1, 2, 3:
				if s == nil {
					tab.Add(n, spaceOf(of), uint64(n), 0)
					slots[n] = &slot{space: of, used: now}
				} else {
					tab.Use(n)
					s.used = now
				}
			case 4:
				if s != nil {
					tab.Remove(n, tenant.Expired)
					if tab.Unpin(n) != (s.pinned > 0) {
						t.Fatalf("seed %d: slot %d is pinned until %d, or not", seed, n, s.pinned)
					}
					delete(slots, n)
				}
			case 5:
				common = []int{0, 4, 9}[r.IntN(3)]
				if err := tab.SetCommonTTL(time.Duration(common) * time.Second); err != nil {
					t.Fatal(err)
				}
				turn()
			case 6:
				ttl := []int{0, 2, 20}[r.IntN(3)]
				d := time.Duration(ttl) * time.Second
				if ttl == 0 {
					d = tenant.Forever
				}
				if err := tab.SetTTL(salt(of), d); err != nil {
					t.Fatal(err)
				}
				if ttls[of] = ttl; tab.Name(spaceOf(of), []byte(salt(of))) {
					for n, s := range slots {
						if s.space == of {
							tab.Adopt(n, spaceOf(of), true, 0, 0)
						}
					}
				}
				named[of] = true
				turn()
			case 7:
				if _, has := ttls[of]; tab.DropTTL(salt(of)) != has {
					t.Fatalf("seed %d: TTL of %d", seed, of)
				}
				delete(ttls, of)
				turn()
			case 8:
				limits[of] = int64(r.IntN(4)) * 10
				if err := tab.SetPinLimit(salt(of), limits[of]); err != nil {
					t.Fatal(err)
				}
				tab.EndPins(false, 1000, func(n uint32) { slots[n].pinned = 0 })
			case 9:
				if s == nil {
					continue
				}
				life := 1 + r.IntN(30)
				fresh, err := tab.Pin(salt(s.space), n, time.Duration(life)*time.Second)
				full := s.pinned == 0 && pinnedOf(s.space)+10 > limits[s.space]
				if (err != nil) != full || fresh != (err == nil && s.pinned == 0) {
					t.Fatalf("seed %d: pin of slot %d: %v, %v; %d of %d are pinned", seed, n, fresh, err, pinnedOf(s.space), limits[s.space])
				}
				if err == nil {
					s.pinned = max(s.pinned, now+life+1)
				}
			case 10:
				tab.EndPins(false, 1000, func(n uint32) {
					if s := slots[n]; s.pinned == 0 || s.pinned > now {
						t.Fatalf("seed %d: the pin of %d ends at %d, until %d", seed, n, now, s.pinned)
					}
					slots[n].pinned = 0
				})
				for n, s := range slots {
					if s.pinned > 0 && s.pinned <= now {
						t.Fatalf("seed %d: slot %d is pinned until %d at %d", seed, n, s.pinned, now)
					}
				}
			}
			for n, s := range slots {
				ttl := common
				if own, ok := ttls[s.space]; ok {
					ttl = own
				}
				want := ttl > 0 && on >= 0 && now-max(s.used, on) > ttl
				if tab.Expired(n) != want {
					t.Fatalf("seed %d: slot %d of %d, used at %d, TTL %d since %d, now %d: expired is not %v", seed, n, s.space, s.used, ttl, on, now, want)
				}
			}
			for _, u := range tab.List() {
				var of int
				_, _ = fmt.Sscanf(u.Salt, "t%d", &of)
				if u.PinnedBytes != pinnedOf(of) || u.PinnedBytes > u.PinLimit || u.PinLimit != limits[of] {
					t.Fatalf("seed %d: %+v; pinned are %d of %d", seed, u, pinnedOf(of), limits[of])
				}
			}
		}
	}
	for seed := range uint64(20) {
		f(seed)
	}
}

// Pins are listed in pieces, all of them, and the limits of pins are kept.
func TestPinsAreListedAndBounded(t *testing.T) {
	tab := tenant.New(1<<40, evict.NewLRU(), func(int64) evict.Policy { return evict.NewLRU() }, func(uint32) bool { return false }, func(uint32) int64 { return 1 })
	if err := tab.SetPinLimit("a", 1<<39); err != nil {
		t.Fatal(err)
	}
	for i := range uint32(tenant.MaxPins) {
		if _, err := tab.Pin("a", i, 10*365*24*time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tab.Pin("a", tenant.MaxPins, time.Hour); !errors.Is(err, tenant.ErrTooManyPins) {
		t.Errorf("one more: %v", err)
	}
	seen := map[uint32]bool{}
	for from := 0; ; {
		var list []tenant.Pinned
		if list, from = tab.Pins(from, 1000, nil); len(list) == 0 {
			t.Fatal("nothing, and more")
		}
		for _, p := range list {
			seen[p.Slot] = true
			if p.Left > tenant.MaxPinLife+time.Second {
				t.Fatalf("pinned for %v", p.Left)
			}
		}
		if from == 0 {
			break
		}
	}
	if len(seen) != tenant.MaxPins {
		t.Errorf("%d of %d are listed", len(seen), tenant.MaxPins)
	}
	ended := 0
	for more := true; more; {
		was := ended
		more = tab.EndPins(true, 1000, func(uint32) { ended++ })
		if ended-was > 1000 {
			t.Fatal("more than was asked for")
		}
	}
	if ended != tenant.MaxPins || tab.List()[0].PinnedObjects != 0 {
		t.Errorf("%d ended: %+v", ended, tab.List())
	}
	for i := range tenant.MaxQuotas - 1 {
		if err := tab.SetPinLimit(fmt.Sprint(i), 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := tab.SetPinLimit("more", 1); !errors.Is(err, tenant.ErrTooMany) {
		t.Errorf("one more may pin: %v", err)
	}
}
