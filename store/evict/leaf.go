// SPDX-License-Identifier: Apache-2.0

package evict

// LeafLRU evicts the least recently used leaf: a slot without a resident successor. Callers may record uses of heads before those of tails.
//
// While every leaf is busy it evicts the least recently used of the other slots.
type LeafLRU struct {
	leaves
}

// leaves is a tree, and an LRU of the same slots from which victims come while every leaf is busy.
type leaves struct {
	tree
	all LRU
}

// NewLeafLRU returns an empty LeafLRU.
func NewLeafLRU() *LeafLRU {
	l := new(LeafLRU)
	l.init(1)
	return l
}

func (l *leaves) init(classes int) {
	l.tree.init(classes)
	l.all.init()
}

// Add implements Policy.
func (l *leaves) Add(slot uint32, id, parent uint64, weight int64) {
	l.all.Add(slot, id, parent, weight)
	l.add(slot, id, parent)
}

// Use implements Policy.
func (l *leaves) Use(slot uint32) {
	l.all.Use(slot)
	if n := l.node(slot); n != nil {
		l.use(n, slot+l.first)
	}
}

// Remove implements Policy.
func (l *leaves) Remove(slot uint32) {
	l.all.Remove(slot)
	if n := l.node(slot); n != nil {
		l.remove(slot, n)
	}
}

// Ascend implements Policy, in the order of last use.
func (l *leaves) Ascend(f func(slot uint32) bool) { l.all.Ascend(f) }

// Victim implements Policy.
func (l *LeafLRU) Victim(busy func(slot uint32) bool) (slot uint32, ok, more bool) {
	return l.victim(busy, func() (uint32, *node) { return l.oldest(0) })
}

// victim calls next for leaves until it finds one that is not busy. It sets the busy ones aside; after maxLooks of them it returns, and more
// says that the caller shall call it again.
func (l *leaves) victim(isBusy func(slot uint32) bool, next func() (uint32, *node)) (slot uint32, ok, more bool) {
	l.settle()
	for range maxLooks {
		i, n := next()
		if n == nil {
			return l.all.Victim(isBusy)
		}
		if slot = i - l.first; !isBusy(slot) {
			return slot, true, false
		}
		l.leave(n)
		n.state = busy
		l.all.setAside(slot)
	}
	return 0, false, true
}
