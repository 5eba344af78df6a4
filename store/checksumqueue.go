// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/internal/container"
)

// maxDueChecksums bounds the objects that wait for a checksum. An object beyond it gets no checksum.
const maxDueChecksums = 1 << 20

// checksumQueue has the slots whose objects must be compared with their checksums before they are served (suspects), and those whose
// objects need a checksum. It reads no bytes and takes no lock: Store.mu guards it. Its zero value is empty.
type checksumQueue struct {
	suspects container.PagedSlice[bool]        // by slot: the object must be compared before it is served
	order    []uint32                          // the suspects; the most recently used last
	due      container.PagedQueue[dueChecksum] // committed objects without a checksum; oldest first
}

type dueChecksum struct {
	slot, generation uint32
	at               time.Time
}

// Suspect records that the object of a slot must be compared before it is served. NextSuspect returns the latest of such slots first.
func (b *checksumQueue) Suspect(slot uint32) {
	b.suspects.Grow(int(slot) + 1)
	*b.suspects.At(int(slot)) = true
	b.order = append(b.order, slot)
}

// Suspected reports whether the object of a slot must be compared before it is served.
func (b *checksumQueue) Suspected(slot uint32) bool {
	return int(slot) < b.suspects.Len() && *b.suspects.At(int(slot))
}

// Trust records that the object of a slot may be served, or that the slot has it no more.
func (b *checksumQueue) Trust(slot uint32) {
	if b.Suspected(slot) {
		*b.suspects.At(int(slot)) = false
	}
}

// Return puts back a slot that NextSuspect returned, or that another goroutine took and did not compare.
func (b *checksumQueue) Return(slot uint32) { b.order = append(b.order, slot) }

// NextSuspect removes and returns the latest suspect for which `taken` reports false. It also removes the suspects that it passes over: the
// goroutine that has taken one compares it.
func (b *checksumQueue) NextSuspect(taken func(slot uint32) bool) (slot uint32, ok bool) {
	for len(b.order) > 0 {
		slot = b.order[len(b.order)-1]
		b.order = b.order[:len(b.order)-1]
		if b.Suspected(slot) && !taken(slot) {
			return slot, true
		}
	}
	return 0, false
}

// Sum queues the object that a slot has in a generation for a checksum, to be computed at `at` or later.
func (b *checksumQueue) Sum(slot, generation uint32, at time.Time) {
	if b.due.Len() < maxDueChecksums {
		b.due.Push(dueChecksum{slot, generation, at})
	}
}

// Due returns the time from which NextDue has an object. It reports false if no object waits for a checksum.
func (b *checksumQueue) Due() (at time.Time, ok bool) {
	if b.due.Len() == 0 {
		return at, false
	}
	return b.due.Front().at, true
}

// Suspects reports whether NextSuspect may have a slot to return.
func (b *checksumQueue) Suspects() bool { return len(b.order) > 0 }

// NextDue removes and returns the oldest object whose checksum is due at the time `now`.
func (b *checksumQueue) NextDue(now time.Time) (slot, generation uint32, ok bool) {
	if b.due.Len() == 0 || now.Before(b.due.Front().at) {
		return 0, 0, false
	}
	d := *b.due.Front()
	b.due.Pop()
	return d.slot, d.generation, true
}
