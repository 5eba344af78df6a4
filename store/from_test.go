// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
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
