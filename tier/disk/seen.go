// SPDX-License-Identifier: Apache-2.0

package disk

import "sync"

// seenKeys remembers the last Most to 2*Most keys, in two tables: when one is full, it replaces the other. Its methods are safe for
// concurrent use.
type seenKeys struct {
	Most int // most keys in one table
	mu   struct {
		sync.Mutex
		now, before map[uint64]struct{}
	}
}

// SeenBefore reports whether a key, by its hash, was seen before, and remembers it.
func (s *seenKeys) SeenBefore(h uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, now := s.mu.now[h]
	_, before := s.mu.before[h]
	if now || before {
		return true
	}
	if len(s.mu.now) >= s.Most || s.mu.now == nil {
		s.mu.now, s.mu.before = make(map[uint64]struct{}), s.mu.now
	}
	s.mu.now[h] = struct{}{}
	return false
}
