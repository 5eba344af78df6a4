package store

import "context"

// SumNext is what the background does once.
func (s *Store) SumNext() int64 { return s.sumNext() }

// WriteNext begins to write one object below that waits for it. It reports false when
// none does.
func (s *Store) WriteNext(now context.Context) bool {
	it, ok := s.outbox.Next(now)
	if ok {
		s.beginWriting(it)
	}
	return ok
}
