// SPDX-License-Identifier: Apache-2.0

package miss

import (
	"encoding/binary"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
)

// Chunks finds slots by the hash of their chunk alone, in any namespace, shard and group: a chunk that a lookup missed may be there under
// another name. The zero Chunks is empty. It takes no lock: its owner's covers it. It takes 1 MiB, and 8 bytes for each slot, allocated as
// slots come.
type Chunks struct {
	heads container.PagedSlice[uint32] // by bits of the hash: slot + 1 of the newest; 0: none
	links container.PagedSlice[link]   // by slot
}

// link is a slot's place in the list of slots whose hashes have the same bits.
type link struct {
	next   uint32 // slot + 1 of the next older slot; 0: none
	before uint32 // slot + 1 of the next newer slot; first: it is the newest; 0: it is in no list
}

const (
	first    = ^uint32(0)
	headBits = 18
)

func headOf(h *kv.Hash) int {
	return int(binary.LittleEndian.Uint64(h[8:]) & (1<<headBits - 1))
}

// Add adds a slot, which must not be there yet, with the hash of its chunk.
func (c *Chunks) Add(slot uint32, h *kv.Hash) {
	at := headOf(h)
	c.heads.Grow(at + 1)
	c.links.Grow(int(slot) + 1)
	head := c.heads.At(at)
	if *head != 0 {
		c.links.At(int(*head - 1)).before = slot + 1
	}
	*c.links.At(int(slot)) = link{next: *head, before: first}
	*head = slot + 1
}

// Remove removes a slot. The slot need not be there.
func (c *Chunks) Remove(slot uint32, h *kv.Hash) {
	if int(slot) >= c.links.Len() {
		return
	}
	l := c.links.At(int(slot))
	switch l.before {
	case 0:
		return
	case first:
		*c.heads.At(headOf(h)) = l.next
	default:
		c.links.At(int(l.before - 1)).next = l.next
	}
	if l.next != 0 {
		c.links.At(int(l.next - 1)).before = l.before
	}
	*l = link{}
}

// Each calls yield for slots, the newest first, until it returns false: for all slots that have the chunk, and some that have other chunks.
func (c *Chunks) Each(h *kv.Hash, yield func(slot uint32) bool) {
	at := headOf(h)
	if at >= c.heads.Len() {
		return
	}
	for s := *c.heads.At(at); s != 0 && yield(s-1); s = c.links.At(int(s - 1)).next {
	}
}

const (
	maxOthers    = 8   // most names that Others returns; it leaves out further ones
	maxLookedFor = 512 // most slots that Of looks at; further ones are not found
)

// Of returns the keys of slots that have the chunk h. It looks at 512 slots at most.
func (c *Chunks) Of(h *kv.Hash, keyOf func(slot uint32) kv.Key) (out []kv.Key) {
	left := maxLookedFor
	c.Each(h, func(slot uint32) bool {
		if k := keyOf(slot); k.Chunk == *h {
			out = append(out, k)
		}
		left--
		return left > 0
	})
	return out
}

// Others returns a few other names under which slots have the chunk of k. No slot may have k itself. With `window` it returns the reason
// Window and no names if other groups of the same shard have the chunk: the store then left out an object that no hit could need.
func (c *Chunks) Others(k *kv.Key, window bool, keyOf func(slot uint32) kv.Key) (why Reason, others []kv.Key) {
	for _, other := range c.Of(&k.Chunk, keyOf) {
		same := other.Namespace == k.Namespace && other.Rank == k.Rank
		switch {
		case same && window:
			return Window, nil
		case !same && len(others) < maxOthers && !slices.ContainsFunc(others, func(o kv.Key) bool {
			return o.Namespace == other.Namespace && o.Rank == other.Rank
		}):
			others = append(others, other)
		}
	}
	return NeverStored, others
}
