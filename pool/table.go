package pool

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
)

// table finds slots by key: open addressing with linear probing over slot
// numbers, 4 bytes each; the keys are the index records'.
//
// It grows a little with each insertion: the former cells stay until all their
// entries have moved, so that no call takes long. An entry that moves, or is
// removed there, leaves a mark that a search passes over. In the current cells
// deletion shifts later entries back.
type table struct {
	cells  []uint32 // slot + 1; 0 is empty; length a power of two
	former []uint32 // the same, half as many; nil unless entries are left in it
	moved  int      // cells of former that are done with
	len    int
	seed   uint64
}

// gone marks a cell of former whose entry moved or was removed.
const gone = ^uint32(0)

// moveStep is how many cells of former an insertion moves: enough to be done well
// before the table has to grow again.
const moveStep = 4

// home returns the cell of mask+1 that a key hashes to. The chunk hash is a BLAKE3
// digest, so a seeded mix of parts of the key spreads well.
func (t *table) home(k *Key, mask int) int {
	le := binary.LittleEndian
	h := le.Uint64(k.Chunk[:]) ^ t.seed
	h = (h ^ le.Uint64(k.Namespace[:])) * 0x9e3779b97f4a7c15
	h = (h ^ h>>32 ^ uint64(k.Rank)<<32 ^ uint64(k.Group)) * 0xd6e8feb86659fd93
	return int(h>>32) & mask
}

func (t *table) find(p *Pool, k *Key) (Slot, bool) {
	if t.len == 0 {
		return 0, false
	}
	mask := len(t.cells) - 1
	for i := t.home(k, mask); t.cells[i] != 0; i = (i + 1) & mask {
		if s := Slot(t.cells[i] - 1); p.record(s).is(k) {
			return s, true
		}
	}
	if t.former == nil {
		return 0, false
	}
	mask = len(t.former) - 1
	for i := t.home(k, mask); t.former[i] != 0; i = (i + 1) & mask {
		if c := t.former[i]; c != gone && p.record(Slot(c-1)).is(k) {
			return Slot(c - 1), true
		}
	}
	return 0, false
}

// is reports whether the record's key is k.
func (r record) is(k *Key) bool {
	le := binary.LittleEndian
	return bytes.Equal(r.b[24:56], k.Chunk[:]) && bytes.Equal(r.b[56:72], k.Namespace[:]) &&
		le.Uint32(r.b[72:]) == uint32(k.Rank) && le.Uint32(r.b[76:]) == k.Group
}

func (t *table) insert(p *Pool, s Slot) {
	if 4*(t.len+1) > 3*len(t.cells) {
		t.move(p, len(t.former)) // nothing is left there unless moveStep is too small
		t.grow()
	}
	t.move(p, moveStep)
	t.len++
	t.put(p, s)
}

func (t *table) put(p *Pool, s Slot) {
	k := p.KeyOf(s)
	mask := len(t.cells) - 1
	i := t.home(&k, mask)
	for t.cells[i] != 0 {
		i = (i + 1) & mask
	}
	t.cells[i] = uint32(s) + 1
}

func (t *table) grow() {
	if t.seed == 0 {
		t.seed = rand.Uint64() | 1
	}
	t.former, t.moved = t.cells, 0
	t.cells = make([]uint32, max(64, 2*len(t.cells)))
}

// move moves the entries of n cells of former.
func (t *table) move(p *Pool, n int) {
	for ; n > 0 && t.former != nil; n-- {
		if t.moved == len(t.former) {
			t.former = nil
			return
		}
		if c := t.former[t.moved]; c != 0 && c != gone {
			t.former[t.moved] = gone
			t.put(p, Slot(c-1))
		}
		t.moved++
	}
}

func (t *table) remove(p *Pool, s Slot) {
	t.len--
	k := p.KeyOf(s)
	mask := len(t.cells) - 1
	i := t.home(&k, mask)
	for t.cells[i] != uint32(s)+1 {
		if t.cells[i] == 0 {
			t.removeFormer(&k, s)
			return
		}
		i = (i + 1) & mask
	}
	// Shift back every later entry of the run that may move into the gap.
	for j := (i + 1) & mask; t.cells[j] != 0; j = (j + 1) & mask {
		k := p.KeyOf(Slot(t.cells[j] - 1))
		if home := t.home(&k, mask); (j-home)&mask >= (j-i)&mask {
			t.cells[i] = t.cells[j]
			i = j
		}
	}
	t.cells[i] = 0
}

func (t *table) removeFormer(k *Key, s Slot) {
	mask := len(t.former) - 1
	i := t.home(k, mask)
	for t.former[i] != uint32(s)+1 {
		i = (i + 1) & mask
	}
	t.former[i] = gone
}
