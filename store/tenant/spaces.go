package tenant

import "github.com/kvasir-kv/kvasir/kv"

// maxSpaces bounds the namespaces of which a Table knows whose they are: models and layouts
// of the tenants that have something of their own.
const maxSpaces = 1 << 14

// spaces maps a namespace to its tenant. When full it forgets the least recently named one without slots; where all
// have slots, a further namespace has no tenant. The zero spaces is empty.
type spaces[T comparable] struct {
	of    map[kv.Namespace]*space[T]
	empty space[T] // the ring of those without a slot: next was not named for the longest
}

// space is a namespace. It stays with its slots when it is forgotten.
type space[T comparable] struct {
	name      kv.Namespace
	whose     T
	slots     int
	forgotten bool

	next, before *space[T] // in the ring of empty ones; nil outside it
}

// name says whose a namespace is. It reports whether that was news.
func (s *spaces[T]) name(ns kv.Namespace, whose T) (news bool) {
	old := s.of[ns]
	switch {
	case old != nil && old.whose == whose:
		if old.slots == 0 {
			s.unlink(old)
			s.link(old)
		}
		return false
	case old != nil:
		s.forget(old)
	case len(s.of) >= maxSpaces:
		if !s.anyEmpty() {
			return false
		}
		s.forget(s.empty.next)
	case s.of == nil:
		s.of = make(map[kv.Namespace]*space[T])
	}
	of := &space[T]{name: ns, whose: whose}
	s.of[ns] = of
	s.link(of)
	return true
}

// forgetAll forgets the namespaces of whose.
func (s *spaces[T]) forgetAll(whose T) {
	for _, of := range s.of {
		if of.whose == whose {
			s.forget(of)
		}
	}
}

func (s *spaces[T]) forget(of *space[T]) {
	of.forgotten = true
	if of.slots == 0 {
		s.unlink(of)
	}
	delete(s.of, of.name)
}

// anyEmpty reports whether a namespace has no slot.
func (s *spaces[T]) anyEmpty() bool { return s.empty.next != nil && s.empty.next != &s.empty }

// link puts a namespace at the end of the ring.
func (s *spaces[T]) link(of *space[T]) {
	ring := &s.empty
	if ring.next == nil {
		ring.next, ring.before = ring, ring
	}
	of.next, of.before = ring, ring.before
	of.before.next, ring.before = of, of
}

// unlink takes a namespace out of the ring.
func (s *spaces[T]) unlink(of *space[T]) {
	of.before.next, of.next.before = of.next, of.before
	of.next, of.before = nil, nil
}

// enter notes one more slot in a namespace.
func (s *spaces[T]) enter(of *space[T]) {
	if of.slots == 0 && !of.forgotten {
		s.unlink(of)
	}
	of.slots++
}

// leave notes one less.
func (s *spaces[T]) leave(of *space[T]) {
	of.slots--
	if of.slots == 0 && !of.forgotten {
		s.link(of)
	}
}
