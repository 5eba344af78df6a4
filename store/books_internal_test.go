// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Whatever becomes of transfers, nothing of them stays in the books: committed,
// refused, given up, detached, of an earlier server.
func TestBooksAreEmptyInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		open := func() *Store {
			p, err := pool.Open(pool.Options{Name: "p", Bytes: 64 * 4096, Dir: dir, Clock: func() time.Duration {
				return time.Hour + time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC))
			}})
			if err != nil {
				t.Fatal(err)
			}
			return New(p, Options{Quarantine: time.Minute, MaxHolds: 40})
		}
		hashes := kv.ChunkHashes([]uint32{1, 2, 3, 4, 5, 6, 7, 8}, 1)
		at := func(instance int64, from int, load bool) hold.Transfer {
			return hold.Transfer{
				Instance: instance, By: fmt.Sprint("uid ", instance%2), Shard: object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: object.FullAttention(1, 4096)},
				From: from, To: from + 2, Last: hashes[from+1], Load: load,
			}
		}
		s := open()
		var p Transfer
		for instance := int64(1); instance <= 3; instance++ {
			for i, from := range []int{0, 2, 4} {
				request := fmt.Append(nil, "r", i)
				if _, err := s.BeginStore(at(instance, from, false), request, hashes, &p); err != nil {
					t.Fatal(err)
				}
				s.Refuse(request, at(instance, from, true))
			}
		}
		one := at(1, 0, false)
		worker, by := s.mu.holds.StagedBy(&one)
		if st := s.mu.holds.Stats(); st.Transfers == 0 || st.Debts != 9 || worker == 0 || by == 0 {
			t.Fatalf("%+v", s.mu.holds)
		}
		s.CommitStore(at(1, 0, false), []byte("r0"), hashes, true)
		s.Detach(1)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = open()
		if s.mu.holds.Empty() {
			t.Fatal("no transfer of the earlier server is known")
		}
		s.CommitStore(at(1, 2, false), []byte("r1"), hashes, true)
		if _, err := s.BeginStore(at(2, 6, false), []byte("r9"), hashes, &p); err != nil {
			t.Fatal(err)
		}
		s.Detach(2)
		for range 5 * 60 {
			time.Sleep(time.Second)
			s.Expire()
		}
		if h := s.mu.holds; !h.Empty() {
			t.Errorf("left in the books: %+v", *h)
		}
		if got := s.Stats(); got.StagedBytes != 0 || got.CondemnedBytes != 0 || got.Transfers != 0 || got.Quarantined != 0 {
			t.Errorf("left in the pool: %+v", got)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// At the limit of transfers in progress stores and loads are declined, and only
// until one ends.
func TestTransfersInProgressAreBounded(t *testing.T) {
	p, err := pool.Open(pool.Options{Name: "p", Bytes: 16 * 4096, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, Options{MaxHolds: 4})
	defer s.Close()
	hashes := kv.ChunkHashes([]uint32{1, 2, 3, 4}, 1)
	sh := object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: object.FullAttention(1, 4096)}
	tr := func(from int, load bool) hold.Transfer {
		return hold.Transfer{Instance: 1, Shard: sh, From: from, To: from + 1, Last: hashes[from], Load: load}
	}
	var place Transfer
	put := func(from int) error {
		_, err := s.BeginStore(tr(from, false), []byte("r"), hashes, &place)
		return err
	}
	if err := put(0); err != nil {
		t.Fatal(err)
	}
	s.CommitStore(tr(0, false), []byte("r"), hashes, true)
	if err := put(1); err != nil {
		t.Fatal(err)
	}
	if err := put(2); err != nil {
		t.Fatal(err)
	}
	if got := s.Lookup([]byte("l"), sh, Hashed(hashes), 1); got.Hit != 1 {
		t.Fatal(got)
	}
	if why := s.BeginLoad([]byte("l"), tr(0, true), hashes, &place); why != miss.Busy {
		t.Errorf("a load beyond the limit: %v", why)
	}
	if why := s.BeginLoad([]byte("l"), tr(0, true), hashes, &Transfer{Own: true}); why != miss.Busy {
		t.Errorf("a copy beyond the limit: %v", why)
	}
	if err := put(3); err != ErrBusy {
		t.Errorf("a store beyond the limit: %v", err)
	}
	s.CommitStore(tr(1, false), []byte("r"), hashes, true)
	s.CommitLoad(tr(0, true), []byte("l")) // of the load that was declined
	if why := s.BeginLoad([]byte("l"), tr(0, true), hashes, &place); why != miss.None {
		t.Errorf("a load after one ended: %v", why)
	}
	if got := s.Stats(); got.Lookups != 1 || got.LoadedChunks != 0 {
		t.Errorf("%+v", got)
	}
	if got := s.CommitLoad(tr(0, true), []byte("l")); got.Chunks != 1 {
		t.Errorf("%+v", got)
	}
	if got := s.Stats(); got.LoadedChunks != 1 || got.LoadedBytes != 4096 || got.StoredChunks != 2 {
		t.Errorf("%+v", got)
	}
}
