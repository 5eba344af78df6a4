// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// Groups of hybrid models.
var hybrids = map[string][]sched.Group{
	"windows":            {{}, {Window: 40}},
	"states":             {{}, {State: true}},
	"states and windows": {{State: true}, {Window: 100}, {}},
	"one window":         {{Window: 50}},
}

// Hybrid models give the same tokens in each run, also from their prefix cache, with a memory so
// small that requests are preempted.
func TestHybridAlone(t *testing.T) {
	preempted := int64(0)
	for name, groups := range hybrids {
		g := geometry(2)
		g.Blocks = 64
		e := open(t, engine.Options{KV: g, Groups: groups, MaxTokens: 256, MaxModel: 256, StepTime: time.Millisecond}, "", nil)
		big := open(t, engine.Options{KV: geometry(1), MaxModel: 1024}, "", nil)
		var wg sync.WaitGroup
		for i := range 30 {
			wg.Go(func() {
				r := engine.Request{ID: fmt.Sprint("r", i), Tokens: prompt(60+i%5*20, uint32(i%4)), MaxTokens: 60}
				want, _ := ask(t, big, r)
				if got, end := ask(t, e, r); end.Err != nil || !slices.Equal(got, want) {
					t.Errorf("%s: %v, %+v", name, got, end)
				}
			})
		}
		wg.Wait()
		idle(t, e)
		for range 2 { // the second finds what the first left
			ask(t, e, engine.Request{ID: "last", Tokens: prompt(100, 99), MaxTokens: 2})
		}
		s := e.Stats()
		if preempted += s.Preemptions; s.Hits == 0 {
			t.Errorf("%s: %+v", name, s)
		}
	}
	if preempted == 0 {
		t.Error("nothing was preempted")
	}
}

// Hybrid models use a cache server that copies, with one object for all groups or one for each, and a server whose pool
// the engines read and write. The prompts grow turn by turn, steps cut them anywhere in a chunk, and the memory is so
// small that requests are preempted. One engine loads the chunks that another one stored.
func TestHybridCacheServer(t *testing.T) {
	for name, groups := range hybrids {
		for _, how := range []struct {
			mode     string
			separate bool
			inline   bool
		}{{"lmcache_driven", true, false}, {"lmcache_driven", false, false}, {"engine_driven", false, false}, {"engine_driven", false, true}} {
			mode := how.mode
			if mode == "engine_driven" && len(groups) == 1 {
				continue // it copies a single group as full attention
			}
			dir := shmDir(t)
			so := server.Options{ChunkTokens: 32, SeparateGroups: how.separate, ShmDir: dir, Log: testLog(t)}
			if how.inline {
				so.Pickle = server.PickleOnly
			}
			n := startNodeWith(t, dir, "pool", 32<<20, so)
			g := geometry(2)
			g.Blocks = 100
			o := engine.Options{KV: g, Groups: groups, MaxTokens: 88, MaxModel: 512, ShmDir: n.dir}
			a, b := open(t, o, lmcacheConfig(n.url, mode), nil), open(t, o, lmcacheConfig(n.url, mode), nil)
			alone := open(t, engine.Options{KV: geometry(1), MaxModel: 512}, "", nil)
			turns := []int{70, 96, 97, 200, 331}
			if testkit.Race {
				turns = []int{97, 331}
			}
			for turn, tokens := range turns {
				var wg sync.WaitGroup
				for i := range 6 {
					r := engine.Request{ID: fmt.Sprint("r", turn, "-", i), Tokens: prompt(tokens, uint32(i%3)), MaxTokens: 1 + 9*i}
					want, _ := ask(t, alone, r)
					wg.Go(func() {
						for _, e := range []*engine.Engine{a, b} {
							s, err := e.Submit(t.Context(), r)
							if err != nil {
								t.Error(err)
								return
							}
							if got, end, err := s.Wait(t.Context()); err != nil || end.Err != nil || !slices.Equal(got, want) {
								t.Errorf("%s, %+v, %d tokens: %v, %+v, %v", name, how, tokens, got, end, err)
							}
						}
					})
				}
				wg.Wait()
				idle(t, a)
				idle(t, b)
				b.ResetPrefixCache(false)
			}
			// The last prompts are in the server whole, whatever the engines have in their own memory.
			fresh := open(t, o, lmcacheConfig(n.url, mode), nil)
			for i := range 3 {
				r := engine.Request{ID: fmt.Sprint("last", i), Tokens: prompt(331, uint32(i)), MaxTokens: 3}
				want, _ := ask(t, alone, r)
				if got, end := ask(t, fresh, r); end.Err != nil || !slices.Equal(got, want) {
					t.Fatalf("%s, %+v: %v, %+v", name, how, got, end)
				}
			}
			idle(t, fresh)
			if s := fresh.Stats(); s.LoadedTokens < 3*320 {
				t.Errorf("%s, %+v: %+v", name, how, s)
			}
		}
	}
}

// Workers that copy themselves register a single group as full attention, as LMCache's do. They register several groups only at servers
// of 0.5.7. Another model is refused before anything is registered, and the error says which setting it needs.
func TestHybridNeedsLentMemory(t *testing.T) {
	n := startNode(t, 8<<20)
	for name, groups := range hybrids {
		for _, mode := range []string{"engine_driven", "auto"} {
			c, err := kvconfig.Parse([]byte(lmcacheConfig(n.url, mode)))
			if err != nil {
				t.Fatal(err)
			}
			e, err := engine.Open(t.Context(), engine.Options{KV: geometry(1), Groups: groups, MaxModel: 256, Connectors: c, ShmDir: n.dir, Unnegotiated: true})
			if err == nil {
				e.Close()
			}
			if err == nil || !strings.Contains(err.Error(), `"lmcache.mp.mp_transfer_mode":"lmcache_driven"`) {
				t.Errorf("%s, %s: %v", name, mode, err)
			}
		}
	}
}

// P and D of hybrid models: windows are clipped, and D computes the last token of models with states.
func TestHybridPair(t *testing.T) {
	for name, groups := range hybrids {
		for _, tp := range [][2]int{{1, 1}, {2, 2}, {2, 1}} {
			if tp[0] != tp[1] && name != "windows" && name != "one window" {
				continue // states are not cut by heads
			}
			port := testkit.FreePort(t)
			p := open(t, engine.Options{KV: geometry(tp[0]), Groups: groups, MaxModel: 1024},
				`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p"}`, map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(port)})
			d := open(t, engine.Options{KV: geometry(tp[1]), Groups: groups, MaxModel: 1024}, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`, nil)
			alone := open(t, engine.Options{KV: geometry(1), MaxModel: 1024}, "", nil)
			for i := range 4 {
				tokens, id := prompt(100+37*i, uint32(i%3)), fmt.Sprint("x", i)
				want, _ := ask(t, alone, engine.Request{ID: id, Tokens: tokens, MaxTokens: 12})
				if _, end := ask(t, p, engine.Request{ID: "p" + id, Tokens: tokens, MaxTokens: 1, Params: wire.RemoteDecode(id)}); end.Err != nil {
					t.Fatalf("%s, TP %v: P: %+v", name, tp, end)
				}
				got, end := ask(t, d, engine.Request{ID: "d" + id, Tokens: tokens, MaxTokens: 12, Params: wire.RemotePrefill(fmt.Sprintf("http://127.0.0.1:%d", port), "p", id)})
				if end.Err != nil || !slices.Equal(got, want) {
					t.Fatalf("%s, TP %v: D: %v, %+v, want %v", name, tp, got, end, want)
				}
			}
			idle(t, p)
			idle(t, d)
			if s := d.Stats(); s.LoadedTokens < 100+130 {
				t.Fatalf("%s, TP %v: %+v", name, tp, s)
			}
		}
	}
}
