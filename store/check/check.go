// Package check keeps the books of checksums: which objects are to be compared with
// theirs before they are served, and which are to get one. It reads no bytes.
//
// Books take no lock: their owner's covers them.
package check

import (
	"time"

	"github.com/kvasir-kv/kvasir/internal/container/growing"
)

// maxDue bounds the objects that wait for a checksum. Beyond it they stay without one.
const maxDue = 1 << 20

// Books know slots of a pool. Their zero value is empty.
type Books struct {
	suspects growing.Slice[bool] // by slot: to be compared before it is served
	order    []uint32            // of the suspects, the most recently used last
	due      growing.Queue[due]  // committed, without a checksum; oldest first
}

type due struct {
	slot, generation uint32
	at               time.Time
}

// Suspect notes that an object is to be compared first: before those that were noted
// earlier.
func (b *Books) Suspect(slot uint32) {
	b.suspects.Grow(int(slot) + 1)
	*b.suspects.At(int(slot)) = true
	b.order = append(b.order, slot)
}

// Suspected reports whether an object is to be compared before it is served.
func (b *Books) Suspected(slot uint32) bool {
	return int(slot) < b.suspects.Len() && *b.suspects.At(int(slot))
}

// Trust says that an object may be served, or is gone.
func (b *Books) Trust(slot uint32) {
	if b.Suspected(slot) {
		*b.suspects.At(int(slot)) = false
	}
}

// Return has NextSuspect find a slot again that it returned, or that somebody else was
// going to compare and does not.
func (b *Books) Return(slot uint32) { b.order = append(b.order, slot) }

// NextSuspect returns the suspect noted last of those for which taken answers false.
// Those for which it answers true are left to who has taken them.
func (b *Books) NextSuspect(taken func(slot uint32) bool) (slot uint32, ok bool) {
	for len(b.order) > 0 {
		slot = b.order[len(b.order)-1]
		b.order = b.order[:len(b.order)-1]
		if b.Suspected(slot) && !taken(slot) {
			return slot, true
		}
	}
	return 0, false
}

// Sum has an object get a checksum from then on: what a slot has of that generation.
func (b *Books) Sum(slot, generation uint32, at time.Time) {
	if b.due.Len() < maxDue {
		b.due.Push(due{slot, generation, at})
	}
}

// NextDue returns the oldest object that is to get a checksum by now, once.
func (b *Books) NextDue(now time.Time) (slot, generation uint32, ok bool) {
	if b.due.Len() == 0 || now.Before(b.due.Front().at) {
		return 0, 0, false
	}
	d := *b.due.Front()
	b.due.Pop()
	return d.slot, d.generation, true
}
