package tenants

import "github.com/kvasir-kv/kvasir/kv"

// maxSpaces bounds the namespaces of which a Table knows whose they are: models and layouts
// of the tenants that have something of their own.
const maxSpaces = 1 << 14

// spaces say whose namespaces are. At the limit those are forgotten that have no slot; where
// all have one, what is in another namespace is nobody's. The zero spaces has none.
type spaces[T comparable] struct {
	of    map[kv.Namespace]*space[T]
	empty int // of them, those without a slot
}

// space is a namespace. It stays with its slots when it is forgotten.
type space[T comparable] struct {
	whose     T
	slots     int
	forgotten bool
}

// name says whose a namespace is. It reports whether that was news.
func (s *spaces[T]) name(ns kv.Namespace, whose T) (news bool) {
	old := s.of[ns]
	switch {
	case old != nil && old.whose == whose:
		return false
	case old != nil:
		s.forget(ns, old)
	case len(s.of) >= maxSpaces:
		if s.empty == 0 {
			return false
		}
		s.forgetAll(func(of *space[T]) bool { return of.slots == 0 })
	case s.of == nil:
		s.of = make(map[kv.Namespace]*space[T])
	}
	s.of[ns] = &space[T]{whose: whose}
	s.empty++
	return true
}

// forgetAll forgets the namespaces for which f answers true.
func (s *spaces[T]) forgetAll(f func(*space[T]) bool) {
	for ns, of := range s.of {
		if f(of) {
			s.forget(ns, of)
		}
	}
}

func (s *spaces[T]) forget(ns kv.Namespace, of *space[T]) {
	of.forgotten = true
	if of.slots == 0 {
		s.empty--
	}
	delete(s.of, ns)
}

// enter notes one more slot in a namespace.
func (s *spaces[T]) enter(of *space[T]) {
	if of.slots == 0 && !of.forgotten {
		s.empty--
	}
	of.slots++
}

// leave notes one less.
func (s *spaces[T]) leave(of *space[T]) {
	of.slots--
	if of.slots == 0 && !of.forgotten {
		s.empty++
	}
}
