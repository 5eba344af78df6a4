// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// node is a cache server in this process.
type node struct {
	url, dir string
	store    *store.Store
}

func startNode(t testing.TB, bytes int64) *node { return startNodeOf(t, bytes, false) }

// startNodeOf starts a server with one object of all groups for each chunk, or separate ones.
func startNodeOf(t testing.TB, bytes int64, separate bool) *node {
	t.Helper()
	return startNodeIn(t, shmDir(t), "pool", bytes, separate)
}

// shmDir is a folder in /dev/shm.
func shmDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvasir_engine_test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// startNodeIn starts a server whose pool has that name in dir.
func startNodeIn(t testing.TB, dir, name string, bytes int64, separate bool) *node {
	t.Helper()
	return startNodeWith(t, dir, name, bytes, server.Options{ChunkTokens: 32, SeparateGroups: separate, ShmDir: dir, Log: testLog(t)})
}

func startNodeWith(t testing.TB, dir, name string, bytes int64, o server.Options) *node {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: name, Bytes: bytes, Dir: dir, ChunkTokens: 32})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	srv := server.New(st, o)
	addr, err := srv.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { srv.Run(ctx) })
	t.Cleanup(func() {
		stop()
		wg.Wait()
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return &node{"tcp://" + addr, dir, st}
}

func lmcacheConfig(url, mode string) string {
	return fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute",
		"kv_connector_extra_config":{"lmcache.mp.server_urls":%q,"lmcache.mp.mp_transfer_mode":%q}}`, url, mode)
}

// One engine loads what another one computed: the tokens are the same, and every byte is compared.
func TestCacheServer(t *testing.T) {
	f := func(mode string, tp int, inline bool) {
		t.Helper()
		n := startNode(t, 8<<20)
		if inline {
			n = startNodeWith(t, n.dir, "inline", 8<<20, server.Options{ChunkTokens: 32, ShmDir: n.dir, Pickle: server.PickleOnly, Log: testLog(t)})
		}
		o := engine.Options{KV: geometry(tp), MaxModel: 1024, ShmDir: n.dir}
		a, b := open(t, o, lmcacheConfig(n.url, mode), nil), open(t, o, lmcacheConfig(n.url, mode), nil)
		alone := open(t, engine.Options{KV: geometry(1), MaxModel: 1024}, "", nil)
		for i := range 5 {
			r := engine.Request{ID: fmt.Sprint("r", i), Tokens: prompt(200+11*i, uint32(i)), MaxTokens: 40}
			want, _ := ask(t, alone, r)
			for _, e := range []*engine.Engine{a, b} {
				got, end := ask(t, e, r)
				if end.Err != nil || !slices.Equal(got, want) {
					t.Fatalf("%s, TP %d: %v, %+v", mode, tp, got, end)
				}
				idle(t, e) // its blocks are free once they are stored
			}
		}
		idle(t, b)
		if s := b.Stats(); s.LoadedTokens < 5*192 {
			t.Fatalf("%s, TP %d: %+v", mode, tp, s)
		}
		other := open(t, o, lmcacheConfig(n.url, mode), nil) // another salt hits nothing
		if _, end := ask(t, other, engine.Request{ID: "salted", Tokens: prompt(200, 0), MaxTokens: 1, Salt: "red"}); end.Err != nil {
			t.Fatal(end.Err)
		}
		if s := other.Stats(); s.LoadedTokens != 0 {
			t.Fatalf("%+v", s)
		}
	}
	f("engine_driven", 1, false)
	f("engine_driven", 2, false)
	f("lmcache_driven", 1, false)
	f("lmcache_driven", 2, false)
	f("engine_driven", 2, true)
}

// An engine that ends stores what it computed, also when it ends right after its answer.
func TestEndingEngineStoresWhatItComputed(t *testing.T) {
	f := func(name, dir, config string, env map[string]string) {
		t.Helper()
		g := geometry(2)
		g.HeadBytes = 1024 // copies take milliseconds
		o := engine.Options{Model: "org/model", KV: g, MaxModel: 1024, ShmDir: dir}
		for seed := range uint32(3) {
			r := engine.Request{ID: fmt.Sprint("r", seed), Tokens: prompt(500, seed), MaxTokens: 1}
			first := openUnclosed(t, o, config, env)
			if _, end := ask(t, first, r); end.Err != nil {
				t.Fatalf("%s: %v", name, end.Err)
			}
			if err := first.Close(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			second := open(t, o, config, env)
			if _, end := ask(t, second, r); end.Err != nil || end.Cached < 480 {
				t.Fatalf("%s: prompt %d: %+v, want 480 tokens or more from the cache", name, seed, end)
			}
			idle(t, second)
		}
	}
	n := startNode(t, 64<<20)
	f("engine_driven", n.dir, lmcacheConfig(n.url, "engine_driven"), nil)
	n = startNode(t, 64<<20)
	f("lmcache_driven", n.dir, lmcacheConfig(n.url, "lmcache_driven"), nil)
	c := newStoreCluster(t, 3)
	f("Mooncake Store", "", storeConfig("kv_both"), c.env)
}
