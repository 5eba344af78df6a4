// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"encoding/binary"
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
)

// indexKey is one of many keys: chunks of three namespaces, two ranks and two groups.
func indexKey(i int) (k kv.Key) {
	k.Namespace[3], k.Rank, k.Group = byte(i%3), kv.Rank(i/3%2), uint32(i/6%2)
	binary.LittleEndian.PutUint32(k.Chunk[28:], uint32(i/12))
	return k
}

func indexEntry(r *rand.Rand) entry {
	return entry{r.Uint64(), r.Uint32(), r.Uint32N(1<<20 + 1), r.Uint32(), r.IntN(2) == 0, r.Uint32(), uint16(r.IntN(5))}
}

// compareIndex compares an index with a map, key by key and as a whole.
func compareIndex(t *testing.T, x *index, want map[kv.Key]entry, keys int) {
	t.Helper()
	for i := range keys {
		k := indexKey(i)
		e, ok := x.get(&k)
		if of, there := want[k]; ok != there || e != of {
			t.Fatalf("key %d: %v, %v; want %v, %v", i, e, ok, of, there)
		}
	}
	seen := map[kv.Key]bool{}
	for at, done := 0, false; !done; {
		at, done = x.walk(at, 100, func(k kv.Key, e entry) {
			if seen[k] || want[k] != e {
				t.Fatalf("walk: %s is %v, want %v; it was seen: %v", k, e, want[k], seen[k])
			}
			seen[k] = true
		})
	}
	if len(seen) != len(want) || x.len() != len(want) {
		t.Fatalf("%d objects, %d are walked; want %d", x.len(), len(seen), len(want))
	}
}

// An index answers like a plain map, while it grows and while most of its entries are removed.
func TestIndex(t *testing.T) {
	f := func(keys int) {
		t.Helper()
		x, want := newIndex(), map[kv.Key]entry{}
		r := rand.New(rand.NewPCG(uint64(keys), 1))
		for i := range 40 * keys {
			k := indexKey(r.IntN(keys))
			if e := indexEntry(r); r.IntN(10) < 5+2*(i/(10*keys)%2*2-1) {
				x.remove(&k)
				delete(want, k)
			} else {
				x.set(&k, e)
				want[k] = e
			}
			if i%(4*keys) == 0 {
				compareIndex(t, &x, want, keys)
			}
		}
		compareIndex(t, &x, want, keys)
		used := x.used
		for i := range keys {
			k := indexKey(i)
			x.remove(&k)
			delete(want, k)
		}
		compareIndex(t, &x, want, keys)
		if len(x.kinds.ids) > 0 || len(x.kinds.free)+1 != len(x.kinds.all) {
			t.Errorf("%d kinds are left of an empty index", len(x.kinds.ids))
		}
		for i := range int(used) {
			k := indexKey(i)
			x.set(&k, entry{seg: 1})
		}
		if x.used > used {
			t.Errorf("%d items for as many objects as %d had", x.used, used)
		}
	}
	f(3)
	f(500)
	f(testkit.Volume(50_000))
}

// A table finds each of its slots and no other, wherever their homes are, while some are put in and others taken out.
func TestTable(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		var tab table
		tags := map[uint32]bool{}
		near := r.Uint32() // homes that lie together, often around the end
		for i := range 600 {
			tag := near + r.Uint32N(1<<24)
			if r.IntN(3) == 0 {
				tag = nearEnd(r)
			}
			at := slotOf(&tab, tag)
			switch {
			case (at >= 0) != tags[tag]:
				t.Fatalf("step %d: tag %x at %d, in the table: %v", i, tag, at, tags[tag])
			case at < 0 && r.IntN(600) > i/2:
				tab.add(uint64(tag)<<32 | 1)
				tags[tag] = true
			}
			for old := range tags {
				if at := slotOf(&tab, old); at < 0 {
					t.Fatalf("step %d: tag %x is lost", i, old)
				} else if r.IntN(20) == 0 {
					tab.remove(at)
					delete(tags, old)
				}
			}
			if tab.used != len(tags) {
				t.Fatalf("%d slots for %d tags", tab.used, len(tags))
			}
		}
	}
}

// nearEnd is one near the end of all tags.
func nearEnd(r *rand.Rand) uint32 { return ^uint32(0) - r.Uint32N(1<<22) }

func slotOf(t *table, tag uint32) int {
	if len(t.slots) == 0 {
		return -1
	}
	for at := t.home(tag); t.slots[at] != 0; at = (at + 1) % len(t.slots) {
		if uint32(t.slots[at]>>32) == tag {
			return at
		}
	}
	return -1
}

// An index of a million objects takes at most 80 bytes for each, however many there are exactly.
func TestIndexBytes(t *testing.T) {
	if testing.Short() {
		t.Skip()
	}
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	x := newIndex()
	worst := 0.0
	for i := range 1_300_000 {
		k := indexKey(i)
		x.set(&k, entry{seg: 1})
		if i > 700_000 && i%100_000 == 0 {
			worst = max(worst, float64(heap()-before)/float64(x.len()))
		}
	}
	if worst > 80 {
		t.Errorf("%.0f bytes an object", worst)
	}
	runtime.KeepAlive(&x)
}

// collide returns two keys, made by of, that have the same tag in the same table.
func collide(x *index, of func(i int) kv.Key) (a, b kv.Key) {
	const keys = 1 << 22
	hashes := make([]uint64, keys)
	for round := 0; ; round += keys {
		for i := range hashes {
			k := of(round + i)
			h := maphash.Comparable(x.seed, k)
			hashes[i] = h>>tableShift<<54 | h&(1<<32-1)<<22 | uint64(i)
		}
		slices.Sort(hashes)
		for i := range keys - 1 {
			if hashes[i]>>22 == hashes[i+1]>>22 {
				return of(round + int(hashes[i]%keys)), of(round + int(hashes[i+1]%keys))
			}
		}
	}
}

// Two keys with the same tag in the same table that differ only in the chunk, or only in the group, are two objects.
func TestIndexCollision(t *testing.T) {
	testkit.LongAlone(t)
	t.Parallel()
	for name, of := range map[string]func(i int) kv.Key{
		"chunk": func(i int) (k kv.Key) { binary.LittleEndian.PutUint32(k.Chunk[:], uint32(i)); return k },
		"group": func(i int) (k kv.Key) { k.Group = uint32(i); return k },
	} {
		x := newIndex()
		a, b := collide(&x, of)
		if ta, tagA := x.table(&a); true {
			if tb, tagB := x.table(&b); a == b || ta != tb || tagA != tagB {
				t.Fatalf("%s: %v and %v do not collide", name, a, b)
			}
		}
		one, two := entry{seg: 1, block: 1}, entry{seg: 2, block: 2}
		want := func(k *kv.Key, e entry, there bool) {
			t.Helper()
			if got, ok := x.get(k); ok != there || got != e {
				t.Errorf("%s: %v, %v; want %v, %v", name, got, ok, e, there)
			}
		}
		x.set(&a, one)
		want(&b, entry{}, false)
		x.remove(&b)
		want(&a, one, true)
		x.set(&b, two)
		want(&a, one, true)
		want(&b, two, true)
		x.remove(&a)
		want(&a, entry{}, false)
		want(&b, two, true)
		x.set(&a, one)
		x.remove(&b)
		want(&a, one, true)
		want(&b, entry{}, false)
	}
}
