// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// sumBench is a store that can be restarted.
type sumBench struct {
	*bench
	dir string
}

func newSumBench(t *testing.T, chunks int) *sumBench {
	b := &sumBench{dir: t.TempDir()}
	b.bench = newBench(t, b.dir, chunks, store.Options{ChecksumRate: 1 << 40, SumAtOnce: true})
	return b
}

func (b *sumBench) restart(t *testing.T, chunks int) {
	t.Helper()
	b.pool.Bytes = int64(chunks * chunkBytes)
	b.bench.restart()
}

// put stores what is missing of h and returns the offsets.
func (b *sumBench) put(t *testing.T, h []kv.Hash) []int64 {
	t.Helper()
	var p store.Transfer
	tr := transfer(7, h, 0, len(h), false)
	if _, err := b.store.BeginStore(tr, []byte("p"), h, &p); err != nil {
		t.Fatal(p, err)
	}
	for i, off := range p.Offsets {
		copy(b.at(off), content(h[p.Indices[i]], 0))
	}
	if got := b.store.CommitStore(tr, []byte("p"), h, true); got.Chunks != len(p.Offsets) {
		t.Fatalf("%+v", got)
	}
	return p.Offsets
}

// look is a lookup whose result is waited for.
func (b *bench) look(t tb, session string, sh object.Shard, h []kv.Hash) store.LookupResult {
	t.Helper()
	got := b.store.Lookup([]byte(session), sh, store.Hashed(h), 1)
	if got.State == store.Pending {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		defer b.run()()
		return b.store.Await(ctx, []byte(session), lease.Owner{})
	}
	b.store.Result([]byte(session), lease.Owner{})
	return got
}

// run does the background work until the returned function is called.
func (b *bench) run() (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.store.Run(ctx)
	}()
	return func() { cancel(); <-ended }
}

func (b *sumBench) sumAll() (n int) {
	for b.store.SumNext() > 0 {
		n++
	}
	return n
}

// A chunk that changed while no server ran is a miss, and so is the rest of its
// prompt; its neighbours are served, before and after the background came by.
func TestCorruptAfterRestart(t *testing.T) {
	for _, background := range []bool{false, true} {
		b := newSumBench(t, 16)
		h := prompt(1, 5)
		offs := b.put(t, h)
		if n := b.sumAll(); n != 5 {
			t.Fatalf("%d checksums", n)
		}
		b.at(offs[3])[chunkBytes-1] ^= 1
		b.restart(t, 16)
		if background {
			if n := b.sumAll(); n != 5 {
				t.Fatalf("%d compared", n)
			}
		}
		got := b.look(t, "r", one, h)
		if got.Hit != 3 || got.Why != miss.Corrupt {
			t.Errorf("background %v: hit %d, %v", background, got.Hit, got.Why)
		}
		var p store.Transfer
		if why := b.store.BeginLoad([]byte("r"), transfer(7, h, 0, 3, true), h, &p); why != miss.None {
			t.Fatal(why)
		}
		for i, off := range p.Offsets {
			if !bytes.Equal(b.at(off), content(h[i], 0)) {
				t.Errorf("chunk %d: wrong bytes", i)
			}
		}
		st := b.store.Stats()
		if st.CorruptChunks != 1 || st.VerifiedChunks < 3 || st.Resident != 4 {
			t.Errorf("%+v", st)
		}
		b.store.EndSession([]byte("r"), lease.Owner{})
		b.stop()
	}
}

// A chunk whose checksum was not recorded before a kill is a miss, also in a slot with
// the checksum of what was there before; with TrustUnsummed it is served.
func TestNoChecksumAfterAKill(t *testing.T) {
	for _, trust := range []bool{false, true} {
		b := newSumBench(t, 4)
		b.opts.TrustUnsummed = trust
		a, c := prompt(1, 4), prompt(2, 4)
		b.put(t, a)
		b.sumAll()
		b.store.Clear(true)
		offs := b.put(t, c) // the same slots
		b.at(offs[2])[0] ^= 1
		b.kill()
		want, why := 0, miss.Unsummed
		if trust {
			want, why = 4, miss.None
		}
		if got := b.store.Lookup([]byte("r"), one, store.Hashed(c), 1); got.Hit != want || got.Why != why {
			t.Errorf("trust %v: hit %d, %v", trust, got.Hit, got.Why)
		}
		st := b.store.Stats()
		if st.VerifiedChunks != 0 || st.CorruptChunks != 0 || st.RestoredChunks != uint64(want) || st.UnsummedChunks != uint64(4-want) {
			t.Errorf("trust %v: %+v", trust, st)
		}
		b.store.EndSession([]byte("r"), lease.Owner{})
		b.put(t, a) // the room of what was dropped
		if got := b.look(t, "s", one, a); got.Hit != 4 {
			t.Errorf("trust %v: stored after the restart: hit %d, %v", trust, got.Hit, got.Why)
		}
		b.stop()
	}
}

// What was committed just before an orderly end has a checksum: it is served, and what
// was changed between the two lives is not.
func TestCloseComputesMissingChecksums(t *testing.T) {
	for _, rate := range []int64{1 << 40, 0} {
		b := newSumBench(t, 300)
		b.opts.ChecksumRate, b.opts.TrustUnsummed = rate, false
		b.restart(t, 300)
		h := prompt(1, 200)
		offs := b.put(t, h)
		if err := b.store.Close(); err != nil {
			t.Fatal(err)
		}
		b.at(offs[150])[7] ^= 4
		b.pool.Cold = false
		b.open()
		if got := b.look(t, "r", one, h); got.Hit != 150 || got.Why != miss.Corrupt {
			t.Errorf("rate %d: hit %d, %v", rate, got.Hit, got.Why)
		}
		if st := b.store.Stats(); st.CorruptChunks != 1 || st.UnsummedChunks != 0 {
			t.Errorf("rate %d: %+v", rate, st)
		}
		b.store.EndSession([]byte("r"), lease.Owner{})
		b.stop()
	}
}

// Two seconds after its commit a chunk outlives a kill, with the options that are the
// default.
func TestCommittedTwoSecondsBeforeAKillIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &sumBench{bench: newBench(t, t.TempDir(), 64, store.Options{ChecksumRate: 512 << 20})}
		defer func() { b.stop() }()
		end := b.run()
		old, young := prompt(1, 16), prompt(2, 16)
		for i := range 16 { // at every phase of the background's clock
			b.put(t, old[:i+1])
			time.Sleep(130 * time.Millisecond)
		}
		time.Sleep(2*time.Second - 130*time.Millisecond)
		b.put(t, young)
		end()
		b.kill()
		if got := b.look(t, "r", one, old); got.Hit != 16 {
			t.Errorf("committed 2 s before the kill: hit %d, %v", got.Hit, got.Why)
		}
		if got := b.look(t, "s", one, young); got.Hit != 0 || got.Why != miss.Unsummed {
			t.Errorf("committed just before the kill: hit %d, %v", got.Hit, got.Why)
		}
		b.store.EndSession([]byte("r"), lease.Owner{})
	})
}

// Chunks that are evicted between queue and checksum, or before they were
// compared, leave nothing behind: their slots' next content is not judged by them.
func TestEvictedBeforeSum(t *testing.T) {
	b := newSumBench(t, 4)
	defer func() { b.stop() }()
	a, c := prompt(1, 4), prompt(2, 4)
	b.put(t, a)
	b.put(t, c) // evicts a, whose tasks are still queued
	if n := b.sumAll(); n != 4 {
		t.Errorf("%d checksums, want 4", n)
	}
	b.restart(t, 4)
	b.put(t, a) // evicts c before it was compared
	if n := b.sumAll(); n != 4 {
		t.Errorf("%d after the restart, want the 4 new ones", n)
	}
	if got := b.look(t, "r", one, a); got.Hit != 4 {
		t.Errorf("hit %d, %v", got.Hit, got.Why)
	}
	if st := b.store.Stats(); st.CorruptChunks != 0 || st.VerifiedChunks != 0 {
		t.Errorf("%+v", st)
	}
}

// Lookups, evictions and the background at once, after a restart: with the race
// detector and, by content, no wrong byte.
func TestSumsConcurrent(t *testing.T) {
	b := newSumBench(t, 40)
	defer func() { b.stop() }()
	for i := range 12 {
		b.put(t, prompt(i, 5))
	}
	b.sumAll()
	b.restart(t, 40)
	stop := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			default:
				b.store.SumNext()
			}
		}
	}()
	for i := range 200 {
		h := prompt(i%30, 5)
		got := b.look(t, "r", one, h)
		if got.Hit < 5 {
			b.store.EndSession([]byte("r"), lease.Owner{})
			b.put(t, h)
			continue
		}
		var p store.Transfer
		if why := b.store.BeginLoad([]byte("r"), transfer(7, h, 0, 5, true), h, &p); why != miss.None {
			t.Fatal(why)
		}
		for j, off := range p.Offsets {
			if !bytes.Equal(b.at(off), content(h[j], 0)) {
				t.Fatalf("prompt %d, chunk %d: wrong bytes", i%30, j)
			}
		}
		b.store.CommitLoad(transfer(7, h, 0, 5, true), []byte("r"))
		b.store.EndSession([]byte("r"), lease.Owner{})
	}
	close(stop)
	<-ended
	if st := b.store.Stats(); st.CorruptChunks != 0 {
		t.Errorf("%+v", st)
	}
}

// Chunks that do not live long cost no checksum.
func TestSumAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &sumBench{bench: newBench(t, t.TempDir(), 8, store.Options{ChecksumRate: 1 << 40, SumAfter: time.Minute})}
		defer b.stop()
		b.put(t, prompt(1, 4))
		if n := b.sumAll(); n != 0 {
			t.Errorf("%d checksums at once", n)
		}
		time.Sleep(time.Minute)
		b.put(t, prompt(2, 2))
		if n := b.sumAll(); n != 4 {
			t.Errorf("%d checksums after a minute, want 4", n)
		}
	})
}
