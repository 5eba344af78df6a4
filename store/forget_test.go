package store_test

import (
	"context"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// What is pinned or in transfer at a clear is not found by later lookups, is served to
// who was promised it, and goes when that ends.
func TestClearHidesPinnedAndHeldChunks(t *testing.T) {
	cleans := 0
	b := &sumBench{bench: newBench(t, t.TempDir(), 32, store.Options{ChecksumRate: 1 << 40, SumAtOnce: true, Clean: func() { cleans++ }})}
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
	b.store.Forget(func() { commits++ })
	b.store.Clear(false)
	if b.store.DropOutdated() || cleans != 0 || commits != 1 {
		t.Errorf("pinned chunks are outdated: %d cleans, %d commits", cleans, commits)
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
	if st := b.store.Stats(); st.Resident != 0 || cleans != 1 || !b.store.DropOutdated() {
		t.Errorf("%d chunks stay, %d cleans", st.Resident, cleans)
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
	b.store.Forget(func() { moment++ })
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
