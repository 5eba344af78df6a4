// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// reserve stages h for worker 7 and returns where.
func (b *bench) reserve(request string, h []kv.Hash) int64 {
	b.t.Helper()
	var p store.Transfer
	if _, err := b.store.BeginStore(transfer(7, h, 0, len(h), false), []byte(request), h, &p); err != nil || len(p.Offsets) != len(h) {
		b.t.Fatalf("Reserve for %s: %v, %v", request, p.Offsets, err)
	}
	return p.Offsets[0]
}

func (b *bench) commit(request string, h []kv.Hash) store.Committed {
	return b.store.CommitStore(transfer(7, h, 0, len(h), false), []byte(request), h, true)
}

// A commit makes visible what its own request wrote, never what another request,
// or the same request in another life, is still writing.
func TestCommitPublishesOnlyWhatItsRequestWrote(t *testing.T) {
	f := func(name, late, then string, between func(b *bench)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, t.TempDir(), 4, store.Options{})
				defer func() { b.stop() }()
				h := prompt(1, 1)
				b.reserve(late, h)
				between(b)
				at := b.reserve(then, h)
				if got := b.commit(late, h); got.Chunks != 0 {
					t.Fatalf("the commit of the earlier transfer: %+v", got)
				}
				if got := b.hit(h); got.Hit != 0 {
					t.Fatal("what is being written is a hit")
				}
				copy(b.at(at), content(h[0], 0))
				if got := b.commit(then, h); got.Chunks != 1 || got.Late {
					t.Fatalf("its own commit: %+v", got)
				}
				if got := b.hit(h); got.Hit != 1 {
					t.Fatalf("%+v", got)
				}
			})
		})
	}
	restart := func(b *bench) { b.restart() }
	expire := func(b *bench) { time.Sleep(quarantine); b.store.Expire() }
	detach := func(b *bench) { b.store.Detach(7) }
	f("another request after a restart", "r1", "r2", restart)
	f("another request after the quarantine", "r1", "r2", expire)
	f("another request after a detachment", "r1", "r2", detach)
	f("the same request after a restart", "r", "r", restart)
	f("the same request after two restarts", "r", "r", func(b *bench) { b.restart(); b.restart() })
	f("the same request after the quarantine", "r", "r", expire)
	f("the same request after a restart and the quarantine", "r", "r", func(b *bench) { b.restart(); expire(b) })
	f("the same request after a detachment", "r", "r", detach)
}

// A commit that no worker owes, or one sent twice, ends no transfer in progress.
func TestStrayCommitEndsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 4, store.Options{})
		defer b.stop()
		h := prompt(1, 2)
		b.put("a", h, 0, 2, 2)
		load := transfer(7, h, 0, 2, true)
		take := func(request string) miss.Reason {
			b.store.Lookup([]byte(request), one, store.Hashed(h), 1)
			return b.store.BeginLoad([]byte(request), load, h, &store.Transfer{})
		}
		if why := take("r1"); why != miss.None {
			t.Fatal(why)
		}
		busy := func(want int) {
			t.Helper()
			if got := b.store.Stats(); got.Transfers != want {
				t.Fatalf("%d transfers in progress, want %d", got.Transfers, want)
			}
		}
		if got := b.store.CommitLoad(load, []byte("r2")); got.Found {
			t.Errorf("a commit of nobody: %+v", got)
		}
		busy(1)
		// r1 asks again and is refused, before and inside of the store; it sends
		// both commits.
		b.store.Refuse([]byte("r1"), load)
		b.store.EndSession([]byte("r1"), lease.Owner{})
		if why := b.store.BeginLoad([]byte("r1"), load, h, &store.Transfer{}); why == miss.None {
			t.Fatal("granted without a lookup")
		}
		for range 2 {
			if got := b.store.CommitLoad(load, []byte("r1")); got.Chunks != 0 {
				t.Errorf("the commit of a refused load: %+v", got)
			}
			busy(1)
		}
		if got := b.store.CommitLoad(load, []byte("r1")); got.Chunks != 2 {
			t.Errorf("the load's own commit: %+v", got)
		}
		busy(0)
		if got := b.store.CommitLoad(load, []byte("r1")); got.Found {
			t.Errorf("a commit too many: %+v", got)
		}
	})
}

// Refused loads whose commits never come take nothing from others and are
// forgotten soon.
func TestRefusedLoadsCostNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 4, store.Options{MaxHolds: 10})
		defer b.stop()
		h := prompt(1, 2)
		b.put("a", h, 0, 2, 2)
		load := transfer(7, h, 0, 2, true)
		for i := range 1000 {
			if why := b.store.BeginLoad([]byte{byte(i), byte(i >> 8)}, load, h, &store.Transfer{}); why != miss.NotPinned {
				t.Fatal(why)
			}
		}
		if got := b.store.Stats(); got.Transfers != 0 {
			t.Fatalf("%d transfers in progress", got.Transfers)
		}
		time.Sleep(time.Minute)
		b.store.Expire()
		b.store.Lookup([]byte{7, 0}, one, store.Hashed(h), 1)
		if why := b.store.BeginLoad([]byte{7, 0}, load, h, &store.Transfer{}); why != miss.None {
			t.Fatal(why)
		}
		if got := b.store.CommitLoad(load, []byte{7, 0}); got.Chunks != 2 {
			t.Fatalf("%+v", got)
		}
	})
}

// A worker that registered again has Groups of its own. The commit that it still owes
// from before ends its transfer, and not one that it began since.
func TestCommitOfAWorkerThatRegisteredAgain(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	h := prompt(1, 2)
	before := transfer(7, h, 0, 2, false)
	again := before
	again.Shard.Groups = object.FullAttention(1, chunkBytes)
	if again == before {
		t.Fatal("two registrations share their Groups: the test shows nothing")
	}
	var first, second store.Transfer
	if _, err := b.store.BeginStore(before, []byte("r"), h, &first); err != nil || len(first.Offsets) != 2 {
		t.Fatal(first, err)
	}
	b.store.Detach(7)
	if _, err := b.store.BeginStore(again, []byte("r"), h, &second); err != nil || len(second.Offsets) != 2 {
		t.Fatal(second, err)
	}
	if got := b.store.CommitStore(again, []byte("r"), h, true); !got.Found || got.Chunks != 0 {
		t.Errorf("the first of two commits: %+v", got)
	}
	if got := b.store.CommitStore(again, []byte("r"), h, true); !got.Found || got.Chunks != 2 {
		t.Errorf("the second: %+v", got)
	}
	if got := b.store.Stats(); got.Transfers != 0 || got.CondemnedBytes != 0 {
		t.Errorf("left: %+v", got)
	}
}
