// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// sizedNode is a server with one address for clients that negotiate, and one for each chunk size of others.
type sizedNode struct {
	dir   string
	ports map[int]int // by chunk size; 0 is the first address
	store *store.Store
	stop  func()
}

const sizedPool = 24 << 20

func (n *sizedNode) start(t testing.TB) {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: sizedPool, Dir: n.dir, ChunkTokens: 256})
	if err != nil {
		t.Fatal(err)
	}
	n.store = store.New(p, store.Options{})
	srv := server.New(n.store, server.Options{ChunkTokens: 256, ShmDir: n.dir, Log: testLog(t)})
	for size, port := range n.ports {
		if _, err := srv.ListenChunks(t.Context(), "tcp://127.0.0.1:"+strconv.Itoa(port), size); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { srv.Run(ctx) })
	n.stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := n.store.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Engines with blocks of 16, 48 and 544 tokens share a node, each in both dialects: those of 0.5.7 negotiate chunks of
// 256, 288 and 544 tokens, those of 0.5.6 take 256, 144 and 544 from their listeners. Each finds the chunks that it stored. Those with chunks of
// 256 and of 544 also find the other dialect's chunks. A quota and eviction work over all sizes. A restart keeps all chunks.
func TestChunkSizesOfOneNode(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "kvasir_engine_test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &sizedNode{dir: dir, ports: map[int]int{0: testkit.FreePort(t), 144: testkit.FreePort(t), 544: testkit.FreePort(t)}}
	n.start(t)
	t.Cleanup(func() { n.stop() })

	engines := []struct {
		block, chunk, port int
		old                bool
		*engine.Engine
	}{{block: 16, chunk: 256}, {block: 48, chunk: 288}, {block: 544, chunk: 544}, {block: 16, chunk: 256, old: true}, {block: 48, chunk: 144, port: 144, old: true}, {block: 544, chunk: 544, port: 544, old: true}}
	for i := range engines {
		e := &engines[i]
		g := kvmem.Geometry{Layers: 3, Heads: 4, HeadBytes: 16, BlockTokens: e.block, Blocks: 1 + 16384/e.block, TPSize: 1}
		mode := []string{"engine_driven", "lmcache_driven"}[i%2]
		config := fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{
			"lmcache.mp.server_urls":"tcp://127.0.0.1:%d","lmcache.mp.mp_transfer_mode":%q,"lmcache.mp.heartbeat_interval":0.2}}`, n.ports[e.port], mode)
		e.Engine = open(t, engine.Options{KV: g, MaxModel: 4096, ShmDir: dir, Unnegotiated: e.old}, config, nil)
	}
	alone := open(t, engine.Options{KV: geometry(1), MaxModel: 2048}, "", nil)
	// askAll sends a prompt to all engines at once, and returns how many tokens each loaded.
	asked := 0
	askAll := func(tokens int, seed uint32, salt string) []int64 {
		t.Helper()
		asked++
		want, _ := ask(t, alone, engine.Request{ID: fmt.Sprint("alone", asked), Tokens: prompt(tokens, seed), MaxTokens: 3})
		loaded := make([]int64, len(engines))
		var wg sync.WaitGroup
		for i := range engines {
			wg.Go(func() {
				e := engines[i]
				if !e.ResetPrefixCache(false) {
					t.Errorf("engine %d: the prefix cache is not emptied", i)
				}
				before := e.Stats().LoadedTokens
				s, err := e.Submit(t.Context(), engine.Request{ID: fmt.Sprint("r", asked), Tokens: prompt(tokens, seed), MaxTokens: 3, Salt: salt})
				if err != nil {
					t.Error(err)
					return
				}
				got, end, err := s.Wait(t.Context())
				if err != nil || end.Err != nil || !slices.Equal(got, want) {
					t.Errorf("engine %d, prompt %d: %v, %+v, %v", i, seed, got, end, err)
				}
				loaded[i] = e.Stats().LoadedTokens - before
			})
		}
		wg.Wait()
		for i := range engines {
			idle(t, engines[i].Engine)
		}
		return loaded
	}
	const tokens = 1300
	// keep asks until all engines load all: a heartbeat may be late on a busy machine.
	keep := func(what string, seed uint32, salt string) {
		t.Helper()
		testkit.Eventually(t, what+": full hits", func() bool {
			loaded := askAll(tokens, seed, salt)
			for i, e := range engines {
				if loaded[i] != int64(tokens/e.chunk*e.chunk) {
					return false
				}
			}
			return true
		})
	}
	// hits is keep, and fails if a chunk is stored meanwhile.
	hits := func(what string, seed uint32, salt string) {
		t.Helper()
		before := n.store.Stats().StoredChunks
		keep(what, seed, salt)
		if now := n.store.Stats().StoredChunks; now != before {
			t.Errorf("%s: %d chunks were stored anew", what, now-before)
		}
	}
	keep("stored", 1, "")
	hits("a second time", 1, "")

	n.stop()
	n.start(t)
	hits("after a restart", 1, "")
	if s := n.store.Stats(); s.RestoredChunks == 0 {
		t.Error("no chunks were found after a restart")
	}

	// The chunks of a tenant with a quota stay, in every size, whatever the other tenants store.
	if err := n.store.SetQuota("red", sizedPool/2); err != nil {
		t.Fatal(err)
	}
	keep("stored with a quota", 2, "red")
	for seed := range uint32(60) {
		askAll(tokens, 100+seed, "")
	}
	hits("a tenant with a quota", 2, "red")
	s := n.store.Stats()
	if s.ResidentBytes > sizedPool || s.EvictedChunks == 0 {
		t.Errorf("%d bytes in a pool of %d, %d evicted", s.ResidentBytes, sizedPool, s.EvictedChunks)
	}
	evicted := map[int]bool{} // by chunk size: one of two engines with the same chunks may load what the other has just stored again
	for i, loaded := range askAll(tokens, 100, "") {
		chunk := engines[i].chunk
		evicted[chunk] = evicted[chunk] || loaded < int64(tokens/chunk*chunk)
	}
	for chunk, some := range evicted {
		if !some {
			t.Errorf("chunks of %d tokens: nothing of the oldest prompt was evicted", chunk)
		}
	}
}
