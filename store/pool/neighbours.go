// SPDX-License-Identifier: Apache-2.0

package pool

import "github.com/kvasir-kv/kvasir/internal/container"

// regions lists the used slots of each stretch of the segment, so that the slots near a place are found without a look at all slots.
type regions struct {
	bytes int64                            // length of a region
	heads []uint32                         // 1 + the first slot of each region, 0 for none
	links container.PagedSlice[neighbours] // by slot
}

type neighbours struct{ next, prev uint32 } // 1 + slot; 0 for none

// maxRegions bounds the number of regions: small pools have regions of 1 MiB, and large pools have larger ones.
const maxRegions = 4096

func newRegions(poolBytes int64) regions {
	size := max(1<<20, (poolBytes+maxRegions-1)/maxRegions)
	return regions{bytes: size, heads: make([]uint32, (poolBytes+size-1)/size)}
}

func (r *regions) add(s Slot, off int64) {
	r.links.Grow(int(s) + 1)
	head := &r.heads[off/r.bytes]
	*r.links.At(int(s)) = neighbours{next: *head}
	if *head != 0 {
		r.links.At(int(*head - 1)).prev = uint32(s) + 1
	}
	*head = uint32(s) + 1
}

func (r *regions) remove(s Slot, off int64) {
	l := *r.links.At(int(s))
	if l.prev != 0 {
		r.links.At(int(l.prev - 1)).next = l.next
	} else {
		r.heads[off/r.bytes] = l.next
	}
	if l.next != 0 {
		r.links.At(int(l.next - 1)).prev = l.prev
	}
}

// slotsNear appends the used slots that begin in the regions of the bytes [from, to), in no order. end is the end of these regions, or the
// pool's limit if that is lower.
func (p *Pool) slotsNear(slots []Slot, from, to int64) (_ []Slot, end int64) {
	r := &p.near
	first := max(from, 0) / r.bytes
	limit := p.arena.End()
	last := (min(to, limit) - 1) / r.bytes
	for i := first; i <= last; i++ {
		for s := r.heads[i]; s != 0; s = r.links.At(int(s - 1)).next {
			slots = append(slots, Slot(s-1))
		}
	}
	return slots, min((last+1)*r.bytes, limit)
}

// Round returns the bytes of the pool that a slot of n bytes takes.
func (p *Pool) Round(n int64) int64 { return p.arena.Round(n) }
