// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"
	"testing/synctest"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// A lookup that starts above chunk 0 pins what lies behind the start only, counts from chunk 0, and makes what lies below
// the most recently used.
func TestLookupFromAChunk(t *testing.T) {
	b := newBench(t, t.TempDir(), 4, store.Options{})
	defer b.stop()
	h := prompt(1, 4)
	b.put("a", h, 0, 3, 3)
	b.store.EndSession([]byte("a"), lease.Owner{})
	look := func(request string, start, chunks, want int) {
		t.Helper()
		p := store.Hashed(h[:chunks])
		p.From = start
		if got := b.store.Lookup([]byte(request), one, p, 1); got.State != store.Ready || got.Hit != want {
			t.Fatalf("from %d of %d: %+v, want a hit of %d", start, chunks, got, want)
		}
	}
	load := func(request string, from, to int, want miss.Reason) {
		t.Helper()
		tr := transfer(1, h, from, to, true)
		var p store.Transfer
		if why := b.store.BeginLoad([]byte(request), tr, h, &p); why != want {
			t.Fatalf("load of [%d, %d): %v, want %v", from, to, why, want)
		}
		b.store.CommitLoad(tr, []byte(request))
	}
	look("b", 1, 4, 3)
	load("b", 0, 3, miss.NotPinned) // chunk 0 has no pin
	load("b", 1, 3, miss.None)
	look("c", 3, 4, 3) // nothing behind the start
	load("c", 2, 3, miss.NotPinned)
	look("d", 4, 4, 4) // all is the engine's own
	for _, id := range []string{"b", "c", "d"} {
		b.store.EndSession([]byte(id), lease.Owner{})
	}

	other := prompt(2, 2)
	b.put("o", other, 0, 1, 1) // the pool is full
	b.store.EndSession([]byte("o"), lease.Owner{})
	look("e", 3, 4, 3) // touches chunks 0 to 2
	b.store.EndSession([]byte("e"), lease.Owner{})
	b.put("o", prompt(3, 1), 0, 1, 1)
	if got := b.hit(h); got.Hit != 3 {
		t.Errorf("%d chunks are left of what was touched", got.Hit)
	}
	if got := b.hit(other); got.Hit != 0 {
		t.Error("what was not touched outlived it")
	}
}

// An engine may have more chunks itself than a lookup searches: then its hit is what it has, and no more is looked at.
func TestLookupFromBeyondItsBound(t *testing.T) {
	const world = 255
	b := newBench(t, t.TempDir(), 4, store.Options{})
	defer b.stop()
	sh := object.Shard{Namespace: kv.Namespace{1}, World: world, Groups: object.FullAttention(16, chunkBytes)}
	h := make([]kv.Hash, 9000)
	for i := range h {
		h[i] = kv.Hash{byte(i), byte(i >> 8), 7}
	}
	p, most := store.Hashed(h), 0
	p.From, p.Hashes = 8500, func(n int) []kv.Hash { most = max(most, n); return h }
	got := b.store.Lookup([]byte("r"), sh, p, 1)
	if got.State != store.Ready || got.Hit != p.From || got.Objects != 0 || most >= p.From {
		t.Errorf("a hit of %d chunks with %d objects, %d hashes: %+v", got.Hit, got.Objects, most, got)
	}
	b.store.EndSession([]byte("r"), lease.Owner{})
}

// What an earlier lookup of a request pinned is given back by its range, once, and nothing else of the request is.
func TestFreeAbandoned(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	h := prompt(1, 4)
	b.put("a", h, 0, 4, 4)
	b.store.EndSession([]byte("a"), lease.Owner{})
	who := lease.Owner{}
	p := store.Hashed(h)
	p.From = 2
	b.store.Lookup([]byte("r"), one, p, 1)
	b.store.Lookup([]byte("r"), one, store.Hashed(h[:3]), 1)
	left := func() (n int) { // chunks that a clear leaves
		b.store.Clear(false)
		return b.hit(h).Hit
	}
	b.store.FreePins([]byte("r"), who, 0, 3, 1)
	b.store.FreeAbandoned([]byte("r"), who, 0, 4, 1) // no lookup had that range
	if n := left(); n != 0 {
		t.Fatalf("a hit of %d after a clear", n)
	}
	if got := b.store.Lookup([]byte("s"), one, p, 1); got.Hit != 4 { // chunks 2 and 3 are still pinned by r
		t.Fatalf("%+v, want what the abandoned lookup pinned", got)
	}
	b.store.EndSession([]byte("s"), who)
	b.store.FreeAbandoned([]byte("r"), who, 2, 4, 1)
	b.store.Clear(false)
	if got := b.store.Lookup([]byte("s"), one, p, 1); got.Hit != 2 {
		t.Fatalf("%+v, want nothing behind the start", got)
	}
}

// An engine that computes the end of a prompt itself gives the last chunk of its newest hit back, and loads the others.
func TestFreeAbandonedOfTheNewestHit(t *testing.T) {
	for _, from := range []int{0, 1} {
		b := newBench(t, t.TempDir(), 8, store.Options{})
		h := prompt(1, 4)
		b.put("a", h, 0, 4, 4)
		b.store.EndSession([]byte("a"), lease.Owner{})
		who := lease.Owner{}
		p := store.Hashed(h)
		p.From = from
		if got := b.store.Lookup([]byte("r"), one, p, 1); got.Hit != 4 {
			t.Fatalf("%+v", got)
		}
		free := b.store.Stats().EvictableObjs
		b.store.FreeAbandoned([]byte("r"), who, 2, 4, 1) // no lookup began there, and an engine gives one chunk back
		if now := b.store.Stats().EvictableObjs; now != free {
			t.Errorf("%d chunks can be evicted, %d before: a range of no lookup released some", now, free)
		}
		b.store.FreeAbandoned([]byte("r"), who, 3, 4, 1)
		b.store.FreeAbandoned([]byte("r"), who, 3, 4, 1) // once more: nothing is left of it
		tr := transfer(1, h, from, 4, true)
		var c store.Transfer
		if why := b.store.BeginLoad([]byte("r"), tr, h, &c); why != miss.NotPinned {
			t.Errorf("a load of all: %v, the last chunk is given back", why)
		}
		b.store.CommitLoad(tr, []byte("r"))
		tr = transfer(1, h, from, 3, true)
		if why := b.store.BeginLoad([]byte("r"), tr, h, &c); why != miss.None {
			t.Errorf("a load of the others: %v", why)
		}
		b.store.CommitLoad(tr, []byte("r"))
		b.store.Clear(false)
		if got := b.hit(h); got.Hit != 0 {
			t.Errorf("from %d: %d chunks are still pinned", from, got.Hit)
		}
		b.stop()
	}
}

// Over a tier a lookup from a chunk reads what lies behind its start: chunks of the engine's own are not read, wherever they are
// missing.
func TestLookupFromAChunkBelow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 16, "", store.Options{})
		defer b.close()
		h := prompt(1, 8)
		keep(t, b.memory, one, h[1:6]...) // chunk 0 is nowhere, chunks 6 and 7 neither
		look := func(start, want, below int) {
			t.Helper()
			p := store.Hashed(h)
			p.From = start
			got := b.store.Lookup([]byte("r"), one, p, 1)
			if got.State == store.Pending {
				got = b.store.Await(t.Context(), []byte("r"), nobody)
			}
			if got.Hit != want || got.Below != below {
				t.Errorf("from chunk %d: a hit of %d, %d from below; want %d, %d", start, got.Hit, got.Below, want, below)
			}
			b.store.EndSession([]byte("r"), nobody)
		}
		look(0, 0, 0)
		look(3, 6, 3)
		if n := b.flaky.Calls("read"); n != 3 {
			t.Errorf("%d reads, want those of chunks 3 to 5", n)
		}
		look(3, 6, 0) // they are in the pool
		look(1, 6, 2) // chunks 1 and 2 are read, the others are there
		look(6, 6, 0) // nothing behind the start
		if n := b.flaky.Calls("read"); n != 5 {
			t.Errorf("%d reads", n)
		}
		b.idle()
	})
}

// A window that reaches below the start needs only what lies behind it: the engine has the rest. In the pool and from below.
func TestLookupFromAChunkOfWindows(t *testing.T) {
	groups, err := object.NewGroups(2, []object.Group{
		{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: chunkBytes}, {ChunkGroup: coordinator.ChunkGroup{Window: 6}, Bytes: chunkBytes}, // three chunks
	})
	if err != nil {
		t.Fatal(err)
	}
	sh := object.Shard{Namespace: one.Namespace, World: 1, Groups: groups}
	h := prompt(1, 6)
	lacks := func(group, chunk int) bool { return group == 1 && chunk < 4 } // of the window only chunks 4 and 5 are there
	check := func(b *bench, wait func() store.LookupResult) {
		t.Helper()
		f := func(start, want, objects int) {
			t.Helper()
			p := store.Hashed(h)
			p.From = start
			got := b.store.Lookup([]byte("r"), sh, p, 1)
			if got.State == store.Pending {
				got = wait()
			}
			if got.Hit != want || got.Objects != objects {
				t.Errorf("from chunk %d: a hit of %d with %d objects, want %d with %d", start, got.Hit, got.Objects, want, objects)
			}
			b.store.EndSession([]byte("r"), nobody)
		}
		f(0, 0, 0) // no hit has its whole window
		f(3, 3, 0)
		f(4, 6, 4)
		f(5, 6, 2)
	}

	b := newBench(t, t.TempDir(), 12, store.Options{})
	defer b.stop()
	c := &store.Transfer{Own: true, Skip: lacks}
	if _, err := b.store.BeginStore(hold.Transfer{Instance: 1, Shard: sh, To: len(h), Last: h[len(h)-1]}, []byte("s"), h, c); err != nil {
		t.Fatal(err)
	}
	c.Done(h, true)
	check(b, nil)

	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 12, "", store.Options{})
		defer b.close()
		for g := range 2 {
			for i, hash := range h {
				if lacks(g, i) {
					continue
				}
				k := objectKey(sh, 0, hash)
				k.Group = uint32(g)
				data := content(hash, g)
				if err := b.memory.Write(t.Context(), k, tier.Meta{Len: chunkBytes, Sum: xxh3.Hash(data)}, data); err != nil {
					t.Fatal(err)
				}
			}
		}
		check(b.bench, func() store.LookupResult { return b.store.Await(t.Context(), []byte("r"), nobody) })
	})
}
