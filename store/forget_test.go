// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"context"
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
