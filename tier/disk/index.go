// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"hash/maphash"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
)

// index maps keys to the places of a volume's objects: a hash table with slots of 8 bytes that lead to
// items of 60 bytes. It has no pointers, so the garbage collector does not walk it. It grows in small
// steps, however many objects there are: the slots are in many small tables, the items
// in pages that never move. Most of a search reads slots alone.
type index struct {
	seed   maphash.Seed
	tables [indexTables]table
	items  container.PagedSlice[item]
	used   uint32 // items that were ever in use, the free ones included
	free   uint32 // the first free item, plus 1; 0: none; block of a free item names the next one
	n      int
	kinds  kinds
	seals  []uint16 // short names of the keys that encrypted objects; the first is 0, for plain objects
}

const (
	indexTables = 1024 // by the upper bits of the hash
	tableShift  = 64 - 10

	// A table grows by half when three quarters of it are full.
	leastSlots = 4
)

// table is an open addressing table with linear probing. A slot has the lower half of the
// hash above the number of the item plus 1; 0 is empty.
type table struct {
	slots []uint64
	used  int
}

// item is an object. Its field block has three parts: the place in the segment (21 bits), the index of its encryption key in
// seals, and in the highest bit whether the object was read.
type item struct {
	chunk                 kv.Hash
	sum                   [2]uint32 // lower and upper half: with a uint64 an item would have 64 bytes
	kind                  uint32    // 0: the item is free
	seg, block, len, over uint32
}

const (
	hotBit    = 1 << 31
	sealShift = 21
	blockMask = 1<<sealShift - 1
	maxSeals  = 1 << 10 // names of keys; objects of further ones become misses, see sealPlace
)

// entry returns where the object of an item is.
func (x *index) entry(it *item) entry {
	return entry{uint64(it.sum[1])<<32 | uint64(it.sum[0]), it.seg, it.block & blockMask, it.len, it.block&hotBit != 0, it.over, x.seals[it.block&^hotBit>>sealShift]}
}

// put records in the item `it` where its object is.
func (x *index) put(it *item, e entry) {
	it.sum, it.seg, it.block, it.len, it.over = [2]uint32{uint32(e.sum), uint32(e.sum >> 32)}, e.seg, e.block, e.len, e.over
	it.block |= x.sealPlace(e.seal) << sealShift
	if e.hot {
		it.block |= hotBit
	}
}

// sealPlace returns the index in seals of a key's short name, which it adds if necessary. When seals is full, it returns the last index for
// every other name; these objects become misses, because that key does not open them.
func (x *index) sealPlace(seal uint16) uint32 {
	at := slices.Index(x.seals, seal)
	if at < 0 {
		if at = len(x.seals); at == maxSeals {
			return maxSeals - 1
		}
		x.seals = append(x.seals, seal)
	}
	return uint32(at)
}

func newIndex() index {
	return index{seed: maphash.MakeSeed(), kinds: newKinds(), seals: []uint16{0}}
}

// len returns how many objects there are.
func (x *index) len() int { return x.n }

// get returns where an object is.
func (x *index) get(k *kv.Key) (entry, bool) {
	t, tag := x.table(k)
	if at := x.find(t, tag, x.kinds.find(k), k); at >= 0 {
		return x.entry(x.at(t.slots[at])), true
	}
	return entry{}, false
}

// set records where an object is, and adds the object if it is new.
func (x *index) set(k *kv.Key, e entry) {
	it, _ := x.item(k)
	x.put(it, e)
}

// item returns the item of an object. If the object is new, item adds one and reports false; the caller must then call put for it. The item
// is valid until the next change of the index.
func (x *index) item(k *kv.Key) (it *item, had bool) {
	id := x.kinds.take(k)
	t, tag := x.table(k)
	if at := x.find(t, tag, id, k); at >= 0 {
		return x.at(t.slots[at]), true
	}
	number := x.used
	if x.free > 0 {
		number = x.free - 1
		x.free = x.items.At(int(number)).block
	} else {
		x.used++
		x.items.Grow(int(x.used))
	}
	t.add(uint64(tag)<<32 | uint64(number+1))
	x.n++
	x.kinds.all[id].objects++
	it = x.items.At(int(number))
	*it = item{chunk: k.Chunk, kind: id}
	return it, false
}

// remove forgets an object.
func (x *index) remove(k *kv.Key) {
	t, tag := x.table(k)
	id := x.kinds.find(k)
	at := x.find(t, tag, id, k)
	if at < 0 {
		return
	}
	slot := t.slots[at]
	t.remove(at)
	*x.at(slot) = item{block: x.free}
	x.free = uint32(slot)
	x.n--
	x.kinds.leave(id)
}

// walk calls f with the objects among the n items from place `from` on. It returns the place to continue from; done is true when there are
// no more items. An object that stays in the index keeps its place.
func (x *index) walk(from, n int, f func(kv.Key, entry)) (next int, done bool) {
	next = min(from+n, int(x.used))
	for i := from; i < next; i++ {
		if it := x.items.At(i); it.kind > 0 {
			kind := &x.kinds.all[it.kind]
			f(kv.Key{Namespace: kind.namespace, Chunk: it.chunk, Rank: kind.rank, Group: kind.group}, x.entry(it))
		}
	}
	return next, next == int(x.used)
}

// at returns the item that a slot leads to.
func (x *index) at(slot uint64) *item { return x.items.At(int(uint32(slot) - 1)) }

// table returns the table of a key and its tag there.
func (x *index) table(k *kv.Key) (*table, uint32) {
	h := maphash.Comparable(x.seed, *k)
	return &x.tables[h>>tableShift], uint32(h)
}

// find returns the slot of a key of the given kind, -1 if the key has none. Kind 0 has no objects.
func (x *index) find(t *table, tag, kind uint32, k *kv.Key) int {
	if len(t.slots) == 0 {
		return -1
	}
	for at := t.home(tag); ; {
		slot := t.slots[at]
		if slot == 0 {
			return -1
		}
		if uint32(slot>>32) == tag {
			if it := x.at(slot); it.kind == kind && it.chunk == k.Chunk {
				return at
			}
		}
		if at++; at == len(t.slots) {
			at = 0
		}
	}
}

// home is the slot where the search for a tag begins. A larger tag has the same home or a later one.
func (t *table) home(tag uint32) int { return int(uint64(tag) * uint64(len(t.slots)) >> 32) }

// add puts a slot into the table, which does not have it.
func (t *table) add(slot uint64) {
	if 4*(t.used+1) > 3*len(t.slots) {
		old := t.slots
		t.slots = make([]uint64, max(leastSlots, len(old)*3/2))
		for _, s := range old {
			if s != 0 {
				t.put(s)
			}
		}
	}
	t.put(slot)
	t.used++
}

func (t *table) put(slot uint64) {
	at := t.home(uint32(slot >> 32))
	for t.slots[at] != 0 {
		if at++; at == len(t.slots) {
			at = 0
		}
	}
	t.slots[at] = slot
}

// remove empties a slot, and moves later slots up that a search would otherwise no longer find.
func (t *table) remove(hole int) {
	n := len(t.slots)
	t.used--
	for at := hole; ; {
		t.slots[hole] = 0
		for {
			if at++; at == n {
				at = 0
			}
			if t.slots[at] == 0 {
				return
			}
			home := t.home(uint32(t.slots[at] >> 32))
			if (at-home+n)%n >= (at-hole+n)%n { // its home is at the hole or before it
				break
			}
		}
		t.slots[hole], hole = t.slots[at], at
	}
}

// kind is what the keys of many objects have in common: all but the chunk.
type kind struct {
	namespace kv.Namespace
	rank      kv.Rank
	group     uint32
}

// kinds numbers the kinds of the objects in an index, from 1 on. Numbers of kinds without objects are reused.
type kinds struct {
	ids  map[kind]uint32
	all  []counted // by number
	free []uint32

	last   kind // the kind of the last search, so that most searches are one comparison; lastID 0: none
	lastID uint32
}

type counted struct {
	kind
	objects int
}

func newKinds() kinds { return kinds{ids: map[kind]uint32{}, all: make([]counted, 1)} }

// find returns the number of a key's kind, 0 when no object is of it.
func (c *kinds) find(k *kv.Key) uint32 {
	of := kind{k.Namespace, k.Rank, k.Group}
	if c.lastID > 0 && of == c.last {
		return c.lastID
	}
	id := c.ids[of]
	if id > 0 {
		c.last, c.lastID = of, id
	}
	return id
}

// take returns the number of a key's kind, a new number if no object is of that kind. The caller must then add an object of the kind.
func (c *kinds) take(k *kv.Key) uint32 {
	if id := c.find(k); id > 0 {
		return id
	}
	of := counted{kind{k.Namespace, k.Rank, k.Group}, 0}
	id := uint32(len(c.all))
	if n := len(c.free); n > 0 {
		id, c.free = c.free[n-1], c.free[:n-1]
		c.all[id] = of
	} else {
		c.all = append(c.all, of)
	}
	c.ids[of.kind] = id
	return id
}

// leave counts a removed object of a kind.
func (c *kinds) leave(id uint32) {
	of := &c.all[id]
	if of.objects--; of.objects > 0 {
		return
	}
	delete(c.ids, of.kind)
	c.free = append(c.free, id)
	c.lastID = 0
}
