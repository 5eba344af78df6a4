// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// lateBeat is between two heartbeats, and how long each may take: a machine that stands still for some seconds makes no server unhealthy.
const lateBeat = 20 * time.Second

// miniRanks lets two ranks of one engine store and load: with MLA rank 0 stores
// for both, otherwise each keeps a shard. The first rank has the scheduler.
func miniRanks(t *testing.T, url, shmDir string, mla bool) {
	t.Helper()
	o := miniOptions{url: url, shmDir: shmDir, model: fmt.Sprint("ranks-", mla, time.Now().UnixNano()), heartbeat: lateBeat}
	if mla {
		o.form = paged.FusedNHD
	}
	var ranks []*miniEngine
	for rank := range 2 {
		o.parallel = lmcache.Parallel{World: 2, TP: 2, Rank: rank, MLA: mla}
		e := newMiniEngine(t, o)
		defer e.close()
		ranks = append(ranks, e)
	}
	a := ranks[0]
	prompt := miniTokens(100, 3)
	step := func(s *connector.Step) {
		ops, err := a.track.Step(s)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ranks {
			e.worker.Load(ops)
			e.worker.Save(ops)
		}
	}

	r := a.request("ranks cold", prompt)
	a.alloc(r, a.match(r, 0).Tokens)
	for _, e := range ranks {
		e.compute(r, 0, 6)
	}
	step(&connector.Step{New: []connector.NewRequest{{ID: r.ID}}, Scheduled: map[string]int{r.ID: 100}})
	finishRanks(ranks, r)
	if n := ranks[1].worker.Stats().Stores; mla && n != 0 || !mla && n != 1 {
		t.Errorf("rank 1 stored %d times", n)
	}

	r = a.request("ranks warm", prompt)
	m := a.match(r, 0)
	if m.Tokens != 96 {
		t.Errorf("%+v", m)
	}
	a.alloc(r, m.Tokens)
	step(&connector.Step{})
	for _, e := range ranks {
		e.until("load", func() bool { return slices.Contains(e.worker.Finished(nil).Received, r.ID) })
		if bad := e.worker.LoadErrors(); len(bad.Requests) > 0 {
			t.Errorf("rank with shard %d: %+v", e.shard, bad)
		}
		e.check(r, 0, 6)
	}
	finishRanks(ranks, r)

	// Every reader has used its pin: nothing keeps the chunks.
	a.clear(false)
	r = a.request("ranks after", prompt)
	if m := a.match(r, 0); m.Tokens != 0 {
		t.Errorf("pins are left: %+v", m)
	}
	_, _ = a.track.Finish(&r.Request)
	a.settle()
}

// finishRanks ends r, which the first rank's scheduler tracks.
func finishRanks(ranks []*miniEngine, r *miniRequest) {
	if _, err := ranks[0].track.Finish(&r.Request); err != nil {
		ranks[0].t.Fatal(err)
	}
	for _, e := range ranks {
		var sent []string
		e.until("end of "+r.ID, func() bool {
			sent = append(sent, e.worker.Finished([]string{r.ID}).Sent...)
			return slices.Contains(sent, r.ID)
		})
		e.settle()
	}
}

func TestEngineRanks(t *testing.T) {
	for _, mla := range []bool{true, false} {
		dir := t.TempDir()
		url, _, stop := startMini(t, dir, "tcp://127.0.0.1:*")
		miniRanks(t, url, dir, mla)
		stop()
	}
}

// The same against the real server of TestEngineScriptReal.
func TestEngineRanksReal(t *testing.T) {
	url := os.Getenv("KVASIR_LMCACHE_URL")
	if url == "" {
		t.Skip("KVASIR_LMCACHE_URL names no lmcache server; interop/lmcache/connector.sh starts one")
	}
	miniRanks(t, url, "", true)
	miniRanks(t, url, "", false)
}

// Two engines with prompts that share prefixes, a pool that is too small, aborts,
// preemptions and clears at random: every byte that is loaded is right, and no
// transfer or pin is left.
func TestEngineRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	dir := t.TempDir()
	url, st, stop := startMiniSized(t, dir, "tcp://127.0.0.1:*", 40*6144)
	defer stop()
	var wg sync.WaitGroup
	var mu sync.Mutex
	loads := 0
	for id := range 2 {
		e := newMiniEngine(t, miniOptions{url: url, shmDir: dir, model: "shared", form: paged.PlanesNHD, heartbeat: lateBeat})
		wg.Go(func() {
			defer e.close()
			rnd := rand.New(rand.NewPCG(seed, uint64(id)))
			for i := 0; i < 60 || i < 600 && st.Stats().EvictedChunks == 0; i++ {
				e.next = 1 // finished requests have left their blocks
				e.playRandom(rnd, fmt.Sprintf("e%d-%d", id, i))
			}
			mu.Lock()
			defer mu.Unlock()
			loads += int(e.worker.Stats().Loads)
		})
	}
	wg.Wait()
	st.Clear(false) // drops all but what is pinned
	if s := st.Stats(); s.Transfers != 0 || s.Resident != 0 || s.EvictedChunks == 0 || loads == 0 {
		t.Errorf("%d loads, %+v", loads, s)
	}
}

// playRandom plays one request with a random fate.
func (e *miniEngine) playRandom(rnd *rand.Rand, id string) {
	tokens := miniTokens(32*(1+rnd.IntN(6)), uint32(rnd.IntN(3)))
	tokens = append(tokens, miniTokens(32+rnd.IntN(64), 100+uint32(rnd.IntN(8)))...)
	r := e.request(id, tokens)
	m := e.match(r, 0)
	if rnd.IntN(6) == 0 {
		_, _ = e.track.Finish(&r.Request)
		e.settle()
		return
	}
	e.alloc(r, m.Tokens)
	e.spoil(r)
	if rnd.IntN(8) == 0 {
		e.clear(rnd.IntN(2) == 0)
	}
	computed := e.loadOrNot(r, m)
	e.run(r, computed, false)
	if rnd.IntN(3) == 0 {
		r.Preempted = true
		e.settle()
		e.spoil(r)
		e.next = 1 + rnd.IntN(100)
		m = e.match(r, 0)
		e.alloc(r, m.Tokens)
		e.run(r, e.loadOrNot(r, m), true)
	}
	e.finish(r)
}

// loadOrNot carries a load out, if there is one, and returns the tokens that need
// not be computed.
func (e *miniEngine) loadOrNot(r *miniRequest, m connector.Matched) int {
	if !m.Async {
		return 0
	}
	if e.load(r) {
		e.check(r, 0, m.Tokens/miniBlock)
		return m.Tokens
	}
	e.match(r, 0)
	e.alloc(r, 0)
	return 0
}
