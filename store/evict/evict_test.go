// SPDX-License-Identifier: Apache-2.0

package evict_test

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/store/evict"
)

// item is what a naive policy knows of a slot.
type item struct {
	slot   uint32
	id     uint64
	parent uint64
	weight int64
	freq   int
}

// naive is a policy written for clearness: slices, searched each time, and nothing is
// remembered of who was busy.
type naive interface {
	add(it item)
	use(slot uint32)
	remove(slot uint32)
	victim(busy map[uint32]bool) (uint32, bool)
}

func index(of []item, slot uint32) int {
	return slices.IndexFunc(of, func(it item) bool { return it.slot == slot })
}

func idle(of []item, busy map[uint32]bool) int {
	return slices.IndexFunc(of, func(it item) bool { return !busy[it.slot] })
}

type naiveLRU struct{ order []item } // oldest first

func (n *naiveLRU) add(it item) { n.order = append(n.order, it) }

func (n *naiveLRU) use(slot uint32) {
	if i := index(n.order, slot); i >= 0 {
		it := n.order[i]
		n.order = append(slices.Delete(n.order, i, i+1), it)
	}
}

func (n *naiveLRU) remove(slot uint32) {
	if i := index(n.order, slot); i >= 0 {
		n.order = slices.Delete(n.order, i, i+1)
	}
}

func (n *naiveLRU) victim(busy map[uint32]bool) (uint32, bool) {
	i := idle(n.order, busy)
	if i < 0 {
		return 0, false
	}
	return n.order[i].slot, true
}

// naiveS3 follows the paper line by line.
type naiveS3 struct {
	capacity      int64
	small, main   []item // oldest first
	ghosts        []item
	ghostCapacity int64
}

func weigh(of []item) (sum int64) {
	for _, it := range of {
		sum += it.weight
	}
	return sum
}

func (n *naiveS3) add(it item) {
	for i := len(n.ghosts) - 1; i >= 0; i-- {
		if n.ghosts[i].id == it.id {
			n.ghosts = slices.Delete(n.ghosts, i, i+1)
			n.main = append(n.main, it)
			return
		}
	}
	n.small = append(n.small, it)
}

func (n *naiveS3) use(slot uint32) {
	for _, of := range [][]item{n.small, n.main} {
		if i := index(of, slot); i >= 0 {
			of[i].freq = min(of[i].freq+1, 3)
		}
	}
}

func (n *naiveS3) remove(slot uint32) {
	if i := index(n.main, slot); i >= 0 {
		n.main = slices.Delete(n.main, i, i+1)
	}
	if i := index(n.small, slot); i >= 0 {
		it := n.small[i]
		n.small = slices.Delete(n.small, i, i+1)
		if it.freq <= 1 {
			n.ghosts = slices.DeleteFunc(n.ghosts, func(o item) bool { return o.id == it.id })
			for len(n.ghosts) > 0 && weigh(n.ghosts)+it.weight > n.ghostCapacity {
				n.ghosts = n.ghosts[1:]
			}
			n.ghosts = append(n.ghosts, it)
		}
	}
}

func (n *naiveS3) victim(busy map[uint32]bool) (uint32, bool) {
	for {
		s, m := idle(n.small, busy), idle(n.main, busy)
		switch {
		case s < 0 && m < 0:
			return 0, false
		case s >= 0 && (weigh(n.small) >= n.capacity/10 || m < 0):
			it := n.small[s]
			if it.freq <= 1 {
				return it.slot, true
			}
			it.freq = 0
			n.small = slices.Delete(n.small, s, s+1)
			n.main = append(n.main, it)
		default:
			it := n.main[m]
			if it.freq == 0 {
				return it.slot, true
			}
			it.freq--
			n.main = append(slices.Delete(n.main, m, m+1), it)
		}
	}
}

// policies are the policies that a model names the victims of exactly; rules_test.go has rules for all.
var policies = map[string]func(capacity int64) naive{
	"lru":    func(int64) naive { return &naiveLRU{} },
	"s3fifo": func(c int64) naive { return &naiveS3{capacity: c, ghostCapacity: c - c/10} },
}

// victim asks until the policy has looked at all.
func victim(p evict.Policy, busy func(uint32) bool) (slot uint32, ok bool) {
	for more := true; more && !ok; {
		slot, ok, more = p.Victim(busy)
	}
	return slot, ok
}

// Random lives of slots, some of them busy at times: every policy names the victims
// that its model names.
func TestPoliciesAgainstModels(t *testing.T) {
	for name := range policies {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(r *rapid.T) {
				capacity := rapid.Int64Range(1, 200).Draw(r, "capacity")
				p, err := evict.New(name, capacity)
				if err != nil {
					r.Fatal(err)
				}
				against(r, p, policies[name](capacity))
			})
		})
	}
}

func against(r *rapid.T, p evict.Policy, model naive) {
	in, busy := map[uint32]bool{}, map[uint32]bool{}
	asked := func() (uint32, bool) { return victim(p, func(s uint32) bool { return busy[s] }) }
	for range rapid.IntRange(1, 150).Draw(r, "steps") {
		s := rapid.Uint32Range(0, 20).Draw(r, "slot")
		switch op := rapid.SampledFrom([]string{"add", "add", "use", "remove", "busy", "evict", "look"}).Draw(r, "op"); {
		case op == "add" && !in[s]:
			it := item{slot: s, id: rapid.Uint64Range(0, 30).Draw(r, "id"), weight: rapid.Int64Range(1, 20).Draw(r, "weight")}
			in[s] = true
			p.Add(it.slot, it.id, it.parent, it.weight)
			model.add(it)
		case op == "use":
			p.Use(s)
			model.use(s)
		case op == "remove":
			delete(in, s)
			delete(busy, s)
			p.Remove(s)
			model.remove(s)
		case op == "busy" && in[s] && busy[s]:
			delete(busy, s)
			p.Use(s)
			model.use(s)
		case op == "busy" && in[s]:
			busy[s] = true
		case op == "evict", op == "look":
			got, ok := asked()
			want, wantOK := model.victim(busy)
			if ok != wantOK || ok && got != want {
				r.Fatalf("Victim = %d, %v, want %d, %v", got, ok, want, wantOK)
			}
			if ok && op == "evict" {
				delete(in, got)
				p.Remove(got)
				model.remove(got)
			}
		}
	}
	left := 0
	p.Ascend(func(s uint32) bool {
		left++
		if !in[s] {
			r.Fatalf("Ascend names slot %d, which is not in the policy", s)
		}
		return true
	})
	if left+len(busy) < len(in) {
		r.Fatalf("Ascend names %d of %d slots, %d of them busy", left, len(in), len(busy))
	}
}

// A pool full of busy slots costs a bounded number of looks per call, and each slot one
// look until it is used: not one for every chunk that is to be stored.
func TestBusySlotsAreLookedAtOnce(t *testing.T) {
	slots := int64(testkit.Volume(100_000))
	for _, name := range evict.Names {
		p, err := evict.New(name, slots)
		if err != nil {
			t.Fatal(err)
		}
		for s := range uint32(slots) {
			p.Add(s, uint64(s), 0, 1)
		}
		looks, all := 0, func(uint32) bool { return true }
		count := func(busy func(uint32) bool) func(uint32) bool {
			return func(s uint32) bool { looks++; return busy(s) }
		}
		for more := true; more; {
			before := looks
			_, _, more = p.Victim(count(all))
			if looks-before > 1000 {
				t.Fatalf("%s: one call looked at %d slots", name, looks-before)
			}
		}
		if looks > int(slots) {
			t.Errorf("%s: %d looks at %d slots", name, looks, slots)
		}
		looks = 0
		for range 1000 {
			victim(p, count(all))
		}
		if looks > 0 {
			t.Errorf("%s: %d looks at slots that were found busy before", name, looks)
		}
		idle := func(s uint32) bool { return s != 777 }
		p.Use(777)
		if s, ok := victim(p, count(idle)); !ok || s != 777 {
			t.Errorf("%s: the slot that is no longer busy is not found: %d, %v", name, s, ok)
		}
		for range 10 { // used often enough for any policy
			p.Use(777)
		}
		if s, ok := victim(p, count(idle)); !ok || s != 777 || looks > 100 {
			t.Errorf("%s: %d, %v after %d looks", name, s, ok, looks)
		}
	}
}

// What a policy is for: a long scan of prompts that never come again does not push out
// what is used again and again. An LRU lets it.
func TestScanResistance(t *testing.T) {
	const slots, hot = 1000, 50
	kept := func(name string) (n int) {
		p, err := evict.New(name, slots)
		if err != nil {
			t.Fatal(err)
		}
		holds, at, free := map[uint32]uint64{}, map[uint64]uint32{}, []uint32{}
		for s := range uint32(slots) {
			free = append(free, s)
		}
		get := func(id uint64) {
			if s, ok := at[id]; ok {
				p.Use(s)
				return
			}
			if len(free) == 0 {
				s, ok := victim(p, func(uint32) bool { return false })
				if !ok {
					t.Fatal("nothing to evict")
				}
				p.Remove(s)
				delete(at, holds[s])
				free = append(free, s)
			}
			s := free[len(free)-1]
			free = free[:len(free)-1]
			holds[s], at[id] = id, s
			p.Add(s, id, 0, 1)
		}
		for range 3 {
			for id := range uint64(hot) {
				get(id)
			}
		}
		for id := range uint64(10 * slots) {
			get(1e6 + id)
		}
		for id := range uint64(hot) {
			if _, ok := at[id]; ok {
				n++
			}
		}
		return n
	}
	if n := kept("lru"); n != 0 {
		t.Errorf("lru keeps %d of %d through a scan of ten times the pool: the test shows nothing", n, hot)
	}
	if n := kept("s3fifo"); n != hot {
		t.Errorf("s3fifo keeps %d of %d", n, hot)
	}
}

// What is evicted soon after it came, and comes back, enters the main queue as long as
// it is remembered: as long as nine tenths of a pool were evicted since.
func TestComeback(t *testing.T) {
	const asNew = 49 // of 51: the last but one that came
	f := func(evictedSince int, remembered bool) {
		t.Helper()
		p := evict.NewS3FIFO(100)
		for s := range uint32(50) {
			p.Add(s, uint64(s), 0, 1)
		}
		p.Remove(7)
		for i := range evictedSince {
			p.Add(60, 1000+uint64(i), 0, 1)
			p.Remove(60)
		}
		p.Add(7, 7, 0, 1)
		p.Add(61, 2000, 0, 1) // never seen before
		order := []uint32{}
		for {
			s, ok := victim(p, func(uint32) bool { return false })
			if !ok {
				break
			}
			p.Remove(s)
			order = append(order, s)
		}
		if at := slices.Index(order, 7); len(order) != 51 || (at != asNew) != remembered {
			t.Errorf("%d evicted since: of %d slots it goes as number %d", evictedSince, len(order), at)
		}
	}
	f(0, true)
	f(89, true)
	f(90, false)
	f(500, false)
}

func TestUnknownPolicy(t *testing.T) {
	if p, err := evict.New("mru", 1); err == nil {
		t.Errorf("%T", p)
	} else if got := err.Error(); got != `evict: unknown policy "mru"; known are arc, leaf-hazard, leaf-lru, lru, s3fifo` {
		t.Error(got)
	}
}

// One reserve in a full pool: the victim goes, a new slot comes.
func BenchmarkVictim(b *testing.B) {
	const slots = 1 << 20
	for _, name := range evict.Names {
		b.Run(name, func(b *testing.B) {
			p, err := evict.New(name, slots)
			if err != nil {
				b.Fatal(err)
			}
			for s := range uint32(slots) {
				p.Add(s, uint64(s), 0, 1)
			}
			id := uint64(slots)
			b.ReportAllocs()
			for b.Loop() {
				s, ok := victim(p, func(uint32) bool { return false })
				if !ok {
					b.Fatal("nothing to evict")
				}
				p.Remove(s)
				p.Add(s, id, 0, 1)
				id++
			}
		})
	}
}
