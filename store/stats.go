// SPDX-License-Identifier: Apache-2.0

package store

import (
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tiering"
)

// Stats is a snapshot of a Store.
type Stats struct {
	Counters
	pool.Usage
	Outbox        tiering.WriteBackStats // objects that wait to be written to the tier below
	Rates         tiering.RateStats      // speed of loads from the tier below, and of computing
	Sessions      int
	Pending       int // lookups that wait for their result
	Transfers     int // transfers in progress
	Quarantined   int // of those, transfers of detached workers
	EvictableObjs int
}

// Stats returns a snapshot.
func (s *Store) Stats() Stats {
	s.lock()
	defer s.unlock()
	h := s.mu.holds.Stats()
	var waits tiering.WriteBackStats
	if s.outbox != nil {
		waits = s.outbox.Stats()
	}
	return Stats{
		Outbox: waits, Rates: s.rates.Stats(),
		Counters: s.mu.n, Usage: s.mu.pool.Usage(), Sessions: s.mu.leases.Len(), Pending: s.mu.pending.All().Count,
		Transfers: h.Transfers, Quarantined: h.Quarantined, EvictableObjs: s.mu.evictable,
	}
}
