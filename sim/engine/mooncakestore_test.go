// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// storeCluster is a fake master with nodes, and the environment of engines that use it.
type storeCluster struct {
	*storetest.Master
	env  map[string]string
	stop []func()
}

func newStoreCluster(t testing.TB, nodes int) *storeCluster {
	t.Helper()
	c := &storeCluster{Master: storetest.New(t)}
	c.Set(func() { c.Lease = time.Minute })
	file := filepath.Join(t.TempDir(), "mooncake.json")
	if err := os.WriteFile(file, fmt.Appendf(nil, `{"metadata_server":"P2PHANDSHAKE","master_server_address":%q,"protocol":"tcp"}`, c.Addr), 0o600); err != nil {
		t.Fatal(err)
	}
	c.env = map[string]string{"MOONCAKE_CONFIG_PATH": file}
	m, err := store.NewMaster(store.MasterOptions{Addresses: []string{c.Addr}, CallTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	for range nodes {
		n, err := store.NewNode(m, store.NodeOptions{Memory: make([]byte, 32<<20), PingEvery: 50 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx) }()
		stop := sync.OnceFunc(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		t.Cleanup(stop)
		c.stop = append(c.stop, stop)
		testkit.Eventually(t, "a node is mounted", func() bool { return n.Stats().Mounted == 1 })
	}
	return c
}

func storeConfig(role string) string {
	return fmt.Sprintf(`{"kv_connector":"MooncakeStoreConnector","kv_role":%q,"kv_load_failure_policy":"recompute"}`, role)
}

// stored waits until an engine has stored what it computed.
func stored(t testing.TB, e *engine.Engine) {
	t.Helper()
	testkit.Eventually(t, "everything is stored", func() bool { return e.StoreStats().Waiting == 0 })
}

// One engine loads from the store what another one computed: with hybrid models, several ranks, both generations of
// keys and growing prompts, and with a memory so small that requests are preempted.
func TestStore(t *testing.T) {
	f := func(name string, groups []sched.Group, tp int, release coordinator.Release) {
		t.Helper()
		c := newStoreCluster(t, 1)
		g := geometry(tp)
		g.Blocks = 100
		o := engine.Options{Model: "org/model", KV: g, Groups: groups, MaxTokens: 88, MaxModel: 512, StoreRelease: release}
		a, b := open(t, o, storeConfig("kv_both"), c.env), open(t, o, storeConfig("kv_both"), c.env)
		alone := open(t, engine.Options{KV: geometry(1), MaxModel: 512}, "", nil)
		for turn, tokens := range []int{70, 96, 97, 331} {
			for _, e := range []*engine.Engine{a, b} {
				var wg sync.WaitGroup
				for i := range 4 {
					r := engine.Request{ID: fmt.Sprint("r", turn, "-", i), Tokens: prompt(tokens, uint32(i%3)), MaxTokens: 1 + 9*i}
					want, _ := ask(t, alone, r)
					wg.Go(func() {
						s, err := e.Submit(t.Context(), r)
						if err != nil {
							t.Error(err)
							return
						}
						if got, end, err := s.Wait(t.Context()); err != nil || end.Err != nil || !slices.Equal(got, want) {
							t.Errorf("%s, TP %d, %d tokens: %v, %+v, %v", name, tp, tokens, got, end, err)
						}
					})
				}
				wg.Wait()
				idle(t, e)
				stored(t, e)
			}
			b.ResetPrefixCache(false)
		}
		fresh := open(t, o, storeConfig("kv_consumer"), c.env)
		for i := range 3 {
			r := engine.Request{ID: fmt.Sprint("last", i), Tokens: prompt(331, uint32(i)), MaxTokens: 3}
			want, _ := ask(t, alone, r)
			if got, end := ask(t, fresh, r); end.Err != nil || !slices.Equal(got, want) {
				t.Fatalf("%s, TP %d: %v, %+v", name, tp, got, end)
			}
		}
		idle(t, fresh)
		if s := fresh.Stats(); s.LoadedTokens != 3*320 {
			t.Errorf("%s, TP %d: %+v", name, tp, s)
		}
		if s := fresh.StoreStats(); s.Saved != 0 || s.LoadErrors != 0 {
			t.Errorf("%s, TP %d: a consumer: %+v", name, tp, s)
		}
		if s := a.StoreStats(); s.SaveErrors != 0 || s.Skipped != 0 {
			t.Errorf("%s, TP %d: %+v", name, tp, s)
		}
	}
	for name, groups := range hybrids {
		f(name, groups, 1, coordinator.Release(0))
		f(name, groups, 2, coordinator.VLLM023)
	}
	f("full", []sched.Group{{}}, 2, coordinator.Release(0))
}

// Exactly the blocks of the masks are stored and loaded. The test counts their bytes by a rule of its own.
func TestStoreMovesTheMaskedBlocks(t *testing.T) {
	const block, window, tokens = 16, 100, 40*16 + 5
	need := (window - 1 + block - 1) / block
	f := func(retention *int, windowBlocks int) {
		t.Helper()
		c := newStoreCluster(t, 1)
		g := geometry(2)
		o := engine.Options{KV: g, Groups: []sched.Group{{}, {Window: window}, {State: true}}, MaxModel: 1024, Retention: retention}
		a := open(t, o, storeConfig("kv_producer"), c.env)
		r := engine.Request{ID: "r", Tokens: prompt(tokens, 1), MaxTokens: 3}
		want, _ := ask(t, a, r)
		idle(t, a)
		stored(t, a)
		whole := int64(3 * (tokens / block)) // all blocks of all groups
		blocks := int64(tokens/block + windowBlocks + 1)
		object := int64(g.Layers * g.BlockBytes())
		s := a.StoreStats()
		if s.Saved != 2*blocks || s.SavedBytes != 2*blocks*object || blocks >= whole {
			t.Errorf("saved %d objects of %d bytes, want %d of %d blocks by 2 ranks", s.Saved, s.SavedBytes, blocks, whole)
		}
		if s.Lookups != 1 { // a producer looks up, as in vLLM
			t.Errorf("%+v", s)
		}
		b := open(t, o, storeConfig("kv_both"), c.env)
		if got, end := ask(t, b, r); end.Err != nil || !slices.Equal(got, want) {
			t.Fatalf("%v, %+v", got, end)
		}
		idle(t, b)
		loads := int64(tokens/block + need + 1)
		if s := b.StoreStats(); s.Loaded != 2*loads || s.LoadedBytes != 2*loads*object || s.HitTokens == 0 || s.HitTokens%(tokens/block*block) != 0 {
			t.Errorf("loaded %d objects of %d bytes of a hit of %d tokens, want %d blocks by 2 ranks", s.Loaded, s.LoadedBytes, s.HitTokens, loads)
		}
	}
	none, some := 0, 10*block
	f(nil, tokens/block) // a hit may end anywhere
	f(&none, need)       // the prompt's end alone
	f(&some, 4*need)     // and each 160 tokens; the prompt ends with one
}

// A node that ends, and a master that forgets everything, cost hits: answers stay right, and the engine stores again.
func TestStoreThatFails(t *testing.T) {
	c := newStoreCluster(t, 2)
	o := engine.Options{KV: geometry(1), Groups: []sched.Group{{}, {Window: 40}}, MaxModel: 512}
	a := open(t, o, storeConfig("kv_both"), c.env)
	alone := open(t, engine.Options{KV: geometry(1), MaxModel: 512}, "", nil)
	r := engine.Request{Tokens: prompt(200, 1), MaxTokens: 5}
	askAll := func(id string) *engine.Engine {
		t.Helper()
		e := open(t, o, storeConfig("kv_both"), c.env)
		r.ID = id
		want, _ := ask(t, alone, r)
		if got, end := ask(t, e, r); end.Err != nil || !slices.Equal(got, want) {
			t.Fatalf("%s: %v, %+v", id, got, end)
		}
		idle(t, e)
		stored(t, e)
		return e
	}
	r.ID = "first"
	ask(t, a, r)
	idle(t, a)
	stored(t, a)
	if s := askAll("whole").Stats(); s.LoadedTokens != 192 {
		t.Fatalf("%+v", s)
	}
	c.Set(func() { // every object was on a node that has gone, while the master still names that node
		for name := range c.Objects {
			c.Objects[name].Pieces[0].Endpoint = "127.0.0.1:1"
		}
	})
	if e := askAll("gone"); e.Stats().LoadedTokens != 0 || e.StoreStats().LoadErrors == 0 {
		t.Fatalf("%+v, %+v", e.Stats(), e.StoreStats())
	}
	c.Set(func() { clear(c.Objects) })
	if s := askAll("forgotten").Stats(); s.LoadedTokens != 0 {
		t.Fatalf("%+v", s)
	}
	if s := askAll("again").Stats(); s.LoadedTokens != 192 {
		t.Fatalf("%+v", s)
	}
}

// A producer loads what another one has stored. As in vLLM, the role only decides about storing.
func TestProducersLookUp(t *testing.T) {
	c := newStoreCluster(t, 1)
	o := engine.Options{Model: "org/model", KV: geometry(1), MaxModel: 512}
	a, b := open(t, o, storeConfig("kv_producer"), c.env), open(t, o, storeConfig("kv_producer"), c.env)
	r := engine.Request{ID: "r", Tokens: prompt(200, 1), MaxTokens: 3}
	want, _ := ask(t, a, r)
	stored(t, a)
	if got, _ := ask(t, b, r); !slices.Equal(got, want) || b.Stats().LoadedTokens < 150 {
		t.Errorf("%v, want %v; %d tokens loaded", got, want, b.Stats().LoadedTokens)
	}
}

// A rank loads for as many requests at a time as VLLM_MOONCAKE_LOAD_RECV_THREADS says, one by default. A request that ends while
// its load waits ends at once.
func TestStoreLoadsInTurn(t *testing.T) {
	c := newStoreCluster(t, 1)
	o := engine.Options{KV: geometry(1), MaxModel: 512}
	a, b := open(t, o, storeConfig("kv_both"), c.env), open(t, o, storeConfig("kv_both"), c.env)
	r := engine.Request{ID: "r", Tokens: prompt(200, 1), MaxTokens: 3}
	want, _ := ask(t, a, r)
	stored(t, a)

	release := b.HoldLoads()
	waits, err := b.Submit(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.ID = "leaves"
	leaves, err := b.Submit(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "both loads wait", func() bool { return b.StoreStats().Queued == 2 })
	for i := range 5 { // the engine goes on
		ask(t, b, engine.Request{ID: fmt.Sprint("short", i), Tokens: prompt(10, 7), MaxTokens: 2})
	}
	cancel()
	if _, _, err := leaves.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if n := b.StoreStats().Loaded; n != 0 {
		t.Errorf("%d blocks were loaded out of turn", n)
	}
	testkit.Eventually(t, "one load waits", func() bool { return b.StoreStats().Queued == 1 })
	release()
	if got, end, err := waits.Wait(t.Context()); err != nil || end.Err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %+v, %v", got, end, err)
	}
	idle(t, b)
	if s := b.Stats(); s.LoadedTokens != 192 {
		t.Errorf("%+v", s)
	}
}
