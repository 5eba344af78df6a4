// SPDX-License-Identifier: Apache-2.0

package events

import (
	"slices"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// applyTierChanges applies all changes of the tiers. After changes were lost, no object counts as being in a tier until a change shows it
// there again.
func (b *Book) applyTierChanges() {
	if b.o.Tiers == nil {
		return
	}
	for last := b.o.Tiers.Last(); ; {
		more, forget := b.belowApply(last)
		if forget != nil {
			for _, s := range b.listSpaces() {
				b.forgetTiers(s, *forget)
			}
		}
		if !more {
			return
		}
	}
}

// belowApply applies some changes of the tiers, up to number `last`. It stops after a change that makes a tier's earlier changes invalid,
// and returns that change as forget.
func (b *Book) belowApply(last uint64) (more bool, forget *tier.Change) {
	b.mu.Lock()
	defer b.unlock()
	if b.mu.changes == nil {
		b.mu.changes = make([]tier.Change, eventBatch)
	}
	limit := min(uint64(eventBatch), max(last, b.mu.tierAfter)-b.mu.tierAfter)
	n, lost := b.o.Tiers.After(b.mu.tierAfter, b.mu.changes[:limit])
	if lost {
		b.mu.tierAfter, b.mu.strays = b.o.Tiers.Last(), tierOnly{}
		return false, &tier.Change{}
	}
	for i, c := range b.mu.changes[:n] {
		if c.All {
			b.mu.strays.forget(c.Tier)
			b.mu.tierAfter += uint64(i + 1)
			return b.mu.tierAfter < last, &c
		}
		b.setLocked(&c.Key, c.Tier, !c.Removed)
	}
	b.mu.tierAfter += uint64(n)
	return b.mu.tierAfter < last, nil
}

// forgetTiers removes those objects of a namespace that c invalidates: those in c's tier, or in all tiers if c names none; and those of c's
// model, or of all models if c names none. A namespace whose model is not known may be of any model.
func (b *Book) forgetTiers(s *namespaceState, c tier.Change) {
	b.mu.Lock()
	defer b.unlock()
	if c.Model != "" && len(s.families) > 0 && !slices.ContainsFunc(s.families, func(f *family) bool { return f.tenant.model == c.Model }) {
		return
	}
	b.removeLocked(s, func(o *keptObject) bool { return o.tier > 0 && (c.Tier == 0 || o.tier == c.Tier) })
}

// tierOnly has objects in tiers whose chunks are not in the pool, as during a load. The zero tierOnly is ready for use.
type tierOnly struct {
	young, old map[kv.Hash][]tierOnlyChunk // when young is full, it becomes old as a whole
}

type tierOnlyChunk struct {
	key  kv.Key
	tier uint8
}

// maxStrays bounds the chunks in young and in old. When young is full, those in old are forgotten and young takes its place.
const maxStrays = 4096

// set records that a tier has an object (`there`), or that it has it no longer.
func (x *tierOnly) set(k *kv.Key, tier uint8, there bool) {
	is := func(s tierOnlyChunk) bool { return s.tier == tier && s.key == *k }
	for _, of := range []map[kv.Hash][]tierOnlyChunk{x.young, x.old} {
		if list := of[k.Chunk]; slices.ContainsFunc(list, is) {
			if list = slices.DeleteFunc(list, is); len(list) > 0 {
				of[k.Chunk] = list
			} else {
				delete(of, k.Chunk)
			}
		}
	}
	if !there {
		return
	}
	if x.young == nil || len(x.young) >= maxStrays {
		x.old, x.young = x.young, make(map[kv.Hash][]tierOnlyChunk)
	}
	if list := x.young[k.Chunk]; len(list) < maxStrayObjects {
		x.young[k.Chunk] = append(list, tierOnlyChunk{*k, tier})
	}
}

// forget removes the objects of a tier.
func (x *tierOnly) forget(tier uint8) {
	for _, of := range []map[kv.Hash][]tierOnlyChunk{x.young, x.old} {
		for hash, list := range of {
			if list = slices.DeleteFunc(list, func(s tierOnlyChunk) bool { return s.tier == tier }); len(list) > 0 {
				of[hash] = list
			} else {
				delete(of, hash)
			}
		}
	}
}

// maxStrayObjects bounds the objects of one chunk. Further ones are not remembered.
const maxStrayObjects = 256

// take removes the known objects of a chunk and calls f with each.
func (x *tierOnly) take(hash kv.Hash, f func(k *kv.Key, tier uint8)) {
	for _, of := range []map[kv.Hash][]tierOnlyChunk{x.old, x.young} {
		list := of[hash]
		delete(of, hash)
		for i := range list {
			f(&list[i].key, list[i].tier)
		}
	}
}

// ring is a list of bindings in the order in which they were added. init makes the zero ring ready.
type ring struct{ root binding }

func (r *ring) init() { r.root.next, r.root.before = &r.root, &r.root }

func (r *ring) add(bound *binding) {
	if bound.next != nil {
		return
	}
	bound.next, bound.before = &r.root, r.root.before
	bound.before.next, r.root.before = bound, bound
}

func (r *ring) remove(bound *binding) {
	if bound.next == nil {
		return
	}
	bound.before.next, bound.next.before = bound.next, bound.before
	bound.next, bound.before = nil, nil
}

// first returns the binding that has been in the ring for longest; nil if there is none.
func (r *ring) first() *binding {
	if r.root.next == &r.root {
		return nil
	}
	return r.root.next
}
