// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

const crowdChunk = 4096

var crowdShard = object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: object.FullAttention(1, crowdChunk)}

func crowdStore(t *testing.T, chunks int, o Options) *Store {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "p", Bytes: int64(chunks) * crowdChunk, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, o)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func crowdPrompt(seed, n int) []kv.Hash {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(seed)
	}
	return kv.ChunkHashes(tokens, 1)
}

func crowdTransfer(by string, instance int64, h []kv.Hash, load bool) hold.Transfer {
	return hold.Transfer{Instance: instance, By: by, Shard: crowdShard, To: len(h), Last: h[len(h)-1], Load: load}
}

// One user's transfers that are never committed leave places for those of others,
// and for those of further ones.
func TestOneUsersTransfersLeavePlacesForOthers(t *testing.T) {
	s := crowdStore(t, 100, Options{MaxHolds: 16})
	taken := func(by string, instance int64) (n int) {
		for i := 0; ; i++ {
			h := crowdPrompt(1000*int(instance)+i, 1)
			_, err := s.BeginStore(crowdTransfer(by, instance, h, false), fmt.Append(nil, i), h, &Transfer{})
			if errors.Is(err, ErrBusy) {
				return n
			}
			n++
		}
	}
	for i, want := range []int{8, 4, 2, 1} {
		by := fmt.Sprint("uid ", i)
		if got := taken(by, int64(i)); got != want {
			t.Errorf("%s has %d transfers in progress, want %d", by, got, want)
		}
		if got := taken(by, int64(10+i)); got != 0 {
			t.Errorf("another worker of %s began %d more", by, got)
		}
	}
	// Loads and copies of this process count as well.
	h := crowdPrompt(1, 1)
	if why := s.BeginLoad([]byte("r"), crowdTransfer("uid 0", 1, h, true), h, &Transfer{}); why != miss.Busy {
		t.Errorf("a load beyond the share: %v", why)
	}
	if why := s.BeginLoad([]byte("r"), crowdTransfer("uid 0", 1, h, true), h, &Transfer{Own: true}); why != miss.Busy {
		t.Errorf("a copy beyond the share: %v", why)
	}
}

// One user's refused loads do not make the server forget those of others, whose
// commits must not end what was granted later.
func TestRefusedLoadsOfOneUserKeepThoseOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := crowdStore(t, 16, Options{Quarantine: time.Minute})
		h := crowdPrompt(1, 2)
		for i := range 2 * hold.MaxDebts {
			s.BeginLoad(fmt.Append(nil, i), crowdTransfer("uid 1", 1, h, true), h, &Transfer{})
		}
		kept := crowdTransfer("uid 2", 2, h, false)
		if _, err := s.BeginStore(kept, []byte("w"), h, &Transfer{}); err != nil {
			t.Fatal(err)
		}
		s.CommitStore(kept, []byte("w"), h, true)
		load := crowdTransfer("uid 2", 2, h, true)
		if why := s.BeginLoad([]byte("r"), load, h, &Transfer{}); why != miss.NotPinned {
			t.Fatal(why)
		}
		s.Lookup([]byte("r"), crowdShard, Hashed(h), 1)
		if why := s.BeginLoad([]byte("r"), load, h, &Transfer{}); why != miss.None {
			t.Fatal(why)
		}
		if got := s.CommitLoad(load, []byte("r")); got.Chunks != 0 {
			t.Fatalf("the commit of the refused load ended the granted one: %+v", got)
		}
		if got := s.CommitLoad(load, []byte("r")); got.Chunks != 2 {
			t.Fatalf("the granted load's commit: %+v", got)
		}
		time.Sleep(time.Minute)
		s.Expire()
		if !s.mu.holds.Empty() {
			t.Errorf("commits are waited for: %+v", *s.mu.holds)
		}
	})
}

// A share holds for transfers that are staged at the same time, too: between its
// batches the first one's chunks count as its worker's.
func TestSharesOfTransfersStagedTogether(t *testing.T) {
	const chunks = 8 * stageBatch
	s := crowdStore(t, chunks, Options{})
	keep := crowdPrompt(1, chunks)
	for from := 0; from < chunks; from += chunks / 4 {
		tr := crowdTransfer("uid 1", 1, keep[:from+chunks/4], false)
		tr.From = from
		if _, err := s.BeginStore(tr, []byte("keep"), keep, &Transfer{}); err != nil {
			t.Fatal(err)
		}
		s.CommitStore(tr, []byte("keep"), keep, true)
	}
	begin := func(seed int, instance int64) *stage {
		h := crowdPrompt(seed, chunks)
		tr := crowdTransfer("uid 2", instance, h, false)
		st := &stage{store: s, name: tr, by: pool.Writer{Name: tr.Name(nil)}, hashes: h}
		st.guard = prefixGuard{store: s, shard: tr.Shard, hashes: h}
		if !st.begin() {
			t.Fatal("busy")
		}
		return st
	}
	var together []*stage
	for i := range 6 {
		together = append(together, begin(10+i, int64(10+i/3)))
	}
	total := map[int64]int{}
	for from := 0; from < chunks; from += stageBatch {
		for _, st := range together {
			st.stageBatch(from, from+stageBatch)
		}
	}
	for _, st := range together {
		st.end()
		total[st.name.Instance] += len(st.taken)
	}
	if total[10] > chunks/4 || total[11] > chunks/4 {
		t.Errorf("two workers took %v of %d places at once, want at most a quarter each", total, chunks)
	}
}

// place fills what is free of the pool with chunks of n bytes each, at most count of
// them, and keeps them as somebody who reads them.
func place(t *testing.T, s *Store, seed, count int, n int64, read bool) {
	t.Helper()
	h := crowdPrompt(seed, count)
	for i := range count {
		tr := crowdTransfer("uid 1", 1, h[:i+1], false)
		tr.From = i
		tr.Shard.Groups = object.FullAttention(1, n)
		if _, err := s.BeginStore(tr, []byte("r"), h, &Transfer{}); err != nil {
			t.Fatal(err)
		}
		if got := s.CommitStore(tr, []byte("r"), h, true); got.Chunks != 1 {
			t.Fatal(got)
		}
	}
	if !read {
		return
	}
	if got := s.Lookup(fmt.Append(nil, "reads ", seed), crowdShard, Hashed(h), 1); got.Hit != count {
		t.Fatal(got)
	}
}

// longTransfer stores chunks of n bytes.
func longTransfer(h []kv.Hash, n int64) hold.Transfer {
	tr := crowdTransfer("uid 2", 2, h, false)
	tr.Shard.Groups = object.FullAttention(1, n)
	return tr
}

// A chunk for which no place can be made, since between any two that are being read
// there is too little, evicts nothing, however often it is asked for.
func TestChunkThatCannotFitEvictsNothing(t *testing.T) {
	s := crowdStore(t, 64, Options{WorkerShare: 1, PeerShare: 1})
	for i := range 8 {
		place(t, s, 10+i, 1, crowdChunk, true)
		place(t, s, 30+i, 7, crowdChunk, false)
	}
	long := crowdPrompt(99, 1)
	for range 10 {
		var p Transfer
		if got, err := s.BeginStore(longTransfer(long, 8*crowdChunk), []byte("long"), long, &p); err != nil || len(p.Offsets) != 0 || got.NoRoom != 1 {
			t.Fatal(p, got, err)
		}
	}
	if n := s.Stats().EvictedChunks; n != 0 {
		t.Errorf("%d of 56 chunks were evicted for nothing", n)
	}
	var p Transfer
	if _, err := s.BeginStore(longTransfer(long, 7*crowdChunk), []byte("long"), long, &p); err != nil || len(p.Offsets) != 1 {
		t.Errorf("a chunk that fits: %v, %v", p, err)
	}
}

// What reaches into a neighbourhood from before it is not free: chunks that are being
// read, and longer than a region, cost their small neighbours nothing.
func TestLongNeighboursAreNotFree(t *testing.T) {
	const mib = 1 << 20
	s := crowdStore(t, 32*mib/crowdChunk, Options{WorkerShare: 1, PeerShare: 1})
	for i := range 7 {
		place(t, s, 10+i, 1, 7*mib/2, true)
		place(t, s, 30+i, mib/2/crowdChunk, crowdChunk, false)
	}
	place(t, s, 50, 4*mib/crowdChunk, crowdChunk, false)
	if free := s.Stats().FreeBytes; free != 0 {
		t.Fatalf("%d bytes are free", free)
	}
	long := crowdPrompt(99, 1)
	var p Transfer
	if _, err := s.BeginStore(longTransfer(long, mib), []byte("long"), long, &p); err != nil || len(p.Offsets) != 1 {
		t.Fatal(p, err)
	}
	// Twice its length in plain order, then its length in one place.
	if n := s.Stats().EvictedBytes; n > 3*mib+crowdChunk {
		t.Errorf("a chunk of 1 MiB evicted %d KiB", n>>10)
	}
}

// Somebody who pins all that is kept, and goes on asking for it, keeps nobody else from
// storing: beyond the share of a user or address the oldest promises are given up.
func TestOneUsersPinsLeaveRoomForOthers(t *testing.T) {
	const chunks = 64
	s := crowdStore(t, chunks, Options{})
	for i := range 4 {
		place(t, s, 10+i, chunks/4, crowdChunk, false)
	}
	pin := func(peer string) {
		for i := range 4 {
			p := Hashed(crowdPrompt(10+i, chunks/4))
			p.Owner.Peer = peer
			if got := s.Lookup(fmt.Append(nil, "pins ", i), crowdShard, p, 1); got.Hit < chunks/4-3 {
				t.Fatal(got)
			}
		}
	}
	pin("uid 2")
	store := func(by string, seed int) int {
		h := crowdPrompt(seed, 1)
		var p Transfer
		if _, err := s.BeginStore(crowdTransfer(by, 3, h, false), []byte("r"), h, &p); err != nil {
			t.Fatal(err)
		}
		s.CommitStore(crowdTransfer(by, 3, h, false), []byte("r"), h, true)
		return len(p.Offsets)
	}
	if n := store("uid 2", 90); n != 0 {
		t.Errorf("a user gave up its own promises for %d chunks", n)
	}
	if n := store("uid 3", 91); n != 1 {
		t.Error("no place beside the pins of another user")
	}
	load := crowdTransfer("uid 2", 2, crowdPrompt(13, chunks/4), true)
	if why := s.BeginLoad([]byte("pins 3"), load, crowdPrompt(13, chunks/4), &Transfer{}); why != miss.None {
		t.Errorf("the newest promise was given up: %v", why)
	}
	s.CommitLoad(load, []byte("pins 3"))
	for i := range 4 {
		s.EndSession(fmt.Append(nil, "pins ", i), lease.Owner{Peer: "uid 2"})
	}
	if st := s.Stats(); st.EvictableObjs != st.Resident || s.mu.leases.Pins() != 0 {
		t.Errorf("pins are left: %d of %d can be evicted, %d", st.EvictableObjs, st.Resident, s.mu.leases.Pins())
	}
}
