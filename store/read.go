// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// Refuse records that a load was refused before BeginLoad was called. The worker may send its commit nevertheless, and that commit must not
// end another hold.
func (s *Store) Refuse(session []byte, name hold.Transfer) {
	s.lock()
	defer s.unlock()
	s.mu.holds.Owe(name, session, time.Now())
}

// loadLocked turns the session's pins of the objects that a load of name's range moves into holds. The reason is None, or why the load is
// refused: Busy for more than maxTransfer objects.
func (s *Store) loadLocked(session []byte, name hold.Transfer, hashes []kv.Hash) ([]heldObject, miss.Reason) {
	now := time.Now()
	if _, known := s.mu.leases.Pinned(session, name.By, now); !known {
		return nil, miss.NotPinned
	}
	if (name.To-name.From)*name.Shard.Groups.Len() > maxTransfer {
		return nil, miss.Busy
	}
	var objects []heldObject
	var spans []lease.Span
	var k kv.Key
	for g := range name.Shard.Groups.Len() {
		need := name.Shard.Groups.Need(g, name.From, name.To)
		span := lease.Span{Row: g*name.Shard.World + name.Shard.Index, From: need.Start}
		for c := need.Start; c < need.End; c++ {
			name.Shard.Key(&k, name.Shard.Index, g, hashes[c])
			slot, ok := s.promisedLocked(&k)
			if !ok {
				_, st := s.mu.pool.Find(&k)
				return nil, s.whyLocked(&k, st).Why
			}
			span.Slots = append(span.Slots, uint32(slot))
			objects = append(objects, heldObject{slot, c - name.From, g, s.mu.pool.Offset(slot), s.mu.pool.Length(slot)})
		}
		spans = append(spans, span)
	}
	l, _ := s.mu.leases.Pinned(session, name.By, now, spans...)
	if l == nil {
		return nil, miss.NotPinned
	}
	for _, o := range objects {
		s.mu.pool.Hold(o.slot)
		s.keepLocked(o.slot)
		s.offerLocked(o.slot)
	}
	for _, span := range spans {
		l.Take(span.Row, span.From, span.From+len(span.Slots), 1, s.unpinLocked)
	}
	return objects, miss.None
}

// CommitLoad ends the transfer that BeginLoad began. After a refused load it only forgets the refusal, and Chunks is 0. Several transfers
// of one name and request end as CommitStore says.
func (s *Store) CommitLoad(name hold.Transfer, requestID []byte) Committed {
	ended, _, out := s.commit(name, requestID)
	for _, h := range ended {
		out.Chunks += len(h.Slots)
		s.end(h, false)
	}
	return out
}
