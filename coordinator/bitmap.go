package coordinator

import "math/bits"

// Bitmap is a set of present blocks kept as bits, per group. Lookups skip 64
// blocks at a time. It suits an exists-set that arrives block by block.
type Bitmap struct {
	units  []int // hash units per block, by group
	blocks []words
	inside []words // hash units inside blocks, for partial hits
}

type words []uint64

// maxBits bounds a group's bits, 32 MiB; positions beyond it stay absent.
const maxBits = 1 << 28

// NewBitmap returns an empty set for c's groups.
func NewBitmap(c *Coordinator) *Bitmap {
	b := &Bitmap{
		units:  make([]int, c.Groups()),
		blocks: make([]words, c.Groups()),
		inside: make([]words, c.Groups()),
	}
	for g := range b.units {
		b.units[g] = max(c.BlockUnits(g), 1)
	}
	return b
}

// Reset empties the set and keeps its memory.
func (b *Bitmap) Reset() {
	for g := range b.blocks {
		clear(b.blocks[g])
		clear(b.inside[g])
	}
}

// Set marks block i of a group as present. The group's bits grow to hold it.
func (b *Bitmap) Set(g, i int) { b.blocks[g] = b.blocks[g].set(i) }

// Clear marks block i of a group as absent.
func (b *Bitmap) Clear(g, i int) { b.blocks[g].clear(i) }

// SetUnit marks a block as present that is filled up to and including the given
// hash unit. A block filled to its end counts as a whole one.
func (b *Bitmap) SetUnit(g, unit int) {
	if k := b.units[g]; (unit+1)%k == 0 {
		b.Set(g, unit/k)
		return
	}
	b.inside[g] = b.inside[g].set(unit)
}

func (w words) set(i int) words {
	if i < 0 || i >= maxBits {
		return w
	}
	for i>>6 >= len(w) {
		w = append(w, 0)
	}
	w[i>>6] |= 1 << (i & 63)
	return w
}

func (w words) has(i int) bool {
	return i>>6 < len(w) && w[i>>6]&(1<<(i&63)) != 0
}

func (w words) clear(i int) {
	if i >= 0 && i>>6 < len(w) {
		w[i>>6] &^= 1 << (i & 63)
	}
}

// firstZero returns the first unset bit of [lo, hi), or hi.
func (w words) firstZero(lo, hi int) int {
	for i := lo; i < hi; i = (i | 63) + 1 {
		if i>>6 >= len(w) {
			return i
		}
		if rest := ^w[i>>6] >> (i & 63); rest != 0 {
			return min(i+bits.TrailingZeros64(rest), hi)
		}
	}
	return hi
}

// last returns the last bit of [lo, hi) that is set (flip 0) or unset (flip all
// ones), or lo-1.
func (w words) last(lo, hi int, flip uint64) int {
	for i := hi - 1; i >= lo; i = (i &^ 63) - 1 {
		v := flip
		if i>>6 < len(w) {
			v ^= w[i>>6]
		} else if flip == 0 { // nothing is set up here
			i = min(i, len(w)<<6)
			continue
		}
		if v <<= 63 - i&63; v != 0 {
			return max(i-bits.LeadingZeros64(v), lo-1)
		}
	}
	return lo - 1
}

func (b *Bitmap) firstAbsent(g, lo, hi int) int { return b.blocks[g].firstZero(lo, hi) }

func (b *Bitmap) lastAbsent(g, lo, hi int) int {
	return b.blocks[g].last(lo, max(lo, hi), ^uint64(0))
}

func (b *Bitmap) lastPresent(g, lo, hi int, fine bool) int {
	if !fine {
		return b.blocks[g].last(lo, hi, 0)
	}
	k := b.units[g]
	block := b.blocks[g].last(0, hi/k, 0) // stands for its last unit
	return max(b.inside[g].last(lo, hi, 0), (block+1)*k-1, lo-1)
}

// Prefix implements Presence.
func (b *Bitmap) Prefix(s Series, lo, hi int) int { return prefixOf(b, &s, lo, hi) }

// Window implements Presence.
func (b *Bitmap) Window(s Series, hi int, w Window) int { return windowOf(b, &s, hi, w) }

// Last implements Presence.
func (b *Bitmap) Last(s Series, lo, hi, align int) int { return alignedLastOf(b, &s, lo, hi, align) }
