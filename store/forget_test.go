// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// What is pinned or in transfer at a clear is not found by later lookups, is served to
// who was promised it, and goes when that ends.
func TestClearHidesPinnedAndHeldChunks(t *testing.T) {
	b := &sumBench{bench: newBench(t, t.TempDir(), 32, store.Options{ChecksumRate: 1 << 40, SumAtOnce: true})}
	defer func() { b.stop() }()
	pinned, staged := prompt(1, 4), prompt(2, 3)
	b.put(t, pinned)
	if got := b.look(t, "old", one, pinned); got.Hit != 4 {
		t.Fatalf("%+v", got)
	}
	var places store.Transfer
	tr := transfer(7, staged, 0, 3, false)
	if _, err := b.store.BeginStore(tr, []byte("p"), staged, &places); err != nil {
		t.Fatal(err)
	}
	commits := 0
	b.store.Forget(func() { commits++ }, false)
	b.store.Clear(false)
	if b.store.DropOutdated() || commits != 1 {
		t.Errorf("pinned chunks are outdated: %d commits", commits)
	}
	if got := b.look(t, "new", one, pinned); got.Hit != 0 || got.Why != miss.Cleared {
		t.Errorf("hit %d of chunks from before the clear, %v", got.Hit, got.Why)
	}
	if why := b.store.BeginLoad([]byte("old"), transfer(7, pinned, 0, 4, true), pinned, &store.Transfer{}); why != miss.None {
		t.Errorf("a load that was promised before the clear: %v", why)
	}
	if got := b.store.CommitStore(tr, []byte("p"), staged, true); got.Chunks != 0 {
		t.Errorf("%d chunks are committed whose store began before the clear", got.Chunks)
	}
	if got := b.look(t, "late", one, staged); got.Hit != 0 {
		t.Errorf("hit %d of a store that began before the clear", got.Hit)
	}
	b.store.CommitLoad(transfer(7, pinned, 0, 4, true), []byte("old"))
	b.store.EndSession([]byte("old"), lease.Owner{})
	b.store.Expire()
	if st := b.store.Stats(); st.Resident != 0 || !b.store.DropOutdated() {
		t.Errorf("%d chunks stay", st.Resident)
	}
	b.put(t, pinned)
	b.put(t, staged)
	if got := b.look(t, "again", one, pinned); got.Hit != 4 {
		t.Errorf("stored after the clear: hit %d, %v", got.Hit, got.Why)
	}
	if got := b.look(t, "and", one, staged); got.Hit != 3 {
		t.Errorf("stored after the clear: hit %d, %v", got.Hit, got.Why)
	}
	b.store.Expire()
	if st := b.store.Stats(); st.Resident != 7 {
		t.Errorf("%d chunks are there, want 7", st.Resident)
	}
}

// Without force a clear leaves the chunks that sessions have pinned, as LMCache's does: later lookups find them until the next
// clear, they are not written below, and neither are chunks found that nothing had pinned.
func TestSoftClearLeavesPinnedChunks(t *testing.T) {
	below := tier.NewMemory(1 << 20)
	b := &sumBench{bench: newBench(t, t.TempDir(), 32, store.Options{ChecksumRate: 1 << 40, SumAtOnce: true, Below: below, Write: store.WriteAtCommit})}
	defer func() { b.stop() }()
	pinned, idle := prompt(1, 4), prompt(2, 3)
	b.put(t, pinned)
	b.put(t, idle)
	if got := b.look(t, "old", one, pinned); got.Hit != 4 {
		t.Fatalf("%+v", got)
	}
	b.store.Forget(func() {}, true)
	b.store.Clear(false)
	if got := b.look(t, "idle", one, idle); got.Hit != 0 {
		t.Errorf("hit %d of chunks that nothing had pinned", got.Hit)
	}
	b.store.EndSession([]byte("old"), lease.Owner{})
	b.store.Expire()
	if got := b.look(t, "new", one, pinned); got.Hit != 4 {
		t.Errorf("hit %d of pinned chunks, %v", got.Hit, got.Why)
	}
	b.store.EndSession([]byte("new"), lease.Owner{})
	end := b.run()
	b.put(t, idle)
	if got := b.look(t, "written", one, idle); got.Hit != 3 {
		t.Errorf("stored after the clear: hit %d", got.Hit)
	}
	b.store.EndSession([]byte("written"), lease.Owner{})
	count := func() (n int) {
		_ = below.List(t.Context(), func(kv.Key, tier.Meta) bool { n++; return true }) // always nil
		return n
	}
	testkit.Eventually(t, "what was stored after the clear is below", func() bool { return count() == 3 })
	end()
	if count() != 3 {
		t.Errorf("%d objects below: those from before the clear are written", count())
	}
	b.store.Forget(func() {}, true)
	b.store.Clear(false)
	b.store.Expire()
	if st := b.store.Stats(); st.Resident != 0 {
		t.Errorf("%d chunks outlive the second clear", st.Resident)
	}
}

// What waits to be written below at a clear, and what is on its way from there, is
// forgotten: it is written under no later generation, and not served when it comes.
func TestClearDropsWritesAndReadsInFlight(t *testing.T) {
	moment := uint64(1)
	b := newTiered(t, 32, "read 1 hang", store.Options{Moment: func() uint64 { return moment }, LoadTimeout: 200 * time.Millisecond})
	defer b.close()
	below, waits := prompt(1, 1), prompt(2, 2)
	data := content(below[0], 0)
	if err := b.memory.Write(t.Context(), objectKey(one, 0, below[0]), tier.Meta{Len: chunkBytes, Sum: xxh3.Hash(data)}, data); err != nil {
		t.Fatal(err)
	}
	got := b.store.Lookup([]byte("load"), one, store.Hashed(below), 1)
	if got.State != store.Pending {
		t.Fatalf("%+v", got)
	}
	for end := time.Now().Add(10 * time.Second); b.flaky.Calls("read") == 0 && time.Now().Before(end); { // it has begun
		time.Sleep(time.Millisecond)
	}
	s := &sumBench{bench: b.bench}
	s.put(t, waits)
	if got := b.look(t, "pin", one, waits); got.Hit != 2 { // they stay in the pool
		t.Fatalf("%+v", got)
	}
	b.store.Forget(func() { moment++ }, false)
	b.store.Clear(false)
	now, cancel := context.WithCancel(t.Context())
	cancel()
	for b.store.WriteNext(now) {
	}
	b.flaky.Release()
	for end := time.Now().Add(10 * time.Second); b.store.Stats().BelowFailures == 0 && time.Now().Before(end); { // the read lands
		time.Sleep(time.Millisecond)
	}
	if st := b.store.Stats(); st.WrittenChunks != 0 || st.BelowChunks != 0 {
		t.Errorf("%d chunks are written below, %d came from there", st.WrittenChunks, st.BelowChunks)
	}
}

// What a session or a worker keeps at a clear is not served after a kill or a stop; what
// is stored after the clear is.
func TestForgetOutlivesTheServer(t *testing.T) {
	for _, trust := range []bool{false, true} {
		for name, end := range map[string]func(*bench){"kill": (*bench).kill, "stop": (*bench).restart} {
			b := &sumBench{bench: newBench(t, t.TempDir(), 32, store.Options{ChecksumRate: 1 << 40, SumAtOnce: true, TrustUnsummed: trust})}
			pinned, loading, later := prompt(1, 4), prompt(2, 3), prompt(3, 2)
			b.put(t, pinned)
			b.put(t, loading)
			b.sumAll()
			if a, c := b.look(t, "old", one, pinned), b.look(t, "load", one, loading); a.Hit != 4 || c.Hit != 3 {
				t.Fatalf("%+v %+v", a, c)
			}
			if why := b.store.BeginLoad([]byte("load"), transfer(7, loading, 0, 3, true), loading, &store.Transfer{}); why != miss.None {
				t.Fatal(why)
			}
			b.store.Forget(func() {}, false)
			b.store.Clear(false)
			b.store.EndSession([]byte("load"), lease.Owner{}) // a use, after the clear
			b.put(t, later)
			b.sumAll()
			end(b.bench)
			for _, h := range [][]kv.Hash{pinned, loading} {
				if got := b.look(t, "new", one, h); got.Hit != 0 {
					t.Errorf("%s: hit %d of chunks from before the clear", name, got.Hit)
				}
			}
			if got := b.look(t, "later", one, later); got.Hit != 2 {
				t.Errorf("%s: hit %d of 2 chunks stored after the clear, %v", name, got.Hit, got.Why)
			}
			end(b.bench) // and another server
			if got := b.look(t, "later", one, later); got.Hit != 2 {
				t.Errorf("%s twice: hit %d of 2 chunks stored after the clear, %v", name, got.Hit, got.Why)
			}
			b.stop()
		}
	}
}

// An object that is deleted from the pool while it comes from the tier is not served when
// it has come.
func TestDropReachesWhatIsOnItsWay(t *testing.T) {
	b := newTiered(t, 32, "read 1 slow 300ms", store.Options{LoadTimeout: 10 * time.Second})
	defer b.close()
	below := prompt(1, 1)
	data, key := content(below[0], 0), objectKey(one, 0, below[0])
	if err := b.memory.Write(t.Context(), key, tier.Meta{Len: chunkBytes, Sum: xxh3.Hash(data)}, data); err != nil {
		t.Fatal(err)
	}
	if got := b.store.Lookup([]byte("load"), one, store.Hashed(below), 1); got.State != store.Pending {
		t.Fatalf("%+v", got)
	}
	testkit.Eventually(t, "the read begins", func() bool { return b.flaky.Calls("read") > 0 })
	b.store.Drop([]kv.Key{key}) // as if the read had the bytes already
	testkit.Eventually(t, "the lookup ends", func() bool { return b.store.Result([]byte("load"), lease.Owner{}).State != store.Pending })
	testkit.Eventually(t, "the read lands", func() bool {
		return b.store.Stats().BelowChunks > 0 || b.store.Stats().FreeBytes == b.store.Stats().Bytes
	})
	if err := b.memory.Delete(t.Context(), []kv.Key{key}); err != nil {
		t.Fatal(err)
	}
	if got := b.look(t, "later", one, below); got.Hit != 0 {
		t.Errorf("hit %d of an object that was deleted while it came", got.Hit)
	}
}

// What transfers and an operator's pin keep at a clear is stored anew after it, and hits, while they go on. Loads that were
// promised before still read the former bytes.
func TestWhatIsKeptAtAClearIsStoredAnew(t *testing.T) {
	b := &sumBench{bench: newBench(t, t.TempDir(), 32, store.Options{ChecksumRate: 1 << 40, SumAtOnce: true})}
	defer func() { b.stop() }()
	loading, staged, pinned := prompt(1, 4), prompt(2, 3), prompt(3, 2)
	b.put(t, loading)
	b.put(t, pinned)
	var places store.Transfer
	if got := b.look(t, "old", one, loading); got.Hit != 4 {
		t.Fatalf("%+v", got)
	}
	if why := b.store.BeginLoad([]byte("old"), transfer(7, loading, 0, 4, true), loading, &places); why != miss.None {
		t.Fatal(why)
	}
	former := slices.Clone(places.Offsets)
	tr := transfer(8, staged, 0, 3, false)
	if _, err := b.store.BeginStore(tr, []byte("slow"), staged, &places); err != nil {
		t.Fatal(err)
	}
	b.store.NameTenant(one.Namespace, []byte("salt"))
	if err := b.store.SetPinLimit("salt", 4*chunkBytes); err != nil {
		t.Fatal(err)
	}
	var keys []kv.Key
	for _, h := range pinned {
		keys = append(keys, objectKey(one, 0, h))
	}
	if n, err := b.store.Pin("salt", keys, time.Hour); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	b.store.Forget(func() {}, true)
	b.store.Clear(false)
	b.store.DropOutdated()
	for i, h := range [][]kv.Hash{loading, staged, pinned} {
		if got := b.look(t, "cleared", one, h); got.Hit != 0 {
			t.Errorf("prompt %d: hit %d of what was there before the clear", i, got.Hit)
		}
		if n := len(b.put(t, h)); n != len(h) {
			t.Errorf("prompt %d: %d of %d chunks are stored anew", i, n, len(h))
		}
		if got := b.look(t, "anew", one, h); got.Hit != len(h) {
			t.Errorf("prompt %d: hit %d of %d chunks that were stored anew, %v", i, got.Hit, len(h), got.Why)
		}
		b.store.EndSession([]byte("anew"), lease.Owner{})
	}
	for i, off := range former {
		if !bytes.Equal(b.at(off)[:chunkBytes], content(loading[i], 0)) {
			t.Errorf("the load reads other bytes of chunk %d", i)
		}
	}
	if got := b.store.CommitLoad(transfer(7, loading, 0, 4, true), []byte("old")); got.Chunks != 4 {
		t.Errorf("the load ends with %+v", got)
	}
	if got := b.store.CommitStore(tr, []byte("slow"), staged, true); got.Chunks != 0 {
		t.Errorf("%d chunks are committed whose store began before the clear", got.Chunks)
	}
	if list, _ := b.store.Pins(0, nil); len(list) != 0 {
		t.Errorf("pinned after the clear: %+v", list)
	}
	b.store.Expire()
	if st := b.store.Stats(); st.Resident != 9 || st.Transfers != 0 || !b.store.DropOutdated() {
		t.Errorf("%d chunks are there, want 9; %d transfers", st.Resident, st.Transfers)
	}
}

// Chunks of the pool whose copies below were deleted, or cleared, are written there again once an engine loads them.
func TestDeletedBelowIsWrittenAgain(t *testing.T) {
	below := tier.NewMemory(1 << 20)
	b := &sumBench{bench: newBench(t, t.TempDir(), 32, store.Options{ChecksumRate: 1 << 40, SumAtOnce: true, Below: below, Place: "below", Write: store.WriteAtCommit})}
	defer func() { b.stop() }()
	defer b.run()()
	h := prompt(1, 4)
	var keys []kv.Key
	for _, hash := range h {
		keys = append(keys, objectKey(one, 0, hash))
	}
	count := func() (n int) {
		_ = below.List(t.Context(), func(kv.Key, tier.Meta) bool { n++; return true }) // always nil
		return n
	}
	b.put(t, h)
	for name, forget := range map[string]func(){
		"deleted": func() {
			if err := b.store.DeleteBelow(keys); err != nil {
				t.Error(err)
			}
		},
		"cleared": func() {
			if err := below.Delete(t.Context(), keys); err != nil {
				t.Error(err)
			}
			b.store.ForgetBelow(func(ns kv.Namespace) bool { return ns == one.Namespace })
		},
	} {
		testkit.Eventually(t, "the chunks are below", func() bool { return count() == 4 })
		testkit.Eventually(t, "the writes end", func() bool { return b.store.Stats().WrittenChunks%4 == 0 })
		forget()
		if n := count(); n != 0 {
			t.Fatalf("%s: %d objects are below", name, n)
		}
		if got := b.look(t, name, one, h); got.Hit != 4 {
			t.Errorf("%s: hit %d in the pool", name, got.Hit)
		}
		if why := b.store.BeginLoad([]byte(name), transfer(7, h, 0, 4, true), h, &store.Transfer{}); why != miss.None {
			t.Fatal(why)
		}
		b.store.CommitLoad(transfer(7, h, 0, 4, true), []byte(name))
		b.store.EndSession([]byte(name), lease.Owner{})
		testkit.Eventually(t, name+": the chunks are below again", func() bool { return count() == 4 })
	}
}

// An object that is being written below while it is deleted there is not there afterwards.
func TestDeleteBelowDuringItsWrite(t *testing.T) {
	b := newTiered(t, 8, "write 1 slow 200ms", store.Options{Place: "below"})
	defer b.close()
	defer b.run()()
	h := prompt(1, 1)
	(&sumBench{bench: b.bench}).put(t, h)
	testkit.Eventually(t, "the write begins", func() bool { return b.flaky.Calls("write") > 0 })
	if err := b.store.DeleteBelow([]kv.Key{objectKey(one, 0, h[0])}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the write has ended", func() bool { return b.store.Stats().WrittenChunks == 1 })
	_ = b.memory.List(t.Context(), func(k kv.Key, _ tier.Meta) bool { t.Errorf("%v is there", k); return true }) // always nil
}
