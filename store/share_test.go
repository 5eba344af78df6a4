// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
)

// A worker that stages all it can and never commits, alone, again under other
// ids, and after it left, costs others a part of the pool for a while: chunks that
// were kept stay hits and others go on storing.
func TestOneWorkerCannotTakeThePool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const chunks = 400
		b := newBench(t, t.TempDir(), chunks, store.Options{WorkerShare: 0.25, PeerShare: 0.75})
		defer b.stop()
		kept := prompt(1, chunks)
		for from := 0; from < chunks; from += chunks / 4 {
			b.put("kept", kept[:from+chunks/4], from, from+chunks/4, chunks/4)
		}
		greedy := func(instance int64, by string) int {
			t.Helper()
			h := prompt(int(10+instance), 1000)
			tr := hold.Transfer{Instance: instance, By: by, Shard: one, To: len(h), Last: h[len(h)-1]}
			var p store.Transfer
			got, err := b.store.BeginStore(tr, fmt.Append(nil, instance), h, &p)
			if err != nil || !got.Share || got.NoRoom != len(h)-got.Staged-got.Cached-len(p.Offsets) {
				t.Fatalf("worker %d took %d places: %+v, %v", instance, len(p.Offsets), got, err)
			}
			return len(p.Offsets)
		}
		if n := greedy(7, "uid 1"); n != chunks/4 {
			t.Fatalf("the worker took %d of %d places, want a quarter", n, chunks)
		}
		if n := greedy(7, "uid 1"); n != 0 {
			t.Fatalf("the worker took %d places beyond its share", n)
		}
		if got := b.hit(kept); got.Hit != chunks*3/4 {
			t.Fatalf("%d of %d chunks are hits still, want three quarters", got.Hit, chunks)
		}
		b.store.Detach(7)
		total := chunks / 4
		for id := int64(8); id < 20; id++ {
			total += greedy(id, "uid 1")
			b.store.Detach(id)
		}
		if total != chunks*3/4 {
			t.Fatalf("the workers of one user took %d of %d places, want three quarters", total, chunks)
		}
		for i := range 20 {
			b.put(fmt.Sprint("other", i), prompt(50+i, 20), 1, 20, 19)
		}
		time.Sleep(quarantine)
		b.store.Expire()
		b.store.Clear(true)
		if n := greedy(30, "uid 1"); n != chunks-chunks/8 {
			t.Fatalf("a worker took %d places of an empty pool, want all but an eighth", n)
		}
		b.store.Detach(30)
		b.put("still", prompt(98, 20), 0, 20, 20)
	})
}

// A chunk larger than the share may evict while the worker's user has nothing
// staged.
func TestShareOfLargeChunks(t *testing.T) {
	b := newBench(t, t.TempDir(), 4, store.Options{WorkerShare: 0.25, PeerShare: 0.75})
	defer b.stop()
	b.put("kept", prompt(2, 4), 0, 4, 4)
	h := prompt(1, 2)
	for i, want := range []int{1, 0} {
		tr := hold.Transfer{Instance: int64(i), By: "uid 1", Shard: one, From: i, To: 2, Last: h[1]}
		tr.Shard.Groups = object.FullAttention(1, 2*chunkBytes)
		var p store.Transfer
		if _, err := b.store.BeginStore(tr, []byte("r"), h, &p); err != nil || len(p.Offsets) != want {
			t.Errorf("worker %d: %d places, %v, want %d", i, len(p.Offsets), err, want)
		}
	}
}
