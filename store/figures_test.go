// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// Each end of a transfer is counted as what it was: read, refused, given up, late, of this
// process or of a worker.
func TestEndsOfTransfersAreCounted(t *testing.T) {
	b := newBench(t, t.TempDir(), 16, store.Options{})
	defer b.stop()
	h, other := prompt(1, 3), prompt(2, 2)
	b.put("a", h, 0, 3, 3)
	var was store.Stats
	counted := func(what string, loaded, refused, late uint64) {
		t.Helper()
		now := b.store.Stats()
		if now.LoadedChunks-was.LoadedChunks != loaded || now.LoadedBytes-was.LoadedBytes != loaded*chunkBytes ||
			now.ReadFailures-was.ReadFailures != refused || now.LateCommits-was.LateCommits != late {
			t.Errorf("%s: before %+v, after %+v", what, was.Counters, now.Counters)
		}
		was = now
	}
	load := transfer(7, h, 0, 3, true)
	look := func() {
		t.Helper()
		if got := b.store.Lookup([]byte("r"), one, store.Hashed(h), 1); got.Hit != 3 {
			t.Fatal(got)
		}
	}
	begin := func(own bool) *store.Transfer {
		t.Helper()
		look()
		p := &store.Transfer{Own: own}
		if why := b.store.BeginLoad([]byte("r"), load, h, p); why != miss.None {
			t.Fatal(why)
		}
		return p
	}
	counted("nothing", 0, 0, 0)
	if got := begin(true).Done(nil, true); got.Chunks != 3 || got.Late {
		t.Errorf("%+v", got)
	}
	counted("an own load", 3, 0, 0)
	if got := begin(true).Done(nil, false); got.Late {
		t.Errorf("%+v", got)
	}
	counted("an own load that was given up", 0, 0, 0)
	own := begin(true)
	b.store.Detach(7)
	if got := own.Done(nil, true); !got.Late {
		t.Errorf("%+v", got)
	}
	counted("an own load for a worker that left", 0, 0, 0)
	begin(false)
	b.store.CommitLoad(load, []byte("r"))
	counted("a worker's load", 3, 0, 0)
	begin(false)
	b.store.Detach(7)
	b.store.CommitLoad(load, []byte("r"))
	counted("a load of a worker that left", 0, 0, 0)
	for _, own := range []bool{false, true} {
		if why := b.store.BeginLoad([]byte("nobody"), load, h, &store.Transfer{Own: own}); why != miss.NotPinned {
			t.Error(why)
		}
		counted("a refused load", 0, 1, 0)
	}
	tr := transfer(7, other, 0, 2, false)
	stage := func(own bool) *store.Transfer {
		t.Helper()
		p := &store.Transfer{Own: own}
		if _, err := b.store.BeginStore(tr, []byte("s"), other, p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	stage(false)
	b.store.Detach(7)
	b.store.CommitStore(tr, []byte("s"), other, true)
	counted("a store of a worker that left", 0, 0, 1)
	own = stage(true)
	b.store.Detach(7)
	own.Done(other, false)
	counted("an own store for a worker that left", 0, 0, 1)
	stage(true).Done(other, false)
	counted("an own store that was given up", 0, 0, 0)
	stored := b.store.Stats()
	stage(true).Done(other, true)
	counted("an own store", 0, 0, 0)
	if got := b.store.Stats(); got.StoredChunks != stored.StoredChunks+2 || got.StoredBytes != stored.StoredBytes+2*chunkBytes {
		t.Errorf("%+v", got.Counters)
	}
	b.store.EndSession([]byte("r"), nobody)
	b.idle()
}

// Calls of the tier that fail are counted, and of them what differed from its checksum.
func TestFailuresBelowAreCounted(t *testing.T) {
	for script, corrupt := range map[string]uint64{"read 1 wrong": 1, "read 1 error": 0, "stat 1 error": 0} {
		synctest.Test(t, func(t *testing.T) {
			b := newTiered(t, 4, script, store.Options{})
			defer b.close()
			h := prompt(1, 1)
			keep(t, b.memory, one, h...)
			b.await(t, nobody, one, h)
			if got := b.store.Stats(); got.BelowFailures != 1 || got.BelowCorrupt != corrupt || got.BelowChunks != 0 || got.BelowBytes != 0 {
				t.Errorf("%s: %+v", script, got.Counters)
			}
			b.store.EndSession([]byte("r"), nobody)
			b.idle()
		})
	}
}

// Without options a chunk gets its checksum after 1 s and before 2, a hold without a commit ends after
// 600 s, and one of an earlier server's readers after twice that.
func TestDefaultsOfTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 8, store.Options{ChecksumRate: 1 << 30})
		defer func() { b.stop() }()
		b.opts.Quarantine = 0
		b.restart()
		h := prompt(1, 2)
		b.put("a", h, 0, 2, 2)
		end := b.run()
		time.Sleep(900 * time.Millisecond)
		if got := b.store.Stats(); got.SummedChunks != 0 {
			t.Errorf("%d chunks have a checksum after 0.9 s", got.SummedChunks)
		}
		time.Sleep(600 * time.Millisecond)
		if got := b.store.Stats(); got.SummedChunks != 2 {
			t.Errorf("%d chunks have a checksum after 1.5 s", got.SummedChunks)
		}
		end()
		b.store.Lookup([]byte("r"), one, store.Hashed(h), 1)
		if why := b.store.BeginLoad([]byte("r"), transfer(7, h, 0, 2, true), h, &store.Transfer{}); why != miss.None {
			t.Fatal(why)
		}
		staged := prompt(2, 3)
		if _, err := b.store.BeginStore(transfer(7, staged, 0, 3, false), []byte("s"), staged, &store.Transfer{}); err != nil {
			t.Fatal(err)
		}
		holds := func(after time.Duration, want int) {
			t.Helper()
			time.Sleep(after)
			b.store.Expire()
			if got := b.store.Stats(); got.Transfers != want {
				t.Errorf("%d transfers are waited for, want %d", got.Transfers, want)
			}
		}
		holds(599*time.Second, 2)
		b.restart() // their time begins again
		holds(599*time.Second, 2)
		holds(2*time.Second, 1)
		holds(597*time.Second, 1)
		holds(3*time.Second, 0)
	})
}

// FreePins changes nothing for a session that has no pins, or is not there, or whose lookup is
// pending: the pins of its lookups before stay.
func TestFreePinsWithoutPinsChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, pinned := prompt(1, 4), prompt(2, 3)
		b := restored(t, 16, h)
		defer func() { b.stop() }()
		b.store.FreePins([]byte("nobody"), nobody, 0, 4, 1)
		b.store.NoHit([]byte("none"), nobody)
		b.store.FreePins([]byte("none"), nobody, 0, 4, 1)
		b.put(t, pinned)
		if got := b.lookupAs(nobody, "r", pinned); got.State != store.Ready || got.Hit != 3 {
			t.Fatal(got)
		}
		if got := b.lookupAs(nobody, "r", h); got.State != store.Pending {
			t.Fatal(got)
		}
		synctest.Wait()
		before := b.store.Stats().EvictableObjs
		b.store.FreePins([]byte("r"), nobody, 0, 3, 1)
		if got := b.store.Stats().EvictableObjs; got != before {
			t.Errorf("%d chunks can be evicted, %d before a pending lookup was given up", got, before)
		}
		b.sumAll()
		synctest.Wait()
		if got := b.store.Result([]byte("r"), nobody); got.Hit != 4 {
			t.Error(got)
		}
		b.store.FreePins([]byte("r"), nobody, 1, 3, 1)
		if got := b.store.Stats().EvictableObjs; got != 2 {
			t.Errorf("%d chunks can be evicted, want the two that were given up", got)
		}
		b.store.FreePins([]byte("r"), nobody, 3, 99, 1) // beyond the hit
		if got := b.store.Stats().EvictableObjs; got != 3 {
			t.Errorf("%d chunks can be evicted, want 3", got)
		}
		b.store.EndSession([]byte("r"), nobody)
		b.idle()
	})
}

// Reads from below use what LoadBytes allows to the last byte: two users who want one
// object each get them at the same time.
func TestReadsUseAllOfLoadBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 64, "read * slow 1s", store.Options{LoadBytes: 2 * chunkBytes})
		defer b.close()
		began := time.Now()
		owners := []lease.Owner{{Peer: "uid 1"}, {Peer: "uid 2"}}
		for i, o := range owners {
			h := prompt(4+i, 1)
			keep(t, b.memory, one, h...)
			if got := b.lookupAs(o, "r", h); got.State != store.Pending {
				t.Fatal(got)
			}
		}
		for _, o := range owners {
			if got := b.store.Await(t.Context(), []byte("r"), o); got.Hit != 1 {
				t.Errorf("%s: %+v", o.Peer, got)
			}
			b.store.EndSession([]byte("r"), o)
		}
		if took := time.Since(began); took != time.Second {
			t.Errorf("two reads at the same time took %v", took)
		}
		b.idle()
	})
}

// An eighth of a pool is left to others from the size on at which that is eight chunks.
func TestAnEighthIsLeftOfPoolsOfManyChunks(t *testing.T) {
	for chunks, want := range map[int]int{63: 63, 64: 56} {
		b := newBench(t, t.TempDir(), chunks, store.Options{WorkerShare: 0.25, PeerShare: 0.75})
		h := prompt(1, 100)
		var p store.Transfer
		if _, err := b.store.BeginStore(transfer(7, h, 0, 100, false), []byte("r"), h, &p); err != nil || len(p.Offsets) != want {
			t.Errorf("%d of %d places, %v, want %d", len(p.Offsets), chunks, err, want)
		}
		b.stop()
	}
}

// A miss names the shard of the first missing chunk, and why it is missing: never stored, being
// stored, or not committed.
func TestReasonsNameTheShardAndTheChunk(t *testing.T) {
	b := newBench(t, t.TempDir(), 16, store.Options{})
	defer b.stop()
	h := prompt(1, 4)
	two := one
	two.World = 2
	for shard, chunks := range []int{4, 2} {
		tr := transfer(1, h, 0, chunks, false)
		tr.Shard.World, tr.Shard.Index = 2, shard
		if _, err := b.store.BeginStore(tr, []byte("a"), h, &store.Transfer{}); err != nil {
			t.Fatal(err)
		}
		b.store.CommitStore(tr, []byte("a"), h, true)
	}
	look := func(h []kv.Hash) store.LookupResult {
		got := b.store.Lookup([]byte("r"), two, store.Hashed(h), 1)
		b.store.EndSession([]byte("r"), nobody)
		return got
	}
	if got := look(h); got.Hit != 2 || got.Shard != 1 || got.Why != miss.NeverStored {
		t.Errorf("%+v", got)
	}
	tr := transfer(1, h, 2, 3, false)
	tr.Shard.World, tr.Shard.Index = 2, 1
	if _, err := b.store.BeginStore(tr, []byte("b"), h, &store.Transfer{}); err != nil {
		t.Fatal(err)
	}
	if got := look(h); got.Hit != 2 || got.Shard != 1 || got.Why != miss.BeingStored {
		t.Errorf("%+v", got)
	}
	b.store.CommitStore(tr, []byte("b"), h, false)
	if got := look(h); got.Hit != 2 || got.Shard != 1 || got.Why != miss.Failed {
		t.Errorf("%+v", got)
	}
	if got := look(h[:2]); got.Hit != 2 || got.Why != miss.None {
		t.Errorf("%+v", got)
	}
	if got := look(nil); got.Hit != 0 || got.Why != miss.None {
		t.Errorf("an empty prompt: %+v", got)
	}
}

// A chunk that somebody else is storing is no cached one; what was not cached and did not fit is
// said, too.
func TestReservedCountsCachedAndStagedApart(t *testing.T) {
	b := newBench(t, t.TempDir(), 4, store.Options{})
	defer b.stop()
	h := prompt(1, 5)
	b.put("a", h, 0, 1, 1)
	if _, err := b.store.BeginStore(transfer(1, h, 1, 3, false), []byte("b"), h, &store.Transfer{}); err != nil {
		t.Fatal(err)
	}
	var p store.Transfer
	got, err := b.store.BeginStore(transfer(2, h, 0, 5, false), []byte("c"), h, &p)
	if err != nil || got.Cached != 1 || got.Staged != 2 || len(p.Offsets) != 1 || got.NoRoom != 1 || got.Share || got.Skipped != 0 {
		t.Errorf("%+v, %d places, %v", got, len(p.Offsets), err)
	}
	if got := b.store.Stats(); got.AllocationFailures != 1 {
		t.Errorf("%+v", got.Counters)
	}
}

// Copies of this process leave the same order behind as workers: tails are evicted first.
func TestExtendedPromptTailsFirstOfOwnTransfers(t *testing.T) {
	b := newBench(t, t.TempDir(), 4, store.Options{})
	defer b.stop()
	h := prompt(1, 4)
	for from := 0; from < 4; from += 2 {
		p := &store.Transfer{Own: true}
		if _, err := b.store.BeginStore(transfer(1, h, from, from+2, false), []byte("a"), h, p); err != nil {
			t.Fatal(err)
		}
		if got := p.Done(h, true); got.Chunks != 2 {
			t.Fatal(got)
		}
	}
	for n := range 3 {
		b.put("b", prompt(20+n, 2), 1, 2, 1)
	}
	if got := b.hit(h); got.Hit != 1 {
		t.Fatalf("hit %d, want 1: tails are evicted before heads", got.Hit)
	}
}

// Sessions that end early, lookups that found nothing and chunks that are cleared count.
func TestSessionsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 8, store.Options{MaxSessions: 2, SessionIdle: time.Minute})
		defer b.stop()
		h := prompt(1, 3)
		b.put("a", h, 0, 3, 3)
		b.lookupAs(nobody, "1", h)
		b.store.NoHit([]byte("2"), nobody)
		if got := b.store.Result([]byte("2"), nobody); got.State != store.Ready || got.Hit != 0 {
			t.Errorf("%+v", got)
		}
		b.lookupAs(nobody, "3", h[:1]) // in place of the first
		got := b.store.Stats()
		if got.Lookups != 3 || got.SessionsPushed != 1 || got.Sessions != 2 || got.EvictableObjs != 2 {
			t.Errorf("%+v", got)
		}
		time.Sleep(time.Minute)
		b.store.Expire()
		got = b.store.Stats()
		if got.SessionsExpired != 2 || got.Sessions != 0 || got.EvictableObjs != 3 {
			t.Errorf("%+v", got)
		}
		b.idle()
	})
}
