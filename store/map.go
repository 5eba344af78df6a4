// SPDX-License-Identifier: Apache-2.0

package store

import "github.com/kvasir-kv/kvasir/store/pool"

// Map returns a map of the pool in at most `cells` cells. It looks at `most` slots at most; 0 is the default. It releases the lock between
// batches, so the map may show a concurrent change or not. The map of a closed store is empty.
func (s *Store) Map(cells, most int) pool.Map {
	m := pool.NewMap(s.Files().Bytes(), cells, most)
	for s.mapSome(&m) {
	}
	return m
}

func (s *Store) mapSome(m *pool.Map) (more bool) {
	s.lock()
	defer s.unlock()
	return !s.mu.closed && m.AddSome(s.mu.pool, batch)
}
