// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/internal/container"
)

// maxDueChecksums bounds the objects that wait for a checksum. Beyond it they stay without one.
const maxDueChecksums = 1 << 20

// checksumQueue holds the slots whose objects must be compared with their checksums before they are served, and those
// that get a checksum. It reads no bytes and takes no lock: Store.mu guards it. Its zero value is empty.
type checksumQueue struct {
	suspects container.PagedSlice[bool]        // by slot: to be compared before it is served
	order    []uint32                          // of the suspects, the most recently used last
	due      container.PagedQueue[dueChecksum] // committed, without a checksum; oldest first
}

type dueChecksum struct {
	slot, generation uint32
	at               time.Time
}

// Suspect notes that an object is to be compared first: before those that were noted
// earlier.
func (b *checksumQueue) Suspect(slot uint32) {
	b.suspects.Grow(int(slot) + 1)
	*b.suspects.At(int(slot)) = true
	b.order = append(b.order, slot)
}

// Suspected reports whether an object is to be compared before it is served.
func (b *checksumQueue) Suspected(slot uint32) bool {
	return int(slot) < b.suspects.Len() && *b.suspects.At(int(slot))
}

// Trust says that an object may be served, or is gone.
func (b *checksumQueue) Trust(slot uint32) {
	if b.Suspected(slot) {
		*b.suspects.At(int(slot)) = false
	}
}

// Return puts back a slot that NextSuspect returned, or that another goroutine claimed and
// did not compare.
func (b *checksumQueue) Return(slot uint32) { b.order = append(b.order, slot) }

// NextSuspect returns the suspect noted last of those for which taken answers false. The others are
// left to the goroutine that has taken them.
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

// Sum queues the object that a slot has in that generation: it gets a checksum, not before at.
func (b *checksumQueue) Sum(slot, generation uint32, at time.Time) {
	if b.due.Len() < maxDueChecksums {
		b.due.Push(dueChecksum{slot, generation, at})
	}
}

// Due returns when NextDue has an object; false where none waits for a checksum.
func (b *checksumQueue) Due() (at time.Time, ok bool) {
	if b.due.Len() == 0 {
		return at, false
	}
	return b.due.Front().at, true
}

// Suspects reports whether NextSuspect may return an object.
func (b *checksumQueue) Suspects() bool { return len(b.order) > 0 }

// NextDue returns the oldest object that is to get a checksum by now, once.
func (b *checksumQueue) NextDue(now time.Time) (slot, generation uint32, ok bool) {
	if b.due.Len() == 0 || now.Before(b.due.Front().at) {
		return 0, 0, false
	}
	d := *b.due.Front()
	b.due.Pop()
	return d.slot, d.generation, true
}
