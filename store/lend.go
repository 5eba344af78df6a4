// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/hold"
)

// Place is where an object is: bytes from the pool's start.
type Place struct{ Offset, Bytes int64 }

// Loan keeps objects in place for a reader that knows their places, until GiveBack or until its time is over.
type Loan struct {
	store *Store
	hold  *hold.Hold
}

// Lend holds the objects of keys for a reader of the user or address `by`, for the time life at most. In each shard and object group it
// lends the objects before the first missing one, at most as many as one transfer may have, and at most `most` bytes. places has one place
// for each key; for a key that is not lent its Bytes is 0. The loan is nil if nothing is lent. Error: ErrBusy.
func (s *Store) Lend(by string, keys []kv.Key, life time.Duration, most int64) (places []Place, _ *Loan, err error) {
	places = make([]Place, len(keys))
	ended, held := make(map[kv.Key]bool), []heldObject(nil) // ended: shards and groups with a missing object, by keys without a chunk
	for from := 0; from < len(keys); from += batch {
		if held, err = s.lendSome(by, keys, from, places, ended, held, &most); err != nil {
			s.giveBackLent(held)
			return nil, nil, err
		}
	}
	if len(held) == 0 {
		return places, nil, nil
	}
	h := s.newHold(hold.Transfer{By: by, Load: true}, nil, held)
	h.Deadline = time.Now().Add(life)
	s.lock()
	defer s.unlock()
	s.mu.holds.AddLoan(h)
	return places, &Loan{s, h}, nil
}

func (s *Store) lendSome(by string, keys []kv.Key, from int, places []Place, ended map[kv.Key]bool, held []heldObject, most *int64) ([]heldObject, error) {
	s.lock()
	defer s.unlock()
	if s.busyLocked(by) {
		return held, ErrBusy
	}
	for i := from; i < min(from+batch, len(keys)); i++ {
		k := &keys[i]
		r := kv.Key{Namespace: k.Namespace, Rank: k.Rank, Group: k.Group}
		slot, ok := s.residentLocked(k)
		if !ok || ended[r] || len(held) == maxTransfer || s.mu.pool.Length(slot) > *most {
			ended[r] = true
			continue
		}
		*most -= s.mu.pool.Length(slot)
		s.mu.pool.Hold(slot)
		s.keepLocked(slot)
		o := heldObject{slot: slot, offset: s.mu.pool.Offset(slot), bytes: s.mu.pool.Length(slot)}
		places[i] = Place{o.offset, o.bytes}
		held = append(held, o)
	}
	return held, nil
}

// giveBackLent ends holds whose places were not given to a reader.
func (s *Store) giveBackLent(held []heldObject) {
	if len(held) > 0 {
		s.end(s.newHold(hold.Transfer{Load: true}, nil, held), false)
	}
}

// GiveBack ends the loan. It does nothing for a loan whose time is over.
func (l *Loan) GiveBack() {
	if l.take() {
		l.store.end(l.hold, false)
	}
}

func (l *Loan) take() bool {
	s := l.store
	s.lock()
	defer s.unlock()
	if s.mu.closed || !s.mu.holds.Keeps(l.hold) {
		return false
	}
	s.mu.holds.Remove(l.hold)
	return true
}
