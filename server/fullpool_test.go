// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
)

// fullPool is a server whose pool of 16 chunks is far smaller than the tier below it, and two engines.
type fullPool struct {
	t *testing.T
	*server.Server
	store *store.Store
	a, b  *connector.PoolClient
	below uint64 // chunks that were stored, and so are below
}

func startFullPool(t *testing.T) *fullPool {
	t.Helper()
	dir := t.TempDir()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 16 * 4096, Dir: dir, ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	x := &fullPool{t: t, store: store.New(p, store.Options{Below: tier.NewMemory(1 << 30), LoadTimeout: 30 * time.Second})}
	x.Server = server.New(x.store, server.Options{ChunkTokens: 16, ShmDir: dir, Log: slog.New(slog.DiscardHandler)})
	addr, err := x.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { x.store.Run(ctx) })
	t.Cleanup(func() {
		end()
		wg.Wait()
		if err := errors.Join(x.Close(), x.store.Close()); err != nil {
			t.Error(err)
		}
	})
	for _, e := range []**connector.PoolClient{&x.a, &x.b} {
		if *e, err = connector.OpenPoolClient(t.Context(), newClient(t, "tcp://"+addr), connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: dir}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*e).Close(context.Background()) })
	}
	return x
}

// fullKey is prompt n of so many chunks, of a request of its own.
func fullKey(n, chunks int, request string) lmcache.Key {
	return lmcache.Key{Tokens: tokens(16*chunks, n), End: 16 * chunks, RequestID: fmt.Sprint(request, n)}
}

func fullByte(n, i, j int) byte { return byte(n*31 + i*7 + j) }

// put stores chunks [from, to) of a prompt and waits until the tier has them.
func (x *fullPool) put(e *connector.PoolClient, n, from, to int) {
	x.t.Helper()
	k := fullKey(n, to, "store")
	k.Start = 16 * from
	stored, err := e.Store(x.t.Context(), k, 16, func(i int, p []byte) {
		for j := range p {
			p[j] = fullByte(n, from+i, j)
		}
	})
	if err != nil || stored != to-from {
		x.t.Fatalf("prompt %d: stored %d of chunks [%d, %d), %v", n, stored, from, to, err)
	}
	x.below += uint64(stored)
	testkit.Eventually(x.t, "it is written below", func() bool { return x.store.Stats().WrittenChunks == x.below })
}

// pin looks a prompt up and leaves its chunks pinned.
func (x *fullPool) pin(e *connector.PoolClient, k lmcache.Key, want int) {
	x.t.Helper()
	began := time.Now()
	if hit, err := e.Lookup(x.t.Context(), k); err != nil || hit != want {
		x.t.Fatalf("%s: a hit of %d chunks, %v, want %d", k.RequestID, hit, err, want)
	}
	if took := time.Since(began); took > 10*time.Second { // the time that a lookup waits for a tier is 30 s
		x.t.Errorf("%s: answered after %v", k.RequestID, took)
	}
}

// take loads what was pinned and compares every byte.
func (x *fullPool) take(e *connector.PoolClient, k lmcache.Key, n, chunks int) {
	x.t.Helper()
	k.End, k.Tokens = 16*chunks, k.Tokens[:16*chunks]
	wrong := 0
	ok, err := e.Retrieve(x.t.Context(), k, 16, func(i int, p []byte) {
		for j := range p {
			if p[j] != fullByte(n, i, j) {
				wrong++
			}
		}
	})
	if !ok || err != nil || wrong > 0 {
		x.t.Errorf("%s: loaded: %v, %v, %d wrong bytes", k.RequestID, ok, err, wrong)
	}
}

// A load into a full pool makes room for itself, of two engines at once, as often as it takes.
// Where prompts in progress pin the pool, a lookup is answered at once with what has room, the reason of
// its miss is that there is none, and what is pinned stays what it was. What they give up is room again.
func TestLoadIntoAFullPool(t *testing.T) {
	x := startFullPool(t)
	const prompts = 12
	for n := range prompts {
		x.put(x.a, n, 0, 4)
	}
	for round := range 3 {
		for n := range prompts {
			e := []*connector.PoolClient{x.a, x.b}[(n+round)%2]
			k := fullKey(n, 4, fmt.Sprint("round", round, "-"))
			x.pin(e, k, 4)
			x.take(e, k, n, 4)
		}
	}
	if s := x.store.Stats(); s.BelowChunks < 2*4*prompts || s.EvictedChunks < s.BelowChunks {
		t.Fatalf("%d chunks came from below, %d were evicted", s.BelowChunks, s.EvictedChunks)
	}

	x.put(x.b, 50, 0, 4)
	x.put(x.b, 50, 4, 8)
	var pinned []lmcache.Key
	for n := range 3 {
		pinned = append(pinned, fullKey(n, 4, "pinned"))
		x.pin(x.a, pinned[n], 4)
	}
	half := fullKey(50, 8, "half")
	x.pin(x.b, half, 4)
	before := x.store.Stats()
	for n := 3; n < prompts; n++ {
		x.pin([]*connector.PoolClient{x.a, x.b}[n%2], fullKey(n, 4, "none"), 0)
	}
	for _, k := range []lmcache.Key{half, fullKey(3, 4, "none"), fullKey(prompts-1, 4, "none")} {
		if got := x.Explain(k.RequestID, 1); len(got.Lookups) != 1 || got.Lookups[0].Reason != miss.NoRoom.Label() || got.Advice[miss.NoRoom.Label()].Do == "" {
			t.Errorf("%s: %+v", k.RequestID, got)
		}
	}
	if s := x.store.Stats(); x.Explain("", 1).Reasons[miss.NoRoom.Label()] != prompts-3+1 || s.EvictedChunks != before.EvictedChunks {
		t.Errorf("the misses are not counted, or something was evicted: %+v, before %+v", s, before)
	}
	if stored, err := x.b.Store(t.Context(), fullKey(60, 4, "store"), 16, func(int, []byte) { t.Error("there is no room") }); stored != 0 || err != nil {
		t.Errorf("stored %d, %v", stored, err)
	}
	for n, k := range pinned {
		x.take(x.a, k, n, 4)
	}
	x.take(x.b, half, 50, 4)
	for n := range prompts {
		k := fullKey(n, 4, "after")
		x.pin(x.b, k, 4)
		x.take(x.b, k, n, 4)
	}
}
