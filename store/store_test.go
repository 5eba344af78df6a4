// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

var one = object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: full}

// full are the groups of the tests' models.
var full = object.FullAttention(1, chunkBytes)

func transfer(worker int64, hashes []kv.Hash, from, to int, load bool) hold.Transfer {
	return hold.Transfer{Instance: worker, Shard: one, From: from, To: to, Last: hashes[to-1], Load: load}
}

// put stores chunks [from, to) and fails unless all want of them are taken.
func (b *bench) put(request string, hashes []kv.Hash, from, to, want int) {
	b.t.Helper()
	tr := transfer(1, hashes, from, to, false)
	var p store.Transfer
	if _, err := b.store.BeginStore(tr, []byte(request), hashes, &p); err != nil || len(p.Offsets) != want {
		b.t.Fatalf("Reserve took %d chunks, %v, want %d", len(p.Offsets), err, want)
	}
	for i, off := range p.Offsets {
		copy(b.at(off), content(hashes[from+p.Indices[i]], 0))
	}
	if want > 0 {
		if got := b.store.CommitStore(tr, []byte(request), hashes, true); got.Chunks != want {
			b.t.Fatalf("CommitStore = %+v, want %d chunks", got, want)
		}
	}
}

func (b *bench) hit(hashes []kv.Hash) store.LookupResult {
	got := b.store.Lookup([]byte("probe"), one, store.Hashed(hashes), 1)
	b.store.EndSession([]byte("probe"), lease.Owner{})
	return got
}

// A request larger than the pool keeps its longest prefix, and a later one makes
// room for itself, tails first.
func TestLongestPrefixAndTailsFirst(t *testing.T) {
	b := newBench(t, t.TempDir(), 4, store.Options{})
	defer b.stop()
	long := prompt(1, 6)
	b.put("a", long, 0, 6, 4)
	if got := b.hit(long); got.Hit != 4 || got.Why != miss.NeverStored {
		t.Fatalf("%+v, want 4 chunks, then never stored", got)
	}
	b.put("a", long, 0, 6, 0) // the rest does not push out its own prefix
	b.store.EndSession([]byte("a"), lease.Owner{})

	b.put("b", prompt(2, 3), 1, 2, 1)
	if got := b.hit(long); got.Hit != 3 || got.Why != miss.Evicted {
		t.Fatalf("%+v, want the tail evicted", got)
	}
}

// Two stores of one prompt, one after the other in time: its head is still
// evicted after its tail.
func TestExtendedPromptTailsFirst(t *testing.T) {
	b := newBench(t, t.TempDir(), 4, store.Options{})
	defer b.stop()
	h := prompt(1, 4)
	b.put("a", h, 0, 2, 2)
	b.put("a", h, 2, 4, 2)
	b.store.EndSession([]byte("a"), lease.Owner{})
	for n := range 3 { // a lookup in between would make the head the newest anyway
		b.put("b", prompt(20+n, 2), 1, 2, 1)
	}
	if got := b.hit(h); got.Hit != 1 {
		t.Fatalf("hit %d, want 1: tails are evicted before heads", got.Hit)
	}
}

// Half of a two-shard chunk is no hit, and the reason names the shard.
func TestEveryShard(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	h := prompt(1, 3)
	for shard := range 2 {
		tr := transfer(1, h, 0, 3-shard, false) // the second shard keeps one chunk less
		tr.Shard.World, tr.Shard.Index = 2, shard
		var p store.Transfer
		if _, err := b.store.BeginStore(tr, []byte("a"), h, &p); err != nil {
			t.Fatal(err)
		}
		b.store.CommitStore(tr, []byte("a"), h, true)
	}
	got := b.store.Lookup([]byte("x"), object.Shard{Namespace: one.Namespace, World: 2, Groups: full}, store.Hashed(h), 1)
	if got.Hit != 2 || got.Shard != 1 {
		t.Fatalf("%+v, want 2 chunks, missing in shard 1", got)
	}
	// What is pinned is exactly the hit: the third chunk of shard 0 can go.
	if n := b.store.Clear(false); n != 1 {
		t.Fatalf("%d chunks cleared, want 1", n)
	}
	b.store.EndSession([]byte("x"), lease.Owner{})
	if n := b.store.Clear(false); n != 4 {
		t.Fatalf("%d chunks cleared, want 4", n)
	}
}

// A worker stands between prepare and commit while its pool is full, others
// store, it is detached, registers again, prepares the same chunk once more, and
// only then writes.
func TestDelayedWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 3, store.Options{})
		defer b.stop()
		h := prompt(1, 1)
		tr := transfer(7, h, 0, 1, false)
		var late store.Transfer
		if _, err := b.store.BeginStore(tr, []byte("slow"), h, &late); err != nil || len(late.Offsets) != 1 {
			t.Fatalf("%v, %v", late, err)
		}
		if got := b.hit(h); got.Hit != 0 || got.Why != miss.BeingStored {
			t.Fatalf("an uncommitted chunk: %+v", got)
		}
		if n := b.store.Detach(7); n != 1 {
			t.Fatalf("Detach = %d", n)
		}
		for n := range 6 { // eviction is active, the late slot stays out of it
			b.put(fmt.Sprint("other", n), prompt(30+n, 2), 1, 2, 1)
		}
		var again store.Transfer
		if _, err := b.store.BeginStore(tr, []byte("slow"), h, &again); err != nil || len(again.Offsets) != 1 || again.Offsets[0] == late.Offsets[0] {
			t.Fatalf("again at %v, %v; the old one is at %v", again.Offsets, err, late.Offsets)
		}
		// The old copy ends now. Its commit must not publish the new slot.
		copy(b.at(late.Offsets[0]), bytes.Repeat([]byte{0xee}, chunkBytes))
		if got := b.store.CommitStore(tr, []byte("slow"), h, true); got.Chunks != 0 || !got.Late {
			t.Fatalf("late commit: %+v", got)
		}
		if got := b.hit(h); got.Hit != 0 {
			t.Fatal("a late commit made a chunk visible that is still being written")
		}
		copy(b.at(again.Offsets[0]), content(h[0], 0))
		if got := b.store.CommitStore(tr, []byte("slow"), h, true); got.Chunks != 1 {
			t.Fatalf("commit: %+v", got)
		}
		if got := b.hit(h); got.Hit != 1 {
			t.Fatalf("%+v", got)
		}
		b.put("room", prompt(50, 3), 0, 3, 3) // every slot is back
	})
}

// A detached worker that never commits: its slots come back after the
// quarantine, not before.
func TestQuarantineEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 2, store.Options{})
		defer b.stop()
		h := prompt(1, 2)
		b.put("a", h, 0, 1, 1)
		b.store.Lookup([]byte("r"), one, store.Hashed(h[:1]), 1)
		var p store.Transfer
		if why := b.store.BeginLoad([]byte("r"), transfer(7, h, 0, 1, true), h, &p); why != miss.None {
			t.Fatal(why)
		}
		if _, err := b.store.BeginStore(transfer(7, h, 1, 2, false), []byte("r"), h, &p); err != nil {
			t.Fatal(err)
		}
		b.store.Detach(7)
		b.store.EndSession([]byte("r"), lease.Owner{})
		time.Sleep(quarantine - time.Second)
		b.store.Expire()
		b.put("b", prompt(2, 2), 0, 2, 0) // no room: both slots may still be touched
		if got := b.store.Stats(); got.CondemnedBytes != chunkBytes || got.Quarantined != 2 {
			t.Fatalf("%+v", got)
		}
		time.Sleep(time.Second)
		b.store.Expire()
		b.put("b", prompt(2, 2), 0, 2, 2)
	})
}

// Workers send a commit after a refused prepare too. It must not end another
// transfer of the same chunks.
func TestStrayCommit(t *testing.T) {
	b := newBench(t, t.TempDir(), 1, store.Options{})
	defer b.stop()
	h := prompt(1, 1)
	b.put("a", h, 0, 1, 1)
	tr := transfer(7, h, 0, 1, true)
	b.store.Lookup([]byte("r"), one, store.Hashed(h), 1)
	var p store.Transfer
	if why := b.store.BeginLoad([]byte("r"), tr, h, &p); why != miss.None {
		t.Fatal(why)
	}
	if why := b.store.BeginLoad([]byte("r"), tr, h, &p); why != miss.NotPinned {
		t.Fatalf("second load: %v", why)
	}
	b.store.CommitLoad(tr, []byte("r")) // the refused one's: the first still reads
	b.store.Clear(true)
	b.put("b", prompt(2, 1), 0, 1, 0)
	b.store.CommitLoad(tr, []byte("r"))
	b.put("b", prompt(2, 1), 0, 1, 1)
}

// num_kv_readers pins are given back one retrieve at a time.
func TestReaders(t *testing.T) {
	b := newBench(t, t.TempDir(), 1, store.Options{})
	defer b.stop()
	h := prompt(1, 1)
	b.put("a", h, 0, 1, 1)
	tr := transfer(7, h, 0, 1, true)
	b.store.Lookup([]byte("r"), one, store.Hashed(h), 2)
	var p store.Transfer
	for range 2 {
		if b.store.Clear(false) != 0 {
			t.Fatal("a pinned chunk was cleared")
		}
		if why := b.store.BeginLoad([]byte("r"), tr, h, &p); why != miss.None {
			t.Fatal(why)
		}
		b.store.CommitLoad(tr, []byte("r"))
	}
	if why := b.store.BeginLoad([]byte("r"), tr, h, &p); why != miss.NotPinned {
		t.Fatal(why)
	}
	b.store.CommitLoad(tr, []byte("r"))
	if b.store.Clear(false) != 1 {
		t.Fatal("a chunk stayed pinned")
	}
}

// A session that is idle too long loses its pins; one that is used does not.
func TestIdleSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 1, store.Options{SessionIdle: time.Minute})
		defer b.stop()
		h := prompt(1, 1)
		b.put("a", h, 0, 1, 1)
		b.store.Lookup([]byte("r"), one, store.Hashed(h), 1)
		for range 3 {
			time.Sleep(40 * time.Second)
			b.store.Result([]byte("r"), lease.Owner{})
			b.store.Expire()
			if b.store.Clear(false) != 0 {
				t.Fatal("the pin of a session in use was dropped")
			}
		}
		time.Sleep(time.Minute)
		b.store.Expire()
		if b.store.Clear(false) != 1 {
			t.Fatal("the pin of an idle session was kept")
		}
	})
}

// 128 chunks, as a 32k-token lookup: hit, pins, free, end.
func BenchmarkLookup(b *testing.B) { benchmarkLookup(b, nil) }

func benchmarkLookup(b *testing.B, curves *hitcurve.Options) {
	h := prompt(1, 128)
	s := newBench(b, b.TempDir(), 256, store.Options{Curves: curves})
	defer s.stop()
	s.put("a", h, 0, 128, 128)
	session := []byte("r")
	b.ReportAllocs()
	for b.Loop() {
		s.store.Lookup(session, one, store.Hashed(h), 1)
		s.store.Result(session, lease.Owner{})
		s.store.FreePins(session, lease.Owner{}, 0, 128, 1)
		s.store.EndSession(session, lease.Owner{})
	}
}

// Memory in quarantine comes back in time however often the server restarts.
func TestQuarantineOverRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newSumBench(t, 4)
		defer func() { b.stop() }()
		h := prompt(1, 3)
		var p store.Transfer
		if _, err := b.store.BeginStore(transfer(7, h, 0, 3, false), []byte("r"), h, &p); err != nil {
			t.Fatal(err)
		}
		free := func() int64 { return b.store.Stats().FreeBytes / chunkBytes }
		for range 3 {
			b.restart(t, 4)
			time.Sleep(quarantine/3 - time.Second)
			b.store.Expire()
			if free() != 1 {
				t.Fatalf("%d chunks free during the quarantine", free())
			}
		}
		b.restart(t, 4)
		time.Sleep(4 * time.Second)
		b.store.Expire()
		if free() != 4 {
			t.Errorf("%d chunks free, want 4", free())
		}
	})
}
