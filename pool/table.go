package pool

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
)

// table finds slots by key: open addressing with linear probing over slot
// numbers, 4 bytes each; the keys are the index records'. Deletion shifts later
// entries back, so there are no tombstones.
type table struct {
	cells []uint32 // slot + 1; 0 is empty; length a power of two
	len   int
	seed  uint64
}

// home returns the cell a key hashes to. The chunk hash is a BLAKE3 digest, so a
// seeded mix of parts of the key spreads well.
func (t *table) home(k *Key) int {
	le := binary.LittleEndian
	h := le.Uint64(k.Chunk[:]) ^ t.seed
	h = (h ^ le.Uint64(k.Namespace[:])) * 0x9e3779b97f4a7c15
	h = (h ^ h>>32 ^ uint64(k.Rank)<<32 ^ uint64(k.Group)) * 0xd6e8feb86659fd93
	return int(h>>32) & (len(t.cells) - 1)
}

func (t *table) find(p *Pool, k *Key) (Slot, bool) {
	if t.len == 0 {
		return 0, false
	}
	for i := t.home(k); t.cells[i] != 0; i = (i + 1) & (len(t.cells) - 1) {
		if s := Slot(t.cells[i] - 1); p.record(s).is(k) {
			return s, true
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
		t.grow(p)
	}
	t.len++
	t.put(p, s)
}

func (t *table) put(p *Pool, s Slot) {
	k := p.KeyOf(s)
	i := t.home(&k)
	for t.cells[i] != 0 {
		i = (i + 1) & (len(t.cells) - 1)
	}
	t.cells[i] = uint32(s) + 1
}

func (t *table) grow(p *Pool) {
	if t.seed == 0 {
		t.seed = rand.Uint64() | 1
	}
	old := t.cells
	t.cells = make([]uint32, max(64, 2*len(old)))
	for _, c := range old {
		if c != 0 {
			t.put(p, Slot(c-1))
		}
	}
}

func (t *table) remove(p *Pool, s Slot) {
	mask := len(t.cells) - 1
	k := p.KeyOf(s)
	i := t.home(&k)
	for t.cells[i] != uint32(s)+1 {
		i = (i + 1) & mask
	}
	t.len--
	// Shift back every later entry of the run that may move into the gap.
	for j := (i + 1) & mask; t.cells[j] != 0; j = (j + 1) & mask {
		k := p.KeyOf(Slot(t.cells[j] - 1))
		if home := t.home(&k); (j-home)&mask >= (j-i)&mask {
			t.cells[i] = t.cells[j]
			i = j
		}
	}
	t.cells[i] = 0
}
