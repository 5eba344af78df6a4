// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// CheckBooks compares what the store counts with what it can be counted from. spaces are those
// of tenants with a quota.
func (s *Store) CheckBooks(spaces map[kv.Namespace]string) error {
	s.lock()
	defer s.unlock()
	evictable := 0
	for slot := range pool.Slot(s.mu.pool.Slots()) {
		if s.evictableLocked(slot) {
			evictable++
		}
	}
	if evictable != s.mu.evictable {
		return fmt.Errorf("%d slots are evictable, counted are %d", evictable, s.mu.evictable)
	}
	known := map[uint32]bool{}
	look := func(space kv.Namespace) { // a tenant's own policy is asked when room is for it
		s.mu.policy.For(space, 1<<50)
		s.mu.policy.Ascend(func(slot uint32) bool { known[slot] = true; return true })
	}
	look(kv.Namespace{})
	for space := range spaces {
		look(space)
	}
	for slot := range known {
		if s.mu.pool.StateOf(pool.Slot(slot)) != pool.Resident {
			return fmt.Errorf("the policy knows slot %d, which is not resident", slot)
		}
	}
	for slot := range pool.Slot(s.mu.pool.Slots()) {
		if s.evictableLocked(slot) && !known[uint32(slot)] {
			return fmt.Errorf("slot %d can be evicted and the policy does not name it", slot)
		}
	}
	return nil
}

// CheckTenants compares what tenants with a quota have with what is in the pool.
func (s *Store) CheckTenants(salts map[kv.Namespace]string) error {
	s.lock()
	defer s.unlock()
	bytes := map[string]int64{}
	for slot := range pool.Slot(s.mu.pool.Slots()) {
		if st := s.mu.pool.StateOf(slot); st == pool.Staged || st == pool.Resident {
			bytes[salts[s.mu.pool.KeyOf(slot).Namespace]] += s.mu.pool.Round(s.mu.pool.Length(slot))
		}
	}
	pinned := map[string]int64{}
	list, _ := s.mu.policy.Pins(0, 1<<20, nil)
	for _, p := range list {
		slot := pool.Slot(p.Slot)
		if s.mu.pool.StateOf(slot) != pool.Resident || !s.keptLocked(slot) {
			return fmt.Errorf("slot %d is pinned, is %v and kept %v", slot, s.mu.pool.StateOf(slot), s.keptLocked(slot))
		}
		pinned[salts[s.mu.pool.KeyOf(slot).Namespace]] += s.mu.pool.Round(s.mu.pool.Length(slot))
	}
	for _, of := range s.mu.policy.List() {
		if of.PinnedBytes != pinned[of.Salt] || of.PinnedBytes > of.PinLimit {
			return fmt.Errorf("tenant %q has %d bytes pinned in the books, %d in the pool, may %d", of.Salt, of.PinnedBytes, pinned[of.Salt], of.PinLimit)
		}
		if of.QuotaBytes >= 0 && of.Bytes != bytes[of.Salt] {
			return fmt.Errorf("tenant %q has %d bytes in the books, %d in the pool", of.Salt, of.Bytes, bytes[of.Salt])
		}
	}
	return nil
}

// CheckIdle fails if anything is still kept.
func (s *Store) CheckIdle() error {
	s.lock()
	defer s.unlock()
	for i := range s.mu.kept.Len() {
		if n := *s.mu.kept.At(i); n > 0 {
			return fmt.Errorf("slot %d is kept by %d", i, n)
		}
	}
	return nil
}

// recorder counts what a policy is told.
type recorder struct {
	evict.Policy
	adds, removes int
}

func (r *recorder) Add(slot uint32, id, parent uint64, weight int64) {
	r.adds++
	r.Policy.Add(slot, id, parent, weight)
}

func (r *recorder) Remove(slot uint32) {
	r.removes++
	r.Policy.Remove(slot)
}

// resident returns which of the hashes are kept.
func (s *Store) resident(h []kv.Hash) (out []int) {
	s.lock()
	defer s.unlock()
	for i := range h {
		var k kv.Key
		crowdShard.Key(&k, 0, 0, h[i])
		if _, ok := s.residentLocked(&k); ok {
			out = append(out, i)
		}
	}
	return out
}

// Pins and holds take nothing out of a policy and put nothing in: a policy with a
// memory would lose it. While everything is pinned, stores that find no room change
// nothing either: afterwards the same chunks go as in a store where nobody tried.
func TestPinsAndHoldsNeverDisturbThePolicy(t *testing.T) {
	const chunks = 40
	for _, name := range evict.Names {
		var order [2][]int
		for twin := range order {
			p, err := evict.New(name, chunks*crowdChunk)
			if err != nil {
				t.Fatal(err)
			}
			rec := &recorder{Policy: p}
			s := crowdStore(t, chunks, Options{WorkerShare: 1, PeerShare: 1, Policy: rec})
			place(t, s, 1, chunks, crowdChunk, false)
			h := crowdPrompt(1, chunks)
			owner := lease.Owner{Peer: "uid 2"}
			look := func(session string, n int) {
				t.Helper()
				if got := s.Lookup([]byte(session), crowdShard, Prompt{Chunks: n, Owner: owner, Hashes: Hashed(h).Hashes}, 1); got.Hit != n {
					t.Fatal(got)
				}
			}
			look("head", 10)
			load := crowdTransfer("uid 2", 2, h[:10], true)
			if why := s.BeginLoad([]byte("head"), load, h, &Transfer{}); why != miss.None {
				t.Fatal(why)
			}
			look("all", chunks)
			for i := range 20 * (1 - twin) {
				other := crowdPrompt(50+i, 3)
				if got, err := s.BeginStore(crowdTransfer("uid 2", 3, other, false), []byte("no room"), other, &Transfer{}); err != nil || got.NoRoom != 3 {
					t.Fatal(got, err)
				}
			}
			s.CommitLoad(load, []byte("head"))
			s.EndSession([]byte("all"), owner)
			s.EndSession([]byte("head"), owner)
			if rec.adds != chunks || rec.removes != 0 {
				t.Errorf("%s: %d slots added, %d removed, %d were stored and none dropped", name, rec.adds, rec.removes, chunks)
			}
			if err := s.CheckIdle(); err != nil {
				t.Error(err)
			}
			for i := range 20 {
				place(t, s, 70+i, 1, crowdChunk, false)
				order[twin] = append(order[twin], -1)
				order[twin] = append(order[twin], s.resident(h)...)
				if err := s.CheckBooks(nil); err != nil {
					t.Fatal(name, err)
				}
			}
		}
		if !slices.Equal(order[0], order[1]) {
			t.Errorf("%s: others go after stores that found no room:\n%v\n%v", name, order[0], order[1])
		}
		t.Log(name, order[0])
	}
}

// Where all but one of many chunks are pinned, each store finds the one at once: not by
// looking at the others again and again under the lock.
func TestAPinnedPoolCostsEachStoreALookOnly(t *testing.T) {
	chunks := testkit.Volume(1 << 14)
	for _, name := range evict.Names {
		p, err := evict.New(name, int64(chunks)*crowdChunk)
		if err != nil {
			t.Fatal(err)
		}
		s := crowdStore(t, chunks, Options{WorkerShare: 1, PeerShare: 1, Policy: p})
		h := crowdPrompt(1, chunks)
		tr := crowdTransfer("uid 1", 1, h, false)
		if got, err := s.BeginStore(tr, []byte("r"), h, &Transfer{}); err != nil || got.NoRoom > 0 {
			t.Fatal(got, err)
		}
		s.CommitStore(tr, []byte("r"), h, true)
		if got := s.Lookup([]byte("pins"), crowdShard, Hashed(h[:chunks-1]), 1); got.Hit != chunks-1 {
			t.Fatal(got)
		}
		looks, most := 0, 0
		busy, before := s.busy, 0
		s.busy = func(slot uint32) bool { looks++; return busy(slot) }
		watch = func(begin bool) {
			if begin {
				before = looks
			} else {
				most = max(most, looks-before)
			}
		}
		const stores = 200
		for i := range stores { // each evicts the one before
			place(t, s, 10+i, 1, crowdChunk, false)
		}
		watch = nil
		if got := s.Stats(); got.EvictedChunks != stores {
			t.Errorf("%s: %d chunks evicted by %d stores", name, got.EvictedChunks, stores)
		}
		if looks > chunks+100*stores || most > batch {
			t.Errorf("%s: %d looks at %d slots by %d stores, %d in one section", name, looks, chunks, stores, most)
		}
	}
}

// A promise that ends without being a use, as that of a write below does, makes a slot evictable again also
// where the policy had found it kept: else its memory would be lost to everybody.
func TestEndedPromisesMakeSlotsEvictableAgain(t *testing.T) {
	for _, name := range evict.Names {
		p, err := evict.New(name, 4*crowdChunk)
		if err != nil {
			t.Fatal(err)
		}
		s := crowdStore(t, 4, Options{WorkerShare: 1, PeerShare: 1, Policy: p})
		place(t, s, 1, 4, crowdChunk, false)
		func() {
			s.lock()
			defer s.unlock()
			for slot := range pool.Slot(4) {
				s.keepLocked(slot)
			}
		}()
		h := crowdPrompt(7, 1)
		if got, err := s.BeginStore(crowdTransfer("uid 1", 2, h, false), []byte("none"), h, &Transfer{}); err != nil || got.NoRoom != 1 {
			t.Fatal(name, got, err)
		}
		func() {
			s.lock()
			defer s.unlock()
			s.policyLooks(t)
			for slot := range pool.Slot(4) {
				s.letGoUnusedLocked(slot)
			}
		}()
		if err := s.CheckBooks(nil); err != nil {
			t.Error(name, err)
		}
		place(t, s, 8, 4, crowdChunk, false) // evicts all four
	}
}

// policyLooks has the policy find every slot kept, as a search for a victim does while one other slot is not.
func (s *Store) policyLooks(t *testing.T) {
	t.Helper()
	if _, ok, more := s.mu.policy.Victim(); ok || more {
		t.Fatal(ok, more)
	}
}
