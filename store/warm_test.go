// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// ranked is a tier that knows what is hot in it, and notes what is read.
type ranked struct {
	tier.Tier
	hot []kv.Hash // the hottest first

	lens map[kv.Hash]int64 // of those that are no chunk long

	away   time.Time // until then it does not answer
	cannot bool      // or cannot tell what is hot

	mu   sync.Mutex
	read []kv.Hash
}

func (r *ranked) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	switch now := time.Now(); {
	case now.Before(r.away) && r.cannot:
		return tier.ErrNoList
	case now.Before(r.away):
		return errors.New("connection refused")
	}
	for _, h := range r.hot[:min(n, len(r.hot))] {
		if !f(objectKey(one, 0, h), tier.Meta{Len: cmp.Or(r.lens[h], chunkBytes), Sum: 1}) {
			return nil
		}
	}
	return ctx.Err()
}

func (r *ranked) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	r.mu.Lock()
	r.read = append(r.read, k.Chunk)
	r.mu.Unlock()
	return r.Tier.Read(ctx, k, dst)
}

// newWarm is a store over a tier in which hot is, in that order of heat.
func newWarm(t *testing.T, chunks int, script string, o store.Options, hot []kv.Hash) (*tiered, *ranked) {
	t.Helper()
	b := &tiered{memory: tier.NewMemory(1 << 30)}
	var err error
	if b.flaky, err = tiertest.NewFlaky(b.memory, script); err != nil {
		t.Fatal(err)
	}
	r := &ranked{Tier: b.flaky, hot: hot}
	o.Below, o.Write = r, store.WriteNever
	b.bench = newBench(t, t.TempDir(), chunks, o)
	keep(t, b.memory, one, hot...)
	return b, r
}

// inPool returns how many of the chunks are in the pool.
func (b *tiered) inPool(hashes []kv.Hash) (n int) {
	for _, h := range hashes {
		r := b.store.Lookup([]byte("w"), one, store.Hashed([]kv.Hash{h}), 1)
		if r.State != store.Pending && r.Hit == 1 {
			n++
		}
		b.store.EndSession([]byte("w"), nobody)
	}
	return n
}

// What is the hottest below is in the pool soon after the start, as much as was asked for, with the
// right bytes, before anybody looks for it, and that is said.
func TestWarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := prompt(1, 10)
		var log bytes.Buffer
		b, r := newWarm(t, 100, "", store.Options{WarmBytes: 4*chunkBytes + 1, Log: slog.New(slog.NewTextHandler(&log, nil))}, h)
		defer b.close()
		end := b.run()
		time.Sleep(time.Second)
		if got := b.store.Lookup([]byte("r"), one, store.Hashed(h[:4]), 1); got.State == store.Pending || got.Hit != 4 {
			t.Errorf("%+v", got)
		}
		b.whole(t, one, h[:4])
		b.store.EndSession([]byte("r"), nobody)
		if got := b.store.Stats(); got.WarmedChunks != 4 || got.WarmedBytes != 4*chunkBytes || got.Resident != 4 {
			t.Errorf("%+v", got)
		}
		slices.SortFunc(r.read, func(a, b kv.Hash) int { return bytes.Compare(a[:], b[:]) })
		want := slices.SortedFunc(slices.Values(h[:4]), func(a, b kv.Hash) int { return bytes.Compare(a[:], b[:]) })
		if !slices.Equal(r.read, want) {
			t.Errorf("read: %v", r.read)
		}
		end()
		if text := log.String(); !strings.Contains(text, "warming: reading") || !strings.Contains(text, "chunks=4") || !strings.Contains(text, "enough was read") {
			t.Errorf("%s", text)
		}
		b.idle()
	})
}

// A tier that does not answer at the start, as where a whole rack starts at once, is asked again until
// the time is over; one that cannot tell is not.
func TestWarmWaitsForTheTier(t *testing.T) {
	for _, cannot := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h := prompt(1, 10)
			var log bytes.Buffer
			b, r := newWarm(t, 100, "", store.Options{WarmBytes: 1 << 30, Log: slog.New(slog.NewTextHandler(&log, nil))}, h)
			defer b.close()
			r.away = time.Now().Add(20 * time.Second)
			if r.cannot = cannot; cannot {
				r.away = time.Now().Add(time.Hour)
			}
			end := b.run()
			time.Sleep(time.Minute)
			end()
			if got := b.store.Stats(); (got.WarmedChunks == 10) == cannot || cannot != strings.Contains(log.String(), "warming is impossible") {
				t.Errorf("%d chunks: %s", got.WarmedChunks, &log)
			}
			b.idle()
		})
	}
}

// Nothing is evicted for what is hot below, and what the pool has is not read again.
func TestWarmFillsFreeMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, own := prompt(1, 30), prompt(2, 6)
		b, r := newWarm(t, 16, "", store.Options{WarmBytes: 1 << 30}, append(slices.Clone(own[:2]), h...))
		defer b.close()
		b.put("p", own, 0, len(own), len(own))
		end := b.run()
		time.Sleep(time.Second)
		end()
		if got := b.store.Stats(); got.EvictedChunks != 0 || got.WarmedChunks != 10 || b.inPool(own) != len(own) {
			t.Errorf("%+v, %d of its own", got, b.inPool(own))
		}
		if slices.Contains(r.read, own[0]) || slices.Contains(r.read, own[1]) {
			t.Error("what the pool has was read")
		}
		b.idle()
	})
}

// An object whose length is not that of its layout is never a hit, also when it was warmed before anybody
// named the layout: a worker that read a whole chunk from it would read its neighbour's bytes.
func TestWarmOfAnotherLength(t *testing.T) {
	for _, looks := range []time.Duration{500 * time.Millisecond, time.Minute} { // while it is read, and later
		synctest.Test(t, func(t *testing.T) {
			h := prompt(1, 3)
			b, r := newWarm(t, 16, "read * slow 1s", store.Options{WarmBytes: 1 << 30}, h)
			defer b.close()
			half := content(h[1], 0)[:chunkBytes/2]
			r.lens = map[kv.Hash]int64{h[1]: chunkBytes / 2}
			k := objectKey(one, 0, h[1])
			if err := b.memory.Delete(t.Context(), []kv.Key{k}); err != nil {
				t.Fatal(err)
			}
			if err := b.memory.Write(t.Context(), k, tier.Meta{Len: chunkBytes / 2, Sum: xxh3.Hash(half)}, half); err != nil {
				t.Fatal(err)
			}
			end := b.run()
			time.Sleep(looks)
			if got := b.await(t, nobody, one, h); got.Hit != 1 {
				t.Errorf("after %v: %d chunks hit, want the one before it", looks, got.Hit)
			}
			b.store.EndSession([]byte("r"), nobody)
			time.Sleep(time.Minute) // all is read, and nothing kept
			if got := b.await(t, nobody, one, h); got.Hit != 1 {
				t.Errorf("after %v, again: %d chunks hit", looks, got.Hit)
			}
			b.store.EndSession([]byte("r"), nobody)
			b.put("p", h, 0, 3, 1)
			if got := b.await(t, nobody, one, h); got.Hit != 3 {
				t.Errorf("after %v: stored anew, %d chunks hit", looks, got.Hit)
			}
			b.store.EndSession([]byte("r"), nobody)
			end()
			b.idle()
		})
	}
}

// Lookups go first: from when one reads from the tier until it has what it wants, nothing else is
// read that was not under way.
func TestLookupsGoBeforeWarming(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, other := prompt(1, 200), prompt(2, 8)
		b, r := newWarm(t, 400, "read * slow 1s", store.Options{WarmBytes: 1 << 30, LoadTimeout: time.Minute}, h)
		defer b.close()
		keep(t, b.memory, one, other...)
		end := b.run()
		time.Sleep(5500 * time.Millisecond)
		if got := b.await(t, nobody, one, other); got.Hit != len(other) {
			t.Errorf("%+v", got)
		}
		b.store.EndSession([]byte("r"), nobody)
		r.mu.Lock()
		first, last := slices.IndexFunc(r.read, func(x kv.Hash) bool { return slices.Contains(other, x) }), 0
		for i, x := range r.read {
			if slices.Contains(other, x) {
				last = i
			}
		}
		if first < 4 || last-first != len(other)-1 {
			t.Errorf("the lookup's reads are %d to %d", first, last)
		}
		r.mu.Unlock()
		time.Sleep(time.Minute)
		end()
		if got := b.store.Stats(); got.WarmedChunks != uint64(len(h)) {
			t.Errorf("%d chunks of %d were read in the end", got.WarmedChunks, len(h))
		}
		b.idle()
	})
}

// A lookup of what is being read in advance waits for that, reads nothing twice, and counts each chunk
// as one that came from the tier.
func TestLookupJoinsWarming(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := prompt(1, 3)
		b, r := newWarm(t, 16, "read * slow 1s", store.Options{WarmBytes: 1 << 30}, h)
		defer b.close()
		end := b.run()
		time.Sleep(500 * time.Millisecond)
		if got := b.await(t, nobody, one, h); got.Hit != 3 || got.Below != 3 {
			t.Errorf("%+v", got)
		}
		b.whole(t, one, h)
		b.store.EndSession([]byte("r"), nobody)
		end()
		if len(r.read) != 3 {
			t.Errorf("%d reads of 3 objects", len(r.read))
		}
		b.idle()
	})
}

// A tier that hangs, fails or lies costs what is hot in it: the time ends, wrong bytes are not kept,
// and a server that stops does not wait for it.
func TestWarmEndsOnAFailingTier(t *testing.T) {
	f := func(script string, want int) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			h := prompt(1, 8)
			var log bytes.Buffer
			b, _ := newWarm(t, 16, script, store.Options{WarmBytes: 1 << 30, WarmTime: 10 * time.Second, Log: slog.New(slog.NewTextHandler(&log, nil))}, h)
			defer b.close()
			end := b.run()
			time.Sleep(time.Minute)
			synctest.Wait()
			if got := b.store.Stats(); int(got.WarmedChunks) != want || strings.Count(log.String(), "warming has ended") != 1 {
				t.Errorf("%s: %d chunks, %s", script, got.WarmedChunks, log.String())
			}
			stopping := time.Now()
			end()
			if time.Since(stopping) > time.Second {
				t.Errorf("%s: it takes %v to stop", script, time.Since(stopping))
			}
		})
	}
	f("read 3 error", 7)
	f("read 2 wrong; read 5 wrong", 6)
	f("read * hang", 0)
	synctest.Test(t, func(t *testing.T) { // while it goes on
		b, _ := newWarm(t, 16, "read * hang", store.Options{WarmBytes: 1 << 30}, prompt(1, 8))
		defer b.close()
		end := b.run()
		time.Sleep(time.Second)
		end()
	})
	synctest.Test(t, func(t *testing.T) { // that cannot tell
		var log bytes.Buffer
		b := newTiered(t, 16, "", store.Options{WarmBytes: 1 << 30, Log: slog.New(slog.NewTextHandler(&log, nil))})
		defer b.close()
		end := b.run()
		time.Sleep(time.Second)
		end()
		if !strings.Contains(log.String(), "warming is impossible") {
			t.Errorf("%s", log.String())
		}
	})
}
