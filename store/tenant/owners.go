// SPDX-License-Identifier: Apache-2.0

package tenant

import "github.com/kvasir-kv/kvasir/kv"

// maxOwners bounds the namespaces whose tenant a Table knows. They are those of tenants that have a quota, a TTL or pins of their own. A
// further namespace takes the place of one without slots; if all have slots, its tenant stays unknown.
const maxOwners = 1 << 14

// owners maps a namespace to its tenant. When it is full, it forgets the namespace without slots that was named least recently. If all
// namespaces have slots, a further namespace has no tenant. The zero owners is empty.
type owners[T comparable] struct {
	of    map[kv.Namespace]*owner[T]
	empty owner[T] // anchor of the ring of namespaces without a slot; next is the one that was not named for longest
}

// owner is a namespace and its tenant. Slots refer to it, so it stays in use after owners has forgotten it.
type owner[T comparable] struct {
	name      kv.Namespace
	tenant    T
	slots     int
	forgotten bool

	next, before *owner[T] // in the ring of empty ones; nil outside it
}

// name sets the tenant of a namespace. It reports whether that changed anything: not if it had this tenant before, or if owners is full of
// namespaces with slots.
func (s *owners[T]) name(ns kv.Namespace, tenant T) (news bool) {
	old := s.of[ns]
	switch {
	case old != nil && old.tenant == tenant:
		if old.slots == 0 {
			s.unlink(old)
			s.link(old)
		}
		return false
	case old != nil:
		s.forget(old)
	case len(s.of) >= maxOwners:
		if !s.anyEmpty() {
			return false
		}
		s.forget(s.empty.next)
	case s.of == nil:
		s.of = make(map[kv.Namespace]*owner[T])
	}
	of := &owner[T]{name: ns, tenant: tenant}
	s.of[ns] = of
	s.link(of)
	return true
}

// forgetAll forgets the namespaces of a tenant.
func (s *owners[T]) forgetAll(tenant T) {
	for _, of := range s.of {
		if of.tenant == tenant {
			s.forget(of)
		}
	}
}

func (s *owners[T]) forget(of *owner[T]) {
	of.forgotten = true
	if of.slots == 0 {
		s.unlink(of)
	}
	delete(s.of, of.name)
}

// anyEmpty reports whether any namespace has no slot.
func (s *owners[T]) anyEmpty() bool { return s.empty.next != nil && s.empty.next != &s.empty }

// link puts the namespace `of` at the newest end of the ring.
func (s *owners[T]) link(of *owner[T]) {
	ring := &s.empty
	if ring.next == nil {
		ring.next, ring.before = ring, ring
	}
	of.next, of.before = ring, ring.before
	of.before.next, ring.before = of, of
}

// unlink takes the namespace `of` out of the ring.
func (s *owners[T]) unlink(of *owner[T]) {
	of.before.next, of.next.before = of.next, of.before
	of.next, of.before = nil, nil
}

// enter counts one more slot in the namespace `of`.
func (s *owners[T]) enter(of *owner[T]) {
	if of.slots == 0 && !of.forgotten {
		s.unlink(of)
	}
	of.slots++
}

// leave counts one slot less in the namespace `of`.
func (s *owners[T]) leave(of *owner[T]) {
	of.slots--
	if of.slots == 0 && !of.forgotten {
		s.link(of)
	}
}
