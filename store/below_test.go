// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/invariant"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// tiered is a store over a tier that fails by script.
type tiered struct {
	*bench
	memory *tier.Memory
	flaky  *tiertest.Flaky
}

func newTiered(t *testing.T, chunks int, script string, o store.Options) *tiered {
	t.Helper()
	b := &tiered{memory: tier.NewMemory(1 << 30)}
	var err error
	if b.flaky, err = tiertest.NewFlaky(b.memory, script); err != nil {
		t.Fatal(err)
	}
	o.Below = b.flaky
	b.bench = newBench(t, t.TempDir(), chunks, o)
	return b
}

// close ends the store after whatever hangs was released.
func (b *tiered) close() {
	b.flaky.Release()
	b.stop()
}

// objectKey names a chunk of a shard.
func objectKey(sh object.Shard, shard int, h kv.Hash) kv.Key {
	rank, _ := kv.NewRank(sh.World, shard)
	return kv.Key{Namespace: sh.Namespace, Chunk: h, Rank: rank}
}

// keep puts chunks of all shards below.
func keep(t tb, m *tier.Memory, sh object.Shard, hashes ...kv.Hash) {
	t.Helper()
	for _, h := range hashes {
		for shard := range sh.World {
			data := content(h, shard)
			if err := m.Write(context.Background(), objectKey(sh, shard, h), tier.Meta{Len: chunkBytes, Sum: xxh3.Hash(data)}, data); err != nil {
				t.Fatalf("%v", err)
			}
		}
	}
}

// await looks a prompt up and waits for the result.
func (b *tiered) await(t *testing.T, owner lease.Owner, sh object.Shard, h []kv.Hash) store.LookupResult {
	t.Helper()
	p := store.Prompt{Chunks: len(h), Owner: owner, Hashes: store.Hashed(h).Hashes}
	got := b.store.Lookup([]byte("r"), sh, p, 1)
	if r := b.store.Await(t.Context(), []byte("r"), owner); got.State == store.Pending {
		got = r
	}
	return got
}

// whole loads the hit of a shard and compares every byte.
func (b *tiered) whole(t *testing.T, sh object.Shard, h []kv.Hash) {
	t.Helper()
	tr := hold.Transfer{Instance: 7, Shard: sh, To: len(h), Last: h[len(h)-1], Load: true}
	var p store.Transfer
	if why := b.store.BeginLoad([]byte("r"), tr, h, &p); why != miss.None {
		t.Error(why)
	}
	for i, off := range p.Offsets {
		if !bytes.Equal(b.at(off), content(h[i], sh.Index)) {
			t.Errorf("chunk %d of shard %d: wrong bytes", i, sh.Index)
		}
	}
	b.store.CommitLoad(tr, []byte("r"))
}

// What the pool lacks comes from below: asked for in a few calls, each object read once,
// pinned like any hit, and in the pool the next time.
func TestHitFromBelow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 100
		b := newTiered(t, 2*n, "", store.Options{})
		defer b.close()
		h := prompt(1, n+20)
		two := object.Shard{Namespace: kv.Namespace{1}, World: 2, Groups: full}
		keep(t, b.memory, two, h[:n]...)
		first := b.store.Lookup([]byte("r"), two, store.Hashed(h), 1)
		if first.State != store.Pending {
			t.Fatal(first)
		}
		got := b.store.Await(t.Context(), []byte("r"), nobody)
		if got.Hit != n || got.Below != n || got.Why != miss.NeverStored || !got.Waited {
			t.Errorf("%+v", got)
		}
		for shard := range 2 {
			sh := two
			sh.Index = shard
			b.whole(t, sh, h[:n])
		}
		b.store.EndSession([]byte("r"), nobody)
		if got := b.flaky.Calls("stat"); got > 4 {
			t.Errorf("%d calls of stat for %d chunks", got, len(h))
		}
		if got := b.await(t, nobody, two, h[:n]); got.Hit != n || got.Below != 0 || got.Waited {
			t.Errorf("the second time: %+v", got)
		}
		b.store.EndSession([]byte("r"), nobody)
		if got := b.flaky.Calls("read"); got != 2*n {
			t.Errorf("%d reads of %d objects", got, 2*n)
		}
		if got := b.store.Stats(); got.BelowChunks != 2*n || got.BelowBytes != 2*n*chunkBytes || got.BelowFailures != 0 || got.EvictableObjs != 2*n {
			t.Errorf("%+v", got)
		}
		b.idle()
	})
}

// Whatever the tier does wrong costs what it concerns, and no more: the prefix before it
// is a hit within LoadTimeout, wrong bytes are never served, and what comes late stays.
func TestTierThatFails(t *testing.T) {
	const n = 6 // the first two are in the pool
	for _, c := range []struct {
		script      string
		hit         int
		why         miss.Reason
		took        time.Duration
		resident    int // a minute later
		second      int // hit of a second lookup then
		secondReads int
	}{
		{"", n, miss.None, 0, n, n, 0},
		{"read 3 error", 4, miss.BelowFailed, 0, 5, n, 1},
		{"read 3 panic", 4, miss.BelowFailed, 0, 5, n, 1},
		{"stat 1 panic", 2, miss.BelowFailed, 0, 2, n, 4},
		{"read 2 wrong", 3, miss.BelowCorrupt, 0, 5, 3, 0}, // the tier forgets it
		{"read 1 missing", 2, miss.BelowFailed, 0, 5, n, 1},
		{"stat 1 error", 2, miss.BelowFailed, 0, 2, n, 4},
		{"stat * lost", 2, miss.NeverStored, 0, 2, 2, 0},
		{"read * slow 300ms", n, miss.None, 1200 * time.Millisecond, n, n, 0},
		{"read * slow 900ms", 4, miss.BelowSlow, 2 * time.Second, 5, n, 1},
		{"read 2 slow 5s", 3, miss.BelowSlow, 2 * time.Second, 4, n, 2},
		{"read * error", 2, miss.BelowFailed, 0, 2, 2, 4},
		{"read 2 hang", 3, miss.BelowSlow, 2 * time.Second, 3, 3, 0},
		{"stat 1 hang", 2, miss.BelowSlow, 2 * time.Second, 2, n, 4},
	} {
		if invariant.Enabled && strings.HasSuffix(c.script, "panic") {
			continue // these builds let bugs go on
		}
		t.Run(c.script, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// One at a time, so that the script knows which is which.
				b := newTiered(t, 16, c.script, store.Options{LoadBytes: chunkBytes})
				defer b.close()
				h := prompt(1, n)
				b.put("p", h[:2], 0, 2, 2)
				keep(t, b.memory, one, h...)
				began := time.Now()
				got := b.await(t, nobody, one, h)
				if got.Hit != c.hit || got.Why != c.why || got.Below != c.hit-2 || time.Since(began) != c.took {
					t.Errorf("after %v: %+v, want %d, %v after %v", time.Since(began), got, c.hit, c.why, c.took)
				}
				b.store.EndSession([]byte("r"), nobody)
				time.Sleep(time.Minute)
				if got := b.store.Stats(); got.Resident != c.resident || got.Pending != 0 || got.EvictableObjs != c.resident {
					t.Errorf("a minute later: %+v, want %d resident", got, c.resident)
				}
				reads := b.flaky.Calls("read")
				if got := b.await(t, nobody, one, h); got.Hit != c.second {
					t.Errorf("the second lookup: %+v, want %d", got, c.second)
				}
				if got := b.flaky.Calls("read") - reads; got != c.secondReads {
					t.Errorf("the second lookup read %d, want %d", got, c.secondReads)
				}
				b.store.EndSession([]byte("r"), nobody)
				b.flaky.Release()
				time.Sleep(time.Minute)
				b.idle()
				if got := b.store.Stats(); got.StagedBytes != 0 || got.CondemnedBytes != 0 {
					t.Errorf("in the end: %+v", got)
				}
			})
		})
	}
}

// Two who want the same share one read of each object, also when one of them stops
// waiting.
func TestOneReadForAll(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const n = 5
			b := newTiered(t, 64, "read * slow 1s", store.Options{})
			defer b.close()
			h := prompt(1, n)
			keep(t, b.memory, one, h...)
			a, c := lease.Owner{Peer: "uid 1"}, lease.Owner{Peer: "uid 2"}
			b.lookupAs(a, "r", h)
			b.lookupAs(c, "r", h[:n-1])
			synctest.Wait()
			if leaves {
				b.store.EndSession([]byte("r"), a)
			}
			if got := b.store.Await(t.Context(), []byte("r"), c); got.Hit != n-1 || got.Below != n-1 {
				t.Errorf("%+v", got)
			}
			if got := b.store.Await(t.Context(), []byte("r"), a); !leaves && got.Hit != n {
				t.Errorf("%+v", got)
			}
			if got := b.flaky.Calls("read"); got != n {
				t.Errorf("%d reads of %d objects", got, n)
			}
			b.store.EndSession([]byte("r"), a)
			b.store.EndSession([]byte("r"), c)
			synctest.Wait()
			if got := b.store.Stats(); got.Resident != n || got.EvictableObjs != n {
				t.Errorf("%+v", got)
			}
			b.idle()
		})
	}
}

// What the tier is known to have is read while it is still asked for the rest, and is the hit where it never answers that.
func TestReadsBeginBeforeAllIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 200, "stat 2 hang", store.Options{})
		defer b.close()
		h := prompt(1, 60)
		keep(t, b.memory, one, h...)
		if got := b.store.Lookup([]byte("r"), one, store.Hashed(h), 1); got.State != store.Pending {
			t.Fatal(got)
		}
		synctest.Wait()
		if n := b.flaky.Calls("read"); n != 16 || b.flaky.Calls("stat") != 2 {
			t.Errorf("%d objects are read, and the tier was asked %d times", n, b.flaky.Calls("stat"))
		}
		if got := b.store.Await(t.Context(), []byte("r"), nobody); got.Hit != 16 || got.Below != 16 || got.Why != miss.BelowSlow {
			t.Errorf("%+v", got)
		}
	})
}

// Where the pool has no room for more, the tier is not asked for the rest.
func TestNoRoomForMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 20, "", store.Options{})
		defer b.close()
		h := prompt(1, 500)
		keep(t, b.memory, one, h...)
		got := b.await(t, nobody, one, h)
		if stats := b.flaky.Calls("stat"); got.Hit < 10 || got.Hit > 20 || stats > 2 || got.Why != miss.NoRoom {
			t.Errorf("%+v, the tier was asked %d times", got, stats)
		}
		b.whole(t, one, h[:got.Hit])
		b.store.EndSession([]byte("r"), nobody)
		b.idle()
	})
}

// A tier that answers nobody keeps lookups waiting for a while, and then none: they are
// answered with what the pool has until it answers again.
func TestTierThatNeverAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 16, "stat * hang", store.Options{})
		defer b.close()
		h := prompt(1, 4)
		b.put("p", h[:1], 0, 1, 1)
		waited := 0
		for i := range 50 {
			began := time.Now()
			got := b.await(t, lease.Owner{Peer: fmt.Sprint(i)}, one, h)
			if got.Hit != 1 || got.Why != miss.BelowSlow {
				t.Fatal(got)
			}
			if time.Since(began) > 0 {
				waited++
			}
		}
		if waited == 0 || waited > 10 {
			t.Errorf("%d of 50 lookups waited for a tier that answers nobody", waited)
		}
		b.flaky.Release()
		synctest.Wait()
		if got := b.await(t, nobody, one, h); got.Why != miss.BelowFailed {
			t.Errorf("it fails now, at once: %+v", got)
		}
	})
}

// One user who reads very much leaves others room to read at once.
func TestReadsOfOnePeerLeaveRoomForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 1024, "read * slow 1s", store.Options{})
		defer b.close()
		for i := range 8 {
			h := prompt(10+i, 100)
			keep(t, b.memory, one, h...)
			b.lookupAs(lease.Owner{Peer: "uid 1"}, fmt.Sprint(i), h)
		}
		synctest.Wait()
		h := prompt(5, 4)
		keep(t, b.memory, one, h...)
		began := time.Now()
		if got := b.await(t, lease.Owner{Peer: "uid 2"}, one, h); got.Hit != 4 || time.Since(began) > time.Second {
			t.Errorf("after %v: %+v", time.Since(began), got)
		}
	})
}

// A read that does not end keeps its slot. Where slots of such reads are half of what may
// be on its way, lookups do not wait for a place behind them.
func TestLookupsDoNotWaitBehindHangingReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 64, "read 1 hang", store.Options{LoadBytes: 2 * chunkBytes})
		defer b.close()
		hangs, h := prompt(1, 1), prompt(5, 4)
		keep(t, b.memory, one, append(hangs, h...)...)
		b.put("p", h[:2], 0, 2, 2)
		if got := b.await(t, nobody, one, hangs); got.Hit != 0 || got.Why != miss.BelowSlow {
			t.Error(got)
		}
		time.Sleep(time.Millisecond)
		for i := range 5 {
			began := time.Now()
			if got := b.await(t, lease.Owner{Peer: fmt.Sprint(i)}, one, h); got.Hit != 2 || got.Why != miss.BelowSlow || time.Since(began) > 0 {
				t.Errorf("after %v: %+v", time.Since(began), got)
			}
		}
		b.flaky.Release()
		synctest.Wait()
		if got := b.await(t, nobody, one, h); got.Hit != 4 {
			t.Errorf("it answers again: %+v", got)
		}
	})
}

// A pool that is too small for a prompt takes its head, and evicts nothing that is pinned.
func TestTierLargerThanThePool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 8, "", store.Options{})
		defer b.close()
		pinned, h := prompt(5, 2), prompt(1, 12)
		b.put("p", pinned, 0, 2, 2)
		if got := b.lookupAs(lease.Owner{Peer: "uid 2"}, "pins", pinned); got.Hit != 2 {
			t.Fatal(got)
		}
		keep(t, b.memory, one, h...)
		if got := b.await(t, nobody, one, h); got.Hit != 6 || got.Why != miss.NoRoom {
			t.Errorf("%+v", got)
		}
		b.whole(t, one, h[:6])
		b.store.EndSession([]byte("r"), nobody)
		b.store.EndSession([]byte("pins"), lease.Owner{Peer: "uid 2"})
		b.idle()
	})
}

// What was on its way when everything was cleared does not come back.
func TestForcedClearOfReadsOnTheirWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 64, "read * slow 1s", store.Options{})
		defer b.close()
		h := prompt(1, 5)
		keep(t, b.memory, one, h...)
		b.lookupAs(nobody, "r", h)
		synctest.Wait()
		if got := b.store.Stats(); got.StagedBytes != 5*chunkBytes {
			t.Errorf("%+v", got)
		}
		b.store.Clear(true)
		if got := b.store.Result([]byte("r"), nobody); got.State == store.Pending || got.Hit != 0 {
			t.Errorf("%+v", got)
		}
		time.Sleep(time.Minute)
		if got := b.store.Stats(); got.FreeBytes != got.Bytes || got.BelowChunks != 0 {
			t.Errorf("%+v", got)
		}
		b.idle()
	})
}

// Objects of another length, of another layout under an equal name, say, are not read.
func TestOtherLengthBelow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 16, "", store.Options{})
		defer b.close()
		h := prompt(1, 3)
		keep(t, b.memory, one, h[0], h[2])
		data := content(h[1], 0)[:1000]
		if err := b.memory.Write(t.Context(), objectKey(one, 0, h[1]), tier.Meta{Len: 1000, Sum: xxh3.Hash(data)}, data); err != nil {
			t.Fatal(err)
		}
		if got := b.await(t, nobody, one, h); got.Hit != 1 || got.Why != miss.BelowCorrupt || b.flaky.Calls("read") != 1 {
			t.Errorf("%+v, %d reads", got, b.flaky.Calls("read"))
		}
	})
}

// Of groups with a window only the window at the hit's end is read.
func TestWindowsFromBelow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 40
		groups, err := object.NewGroups(2, []object.Group{
			{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: chunkBytes},
			{ChunkGroup: coordinator.ChunkGroup{Window: 6}, Bytes: chunkBytes},
		})
		if err != nil {
			t.Fatal(err)
		}
		sh := object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: groups}
		b := newTiered(t, 2*n, "", store.Options{})
		defer b.close()
		h := prompt(1, n)
		keep(t, b.memory, one, h...)
		for c, hash := range h[:n-5] { // of the window group the last five are not there
			k := objectKey(sh, 0, hash)
			k.Group = 1
			data := content(hash, 1)
			if err := b.memory.Write(t.Context(), k, tier.Meta{Len: chunkBytes, Sum: xxh3.Hash(data)}, data); err != nil {
				t.Fatal(c, err)
			}
		}
		got := b.await(t, nobody, sh, h)
		if got.Hit != n-5 {
			t.Errorf("%+v", got)
		}
		window := groups.Need(1, 0, n-5)
		if got := b.flaky.Calls("read"); got != n-5+window.End-window.Start || window.End-window.Start > 4 {
			t.Errorf("%d reads, want %d chunks and a window of %d", got, n-5, window.End-window.Start)
		}
		b.store.EndSession([]byte("r"), nobody)
		b.idle()
	})
}

// Close waits for calls of the tier, and does not unmap what one of them may write to.
func TestCloseWithATierThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 16, "read 1 hang", store.Options{})
		h := prompt(1, 3)
		keep(t, b.memory, one, h...)
		b.lookupAs(nobody, "r", h)
		synctest.Wait()
		if err := b.store.Close(); !errors.Is(err, store.ErrBelowHangs) {
			t.Errorf("Close: %v", err)
		}
		b.close()
	})
}

// After a restart, what came from below has its checksum.
func TestLoadedObjectsKeepTheirChecksum(t *testing.T) {
	b := newTiered(t, 16, "", store.Options{ChecksumRate: 1 << 40})
	h := prompt(1, 4)
	keep(t, b.memory, one, h...)
	if got := b.await(t, nobody, one, h); got.Hit != 4 {
		t.Fatalf("%+v", got)
	}
	b.opts.Below = nil
	b.restart()
	defer b.stop()
	if got := b.look(t, "r", one, h); got.Hit != 4 || !got.Waited {
		t.Errorf("%+v", got)
	}
	if got := b.store.Stats(); got.VerifiedChunks != 4 {
		t.Errorf("%+v", got)
	}
}

// Chunks within the quotas of others are not evicted for a tenant without a quota: then no_room is
// the reason, though nothing is pinned.
func TestNoRoomBesideQuotas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 16, "", store.Options{})
		defer b.close()
		theirs, other := prompt(1, 16), one
		if err := b.store.SetQuota("theirs", b.store.Stats().Bytes); err != nil {
			t.Fatal(err)
		}
		b.store.NameTenant(one.Namespace, []byte("theirs"))
		b.put("theirs", theirs, 0, len(theirs), len(theirs))
		b.store.EndSession([]byte("theirs"), nobody)
		synctest.Wait()
		other.Namespace = kv.Namespace{200}
		b.store.NameTenant(other.Namespace, []byte("other"))
		h := prompt(2, 4)
		keep(t, b.memory, other, h...)
		before := b.store.Stats()
		if got := b.await(t, nobody, other, h); got.Hit != 0 || got.Why != miss.NoRoom || before.Resident != len(theirs) {
			t.Errorf("%+v beside %d chunks of others", got, before.Resident)
		}
		if after := b.store.Stats(); after.EvictedChunks != before.EvictedChunks {
			t.Errorf("%d chunks went", after.EvictedChunks-before.EvictedChunks)
		}
	})
}
