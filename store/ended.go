package store

import (
	"maps"
	"time"
)

// PoolPath is the pool's file.
func (s *Store) PoolPath() string { return s.mu.pool.Path() }

// PoolInode identifies the pool's file.
func (s *Store) PoolInode() uint64 { return s.mu.pool.Inode() }

// EndQuarantine says that nobody can touch any more what a detached instance was
// told of: its process has ended. It returns the transfers whose memory came back.
func (s *Store) EndQuarantine(instance int64) int {
	s.lock()
	defer s.unlock()
	now, n := time.Now(), 0
	for h := range maps.Keys(s.mu.holds.byInstance[instance]) {
		if h.orphan && h.transfer.own == 0 {
			h.deadline = now
			n++
		}
	}
	if n > 0 {
		s.expireLocked(now)
	}
	return n
}
