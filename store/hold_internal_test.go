// SPDX-License-Identifier: Apache-2.0

package store

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Whatever a client asks for, others get the lock after a batch of chunks.
func TestNoCallKeepsTheLockForMoreThanABatch(t *testing.T) {
	const world, chunks = 4, 4096
	p, err := pool.Open(pool.Options{Name: "p", Bytes: 2 * world * chunks * 64, Align: 64, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, Options{WorkerShare: 1, PeerShare: 1, LoadTimeout: time.Hour})
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	hashes := scaleHashes(chunks)
	sh := object.Shard{Namespace: kv.Namespace{1}, World: world, Groups: object.FullAttention(1, 64)}
	transfer := func(instance int64, shard int, load bool) hold.Transfer {
		of := sh
		of.Index = shard
		return hold.Transfer{Instance: instance, Shard: of, To: chunks, Last: hashes[chunks-1], Load: load}
	}
	stage := func(instance int64) {
		for shard := range world {
			if got, err := s.BeginStore(transfer(instance, shard, false), []byte("r"), hashes, &Transfer{}); err != nil || got.NoRoom+got.Staged+got.Cached > 0 {
				t.Fatal(got, err)
			}
		}
	}
	in := func(name string, f func()) {
		t.Helper()
		type books struct{ drops, free, evictable int64 }
		now := func() books {
			return books{int64(s.mu.drops), s.mu.pool.Usage().FreeBytes / 64, int64(s.mu.evictable)}
		}
		distance := func(a, b int64) int64 { return max(a-b, b-a) }
		var before books
		most, sections := int64(0), 0
		watch = func(begin bool) {
			if begin {
				before = now()
				return
			}
			sections++
			after := now()
			most = max(most, distance(after.drops, before.drops), distance(after.free, before.free), distance(after.evictable, before.evictable))
		}
		f()
		watch = nil
		if most > batch || most == 0 {
			t.Errorf("%s: %d chunks in one of %d sections, want at most %d", name, most, sections, batch)
		}
	}
	in("prepare_store", func() { stage(1) })
	in("unregister", func() { s.Detach(1) })
	in("the quarantine's end", func() { s.EndQuarantine(1) })
	stage(2)
	in("commit_store", func() {
		for shard := range world {
			if got := s.CommitStore(transfer(2, shard, false), []byte("r"), hashes, true); got.Chunks != chunks {
				t.Fatal(got)
			}
		}
	})
	in("lookup", func() {
		if got := s.Lookup([]byte("r"), sh, Hashed(hashes), 1); got.Hit != chunks {
			t.Fatal(got)
		}
	})
	in("free_lookup_locks", func() { s.FreePins([]byte("r"), lease.Owner{}, 0, chunks, 1) })
	s.Lookup([]byte("r"), sh, Hashed(hashes), 1)
	for shard := range world {
		if why := s.BeginLoad([]byte("r"), transfer(2, shard, true), hashes, &Transfer{}); why != miss.None {
			t.Fatal(why)
		}
	}
	in("commit_retrieve", func() {
		for shard := range world {
			if got := s.CommitLoad(transfer(2, shard, true), []byte("r")); got.Chunks != chunks {
				t.Fatal(got)
			}
		}
	})
	s.Lookup([]byte("r"), sh, Hashed(hashes), 1)
	in("end_session", func() { s.EndSession([]byte("r"), lease.Owner{}) })
	for slot := range pool.Slot(s.mu.pool.Slots()) { // as after a restart
		if s.mu.pool.StateOf(slot) != pool.Resident {
			continue
		}
		sum, err := s.mu.pool.Hash(s.mu.pool.Offset(slot), s.mu.pool.Length(slot), make([]byte, 64))
		if err != nil {
			t.Fatal(err)
		}
		s.mu.pool.SetSum(slot, sum)
		s.mu.sums.Suspect(uint32(slot))
	}
	in("a pending lookup", func() {
		if got := s.Lookup([]byte("r"), sh, Hashed(hashes), 1); got.State != Pending {
			t.Fatal(got)
		}
		_, ended := s.result([]byte("r"), lease.Owner{})
		for waiting := true; waiting; {
			s.sumNext()
			select {
			case <-ended:
				waiting = false
			default:
			}
		}
		if got := s.Result([]byte("r"), lease.Owner{}); got.Hit != chunks {
			t.Fatal(got)
		}
	})
	in("end_session after it", func() { s.EndSession([]byte("r"), lease.Owner{}) })
	s.Lookup([]byte("r"), sh, Hashed(hashes), 1)
	s.BeginLoad([]byte("r"), transfer(2, 0, true), hashes, &Transfer{})
	in("clear, forced", func() {
		if n := s.Clear(true); n != world*chunks {
			t.Fatal(n)
		}
	})
}
