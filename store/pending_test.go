// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// restored is a store that has taken over prompts, nothing of which was compared yet.
func restored(t *testing.T, chunks int, prompts ...[]kv.Hash) *sumBench {
	t.Helper()
	b := newSumBench(t, chunks)
	for _, h := range prompts {
		b.put(t, h)
	}
	b.sumAll()
	b.restart(t, chunks)
	return b
}

func (b *bench) lookupAs(owner lease.Owner, session string, h []kv.Hash) store.LookupResult {
	return b.store.Lookup([]byte(session), one, store.Prompt{Chunks: len(h), Owner: owner, Hashes: store.Hashed(h).Hashes}, 1)
}

// idle fails if anything is kept.
func (b *bench) idle() {
	b.t.Helper()
	if err := b.store.CheckIdle(); err != nil {
		b.t.Errorf("%v", err)
	}
	if err := b.store.CheckBooks(nil); err != nil {
		b.t.Errorf("%v", err)
	}
}

var nobody lease.Owner

// A lookup of chunks that are still to be compared returns at once. Its result is
// pending until they were, comes once, and what it promised can be loaded.
func TestLookupNeverWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := prompt(1, 5)
		b := restored(t, 16, h)
		defer func() { b.stop() }()
		if got := b.lookupAs(nobody, "r", h); got.State != store.Pending || got.Asked != 5 {
			t.Fatal(got)
		}
		synctest.Wait()
		for range 3 {
			if got := b.store.Result([]byte("r"), nobody); got.State != store.Pending {
				t.Fatal(got)
			}
		}
		for b.store.SumNext() > 0 {
		}
		synctest.Wait()
		if got := b.store.Result([]byte("r"), nobody); got.State != store.Ready || got.Hit != 5 || got.Why != miss.None || !got.Waited {
			t.Fatal(got)
		}
		if got := b.store.Result([]byte("r"), nobody); got.State != store.Taken || got.Hit != 0 {
			t.Fatal(got)
		}
		var p store.Transfer
		tr := transfer(7, h, 0, 5, true)
		if why := b.store.BeginLoad([]byte("r"), tr, h, &p); why != miss.None {
			t.Fatal(why)
		}
		for i, off := range p.Offsets {
			if !bytes.Equal(b.at(off), content(h[i], 0)) {
				t.Errorf("chunk %d: wrong bytes", i)
			}
		}
		b.store.CommitLoad(tr, []byte("r"))
		b.store.EndSession([]byte("r"), nobody)
		if got := b.lookupAs(nobody, "again", h); got.State != store.Ready || got.Hit != 5 || got.Waited {
			t.Errorf("compared already: %+v", got)
		}
		b.store.EndSession([]byte("again"), nobody)
		b.idle()
	})
}

// However many want an object that is to be compared, it is read once, and each of them
// keeps it: also those that come while the background reads it anyway.
func TestOneFlightPerObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 20
		h := prompt(1, n)
		b := restored(t, 32, h)
		defer func() { b.stop() }()
		for i := range 8 {
			if got := b.lookupAs(lease.Owner{Peer: fmt.Sprint("uid ", i)}, "r", h[:n-i]); got.State != store.Pending {
				t.Fatal(got)
			}
		}
		end := b.run()
		for i := range 8 {
			got := b.store.Await(t.Context(), []byte("r"), lease.Owner{Peer: fmt.Sprint("uid ", i)})
			if got.State != store.Ready || got.Hit != n-i {
				t.Errorf("session %d: %+v", i, got)
			}
		}
		end()
		synctest.Wait() // a lookup is counted as pending until its goroutine ends, after its result
		if got := b.store.Stats(); got.ComparedBytes != n*chunkBytes || got.VerifiedChunks != n || got.Pending != 0 {
			t.Errorf("%d bytes were read of %d: %+v", got.ComparedBytes, n*chunkBytes, got)
		}
		for i := range 8 {
			b.store.EndSession([]byte("r"), lease.Owner{Peer: fmt.Sprint("uid ", i)})
		}
		b.idle()
	})
}

// After LoadTimeout what is there is the answer: the head that was compared. What comes
// later stays, for the next lookup.
func TestLookupEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := prompt(1, 6)
		b := restored(t, 16, h)
		defer func() { b.stop() }()
		began := time.Now()
		b.lookupAs(nobody, "r", h)
		synctest.Wait()
		b.store.SumNext()
		b.store.SumNext()
		got := b.store.Await(t.Context(), []byte("r"), nobody)
		if got.State != store.Ready || got.Hit != 2 || got.Why != miss.NotCompared || time.Since(began) != 2*time.Second {
			t.Errorf("after %v: %+v", time.Since(began), got)
		}
		if got := b.store.Stats(); got.LateLookups != 1 || got.EvictableObjs != 4 {
			t.Errorf("%+v", got)
		}
		b.store.EndSession([]byte("r"), nobody)
		b.idle()
		if n := b.sumAll(); n != 4 {
			t.Errorf("the background compares %d that nobody waited for any more, want 4", n)
		}
		if got := b.lookupAs(nobody, "r", h); got.State != store.Ready || got.Hit != 6 {
			t.Error(got)
		}
	})
}

// Whoever stops waiting gives everything back, in each way of stopping, and takes nothing
// from another one that waits for the same chunks.
func TestPendingLookupsThatEnd(t *testing.T) {
	leaves := lease.Owner{Peer: "uid 1", Conn: 1}
	for name, end := range map[string]func(b *sumBench, h []kv.Hash){
		"end of the session": func(b *sumBench, _ []kv.Hash) { b.store.EndSession([]byte("a"), leaves) },
		"connection lost":    func(b *sumBench, _ []kv.Hash) { b.store.Leave(leaves) },
		"another lookup": func(b *sumBench, _ []kv.Hash) {
			if got := b.lookupAs(leaves, "a", prompt(9, 3)); got.State != store.Ready || got.Hit != 0 {
				b.t.Errorf("%+v", got)
			}
		},
		"the same lookup again": func(b *sumBench, h []kv.Hash) { b.lookupAs(leaves, "a", h[:3]) },
		"no hit":                func(b *sumBench, _ []kv.Hash) { b.store.NoHit([]byte("a"), leaves) },
		"time":                  func(b *sumBench, _ []kv.Hash) { time.Sleep(time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := prompt(1, 6)
				b := restored(t, 16, h)
				defer func() { b.stop() }()
				b.lookupAs(leaves, "a", h)
				synctest.Wait()
				b.store.SumNext() // one has landed
				end(b, h)
				synctest.Wait()
				stays := lease.Owner{Peer: "uid 2", Conn: 1}
				b.lookupAs(stays, "a", h) // of an equal id
				synctest.Wait()
				b.sumAll()
				synctest.Wait()
				if got := b.store.Result([]byte("a"), stays); got.State != store.Ready || got.Hit != 6 {
					t.Errorf("who stays: %+v", got)
				}
				b.store.EndSession([]byte("a"), stays)
				b.store.EndSession([]byte("a"), leaves)
				synctest.Wait()
				if got := b.store.Stats(); got.Pending != 0 || got.EvictableObjs != 6 || got.ComparedBytes != 6*chunkBytes {
					t.Errorf("%+v", got)
				}
				b.idle()
			})
		})
	}
}

// The same while both wait: the flights of the one who stays land.
func TestOneOfTwoPendingLookupsEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := prompt(1, 6)
		b := restored(t, 16, h)
		defer func() { b.stop() }()
		gone, stays := lease.Owner{Peer: "uid 1", Conn: 1}, lease.Owner{Peer: "uid 1", Conn: 2}
		b.lookupAs(gone, "r", h)
		b.lookupAs(stays, "r", h)
		synctest.Wait()
		waited := make(chan store.LookupResult)
		go func() { waited <- b.store.Await(context.Background(), []byte("r"), gone) }()
		b.store.Leave(gone)
		if got := <-waited; got.State != store.Unknown {
			t.Errorf("who waits for a session that ended: %+v", got)
		}
		b.sumAll()
		synctest.Wait()
		if got := b.store.Result([]byte("r"), stays); got.Hit != 6 {
			t.Error(got)
		}
		b.store.EndSession([]byte("r"), stays)
		b.idle()
	})
}

// A forced clear ends promises that are still pending.
func TestForcedClearOfPendingLookups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := prompt(1, 6)
		b := restored(t, 16, h)
		defer func() { b.stop() }()
		b.lookupAs(nobody, "r", h)
		synctest.Wait()
		b.store.SumNext()
		b.store.Clear(true)
		synctest.Wait()
		if got := b.store.Result([]byte("r"), nobody); got.State == store.Pending || got.Hit != 0 {
			t.Error(got)
		}
		b.store.Clear(true) // what the lookup kept meanwhile
		if got := b.store.Stats(); got.Resident != 0 || got.Pending != 0 {
			t.Errorf("%+v", got)
		}
		b.idle()
	})
}

// Who has many lookups pending is answered at once beyond its share, with what may be
// served, and others still wait for theirs.
func TestPendingLookupsOfOnePeerAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := prompt(1, 6)
		b := restored(t, 16, h)
		defer func() { b.stop() }()
		b.store.SumNext() // in some order; one chunk may be served
		pending := 0
		for i := range 400 {
			if got := b.lookupAs(lease.Owner{Peer: "uid 1"}, fmt.Sprint(i), h); got.State == store.Pending {
				pending++
			} else if got.Hit > 1 || got.Why != miss.NotCompared {
				t.Fatal(got)
			}
		}
		if pending == 0 || pending > 200 {
			t.Errorf("%d lookups of one peer are pending", pending)
		}
		if got := b.lookupAs(lease.Owner{Peer: "uid 2"}, "r", h); got.State != store.Pending {
			t.Error(got)
		}
		time.Sleep(time.Minute)
		if got := b.store.Stats(); got.Pending != 0 {
			t.Errorf("%+v", got)
		}
	})
}

// A short lookup does not wait until a long one that came before has its last chunk.
func TestPendingLookupsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		long, short := prompt(1, 100), prompt(5, 2)
		b := restored(t, 128, long, short)
		defer func() { b.stop() }()
		b.lookupAs(lease.Owner{Peer: "uid 1"}, "long", long)
		synctest.Wait()
		b.lookupAs(lease.Owner{Peer: "uid 2"}, "short", short)
		synctest.Wait()
		for range 4 {
			b.store.SumNext()
		}
		synctest.Wait()
		if got := b.store.Result([]byte("short"), lease.Owner{Peer: "uid 2"}); got.Hit != 2 {
			t.Error(got)
		}
		if got := b.store.Result([]byte("long"), lease.Owner{Peer: "uid 1"}); got.State != store.Pending {
			t.Error(got)
		}
	})
}

// A lookup of one user does not wait for all the lookups that another one has pending.
func TestPendingLookupsTakeTurnsByPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		prompts := [][]kv.Hash{}
		for i := range 60 {
			prompts = append(prompts, prompt(10+i, 2)[1:])
		}
		mine := prompt(5, 3)
		b := restored(t, 128, append(prompts, mine)...)
		defer func() { b.stop() }()
		for i, h := range prompts {
			b.lookupAs(lease.Owner{Peer: "uid 1"}, fmt.Sprint(i), h)
		}
		synctest.Wait()
		b.lookupAs(lease.Owner{Peer: "uid 2"}, "mine", mine)
		synctest.Wait()
		for range 7 {
			b.store.SumNext()
		}
		synctest.Wait()
		if got := b.store.Result([]byte("mine"), lease.Owner{Peer: "uid 2"}); got.Hit != 3 {
			t.Error(got)
		}
		if got := b.store.Stats(); got.Pending < 50 {
			t.Errorf("%d lookups are pending: the test shows nothing", got.Pending)
		}
	})
}

// Close does not wait for what is pending.
func TestCloseWithPendingLookups(t *testing.T) {
	h := prompt(1, 6)
	b := restored(t, 16, h)
	b.lookupAs(nobody, "r", h)
	b.stop()
}

// A lookup whose answer is in memory costs what it did before there were others.
func TestReadyLookupsAllocateLittle(t *testing.T) {
	const chunks = 64
	b := newBench(t, t.TempDir(), chunks, store.Options{})
	defer b.stop()
	h := prompt(1, chunks)
	b.put("p", h, 0, chunks, chunks)
	session := []byte("r")
	p := store.Prompt{Chunks: chunks, Hashes: func(int) []kv.Hash { return h }}
	n := testing.AllocsPerRun(200, func() {
		if got := b.store.Lookup(session, one, p, 1); got.State != store.Ready || got.Hit != chunks {
			t.Fatal(got)
		}
		b.store.Result(session, nobody)
		b.store.EndSession(session, nobody)
	})
	t.Logf("%v allocations for a lookup, its result and its end", n)
	allowed := float64(allocsPerLookup)
	if testkit.Race {
		allowed++ // the race detector's own
	}
	if n > allowed {
		t.Errorf("%v allocations, want at most %v", n, allowed)
	}
}

// allocsPerLookup: its session, the pinned slots and the readers left of each.
const allocsPerLookup = 3
