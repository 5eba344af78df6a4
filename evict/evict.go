// Package evict holds eviction policies as pure state machines: they know slot
// numbers and order, not bytes or memory.
//
// A policy is not safe for concurrent use: its owner locks.
package evict

// LRU orders evictable slots by last use. The owner removes a slot while
// something pins it and adds it again afterwards, so every slot in the list may
// be evicted. To evict tails of a prompt before heads, the owner touches later
// chunks before earlier ones.
//
// All operations take constant time and allocate only to grow.
type LRU struct {
	links []link // by slot; links[0] is the ring's anchor, slot s is at s+1
	len   int
}

type link struct{ older, newer uint32 } // indices into links; both 0 and not the anchor: absent

// NewLRU returns an empty LRU.
func NewLRU() *LRU { return &LRU{links: make([]link, 1)} }

// Len is the number of evictable slots.
func (l *LRU) Len() int { return l.len }

// Has reports whether slot is evictable.
func (l *LRU) Has(slot uint32) bool {
	i := int(slot) + 1
	return i < len(l.links) && (l.links[i] != link{} || l.len == 1 && l.links[0].older == uint32(i))
}

// Touch makes slot evictable and the most recently used.
func (l *LRU) Touch(slot uint32) {
	l.Remove(slot)
	i := slot + 1
	for int(i) >= len(l.links) {
		l.links = append(l.links, link{})
	}
	newest := l.links[0].older
	l.links[i] = link{older: newest, newer: 0}
	l.links[newest].newer = i
	l.links[0].older = i
	l.len++
}

// Remove makes slot not evictable. A slot that is not in the list is left alone.
func (l *LRU) Remove(slot uint32) {
	if !l.Has(slot) {
		return
	}
	i := slot + 1
	k := l.links[i]
	l.links[k.older].newer = k.newer
	l.links[k.newer].older = k.older
	l.links[i] = link{}
	l.len--
}

// Ascend calls f for the slots, the least recently used first, until f answers
// false. f must not change the list.
func (l *LRU) Ascend(f func(slot uint32) bool) {
	for i := l.links[0].newer; i != 0 && f(i-1); i = l.links[i].newer {
	}
}

// Oldest returns the least recently used slot: the next to evict.
func (l *LRU) Oldest() (slot uint32, ok bool) {
	i := l.links[0].newer
	return i - 1, i != 0
}
