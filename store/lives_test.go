// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// putFor stores the chunks [from, to) of a prompt by a request with a TTL, and fails unless want of them are taken.
func (b *bench) putFor(ttl time.Duration, hashes []kv.Hash, from, to, want int) {
	b.t.Helper()
	tr, p := transfer(1, hashes, from, to, false), store.Transfer{TTL: ttl}
	if _, err := b.store.BeginStore(tr, []byte("ttl"), hashes, &p); err != nil || len(p.Offsets) != want {
		b.t.Fatalf("BeginStore took %d chunks, %v, want %d", len(p.Offsets), err, want)
	}
	for i, off := range p.Offsets {
		copy(b.at(off), content(hashes[from+p.Indices[i]], 0))
	}
	if want > 0 {
		b.store.CommitStore(tr, []byte("ttl"), hashes, true)
	}
}

// hits fails unless a prompt's hit has so many chunks, and ends for a reason.
func (b *bench) hits(hashes []kv.Hash, want int, why miss.Reason) {
	b.t.Helper()
	if got := b.hit(hashes); got.Hit != want || got.Why != why {
		b.t.Fatalf("hit %d of %d chunks, %q; want %d, %q", got.Hit, len(hashes), got.Why, want, why)
	}
}

// What a request with a TTL stored is served up to its end and not from then on, however often it is hit, with or without the
// background's help. The end is counted and explained.
func TestRequestTTLEndsWhateverHits(t *testing.T) {
	f := func(background bool) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, t.TempDir(), 64, store.Options{})
			defer b.stop()
			b.store.Watch(100)
			h, other := prompt(1, 3), prompt(2, 1)
			b.putFor(10*time.Second, h, 0, 3, 3)
			b.put("for ever", other, 0, 1, 1)
			for range 9 {
				time.Sleep(time.Second)
				b.hits(h, 3, miss.None)
				if background {
					b.store.Expire()
				}
			}
			time.Sleep(time.Second - 1)
			b.hits(h, 3, miss.None)
			time.Sleep(time.Nanosecond)
			if background {
				b.store.Expire()
				if got := b.store.Stats(); got.Resident != 1 {
					t.Fatalf("%d objects are resident", got.Resident)
				}
			}
			b.hits(h, 0, miss.RequestTTL)
			b.hits(other, 1, miss.None)
			b.store.Expire()
			if got := b.store.Stats(); got.EndedChunks != 3 || got.EndedBytes != 3*chunkBytes || got.ExpiredChunks != 0 || b.removed(0) != 3 {
				t.Fatalf("%+v, %d events of removal", got.Counters, b.removed(0))
			}
			b.put("again", h, 0, 3, 3) // its slots have no end
			time.Sleep(time.Hour)
			b.store.Expire()
			b.hits(h, 3, miss.None)
			b.idle()
		})
	}
	f(false)
	f(true)
}

// Of several stores of one object the longest life counts, whichever came first and while it is staged, too. A store of what
// continues a prompt has the chunks before it live as long.
func TestLongestRequestTTLWins(t *testing.T) {
	const never = 0
	f := func(lives time.Duration, stores ...time.Duration) {
		t.Helper()
		for _, staged := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, t.TempDir(), 64, store.Options{})
				defer b.stop()
				h := prompt(1, 2)
				tr, first := transfer(1, h, 0, 2, false), store.Transfer{TTL: stores[0]}
				if _, err := b.store.BeginStore(tr, []byte("first"), h, &first); err != nil || len(first.Offsets) != 2 {
					t.Fatal(first.Offsets, err)
				}
				commit := func() { b.store.CommitStore(tr, []byte("first"), h, true) }
				if !staged {
					commit()
				}
				for _, ttl := range stores[1:] {
					b.putFor(ttl, h, 0, 2, 0)
				}
				if staged {
					commit()
				}
				if lives == never {
					time.Sleep(24 * time.Hour)
					b.store.Expire()
					b.hits(h, 2, miss.None)
					return
				}
				time.Sleep(lives - 1)
				b.hits(h, 2, miss.None)
				time.Sleep(time.Nanosecond)
				b.hits(h, 0, miss.RequestTTL)
			})
		}
	}
	f(9*time.Second, 9*time.Second)
	f(9*time.Second, 9*time.Second, 3*time.Second)
	f(9*time.Second, 3*time.Second, 9*time.Second, 4*time.Second)
	f(never, 3*time.Second, never, 4*time.Second)
	f(never, never, 4*time.Second)

	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 64, store.Options{})
		defer b.stop()
		h, side := prompt(1, 4), prompt(2, 1)
		b.putFor(5*time.Second, h, 0, 2, 2)
		b.putFor(5*time.Second, side, 0, 1, 1)
		b.putFor(time.Minute, h, 2, 3, 1)
		time.Sleep(10 * time.Second)
		b.hits(h, 3, miss.NeverStored)
		b.hits(side, 0, miss.RequestTTL)
		b.put("for ever", h, 3, 4, 1)
		time.Sleep(time.Hour)
		b.hits(h, 4, miss.None)
	})
}

// A promise that was made before the end is kept: the load goes on. Other lookups find nothing from the end on, and an operator's pin
// makes no life longer.
func TestRequestTTLEndsUnderPromises(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 64, store.Options{SessionIdle: time.Hour})
		defer b.stop()
		h := prompt(1, 2)
		b.putFor(5*time.Second, h, 0, 2, 2)
		if got := b.store.Lookup([]byte("early"), one, store.Hashed(h), 1); got.Hit != 2 {
			t.Fatalf("%+v", got)
		}
		time.Sleep(5 * time.Second)
		b.store.Expire()
		b.hits(h, 0, miss.RequestTTL)
		var p store.Transfer
		tr := transfer(1, h, 0, 2, true)
		if why := b.store.BeginLoad([]byte("early"), tr, h, &p); why != miss.None || len(p.Offsets) != 2 {
			t.Fatalf("the load of what was promised: %v, %d places", why, len(p.Offsets))
		}
		b.hits(h, 0, miss.RequestTTL)
		b.store.CommitLoad(tr, []byte("early"))
		b.store.EndSession([]byte("early"), lease.Owner{})
		time.Sleep(time.Second)
		b.store.Expire()
		if got := b.store.Stats(); got.Resident != 0 || got.EndedChunks != 2 {
			t.Fatalf("%d are resident: %+v", got.Resident, got.Counters)
		}

		x := b.tenantOf("x", chunkBytes)
		if err := b.store.SetPinLimit("x", 4*chunkBytes); err != nil {
			t.Fatal(err)
		}
		one, space := numbered(1), x.shard()
		tr = transfer(1, one, 0, 1, false)
		tr.Shard, p = space, store.Transfer{TTL: 5 * time.Second}
		if _, err := b.store.BeginStore(tr, []byte("x"), one, &p); err != nil {
			t.Fatal(err)
		}
		b.store.CommitStore(tr, []byte("x"), one, true)
		if got, err := b.store.Pin("x", x.keys(1), time.Hour); got != 1 || err != nil {
			t.Fatal(got, err)
		}
		time.Sleep(5 * time.Second)
		if got := x.ask(1); got.Hit != 0 || got.Why != miss.RequestTTL || x.usage().PinnedObjects != 0 {
			t.Fatalf("%+v, pinned %+v", got, x.usage())
		}
		b.idle()
	})
}

// Whoever needs room gets that of objects whose end has come, before any other object is evicted.
func TestEndedObjectsMakeRoomFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 6, store.Options{})
		defer b.stop()
		oldest, limited := prompt(1, 3), prompt(2, 3)
		b.put("oldest", oldest, 0, 3, 3)
		b.putFor(5*time.Second, limited, 0, 3, 3)
		time.Sleep(5 * time.Second)
		b.put("new", prompt(3, 3), 0, 3, 3)
		b.hits(oldest, 3, miss.None)
		if got := b.store.Stats(); got.EvictedChunks != 0 || got.EndedChunks != 3 {
			t.Fatalf("%+v", got.Counters)
		}
		b.putFor(time.Hour, prompt(4, 3), 0, 3, 2) // its head is that of the oldest. What has time left is evicted as others are
		b.put("new", prompt(5, 6), 0, 6, 6)
		if got := b.store.Stats(); got.EvictedChunks != 8 || got.EndedChunks != 3 {
			t.Fatalf("%+v", got.Counters)
		}
		b.idle()
	})
}

// An object with an end is not written to the tier below, at its commit or at a hit. Once its end is taken away it is.
func TestRequestTTLStaysOutOfTiers(t *testing.T) {
	for _, policy := range []store.WritePolicy{store.WriteAtCommit, store.WriteAtFirstHit} {
		synctest.Test(t, func(t *testing.T) {
			b := newTiered(t, 8, "", store.Options{Write: policy, ChecksumRate: 1 << 30})
			defer b.close()
			end := b.run()
			defer func() { end() }()
			h, older := prompt(1, 2), prompt(2, 1)
			b.putFor(time.Hour, h, 0, 2, 2)
			b.load(t, h)
			keep(t, b.memory, one, older...) // from a request without TTL
			time.Sleep(time.Minute)
			if got := b.below(t, h); got != 0 {
				t.Fatalf("%d of the chunks with an end are below", got)
			}
			b.putFor(time.Second, older, 0, 1, 1)
			b.putFor(0, h, 0, 2, 0)
			b.load(t, h)
			time.Sleep(time.Minute)
			if got := b.below(t, h); got != 2 {
				t.Fatalf("%d chunks are below without an end", got)
			}
			if got := b.await(t, nobody, one, older); got.Hit != 1 || got.Below != 1 {
				t.Fatalf("the object that a request without TTL had written: %+v", got)
			}
			b.store.EndSession([]byte("r"), nobody)
		})
	}
}

// An object with an end ends with its server at the latest: a stopped one's or a killed one's successor does not serve it, with or
// without checksums and a tier. What lost its end is there.
func TestRequestTTLEndsWithItsServer(t *testing.T) {
	f := func(end func(*bench), checksums int64, below bool) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, t.TempDir(), 16, store.Options{ChecksumRate: checksums})
			if below {
				b.memory = tier.NewMemory(1 << 20)
				b.restart()
			}
			defer func() { b.release(); b.stop() }()
			limited, freed, plain := prompt(1, 2), prompt(2, 2), prompt(3, 2)
			stop := b.run()
			b.putFor(time.Hour, limited, 0, 2, 2)
			b.putFor(time.Hour, freed, 0, 2, 2)
			b.put("plain", plain, 0, 2, 2)
			b.hits(limited, 2, miss.None) // a use
			b.putFor(0, freed, 0, 2, 0)
			time.Sleep(time.Minute)
			stop()
			end(b)
			if got := b.store.Stats(); got.Resident != 4 || got.RestoredChunks != 4 {
				t.Fatalf("%d are resident, %+v", got.Resident, got.Counters)
			}
			hit := func(h []kv.Hash) int {
				defer b.store.EndSession([]byte("l"), lease.Owner{})
				return b.look(t, "l", one, h).Hit
			}
			if hit(limited) != 0 || hit(freed) != 2 || hit(plain) != 2 {
				t.Fatalf("hits %d, %d, %d", hit(limited), hit(freed), hit(plain))
			}
		})
	}
	for _, end := range []func(*bench){(*bench).restart, (*bench).kill} {
		f(end, 0, false)
		f(end, 1<<30, false)
		f(end, 1<<30, true)
	}
}
