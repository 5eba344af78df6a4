// SPDX-License-Identifier: Apache-2.0

package store

import (
	"runtime"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Whatever goes while a lookup searches and pins, between any two of its sections, the
// hit is the longest that can be served then, and what it needs is pinned, that and no
// more.
func TestEvictionDuringALookupShortensItsHit(t *testing.T) {
	const world, chunks = 2, 600 // more than a section searches or pins
	p, err := pool.Open(pool.Options{Name: "p", Bytes: 4 * chunks * 64, Align: 64, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, Options{WorkerShare: 1, PeerShare: 1})
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	groups, err := object.NewGroups(2, []object.Group{
		{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: 64}, {ChunkGroup: coordinator.ChunkGroup{Window: 5}, Bytes: 64},
	})
	if err != nil {
		t.Fatal(err)
	}
	h := scaleHashes(chunks)
	sh := object.Shard{Namespace: kv.Namespace{1}, World: world, Groups: groups}
	fill := func(from, to int) {
		t.Helper()
		for i := range world {
			of := sh
			of.Index = i
			tr := &Transfer{Own: true}
			if got, err := s.BeginStore(hold.Transfer{Instance: 1, Shard: of, From: from, To: to, Last: h[to-1]}, []byte("s"), h, tr); err != nil || got.NoRoom > 0 {
				t.Fatal(got, err)
			}
			if len(tr.Parts) > 0 {
				tr.Done(h, true)
			}
		}
	}
	fill(0, chunks)
	slotOf := func(c, row int) (pool.Slot, bool) {
		var k kv.Key
		sh.Key(&k, row%world, row/world, h[c])
		return s.residentLocked(&k)
	}
	// expected is the hit, counted out.
	expected := func() int {
		missing := make([][]int, 2*world) // chunks, by row, the last one first
		for row := range missing {
			for c := chunks - 1; c >= 0; c-- {
				if _, ok := slotOf(c, row); !ok {
					missing[row] = append(missing[row], c)
				}
			}
		}
		for n := chunks; ; n-- {
			ok := true
			for row, of := range missing {
				need := groups.Need(row/world, 0, n)
				ok = ok && !slices.ContainsFunc(of, func(c int) bool { return c >= need.Start && c < need.End })
			}
			if ok {
				return n
			}
		}
	}
	sections, step := 0, 1
	if testkit.Race {
		step = 5 // still each object and each chunk
	}
	for victim := 0; ; victim += step {
		c, row := []int{0, 512, chunks - 1}[victim%3], victim/3%(2*world)
		at := victim / (3 * 2 * world) // after this many sections
		now := 0
		watch = func(begin bool) {
			if begin {
				return
			}
			if now++; now == at+1 {
				if slot, ok := slotOf(c, row); ok && s.evictableLocked(slot) {
					s.dropLocked(slot, miss.Evicted)
				}
			}
		}
		got := s.Lookup([]byte("r"), sh, Hashed(h), 1)
		watch = nil
		if got.State != Ready || got.Hit != expected() {
			t.Fatalf("object %d of chunk %d went after section %d: %+v, want a hit of %d", row, c, at, got, expected())
		}
		for row := range 2 * world {
			need := groups.Need(row/world, 0, got.Hit)
			for c := range chunks {
				slot, ok := slotOf(c, row)
				if kept := ok && s.keptLocked(slot); kept != (c >= need.Start && c < need.End) {
					t.Fatalf("victim %d: of a hit of %d, object %d of chunk %d is pinned: %v", victim, got.Hit, row, c, kept)
				}
			}
		}
		s.EndSession([]byte("r"), lease.Owner{})
		if err := s.CheckIdle(); err != nil {
			t.Fatal(err)
		}
		fill(c, c+1)
		if sections = max(sections, now); at > sections {
			break
		}
	}
	if sections < 8 {
		t.Errorf("only %d sections: the test shows nothing", sections)
	}
}

// A flight is begun by one worker only, however many lookups wait for it.
func TestEachFlightBeginsOnce(t *testing.T) {
	s := crowdStore(t, 8, Options{WorkerShare: 1, PeerShare: 1})
	place(t, s, 1, 3, crowdChunk, false)
	h := crowdPrompt(1, 3)
	func() {
		s.lock()
		defer s.unlock()
		waiting := []*prefetch{{}, {}, {}}
		for i, pf := range waiting {
			pf.prompt.Owner.Peer = []string{"uid 1", "uid 2", "uid 2"}[i]
			for c := range h {
				var k kv.Key
				crowdShard.Key(&k, 0, 0, h[c])
				slot, _ := s.residentLocked(&k)
				s.joinFlightLocked(pf, slot, c)
			}
		}
		begun := map[pool.Slot]*flight{}
		for fl := s.nextWantedLocked(); fl != nil; fl = s.nextWantedLocked() {
			if begun[fl.slot] != nil {
				t.Fatalf("slot %d is compared twice at the same time", fl.slot)
			}
			begun[fl.slot] = fl
		}
		if len(begun) != 3 {
			t.Errorf("%d of 3 flights were begun", len(begun))
		}
		for _, fl := range begun {
			s.endFlightLocked(fl, false)
		}
		if left := len(s.mu.flights.of); left != 0 {
			t.Errorf("%d flights are left", left)
		}
		for i, pf := range waiting {
			if pf.waiting != 0 || pf.queued || len(pf.pins) != 0 {
				t.Errorf("lookup %d waits for %d flights, queued %v, %d pins", i, pf.waiting, pf.queued, len(pf.pins))
			}
		}
	}()
	if err := s.CheckIdle(); err != nil {
		t.Error(err)
	}
}

// Pending lookups count with all their objects, of every row: one whose objects are more
// than a user may have waiting is answered at once, with what there is.
func TestPendingLookupsCountTheirObjects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := crowdStore(t, 8, Options{WorkerShare: 1, PeerShare: 1})
		sh := crowdShard
		sh.World = 64
		begin := func(session string, chunks int) bool {
			q := query{session: []byte(session), shard: sh, prompt: Hashed(make([]kv.Hash, chunks)), readers: 1}
			return s.begin(&q, &found{rows: 64}, make([]kv.Hash, chunks))
		}
		waiting := func() int64 {
			s.lock()
			defer s.unlock()
			return s.mu.pending.All().Size
		}
		if begin("too many", maxLookup/64) {
			t.Error("a lookup of all objects that may wait is pending")
		}
		if n := waiting(); n != 0 {
			t.Errorf("%d objects of no pending lookup", n)
		}
		if !begin("some", 100) {
			t.Error("a lookup of few objects is not pending")
		}
		synctest.Wait() // nothing is there: it has ended
		if n := waiting(); n != 0 || s.Stats().Pending != 0 {
			t.Errorf("%d objects of lookups that have ended", n)
		}
	})
}

// Of two processors and more, one is left to those who answer requests.
func TestReadersLeaveAProcessor(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for processors, want := range map[int]int{1: 1, 2: 1, 3: 2, 8: 7} {
		runtime.GOMAXPROCS(processors)
		if got := readers(); got != want {
			t.Errorf("%d of %d processors read chunks, want %d", got, processors, want)
		}
	}
}

// A transfer has at most so many objects: what is beyond is not stored with it, and not
// loaded at once.
func TestObjectsOfATransferAreBounded(t *testing.T) {
	p, err := pool.Open(pool.Options{Name: "p", Bytes: (maxTransfer + 1) * 64, Align: 64, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, Options{WorkerShare: 1, PeerShare: 1})
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	h := scaleHashes(maxTransfer + 1)
	name := func(from, to int, load bool) hold.Transfer {
		sh := crowdShard
		sh.Groups = object.FullAttention(1, 64)
		return hold.Transfer{Instance: 1, Shard: sh, From: from, To: to, Last: h[to-1], Load: load}
	}
	own := &Transfer{Own: true}
	if got, err := s.BeginStore(name(0, len(h), false), []byte("r"), h, own); err != nil || len(own.Parts) != maxTransfer || got.NoRoom != 1 {
		t.Fatalf("%d objects, %+v, %v", len(own.Parts), got, err)
	}
	own.Done(h, true)
	own = &Transfer{Own: true}
	if _, err := s.BeginStore(name(maxTransfer, len(h), false), []byte("r"), h, own); err != nil || len(own.Parts) != 1 {
		t.Fatal(len(own.Parts), err)
	}
	own.Done(h, true)
	if got := s.Lookup([]byte("l"), name(0, 1, true).Shard, Hashed(h), 1); got.Hit != len(h) {
		t.Fatal(got)
	}
	if why := s.BeginLoad([]byte("l"), name(0, len(h), true), h, &Transfer{Own: true}); why != miss.Busy {
		t.Errorf("a load of %d objects: %v", len(h), why)
	}
	own = &Transfer{Own: true}
	if why := s.BeginLoad([]byte("l"), name(1, len(h), true), h, own); why != miss.None || len(own.Parts) != maxTransfer {
		t.Fatalf("a load of %d objects: %v", len(own.Parts), why)
	}
	own.Done(nil, true)
	s.EndSession([]byte("l"), lease.Owner{})
	if err := s.CheckIdle(); err != nil {
		t.Error(err)
	}
}
