// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// resizing is a server that is started again with other sizes of its pool, and a worker that lives on.
type resizing struct {
	t   *testing.T
	dir string
	url string
	*server.Server
	store *store.Store
	end   func()

	cold bool           // each start discards the pool
	uses func(int) bool // whether a process uses a device; nil: none does
}

func (r *resizing) start(chunks int) {
	r.t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: int64(chunks) * 4096, Dir: r.dir, ChunkTokens: 16, Cold: r.cold})
	if err != nil {
		r.t.Fatal(err)
	}
	r.store = store.New(p, store.Options{ChecksumRate: 1 << 30})
	o := server.Options{ChunkTokens: 16, Log: slog.New(slog.DiscardHandler), Pickle: server.PickleOn}
	if r.uses != nil {
		o.UsesDevice = func(pid int) (bool, bool) { return r.uses(pid), true }
	}
	r.Server = server.New(r.store, o)
	if _, err := r.Listen(context.Background(), r.url); err != nil {
		r.t.Fatal(err)
	}
	running, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { r.Run(running) })
	r.end = func() { cancel(); wg.Wait() }
}

func (r *resizing) stop() {
	r.end()
	if err := r.Close(); err != nil {
		r.t.Error(err)
	}
	if err := r.store.Close(); err != nil {
		r.t.Error(err)
	}
}

// The pool of a running engine becomes smaller in the middle of a load: the load reads the right bytes, what was used last
// hits, and the worker goes on without registering again. It becomes larger: everything is kept, and the worker, which maps too
// little, is asked to register again.
func TestPoolIsResizedUnderItsWorkers(t *testing.T) {
	ctx := t.Context()
	r := &resizing{t: t, dir: t.TempDir(), url: fmt.Sprint("tcp://127.0.0.1:", testkit.FreePort(t))}
	r.start(64)
	defer func() { r.stop() }()
	c := newClient(t, r.url)
	w, err := connector.OpenPoolClient(ctx, c, connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: r.dir})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close(ctx)
	prompt := func(n int) lmcache.Key {
		return lmcache.Key{Tokens: tokens(4*16, 1000*n+1), End: 4 * 16, RequestID: strings.Repeat("r", n+1)}
	}
	content := func(n, chunk int) []byte { return bytes.Repeat([]byte{byte(10*n + chunk + 1)}, 4096) }
	store := func(n, want int) {
		t.Helper()
		stored, err := w.Store(ctx, prompt(n), 16, func(i int, b []byte) { copy(b, content(n, i)) })
		if err != nil || stored != want {
			t.Fatalf("prompt %d: stored %d, %v, want %d", n, stored, err, want)
		}
	}
	load := func(what string, n, want int, during func()) {
		t.Helper()
		k := prompt(n)
		hit, err := w.Lookup(ctx, k)
		if err != nil || hit != want {
			t.Fatalf("%s: prompt %d hits %d chunks, %v, want %d", what, n, hit, err, want)
		}
		if hit == 0 {
			return
		}
		k.Tokens, k.End = k.Tokens[:16*hit], 16*hit
		_, err = w.Retrieve(ctx, k, 16, func(i int, b []byte) {
			if during != nil {
				during()
				during = nil
			}
			if !bytes.Equal(b, content(n, i)) {
				t.Errorf("%s: prompt %d, chunk %d: bytes of %d", what, n, i, b[0])
			}
		})
		if err != nil && during == nil && !strings.Contains(what, "middle") {
			t.Errorf("%s: %v", what, err)
		}
	}
	again := func(chunks int) {
		r.stop()
		r.start(chunks)
		answered(t, c)
	}
	for n := range 16 {
		store(n, 4)
	}
	load("in the middle of a load", 15, 4, func() { again(40) })
	for n := 7; n < 16; n++ {
		load("smaller", n, 4, nil)
	}
	load("smaller", 5, 0, nil)
	store(16, 4) // without registering again
	load("smaller, stored since", 16, 4, nil)
	again(80)
	store(17, 0)
	if err := w.Beat(ctx); err != nil {
		t.Fatal(err)
	}
	for n := 17; n < 27; n++ {
		store(n, 4)
	}
	for n := 17; n < 27; n++ {
		load("larger", n, 4, nil)
	}
	load("larger, from before", 16, 4, nil)
	load("larger, from before", 8, 4, nil)
}
