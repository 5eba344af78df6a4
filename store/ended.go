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
	now := time.Now()
	n := s.dueNow(instance, now)
	if n > 0 {
		s.expire(now)
	}
	return n
}

func (s *Store) dueNow(instance int64, now time.Time) (n int) {
	s.lock()
	defer s.unlock()
	for h := range maps.Keys(s.mu.holds.byInstance[instance]) {
		if h.orphan && h.transfer.own == 0 {
			h.deadline = now
			n++
		}
	}
	return n
}
