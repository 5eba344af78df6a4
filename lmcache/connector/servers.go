// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"errors"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// Servers is the Cache of an engine whose workers are divided among several servers (Parallel.Servers): a hit is the prefix that all
// servers have. All methods must be called on one goroutine, the Scheduler's, except Flush.
type Servers struct {
	list    []*ServerCache // immutable
	lookups map[string]*sharedLookup
}

// sharedLookup is one lookup at all servers.
type sharedLookup struct {
	tokens []uint32
	salt   string
	known  bool
	hit    int // tokens
}

// NewServers returns the Cache over servers. The caller closes the servers.
func NewServers(servers ...*ServerCache) *Servers {
	return &Servers{list: servers, lookups: make(map[string]*sharedLookup)}
}

// SubmitLookup implements Cache.
func (s *Servers) SubmitLookup(id string, tokens []uint32, salt string) {
	if s.lookups[id] != nil {
		return
	}
	s.lookups[id] = &sharedLookup{tokens: tokens, salt: salt}
	for _, c := range s.list {
		c.SubmitLookup(id, tokens, salt)
	}
}

// LookupResult implements Cache. The hit is the shortest one of all servers. The pins of longer hits beyond it are released.
func (s *Servers) LookupResult(id string) (hitTokens int, ok bool) {
	l := s.lookups[id]
	switch {
	case l == nil:
		return 0, false
	case l.known:
		return l.hit, true
	}
	for _, c := range s.list {
		if !c.answered(id) {
			return 0, false // no result is taken yet: CleanupLookup would not release the pins of a result that was taken
		}
	}
	hits := make([]int, len(s.list))
	for i, c := range s.list {
		hits[i], _ = c.LookupResult(id)
		if i == 0 || hits[i] < l.hit {
			l.hit = hits[i]
		}
	}
	for i, c := range s.list {
		c.FreeLookupLocks(id, l.tokens, l.hit, hits[i], l.salt)
	}
	l.known = true
	return l.hit, true
}

// CleanupLookup implements Cache.
func (s *Servers) CleanupLookup(id string) {
	delete(s.lookups, id)
	for _, c := range s.list {
		c.CleanupLookup(id)
	}
}

// FreeLookupLocks implements Cache.
func (s *Servers) FreeLookupLocks(id string, tokens []uint32, start, end int, salt string) {
	for _, c := range s.list {
		c.FreeLookupLocks(id, tokens, start, end, salt)
	}
}

// EndSession implements Cache.
func (s *Servers) EndSession(id string) {
	delete(s.lookups, id)
	for _, c := range s.list {
		c.EndSession(id)
	}
}

// ReportBlockAllocations implements Cache.
func (s *Servers) ReportBlockAllocations(records []lmcache.BlockAllocation) {
	for _, c := range s.list {
		c.ReportBlockAllocations(records)
	}
}

// Flush calls ServerCache.Flush of each server.
func (s *Servers) Flush(ctx context.Context) error {
	var errs []error
	for _, c := range s.list {
		errs = append(errs, c.Flush(ctx))
	}
	return errors.Join(errs...)
}
