package store

// Populate makes the kernel provide pool memory ahead of its first use, and with
// keep map it here.
func (s *Store) Populate(off, n int64, keep bool) error { return s.mu.pool.Populate(off, n, keep) }

// Provided returns how many bytes from the pool's start have memory already.
func (s *Store) Provided() int64 { return s.mu.pool.Provided() }

// Limit lets nothing of the pool above that many bytes be handed out; without it
// there is no limit. What was handed out, or is kept, stays. An error means that
// there is no memory for the index of so much.
func (s *Store) Limit(bytes int64) error {
	s.lock()
	defer s.unlock()
	return s.mu.pool.Limit(bytes)
}

// Round returns what an object of n bytes takes in the pool.
func (s *Store) Round(n int64) int64 { return s.mu.pool.Round(n) }
