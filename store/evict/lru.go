// SPDX-License-Identifier: Apache-2.0

package evict

import "github.com/kvasir-kv/kvasir/internal/container"

// LRU evicts the slot that was not used for longest. To evict the tail of a prompt before its head, the owner records uses of later chunks
// before those of earlier ones.
//
// Victim moves busy slots to a list aside, where they stay until their next Use, so that it looks at each only once. All operations take
// constant time, and allocate only to grow.
type LRU struct {
	links container.PagedSlice[link] // the anchors, then slot s at s+firstSlot
}

// link is a place in a ring: that of the slots in order of use, or that of the slots that were set aside. A slot with the zero link is in
// no ring.
type link struct{ older, newer uint32 } // indices into LRU.links

const (
	inOrder   = 1 // anchor of the slots in order of use
	aside     = 2 // anchor of the slots that were found busy
	firstSlot = 3 // 0 is no place
)

// NewLRU returns an empty LRU.
func NewLRU() *LRU {
	l := new(LRU)
	l.init()
	return l
}

func (l *LRU) init() {
	l.links.Grow(firstSlot)
	*l.at(inOrder), *l.at(aside) = link{inOrder, inOrder}, link{aside, aside}
}

// Add implements Policy. Only the slot matters.
func (l *LRU) Add(slot uint32, _, _ uint64, _ int64) {
	l.links.Grow(int(slot) + firstSlot + 1)
	l.linkNewest(inOrder, slot+firstSlot)
}

// Use implements Policy: the slot becomes the most recently used.
func (l *LRU) Use(slot uint32) {
	if l.unlink(slot) {
		l.linkNewest(inOrder, slot+firstSlot)
	}
}

// Remove implements Policy.
func (l *LRU) Remove(slot uint32) { l.unlink(slot) }

// Victim implements Policy.
func (l *LRU) Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool) {
	for range maxLooks {
		i := l.at(inOrder).newer
		if i == inOrder {
			return 0, false, false
		}
		slot = i - firstSlot
		if !busy(slot) {
			return slot, true, false
		}
		l.setAside(slot)
	}
	return 0, false, true
}

// setAside moves a busy slot out of the order until its next Use.
func (l *LRU) setAside(slot uint32) {
	if l.unlink(slot) {
		l.linkNewest(aside, slot+firstSlot)
	}
}

// Ascend implements Policy.
func (l *LRU) Ascend(f func(slot uint32) bool) {
	for i := l.at(inOrder).newer; i != inOrder && f(i-firstSlot); i = l.at(i).newer {
	}
}

func (l *LRU) at(i uint32) *link { return l.links.At(int(i)) }

func (l *LRU) linkNewest(anchor, i uint32) {
	newest := l.at(anchor).older
	*l.at(i) = link{older: newest, newer: anchor}
	l.at(newest).newer = i
	l.at(anchor).older = i
}

// unlink removes a slot from its ring. It reports false for a slot that is in none.
func (l *LRU) unlink(slot uint32) bool {
	i := slot + firstSlot
	if int(i) >= l.links.Len() || *l.at(i) == (link{}) {
		return false
	}
	k := *l.at(i)
	l.at(k.older).newer = k.newer
	l.at(k.newer).older = k.older
	*l.at(i) = link{}
	return true
}
