// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
)

// Clear says how many chunks it dropped, and counts them; what is pinned stays
// unless it is forced, and what a worker holds keeps its memory.
func TestClearCounts(t *testing.T) {
	b := newBench(t, t.TempDir(), 2000, store.Options{})
	defer b.stop()
	f := func(force bool, want int) {
		t.Helper()
		before := b.store.Stats().Cleared
		if n := b.store.Clear(force); n != want || b.store.Stats().Cleared != before+uint64(want) {
			t.Errorf("clear (force %v): %d, counted %d, want %d", force, n, b.store.Stats().Cleared-before, want)
		}
	}
	h := prompt(1, 1000) // many batches
	b.put("a", h, 0, 1000, 1000)
	b.store.Lookup([]byte("r"), one, store.Hashed(h[:10]), 1)
	f(false, 990)
	f(false, 0)
	b.reserve("staged", prompt(2, 5)[1:])
	f(true, 14)
	if got := b.store.Stats(); got.Resident != 0 || got.CondemnedBytes != 4*chunkBytes || got.Transfers != 1 {
		t.Errorf("%+v", got)
	}
}

// Checksums that were made and compared are counted.
func TestSumsAreCounted(t *testing.T) {
	b := newSumBench(t, 16)
	defer func() { b.stop() }()
	h := prompt(1, 6)
	b.put(t, h)
	b.sumAll()
	if got := b.store.Stats(); got.SummedChunks != 6 || got.VerifiedChunks != 0 {
		t.Errorf("%+v", got.Counters)
	}
	b.restart(t, 16)
	if got := b.look(t, "r", one, h[:4]); got.Hit != 4 || !got.Waited {
		t.Fatal(got)
	}
	if got := b.store.Stats(); got.VerifiedChunks < 4 || got.PendingLookups != 1 || got.LateLookups != 0 || got.CorruptChunks != 0 {
		t.Errorf("after the lookup: %+v", got.Counters)
	}
	b.sumAll()
	if got := b.store.Stats(); got.VerifiedChunks != 6 || got.RestoredChunks != 6 {
		t.Errorf("after the background: %+v", got.Counters)
	}
}

// The end of a worker's process ends the quarantine of what it was told of, and of
// nothing else.
func TestEndOfAProcessEndsItsQuarantineOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 8, store.Options{})
		defer b.stop()
		stage := func(instance int64, h []kv.Hash) {
			t.Helper()
			tr := hold.Transfer{Instance: instance, Shard: one, To: len(h), Last: h[len(h)-1]}
			if _, err := b.store.BeginStore(tr, []byte("r"), h, &store.Transfer{}); err != nil {
				t.Fatal(err)
			}
		}
		stage(1, prompt(1, 3)[1:])
		stage(2, prompt(2, 3)[1:])
		if n := b.store.EndQuarantine(1); n != 0 { // it is registered still
			t.Errorf("%d transfers of a worker that is there", n)
		}
		b.store.Detach(1)
		b.store.Detach(2)
		if n := b.store.EndQuarantine(1); n != 1 {
			t.Errorf("%d transfers", n)
		}
		if got := b.store.Stats(); got.CondemnedBytes != 2*chunkBytes || got.Transfers != 1 {
			t.Errorf("%+v", got)
		}
		if n := b.store.EndQuarantine(1); n != 0 {
			t.Errorf("%d transfers, again", n)
		}
		// A copy that this process makes for the worker goes on.
		groups, err := object.NewGroups(1, []object.Group{{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: chunkBytes}})
		if err != nil {
			t.Fatal(err)
		}
		h := prompt(4, 2)[1:]
		c := &store.Transfer{Own: true}
		_, err = b.store.BeginStore(hold.Transfer{Instance: 3, Shard: object.Shard{Namespace: kv.Namespace{2}, World: 1, Groups: groups}, To: 1, Last: h[0]}, []byte("r"), h, c)
		if err != nil {
			t.Fatal(err)
		}
		b.store.Detach(3)
		if n := b.store.EndQuarantine(3); n != 0 {
			t.Errorf("the memory of %d copies in progress was given away", n)
		}
		if got := c.Done(h, true); got.Chunks != 0 || !got.Late {
			t.Errorf("%+v", got)
		}
		time.Sleep(quarantine)
		b.store.Expire()
		if got := b.store.Stats(); got.FreeBytes != got.Bytes {
			t.Errorf("%+v", got)
		}
	})
}

// A chunk that is kept in one group and not in the other is stored in the other.
func TestMissingGroupIsStored(t *testing.T) {
	b := newBench(t, t.TempDir(), 16, store.Options{})
	defer b.stop()
	groups, err := object.NewGroups(2, []object.Group{
		{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: chunkBytes}, {ChunkGroup: coordinator.ChunkGroup{Window: 2}, Bytes: chunkBytes},
	})
	if err != nil {
		t.Fatal(err)
	}
	h := prompt(1, 3)
	tr := hold.Transfer{Instance: 1, Shard: object.Shard{Namespace: kv.Namespace{3}, World: 1, Groups: groups}, To: 3, Last: h[2]}
	put := func(skip func(g, c int) bool) (stored int, out store.Reserved) {
		t.Helper()
		c := &store.Transfer{Own: true, Skip: skip}
		out, err := b.store.BeginStore(tr, []byte("s"), h, c)
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Parts) == 0 {
			return 0, out
		}
		return c.Done(h, true).Chunks, out
	}
	if n, out := put(func(g, c int) bool { return g == 1 && c != 1 }); n != 4 || out.Skipped != 0 {
		t.Errorf("%d objects, %+v", n, out)
	}
	if n, out := put(nil); n != 2 || out.Cached != 1 {
		t.Errorf("the other group: %d objects, want 2, %+v", n, out)
	}
	if n, out := put(func(int, int) bool { return true }); n != 0 || out.Skipped != 3 {
		t.Errorf("nothing wanted: %d objects, %+v", n, out)
	}
	if n, out := put(nil); n != 0 || out.Cached != 3 {
		t.Errorf("all there: %d objects, %+v", n, out)
	}
}

// A copy of this process, too, makes the chunks before its range the more recently
// used: when room is needed its tail goes first.
func TestCopyTouchesItsHeads(t *testing.T) {
	b := newBench(t, t.TempDir(), 6, store.Options{})
	defer b.stop()
	groups, err := object.NewGroups(1, []object.Group{{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: chunkBytes}})
	if err != nil {
		t.Fatal(err)
	}
	sh := object.Shard{Namespace: kv.Namespace{5}, World: 1, Groups: groups}
	put := func(h []kv.Hash, from int) {
		t.Helper()
		c := &store.Transfer{Own: true}
		_, err := b.store.BeginStore(hold.Transfer{Instance: 1, Shard: sh, From: from, To: len(h), Last: h[len(h)-1]}, []byte("s"), h, c)
		if err != nil || len(c.Parts) == 0 {
			t.Fatal(err)
		}
		c.Done(h, true)
	}
	long := prompt(1, 4)
	put(long[:2], 0)
	put(prompt(2, 2), 0) // between the head and the tail of long
	put(long, 2)
	put(prompt(30, 4)[1:], 0) // three chunks: the other prompt, then the tail of long
	if got := b.store.Lookup([]byte("l"), sh, store.Hashed(long), 1); got.Hit != 3 {
		t.Errorf("%d chunks of the prompt are left, want 3", got.Hit)
	}
}
