// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// below returns how many of a prompt's chunks lie below, with the right bytes.
func (b *tiered) below(t *testing.T, h []kv.Hash) (n int) {
	t.Helper()
	for _, c := range h {
		dst := make([]byte, chunkBytes)
		_, err := b.memory.Read(t.Context(), objectKey(one, 0, c), dst)
		if err == nil && !bytes.Equal(dst, content(c, 0)) {
			t.Error("other bytes lie below")
		}
		if err == nil {
			n++
		}
	}
	return n
}

// load has a worker load a prompt that is in the pool.
func (b *tiered) load(t *testing.T, h []kv.Hash) {
	t.Helper()
	if got := b.await(t, nobody, one, h); got.Hit != len(h) {
		t.Fatalf("%+v", got)
	}
	b.whole(t, one, h)
	b.store.EndSession([]byte("r"), nobody)
}

// What is stored lies below soon after its commit, once, and what is evicted then comes
// back. When it lies below depends on the policy.
func TestWriteBack(t *testing.T) {
	const n = 6
	f := func(policy store.WritePolicy, atCommit, atHit int) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			b := newTiered(t, n, "", store.Options{Write: policy, ChecksumRate: 1 << 30})
			defer b.close()
			end := b.run()
			defer func() { end() }()
			h := prompt(1, n)
			b.put("p", h, 0, n, n)
			time.Sleep(time.Minute)
			if got := b.below(t, h); got != atCommit {
				t.Errorf("policy %d: %d chunks are below after the commit, want %d", policy, got, atCommit)
			}
			b.load(t, h)
			b.load(t, h)
			time.Sleep(time.Minute)
			if got := b.below(t, h); got != atHit {
				t.Errorf("policy %d: %d chunks are below after a hit, want %d", policy, got, atHit)
			}
			if got := b.flaky.Calls("write"); got != atHit {
				t.Errorf("policy %d: %d writes of %d objects", policy, got, atHit)
			}
			other := prompt(2, n)
			b.put("p", other, 0, n, n) // evicts all
			time.Sleep(time.Minute)
			if got := b.store.Stats(); got.WrittenChunks != uint64(atHit+atCommit) || got.LostChunks > 0 {
				t.Errorf("policy %d: %+v", policy, got)
			}
			if atHit == n {
				b.load(t, h)
			}
			b.idle()
		})
	}
	f(store.WriteAtCommit, n, n)
	f(store.WriteAtFirstHit, 0, n)
	f(store.WriteNever, 0, 0)
}

// That an object lies below survives a restart: it is not written again, unless another
// place lies below now. What did not lie below is written then, once it was compared.
func TestBelowSurvivesRestarts(t *testing.T) {
	const n = 6
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), n, store.Options{ChecksumRate: 1 << 30, Place: "one"})
		defer func() { b.release(); b.stop() }()
		b.memory = tier.NewMemory(1 << 20)
		b.script = "write * error"
		b.restart()
		h := prompt(1, n)
		b.put("p", h, 0, n, n)
		run := func() (writes int) {
			end := b.run()
			time.Sleep(time.Minute)
			end()
			return b.flaky.Calls("write")
		}
		kept := func() int { return (&tiered{bench: b, memory: b.memory}).below(t, h) }
		if run(); kept() != 0 || b.store.Stats().WriteFailures != 10*n {
			t.Fatalf("%d chunks are below, %+v", kept(), b.store.Stats())
		}
		b.script = ""
		b.restart()
		if writes := run(); kept() != n || writes != n {
			t.Errorf("after a restart %d chunks are below, %d were written", kept(), writes)
		}
		b.restart()
		if writes := run(); writes != 0 {
			t.Errorf("%d chunks were written again", writes)
		}
		b.opts.Place = "two"
		b.restart()
		if writes := run(); writes != n {
			t.Errorf("%d of %d chunks were written to another place", writes, n)
		}
		b.idle()
	})
}

// What was below when a server ended and has gone since is written again by the next one, and nothing else is: the
// tier is asked for it, not before it knows all that it has.
func TestObjectsLostBelowAreWrittenAgain(t *testing.T) {
	const n = 6
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 2*n, store.Options{ChecksumRate: 1 << 30, Place: "one"})
		defer func() { b.release(); b.stop() }()
		b.memory = tier.NewMemory(1 << 20)
		b.restart()
		end := b.run()
		stays, goes := prompt(1, n), prompt(2, n)
		b.put("p", stays, 0, n, n)
		b.put("p", goes, 0, n, n)
		time.Sleep(time.Minute)
		end()
		left := func(h []kv.Hash) int { return (&tiered{bench: b, memory: b.memory}).below(t, h) }
		if left(stays) != n || left(goes) != n {
			t.Fatalf("%d and %d chunks are below", left(stays), left(goes))
		}
		for _, h := range goes {
			if err := b.memory.Delete(t.Context(), []kv.Key{objectKey(one, 0, h)}); err != nil {
				t.Fatal(err)
			}
		}
		opened := make(chan struct{})
		b.opts.BelowOpened = opened
		b.restart()
		defer b.run()()
		time.Sleep(time.Minute)
		if got := b.flaky.Calls("stat"); got > 0 {
			t.Errorf("the tier was asked %d times before it knew what it has", got)
		}
		close(opened)
		time.Sleep(time.Minute)
		got := b.store.Stats()
		if left(stays) != n || left(goes) != n || b.flaky.Calls("write") != n || got.GoneBelow != n {
			t.Errorf("%d and %d chunks are below after %d writes; %d had gone", left(stays), left(goes), b.flaky.Calls("write"), got.GoneBelow)
		}
		b.idle()
	})
}

// remove has another program remove chunks from below, and says so.
func (b *tiered) remove(t *testing.T, h []kv.Hash) {
	t.Helper()
	for _, c := range h {
		if err := b.memory.Delete(t.Context(), []kv.Key{objectKey(one, 0, c)}); err != nil {
			t.Fatal(err)
		}
	}
	b.store.RecheckBelow()
}

// What was removed from the tier does not count as being there any more, once RecheckBelow was called. It is written again when
// an engine loads it, and not before.
func TestObjectsRemovedBelowAreWrittenAtTheNextLoad(t *testing.T) {
	const n = 6
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 2*n, "", store.Options{ChecksumRate: 1 << 30})
		defer b.close()
		defer b.run()()
		stays, goes := prompt(1, n), prompt(2, n)
		b.put("p", stays, 0, n, n)
		b.put("p", goes, 0, n, n)
		for round := range 3 {
			time.Sleep(time.Minute)
			b.remove(t, goes)
			time.Sleep(time.Minute)
			want := n * (2 + round)
			if got := b.store.Stats(); b.below(t, stays) != n || b.below(t, goes) != 0 || int(got.GoneBelow) != n*(1+round) || int(got.WrittenChunks) != want {
				t.Fatalf("round %d: %d and %d chunks are below, %+v", round, b.below(t, stays), b.below(t, goes), got)
			}
			b.load(t, stays)
			b.load(t, goes)
			time.Sleep(time.Minute)
			if got := b.store.Stats(); b.below(t, goes) != n || int(got.WrittenChunks) != want+n {
				t.Fatalf("round %d: %d chunks are below after a load, %+v", round, b.below(t, goes), got)
			}
		}
		b.idle()
	})
}

// lateTier answers reads and writes a second after it has done them.
type lateTier struct{ tier.Tier }

func (l lateTier) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	defer time.Sleep(time.Second)
	return l.Tier.Write(ctx, k, m, src)
}

func (l lateTier) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	defer time.Sleep(time.Second)
	return l.Tier.Read(ctx, k, dst)
}

// What was removed from the tier after a write or a read was done there, and before the store has heard of its end, does not
// count as being below either.
func TestObjectsRemovedDuringTheirTransferAreWrittenAgain(t *testing.T) {
	const n = 4 // less than are written or read at once
	synctest.Test(t, func(t *testing.T) {
		b := &tiered{memory: tier.NewMemory(1 << 30)}
		b.bench = newBench(t, t.TempDir(), n, store.Options{ChecksumRate: 1 << 30, Below: lateTier{b.memory}, LoadTimeout: time.Minute, LoadBytes: 16 * n * chunkBytes})
		defer b.stop()
		defer b.run()()
		h, other := prompt(1, n), prompt(2, n)
		b.put("p", h, 0, n, n)
		during := func(what string) {
			t.Helper()
			time.Sleep(500 * time.Millisecond)
			b.remove(t, h)
			time.Sleep(time.Minute)
			if got := b.below(t, h); got != 0 {
				t.Fatalf("%s: %d chunks are below", what, got)
			}
			b.load(t, h)
			time.Sleep(time.Minute)
			if got := b.below(t, h); got != n {
				t.Errorf("%s: %d chunks are below after the next load, want %d", what, got, n)
			}
		}
		during("a write")
		b.put("p", other, 0, n, n) // evicts all
		time.Sleep(time.Minute)
		p := store.Prompt{Chunks: n, Owner: nobody, Hashes: store.Hashed(h).Hashes}
		if got := b.store.Lookup([]byte("l"), one, p, 1); got.State != store.Pending {
			t.Fatalf("%+v", got)
		}
		during("a read")
		b.store.EndSession([]byte("l"), nobody)
		b.idle()
	})
}

// A tier that does not answer when it is asked for what was below is asked again until it does.
func TestRecheckRetriesASilentTier(t *testing.T) {
	const n = 6
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 2*n, store.Options{ChecksumRate: 1 << 30, Place: "one"})
		defer func() { b.release(); b.stop() }()
		b.memory = tier.NewMemory(1 << 20)
		b.restart()
		end := b.run()
		h := prompt(1, n)
		b.put("p", h, 0, n, n)
		time.Sleep(time.Minute)
		end()
		b.memory = tier.NewMemory(1 << 20) // all has gone
		b.script = "stat 1 error; stat 2 slow 1h; stat 3 error"
		b.restart()
		defer b.run()()
		time.Sleep(time.Minute)
		if got := (&tiered{bench: b, memory: b.memory}).below(t, h); got != n || b.flaky.Calls("stat") != 4 {
			t.Errorf("%d chunks are below after %d calls", got, b.flaky.Calls("stat"))
		}
		b.idle()
	})
}

// A chunk that is noted as being below, is not there any more and has left the pool is a miss, however often it is
// asked for: nothing is read, and every lookup ends.
func TestNotedBelowAndGoneIsAMiss(t *testing.T) {
	const n = 6
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), n, store.Options{ChecksumRate: 1 << 30, Place: "one"})
		defer func() { b.release(); b.stop() }()
		b.memory = tier.NewMemory(1 << 20)
		b.restart()
		end := b.run()
		h, other := prompt(1, n), prompt(2, n)
		b.put("p", h, 0, n, n)
		time.Sleep(time.Minute)
		end()
		b.memory = tier.NewMemory(1 << 20)
		b.opts.Write = store.WriteNever // so that nobody finds out before a lookup does
		b.restart()
		defer b.run()()
		time.Sleep(time.Minute)
		b.put("p", other, 0, n, n) // evicts all
		x := &tiered{bench: b, memory: b.memory, flaky: b.flaky}
		for i := range 5 {
			began := time.Now()
			got := x.await(t, nobody, one, h)
			if got.State != store.Ready || got.Hit != 0 || got.Why != miss.Evicted || time.Since(began) > time.Second {
				t.Errorf("lookup %d after %v: %+v", i, time.Since(began), got)
			}
			b.store.EndSession([]byte("r"), nobody)
		}
		if reads := b.flaky.Calls("read"); reads > 0 || b.store.Stats().Lookups < 5 {
			t.Errorf("%d reads, %+v", reads, b.store.Stats())
		}
		b.idle()
	})
}

// What the tier does not take is no failure. It is offered again at the next hit; what
// fails is offered then, too.
func TestOfferedAgainAtAHit(t *testing.T) {
	for script, writes := range map[string]int{"write * notkept": 4, "write * error": 40} { // ten tries each time
		synctest.Test(t, func(t *testing.T) {
			b := newTiered(t, 4, script, store.Options{})
			defer b.close()
			defer b.run()()
			h := prompt(1, 2)
			b.put("p", h, 0, 2, 2)
			time.Sleep(time.Minute)
			b.load(t, h)
			time.Sleep(time.Minute)
			got := b.store.Stats()
			if b.flaky.Calls("write") != writes || got.WrittenChunks != 0 || int(got.NotKeptBelow+got.WriteFailures) != writes || (got.NotKeptBelow > 0) != (script == "write * notkept") {
				t.Errorf("%s: %d writes, %+v", script, b.flaky.Calls("write"), got)
			}
			b.idle()
		})
	}
}

// A tier that writes slowly holds a few slots. What waits is bounded; what passes that is
// skipped, what is evicted meanwhile is not written, and nobody else waits.
func TestSlowTierWritesDelayNoTransfer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 32
		b := newTiered(t, n, "write * slow 1h", store.Options{WriteBytes: 10 * chunkBytes})
		defer b.close()
		defer b.run()()
		h := prompt(1, n)
		b.put("p", h, 0, n, n)
		synctest.Wait()
		if got := b.store.Stats(); got.Outbox.WaitingBytes > 10*chunkBytes || got.Outbox.Skipped > n-10 || got.Outbox.Skipped < n-10-8 { // eight are taken out at some time
			t.Errorf("%+v", got.Outbox)
		}
		began := time.Now()
		for _, i := range []int{2, 3} { // they begin unlike each other, and unlike the first
			other := prompt(i, n-8)
			b.put("p", other, 0, n-8, n-8)
			b.load(t, other)
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("others waited %v", took)
		}
		if got := b.store.Stats(); got.Outbox.WaitingBytes > 10*chunkBytes || got.LostChunks == 0 {
			t.Errorf("%+v", got)
		}
	})
}

// Loads go first: a write waits while something is read from below, but not for ever.
func TestLoadsBeforeStores(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 16, "read * slow 150ms; write * slow 10s", store.Options{})
		defer b.close()
		defer b.run()()
		below, stored := prompt(1, 2), prompt(2, 2)
		keep(t, b.memory, one, below...)
		b.lookupAs(nobody, "r", below)
		synctest.Wait() // it reads
		b.put("p", stored, 0, 2, 2)
		time.Sleep(100 * time.Millisecond)
		if got := b.flaky.Calls("write"); got != 0 {
			t.Errorf("%d writes while something is read", got)
		}
		time.Sleep(200 * time.Millisecond)
		if got := b.flaky.Calls("write"); got != 2 {
			t.Errorf("%d writes afterwards, want 2", got)
		}
		time.Sleep(time.Minute)
		b.store.EndSession([]byte("r"), nobody)
	})
}

// A tier that hangs in a write keeps that slot and no other, and the store from unmapping
// the pool; the rest goes on.
func TestWriteThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 8, "write 1 hang", store.Options{})
		end := b.run()
		h := prompt(1, 4)
		b.put("p", h, 0, 4, 4)
		time.Sleep(time.Minute)
		if got := b.below(t, h); got != 3 {
			t.Errorf("%d chunks are below, want 3", got)
		}
		b.load(t, h) // offers it again
		time.Sleep(time.Minute)
		if got := b.flaky.Calls("write"); got != 4 {
			t.Errorf("%d writes: what is being written is written again", got)
		}
		b.store.Clear(true)
		if got := b.store.Stats(); got.CondemnedBytes != chunkBytes {
			t.Errorf("%d bytes wait for the write", got.CondemnedBytes)
		}
		end()
		b.flaky.Release()
		synctest.Wait()
		if got := b.store.Stats(); got.CondemnedBytes != 0 {
			t.Errorf("%d bytes wait for nobody", got.CondemnedBytes)
		}
		b.stop()
	})
}

// What another server put below without a checksum is loaded by its length, and has the
// checksum of what came from then on.
func TestObjectsWithoutAChecksum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 8, "", store.Options{})
		defer b.close()
		h := prompt(1, 3)
		for i, c := range h {
			m := tier.Meta{Len: chunkBytes, NoSum: true}
			if i == 2 { // its checksum is there and wrong
				m = tier.Meta{Len: chunkBytes, Sum: 1}
			}
			if err := b.memory.Write(t.Context(), objectKey(one, 0, c), m, content(c, 0)); err != nil {
				t.Fatal(err)
			}
		}
		if got := b.await(t, nobody, one, h); got.Hit != 2 || got.Why != miss.BelowCorrupt {
			t.Errorf("%+v", got)
		}
		b.whole(t, one, h[:2])
		b.store.EndSession([]byte("r"), nobody)
		if got := b.below(t, h); got != 2 {
			t.Errorf("%d chunks are below, want 2: the wrong one is forgotten", got)
		}
	})
}

// With LoadIfFaster a tier that gives less than engines compute is left out, and tried now
// and then; without it is asked whatever it costs.
func TestLoadIfFaster(t *testing.T) {
	for _, only := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const lookups = 64
			b := newTiered(t, 200, "read * slow 1s", store.Options{LoadIfFaster: only, Write: store.WriteNever})
			defer b.close()
			for i := range 16 { // engines compute a chunk in a millisecond
				h := prompt(300+i, 2)
				b.await(t, nobody, one, h)
				time.Sleep(time.Millisecond)
				b.put("r", h, 1, 2, 1)
				b.store.EndSession([]byte("r"), nobody)
			}
			for i := range 8 { // what lies below comes in a second
				h := prompt(100+i, 2)
				keep(t, b.memory, one, h...)
				b.await(t, nobody, one, h)
				b.store.EndSession([]byte("r"), nobody)
			}
			if got := b.store.Stats().Rates; got.LoadRate == 0 || got.ComputeRate < 10*got.LoadRate {
				t.Fatalf("%+v", got)
			}
			reads, slower := b.flaky.Calls("read"), 0
			for i := range lookups {
				h := prompt(200+i, 2)[1:] // none is in the pool
				keep(t, b.memory, one, h...)
				if got := b.await(t, nobody, one, h); got.Why == miss.BelowSlower {
					slower++
				}
				b.store.EndSession([]byte("r"), nobody)
			}
			read := b.flaky.Calls("read") - reads
			if only && (slower != lookups-lookups/16 || read != lookups/16) || !only && (slower != 0 || read != lookups) {
				t.Errorf("LoadIfFaster %v: %d of %d lookups left the tier out, %d reads", only, slower, lookups, read)
			}
		})
	}
}

// A lookup that the pool serves whole asks no tier, allocates no more for one, and is ready
// at once.
func TestWholeHitsAskNoTier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 64
		h := prompt(1, n)
		p := store.Hashed(h)
		allocations := func(b *bench) float64 {
			b.put("p", h, 0, n, n)
			return testing.AllocsPerRun(100, func() {
				if got := b.store.Lookup([]byte("r"), one, p, 1); got.State != store.Ready || got.Hit != n {
					t.Fatal(got)
				}
				b.store.EndSession([]byte("r"), nobody)
			})
		}
		plain := newBench(t, t.TempDir(), n, store.Options{})
		defer plain.stop()
		b := newTiered(t, n, "stat * error; read * error", store.Options{LoadIfFaster: true})
		defer b.close()
		if without, with := allocations(plain), allocations(b.bench); with > without {
			t.Errorf("%v allocations with a tier, %v without", with, without)
		}
		if b.flaky.Calls("stat")+b.flaky.Calls("read") > 0 {
			t.Error("the tier was asked")
		}
	})
}
