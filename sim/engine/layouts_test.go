// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

var allLayouts = []kvmem.Layout{kvmem.Fused, kvmem.NHD, kvmem.HND, kvmem.FlashInfer, kvmem.MLA}

func geometryOf(tp int, layout kvmem.Layout) kvmem.Geometry {
	g := geometry(tp)
	g.Layers, g.Layout = 4, layout
	if layout == kvmem.MLA {
		g.Heads = 1
	}
	return g
}

// sameAs asks engines for the same prompt, one after the other, and compares what they answer with an engine alone.
func sameAs(t *testing.T, o engine.Options, tokens int, engines ...*engine.Engine) {
	t.Helper()
	o.Connectors, o.PPSize = nil, 0
	alone := open(t, o, "", nil)
	r := engine.Request{ID: fmt.Sprint("r", tokens), Tokens: prompt(tokens, 1), MaxTokens: 20}
	want, _ := ask(t, alone, r)
	for i, e := range engines {
		if got, end := ask(t, e, r); end.Err != nil || !slices.Equal(got, want) {
			t.Fatalf("engine %d: %v, %+v", i, got, end)
		}
		idle(t, e)
	}
}

// One engine loads what another one stored: in every layout, in both modes, with pipeline stages and over several
// servers that share the ranks. All ranks of MLA have the same bytes, so one rank per server stores them.
func TestCacheServerLayouts(t *testing.T) {
	f := func(mode string, layout kvmem.Layout, tp, pp, servers int) {
		t.Helper()
		name := fmt.Sprintf("%s, %v, TP %d, PP %d, %d servers", mode, layout, tp, pp, servers)
		var urls []string
		var nodes []*node
		for i := range servers {
			n := startNode(t, 8<<20)
			if i > 0 {
				n = startNodeIn(t, nodes[0].dir, "pool"+strconv.Itoa(i), 8<<20, false)
			}
			nodes, urls = append(nodes, n), append(urls, n.url)
		}
		o := engine.Options{KV: geometryOf(tp, layout), MaxModel: 1024, ShmDir: nodes[0].dir, PPSize: pp}
		config := lmcacheConfig(strings.Join(urls, ","), mode)
		a, b := open(t, o, config, nil), open(t, o, config, nil)
		sameAs(t, o, 200, a, b)
		if s := b.Stats(); s.LoadedTokens != 192 {
			t.Errorf("%s: %+v", name, s)
		}
		for i, n := range nodes {
			want := 6 * tp * pp / servers // whole chunks of 32 tokens of the prompt and its answer, one of each worker
			if layout == kvmem.MLA {
				want = 6 * pp
			}
			if s := n.store.Stats(); s.Resident != want {
				t.Errorf("%s: server %d has %d objects, want %d", name, i, s.Resident, want)
			}
		}
	}
	for _, layout := range allLayouts {
		f("engine_driven", layout, 2, 1, 1)
		f("lmcache_driven", layout, 2, 1, 1)
	}
	f("engine_driven", kvmem.Fused, 2, 2, 1)
	f("lmcache_driven", kvmem.FlashInfer, 1, 4, 1)
	f("engine_driven", kvmem.MLA, 2, 2, 1)
	f("engine_driven", kvmem.Fused, 4, 1, 2)
	f("lmcache_driven", kvmem.NHD, 2, 1, 2)
	f("engine_driven", kvmem.MLA, 4, 1, 2)
}

// When servers have prefixes of different lengths, the hit is the shortest one, and the engine releases the other servers' pins.
func TestServersThatDiffer(t *testing.T) {
	nodes := []*node{startNode(t, 8<<20)}
	for i := range 3 {
		nodes = append(nodes, startNodeIn(t, nodes[0].dir, "pool"+strconv.Itoa(i), 8<<20, false))
	}
	o := engine.Options{KV: geometry(2), MaxModel: 1024, ShmDir: nodes[0].dir}
	over := func(a, b int) *engine.Engine {
		return open(t, o, lmcacheConfig(nodes[a].url+","+nodes[b].url, "engine_driven"), nil)
	}
	sameAs(t, o, 200, over(0, 1))
	short := over(2, 3)
	sameAs(t, o, 100, short)
	e := over(0, 3)
	sameAs(t, o, 200, e)
	if s := e.Stats(); s.LoadedTokens != 96 {
		t.Errorf("%+v", s)
	}
	for i, n := range nodes {
		testkit.Eventually(t, fmt.Sprint("no pins at server ", i), func() bool { s := n.store.Stats(); return s.EvictableObjs == s.Resident && s.Transfers == 0 })
	}
}

// D's blocks equal P's in every layout that the dialect registers. 0.13 also registers the split layout, with one region each for keys and values.
func TestPrefillAndDecodeLayouts(t *testing.T) {
	f := func(first bool, layout kvmem.Layout, tp int) {
		t.Helper()
		env := map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(testkit.FreePort(t))}
		o := engine.Options{KV: geometryOf(tp, layout), MaxModel: 512, First: first}
		p := open(t, o, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p"}`, env)
		d := open(t, o, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`, env)
		alone := open(t, engine.Options{KV: o.KV, MaxModel: 512}, "", nil)
		for i := range 3 {
			id := fmt.Sprint("x", i)
			r := engine.Request{ID: id, Tokens: prompt(100+37*i, uint32(i)), MaxTokens: 12}
			want, _ := ask(t, alone, r)
			ofP, params := r, wire.RemotePrefill("http://127.0.0.1:"+env["VLLM_MOONCAKE_BOOTSTRAP_PORT"], "p", id)
			ofP.MaxTokens, ofP.Params = 1, wire.RemoteDecode(id)
			if first {
				ofP.Params = wire.RemoteDecode("")
			}
			_, end := ask(t, p, ofP)
			if r.Params = params; first {
				r.Params = end.Params
			}
			got, end := ask(t, d, r)
			if end.Err != nil || !slices.Equal(got, want) {
				t.Fatalf("0.13: %v, %v, TP %d: %v, %+v", first, layout, tp, got, end)
			}
		}
		idle(t, d)
		idle(t, p)
		if s := d.Stats(); s.LoadedTokens < 300 {
			t.Errorf("0.13: %v, %v, TP %d: %+v", first, layout, tp, s)
		}
	}
	for _, layout := range allLayouts {
		f(true, layout, 1)
		if !layout.Split() {
			f(false, layout, 2)
		}
	}
	f(true, kvmem.NHD, 2)
	_, err := engine.Open(t.Context(), engine.Options{KV: geometryOf(1, kvmem.NHD), Connectors: parsed(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}`)})
	if err == nil || !strings.Contains(err.Error(), "take flashinfer") {
		t.Error(err)
	}
}

// Blocks of every layout go through a Mooncake Store.
func TestStoreLayouts(t *testing.T) {
	for _, layout := range allLayouts {
		c := newStoreCluster(t, 1)
		o := engine.Options{KV: geometryOf(2, layout), MaxModel: 512}
		a, b := open(t, o, storeConfig("kv_both"), c.env), open(t, o, storeConfig("kv_both"), c.env)
		sameAs(t, o, 200, a)
		stored(t, a)
		sameAs(t, o, 200, b)
		if s := b.Stats(); s.LoadedTokens != 192 {
			t.Errorf("%v: %+v", layout, s)
		}
	}
}

// Impossible ranks are refused.
func TestRanks(t *testing.T) {
	f := func(want string, change func(o *engine.Options)) {
		t.Helper()
		o := engine.Options{KV: geometryOf(1, kvmem.Fused)}
		change(&o)
		if e, err := engine.Open(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
			if e != nil {
				e.Close()
			}
		}
	}
	f("data-parallel rank 2 of 2", func(o *engine.Options) { o.DPRank, o.DPSize = 2, 2 })
	f("4 layers on 3 pipeline stages", func(o *engine.Options) { o.PPSize = 3 })
	f("MooncakeStoreConnector with 2 pipeline stages", func(o *engine.Options) {
		o.PPSize, o.Connectors = 2, parsed(t, storeConfig("kv_both"))
	})
}

// Engines of two data-parallel ranks share the registry of rank 0, each under its rank; in 0.13's dialect each has a side channel of its own.
func TestDataParallelRanks(t *testing.T) {
	env := map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(testkit.FreePort(t))}
	registry := "http://127.0.0.1:" + env["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
	o := engine.Options{KV: geometry(1), MaxModel: 512, DPSize: 2}
	d := open(t, engine.Options{KV: geometry(1), MaxModel: 512}, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`, nil)
	for rank := range 2 {
		o.DPRank = rank
		p := open(t, o, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p"}`, env)
		id := fmt.Sprint("x", rank)
		r := engine.Request{ID: id, Tokens: prompt(100, uint32(rank)), MaxTokens: 1, Params: wire.RemoteDecode(id)}
		ask(t, p, r)
		r.Params = wire.RemotePrefill(registry, fmt.Sprint("p_dp", rank), id)
		if _, end := ask(t, d, r); end.Err != nil {
			t.Fatal(rank, end.Err)
		}
	}
	idle(t, d)
	if s := d.Stats(); s.LoadedTokens < 2*96 {
		t.Errorf("%+v", s)
	}
	o.First = true
	first := engine.Options{KV: geometry(1), MaxModel: 512, First: true}
	d = open(t, first, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`, nil)
	base := testkit.FreePort(t)
	for rank := range 2 {
		o.DPRank = rank
		p := open(t, o, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p"}`, map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(base)})
		r := engine.Request{ID: fmt.Sprint("y", rank), Tokens: prompt(100, uint32(rank)), MaxTokens: 1, Params: wire.RemoteDecode("")}
		_, end := ask(t, p, r)
		r.Params = end.Params
		if _, end = ask(t, d, r); end.Err != nil {
			t.Fatal(rank, end.Err)
		}
	}
	idle(t, d)
	if s := d.Stats(); s.LoadedTokens < 2*96 {
		t.Errorf("%+v", s)
	}
}

// eventLog collects the KV events that an engine publishes.
type eventLog struct {
	mu   sync.Mutex
	list []event.Event
}

func (l *eventLog) add(list []event.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, list...)
}

// has returns the tokens of each block in a medium, according to the events so far.
func (l *eventLog) has(medium string) map[string][]int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[string][]int64)
	for _, e := range l.list {
		switch {
		case e.Kind == event.Cleared:
			clear(out)
		case e.Medium != medium:
		case e.Kind == event.Removed:
			for _, h := range e.Hashes {
				delete(out, string(h))
			}
		default:
			for i, h := range e.Hashes {
				out[string(h)] = e.Tokens[i*e.BlockTokens : (i+1)*e.BlockTokens]
			}
		}
	}
	return out
}

// The events report the blocks of the engine's own cache, and the chunks that all of its ranks have stored on a
// cache server.
func TestKVEvents(t *testing.T) {
	n := startNode(t, 8<<20)
	var log eventLog
	o := engine.Options{KV: geometry(2), MaxModel: 1024, ShmDir: n.dir, OnEvents: log.add}
	e := open(t, o, lmcacheConfig(n.url, "engine_driven"), nil)
	tokens := prompt(200, 1)
	ask(t, e, engine.Request{ID: "r", Tokens: tokens, MaxTokens: 1})
	idle(t, e)
	check := func(medium string, block, blocks int) {
		t.Helper()
		testkit.Eventually(t, medium+" events", func() bool { return len(log.has(medium)) == blocks })
		var starts []int
		for _, got := range log.has(medium) {
			at := slices.Index(tokens, uint32(got[0]))
			for i, token := range got {
				if len(got) != block || tokens[at+i] != uint32(token) {
					t.Fatalf("%s: %v", medium, got)
				}
			}
			starts = append(starts, at/block)
		}
		slices.Sort(starts)
		for i, at := range starts {
			if i != at {
				t.Fatalf("%s: blocks %v", medium, starts)
			}
		}
	}
	check(event.GPU, 16, 200/16)
	check(event.CPU, 32, 200/32)
	if !e.ResetPrefixCache(false) {
		t.Fatal("not reset")
	}
	ask(t, e, engine.Request{ID: "short", Tokens: prompt(5, 9), MaxTokens: 1}) // a step that publishes
	idle(t, e)
	testkit.Eventually(t, "the reset", func() bool { return len(log.has(event.GPU)) == 0 })
}
