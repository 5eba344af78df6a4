package store

import "github.com/kvasir-kv/kvasir/store/pool"

// Map returns what lies where in the pool, in at most so many cells, with a look at so many slots at
// most; 0 is the default. Others have the lock between batches, so what changes meanwhile may be seen as it was or as
// it is. A store that is closed has nothing.
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
