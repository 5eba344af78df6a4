// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"slices"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
)

// setLocked records that an object is in the pool (tier 0) or in a tier; without `there`, that it no longer is. An object in a tier counts
// only if its chunk is in the pool or has known tokens; otherwise it is remembered in strays.
func (b *Book) setLocked(k *kv.Key, tier uint8, there bool) {
	code := uint32(k.Rank)>>16<<16 | k.Group&0xffff // world and rank are its upper bytes
	bound := b.mu.bindings[k.Chunk]
	if bound == nil {
		if tier > 0 {
			b.mu.strays.set(k, tier, there)
		}
		if !there || tier > 0 {
			return
		}
		bound = b.newBindingLocked(k.Chunk)
		defer b.mu.strays.take(k.Chunk, func(k *kv.Key, tier uint8) { b.setLocked(k, tier, true) })
	}
	h := bound.of(k.Namespace)
	if h == nil {
		if !there {
			return
		}
		h = b.holdLocked(bound, k.Namespace)
	}
	for i := range h.objects {
		if o := &h.objects[i]; o.code == code && o.tier == tier {
			if there {
				o.scan = b.mu.scan
				return
			}
			b.takeLocked(h, i)
			b.changedLocked(h)
			return
		}
	}
	if !there {
		return
	}
	h.objects = append(h.objects, keptObject{code, b.mu.scan, tier})
	if tier == 0 {
		if bound.pool++; bound.pool == 1 {
			b.mu.below.remove(bound)
			if bound.text == nil {
				b.unbound.Add(1)
			}
		}
	}
	b.changedLocked(h)
}

// takeLocked removes object i of a holding.
func (b *Book) takeLocked(h *holding, i int) {
	bound := h.binding
	if h.objects[i].tier == 0 {
		if t, ok := b.mu.announced[bound.hash]; ok && bound.text == nil && bound.pool == 1 {
			b.bindLocked(bound, t) // a tier may have it
		}
		if bound.pool--; bound.pool == 0 {
			if bound.text == nil {
				b.unbound.Add(-1)
			} else {
				b.mu.below.add(bound)
			}
		}
	}
	h.objects = slices.Delete(h.objects, i, i+1)
}

// newBindingLocked returns the new binding of a chunk that comes into the pool.
func (b *Book) newBindingLocked(hash kv.Hash) *binding {
	// One allocation for the usual case: one namespace, one family.
	all := &struct {
		binding
		in    [1]*holding
		whole [1]wholeChunk
	}{}
	bound := &all.binding
	bound.hash, bound.in, bound.whole = hash, all.in[:0], all.whole[:0]
	b.mu.bindings[hash] = bound
	return bound
}

// of returns the objects of the chunk in a namespace, or nil.
func (bound *binding) of(name kv.Namespace) *holding {
	for _, h := range bound.in {
		if h.space.name == name {
			return h
		}
	}
	return nil
}

func (b *Book) holdLocked(bound *binding, name kv.Namespace) *holding {
	s := b.mu.namespaces[name]
	if s == nil {
		s = &namespaceState{name: name}
		b.mu.namespaces[name] = s
		b.nameless.Add(1)
	}
	all := &struct {
		holding
		objects [2]keptObject
	}{}
	h := &all.holding
	h.binding, h.space, h.objects, h.at = bound, s, all.objects[:0], len(s.chunks)
	s.chunks = append(s.chunks, h)
	bound.in = append(bound.in, h)
	return h
}

// changedLocked updates a chunk of which an object was added or removed.
func (b *Book) changedLocked(h *holding) {
	bound, s := h.binding, h.space
	for _, f := range s.families {
		b.judgeLocked(f, bound)
	}
	if len(h.objects) == 0 {
		last := len(s.chunks) - 1
		s.chunks[h.at], s.chunks[last].at = s.chunks[last], h.at
		s.chunks[last] = nil
		s.chunks = s.chunks[:last]
		bound.in = slices.DeleteFunc(bound.in, func(o *holding) bool { return o == h })
		if len(s.chunks) == 0 {
			b.dropLocked(s)
		}
	}
	if len(bound.in) == 0 {
		b.unbindLocked(bound)
	} else if bound.pool == 0 && bound.text == nil {
		b.forgetLocked(bound) // no reader has seen it, and none will
	}
}

// forgetLocked removes all objects that tiers have of a chunk that is not in the pool.
func (b *Book) forgetLocked(bound *binding) {
	for len(bound.in) > 0 {
		h := bound.in[len(bound.in)-1]
		h.objects = h.objects[:0]
		b.changedLocked(h)
	}
}

func (b *Book) unbindLocked(bound *binding) {
	if b.mu.bindings[bound.hash] != bound {
		return
	}
	b.mu.below.remove(bound)
	b.mu.bytes -= int64(len(bound.text))
	delete(b.mu.bindings, bound.hash)
}

// bindLocked copies a chunk's tokens. It reports false if there is no memory for them. To make room it removes chunks that only tiers have.
func (b *Book) bindLocked(bound *binding, t tokens) bool {
	for b.mu.bytes+int64(len(t.text)) > b.o.TokenBytes && b.mu.below.first() != nil {
		b.forgetLocked(b.mu.below.first())
	}
	if b.mu.bytes+int64(len(t.text)) > b.o.TokenBytes {
		return false
	}
	b.mu.bytes += int64(len(t.text))
	if bound.pool > 0 {
		b.unbound.Add(-1)
	}
	bound.tokens = t
	bound.text = append([]byte(nil), t.text...) // this allocates exactly the length, and does not zero it first
	for _, h := range bound.in {
		for _, f := range h.space.families {
			b.judgeLocked(f, bound)
		}
	}
	return true
}

// dropLocked removes a namespace that has no chunks. Its next store adds it again.
func (b *Book) dropLocked(s *namespaceState) {
	delete(b.mu.namespaces, s.name)
	if len(s.families) == 0 {
		b.nameless.Add(-1)
	}
	for _, f := range s.families {
		for _, o := range f.each {
			if o == s || !slices.Contains(o.families, f) {
				continue
			}
			o.families = slices.DeleteFunc(o.families, func(g *family) bool { return g == f })
			if len(o.families) == 0 {
				b.nameless.Add(1)
			}
		}
		if f.tenant.families--; f.tenant.families == 0 {
			delete(b.mu.tenants, f.tenant.tenantKey)
		}
	}
}

// judgeLocked finds out which media have a whole chunk of a family, and adds a record for each change.
func (b *Book) judgeLocked(f *family, bound *binding) {
	at := slices.IndexFunc(bound.whole, func(w wholeChunk) bool { return w.family == f })
	var was, is [media]bool
	if at >= 0 {
		was = bound.whole[at].in
	}
	if bound.text != nil {
		is = f.complete(bound)
	}
	if is == was {
		return
	}
	var c *Chunk // the tenant's Chunk, which any of its families may have made
	for i := range bound.whole {
		if bound.whole[i].family.tenant == f.tenant {
			c = bound.whole[i].chunk
		}
	}
	if c == nil {
		c = &Chunk{
			Model: f.tenant.model, Salt: f.tenant.salt, Hash: bound.hash, Parent: bound.parent, Index: bound.index, Tokens: bound.text, Group: f.tenant.group,
		}
	}
	if at < 0 {
		at = len(bound.whole)
		bound.whole = append(bound.whole, wholeChunk{family: f, chunk: c})
	}
	for m := range Medium(media) {
		if is[m] == was[m] {
			continue
		}
		tenant, model := bound.heldElsewhere(f, m)
		bound.whole[at].in[m] = is[m]
		if !tenant {
			b.recordLocked(Record{Placed: Placed{c, m}, Removed: !is[m], OfModel: !model})
		}
	}
	if is == ([media]bool{}) {
		bound.whole = slices.Delete(bound.whole, at, at+1)
	}
}

// heldElsewhere reports whether another family of the same tenant has the chunk in a medium, and whether one of the same model has.
func (bound *binding) heldElsewhere(f *family, m Medium) (tenant, model bool) {
	for i := range bound.whole {
		w := &bound.whole[i]
		if w.family == f || !w.in[m] {
			continue
		}
		tenant = tenant || w.family.tenant == f.tenant
		model = model || w.family.tenant.model == f.tenant.model
	}
	return tenant, model
}

// complete reports which media have all objects of a chunk that a hit needs.
func (f *family) complete(bound *binding) (is [media]bool) {
	is = [media]bool{true, true}
	for rank, s := range f.each {
		h := bound.of(s.name)
		if h == nil {
			return [media]bool{}
		}
		for _, g := range f.groups {
			code := codeOf(f.world, rank, g)
			var has [media]bool
			for _, o := range h.objects {
				if o.code != code {
					continue
				}
				if o.tier == 0 {
					has[InPool] = true
				} else {
					has[Below] = true
				}
			}
			is[InPool], is[Below] = is[InPool] && has[InPool], is[Below] && has[Below]
		}
	}
	return is
}

// namedLocked records the model and salt of a shard's namespace, and the family of shards that a lookup searches together. It records
// nothing while one of these shards has no chunks.
func (b *Book) namedLocked(model, salt []byte, group int, sh *object.Shard) {
	var few [8]*namespaceState
	each := few[:0]
	for rank := range sh.World {
		name := sh.Namespace
		if sh.Each != nil {
			name = (*sh.Each)[rank].Namespace
		}
		s := b.mu.namespaces[name]
		if s == nil {
			return // this shard has no chunk, so no chunk is whole
		}
		each = append(each, s)
	}
	for _, f := range each[0].families {
		if f.world == sh.World && slices.Equal(f.each, each) {
			return
		}
	}
	key := tenantKey{string(model), string(salt), group}
	t := b.mu.tenants[key]
	if t == nil {
		t = &tenant{tenantKey: key}
		b.mu.tenants[key] = t
	}
	t.families++
	f := &family{tenant: t, world: sh.World, each: slices.Clone(each), groups: needed(sh.Groups)}
	for rank, s := range f.each {
		if slices.Contains(f.each[:rank], s) {
			continue
		}
		if len(s.families) == 0 {
			b.nameless.Add(-1)
		}
		s.families = append(s.families, f)
	}
	of := slices.Clone(f.each[0].chunks)
	slices.SortFunc(of, func(x, y *holding) int { return cmp.Compare(x.binding.index, y.binding.index) })
	for _, h := range of { // chunks come after those that they follow
		b.judgeLocked(f, h.binding)
	}
}

// needed returns the groups whose objects every hit needs: those of full attention, or all groups if there are none.
func needed(groups *object.Groups) (out []int) {
	for g := range groups.Len() {
		if groups.Full(g) {
			out = append(out, g)
		}
	}
	if out == nil {
		for g := range groups.Len() {
			out = append(out, g)
		}
	}
	return out
}
