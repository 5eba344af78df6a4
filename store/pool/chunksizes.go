// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

// An engine reads the chunk size once, when it starts, and keeps it for life. So the index records the sizes that earlier servers of this
// pool announced, even if a server makes the pool anew with another size. They are in header bytes 88 to 119: eight numbers of 4 bytes, 0
// for none. Of more sizes, the latest are kept.
const (
	headerFormer = 88
	maxFormer    = 8
)

// FormerChunkTokens returns the chunk sizes, other than the pool's own, that earlier servers of the pool announced to engines. Such engines
// may still run.
func (p *Pool) FormerChunkTokens() []int { return formerOf(p.index) }

// ForgetFormer forgets the former chunk sizes. Call it when no engine uses one any more.
func (p *Pool) ForgetFormer() { setFormer(p.index, nil) }

func formerOf(index *shm.Segment) (out []int) {
	for i := range int64(maxFormer / 2) {
		w := index.Word(headerFormer + 8*i).Load()
		for _, n := range []uint32{uint32(w), uint32(w >> 32)} {
			if n != 0 {
				out = append(out, int(n))
			}
		}
	}
	return out
}

func setFormer(index *shm.Segment, sizes []int) {
	for i := range int64(maxFormer / 2) {
		w := uint64(0)
		for half := range int64(2) {
			if at := int(2*i + half); at < len(sizes) {
				w |= uint64(uint32(sizes[at])) << (32 * half)
			}
		}
		index.Word(headerFormer + 8*i).Store(w)
	}
}

// announcedSizes returns the chunk sizes other than `ours` that the servers of an index announced, the latest first.
func announcedSizes(index *shm.Segment, h header, ours int) []int {
	announced := append([]int{h.opts.ChunkTokens}, formerOf(index)...)
	announced = slices.DeleteFunc(announced, func(n int) bool { return n == ours || n == 0 })
	return announced[:min(len(announced), maxFormer)]
}

// FormerTransfer has the slots that one transfer of an earlier server's worker may still touch.
type FormerTransfer struct {
	Writer Writer        // the transfer; see Held
	For    time.Duration // time since the first start of a server that found the slots held
	Reads  bool          // the transfer reads: the slots are resident
	Slots  []Slot
}

// FormerTransfers returns the held slots of Restored, by transfer, the latest transfer first.
func (p *Pool) FormerTransfers() []FormerTransfer {
	type key struct {
		writer Writer
		age    time.Duration
		reads  bool
	}
	of := map[key][]Slot{}
	for _, h := range p.restored.Held {
		k := key{h.Writer, h.For, p.StateOf(h.Slot) == Resident}
		of[k] = append(of[k], h.Slot)
	}
	out := make([]FormerTransfer, 0, len(of))
	for k, slots := range of {
		out = append(out, FormerTransfer{Writer: k.writer, For: k.age, Reads: k.reads, Slots: slots})
	}
	slices.SortFunc(out, func(a, b FormerTransfer) int {
		return cmp.Or(cmp.Compare(a.For, b.For), cmp.Compare(a.Slots[0], b.Slots[0]))
	})
	return out
}
