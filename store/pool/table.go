// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"

	"github.com/kvasir-kv/kvasir/kv"
)

// table finds slots by key. It is a hash table with open addressing and linear probing over slot numbers, 4 bytes each; the keys are in the
// index records.
//
// The table grows a little with each insertion: the former cells stay until all their entries have moved, so that no call takes long. An
// entry that is moved or removed there leaves a mark, which a search passes over. In the current cells a removal shifts later entries back.
type table struct {
	cells  cells // slot + 1; 0 is empty
	former cells // the cells before the last growth, half as many; empty once all their entries have moved
	moved  int   // number of former cells whose entries have moved
	len    int
	seed   uint64
}

// cells is a power of two of cells. Their memory is allocated page by page as they are used: an allocation of a million at once would keep
// other goroutines from the lock for milliseconds.
type cells struct {
	len   int
	pages []*[cellPage]uint32 // nil: all its cells are 0
}

const cellPage = 4096

func newCells(n int) cells {
	return cells{n, make([]*[cellPage]uint32, (n+cellPage-1)/cellPage)}
}

func (c *cells) get(i int) uint32 {
	if p := c.pages[uint(i)/cellPage]; p != nil {
		return p[uint(i)%cellPage]
	}
	return 0
}

func (c *cells) set(i int, v uint32) {
	p := &c.pages[uint(i)/cellPage]
	if *p == nil {
		*p = new([cellPage]uint32)
	}
	(*p)[uint(i)%cellPage] = v
}

// gone marks a cell of former whose entry was moved or removed.
const gone = ^uint32(0)

// moveStep is how many former cells one insertion moves. It is large enough that all have moved well before the table grows again.
const moveStep = 4

// home returns the cell, of mask+1 cells, at which the search for a key begins. The chunk hash is a BLAKE3 digest, so a seeded mix of parts
// of the key spreads well.
func (t *table) home(k *kv.Key, mask int) int {
	le := binary.LittleEndian
	h := le.Uint64(k.Chunk[:]) ^ t.seed
	h = (h ^ le.Uint64(k.Namespace[:])) * 0x9e3779b97f4a7c15
	h = (h ^ h>>32 ^ uint64(k.Rank)<<32 ^ uint64(k.Group)) * 0xd6e8feb86659fd93
	return int(h>>32) & mask
}

func (t *table) find(p *Pool, k *kv.Key) (Slot, bool) {
	if s, ok := t.cells.find(t, p, k); ok || t.former.len == 0 {
		return s, ok
	}
	return t.former.find(t, p, k)
}

func (in *cells) find(t *table, p *Pool, k *kv.Key) (Slot, bool) {
	if in.len == 0 {
		return 0, false
	}
	mask := in.len - 1
	for i := t.home(k, mask); ; i = (i + 1) & mask {
		c := in.get(i)
		if c == 0 {
			return 0, false
		}
		if c != gone && p.record(Slot(c-1)).is(k) {
			return Slot(c - 1), true
		}
	}
}

// is reports whether the record's key is k.
func (r record) is(k *kv.Key) bool {
	le := binary.LittleEndian
	return bytes.Equal(r.b[24:56], k.Chunk[:]) && bytes.Equal(r.b[56:72], k.Namespace[:]) &&
		le.Uint32(r.b[72:]) == uint32(k.Rank) && le.Uint32(r.b[76:]) == k.Group
}

func (t *table) insert(p *Pool, s Slot) {
	if 4*(t.len+1) > 3*t.cells.len {
		t.move(p, t.former.len) // nothing is left there unless moveStep is too small
		t.grow()
	}
	t.move(p, moveStep)
	t.len++
	t.put(p, s)
}

func (t *table) put(p *Pool, s Slot) {
	k := p.KeyOf(s)
	mask := t.cells.len - 1
	i := t.home(&k, mask)
	for t.cells.get(i) != 0 {
		i = (i + 1) & mask
	}
	t.cells.set(i, uint32(s)+1)
}

func (t *table) grow() {
	if t.seed == 0 {
		t.seed = rand.Uint64() | 1
	}
	t.former, t.moved = t.cells, 0
	t.cells = newCells(max(64, 2*t.cells.len))
}

// move moves the entries of the next n former cells.
func (t *table) move(p *Pool, n int) {
	for ; n > 0 && t.former.len > 0; n-- {
		if t.moved == t.former.len {
			t.former = cells{}
			return
		}
		if c := t.former.get(t.moved); c != 0 && c != gone {
			t.former.set(t.moved, gone)
			t.put(p, Slot(c-1))
		}
		t.moved++
	}
}

func (t *table) remove(p *Pool, s Slot) {
	t.len--
	k := p.KeyOf(s)
	mask := t.cells.len - 1
	i := t.home(&k, mask)
	for t.cells.get(i) != uint32(s)+1 {
		if t.cells.get(i) == 0 {
			t.removeFormer(&k, s)
			return
		}
		i = (i + 1) & mask
	}
	// Shift back every later entry of the run that may move into the gap.
	for j := (i + 1) & mask; t.cells.get(j) != 0; j = (j + 1) & mask {
		k := p.KeyOf(Slot(t.cells.get(j) - 1))
		if home := t.home(&k, mask); (j-home)&mask >= (j-i)&mask {
			t.cells.set(i, t.cells.get(j))
			i = j
		}
	}
	t.cells.set(i, 0)
}

func (t *table) removeFormer(k *kv.Key, s Slot) {
	mask := t.former.len - 1
	i := t.home(k, mask)
	for t.former.get(i) != uint32(s)+1 {
		i = (i + 1) & mask
	}
	t.former.set(i, gone)
}
