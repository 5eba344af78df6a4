// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// A request id may be used again when its request has ended. Each request gives its blocks back, also when
// nothing of it was stored or loaded.
func TestLivesOfOneID(t *testing.T) {
	for _, mode := range []string{"engine_driven", "lmcache_driven"} {
		n := startNode(t, 8<<20)
		e := open(t, engine.Options{KV: geometry(2), MaxModel: 1024, ShmDir: n.dir}, lmcacheConfig(n.url, mode), nil)
		for life := range 6 {
			r := engine.Request{ID: "same", Tokens: prompt([]int{10, 10, 100, 10, 100, 1}[life], uint32(life%2)), MaxTokens: 3}
			if _, end := ask(t, e, r); end.Err != nil {
				t.Fatalf("%s, life %d: %+v", mode, life, end)
			}
			testkit.Eventually(t, fmt.Sprint(mode, ": the blocks of life ", life, " are free"), func() bool { s := e.Stats(); return s.Free == s.Blocks && s.Kept == 0 })
		}
	}
}

// In the metrics a prompt counts once, when it has its first token. Tokens that failed to load
// count as computed.
func TestFigures(t *testing.T) {
	g := geometry(1)
	g.Blocks = 24
	e := open(t, engine.Options{KV: g, MaxModel: 256, StepTime: time.Millisecond}, "", nil)
	var asked int64
	for round, end := 0, time.Now().Add(60*time.Second); e.Stats().Preemptions == 0 && time.Now().Before(end); round++ {
		var wg sync.WaitGroup
		for i := range 8 { // they preempt each other, once enough of them run at a time
			asked += 40
			wg.Go(func() {
				ask(t, e, engine.Request{ID: fmt.Sprint("r", round, "-", i), Tokens: prompt(40, uint32(8*round+i)), MaxTokens: 80})
			})
		}
		wg.Wait()
	}
	if s := e.Stats(); s.Preemptions == 0 || s.Queries != asked || s.PromptTokens != asked || s.CachedTokens != 0 {
		t.Errorf("preempted: %+v, asked for %d tokens", s, asked)
	}

	one := open(t, engine.Options{KV: geometry(1), MaxModel: 1024, MaxSeqs: 1, StepTime: 50 * time.Millisecond}, "", nil)
	running, err := one.Submit(t.Context(), engine.Request{ID: "a", Tokens: prompt(30, 1), MaxTokens: 900}) // 45 s, if it were not aborted
	if err != nil {
		t.Fatal(err)
	}
	waiting, err := one.Submit(t.Context(), engine.Request{ID: "b", Tokens: prompt(30, 2), MaxTokens: 5})
	if err != nil {
		t.Fatal(err)
	}
	one.Abort("b")
	if _, _, err := waiting.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the other one has a token", func() bool { return one.Stats().PromptTokens > 0 })
	if s := one.Stats(); s.PromptTokens != 30 || s.Aborted != 1 || s.Finished != 0 {
		t.Errorf("aborted: %+v", s)
	}
	one.Abort("a")
	if _, _, err := running.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := one.Stats(); s.PromptTokens != 30 || s.Aborted != 2 || s.Finished != 0 {
		t.Errorf("both aborted: %+v", s)
	}

	d := open(t, engine.Options{KV: geometry(1), MaxModel: 1024}, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer","kv_load_failure_policy":"recompute"}`, nil)
	nobody := fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePort(t))
	for i := range 2 {
		_, end := ask(t, d, engine.Request{ID: fmt.Sprint("d", i), Tokens: prompt(100, uint32(i)), MaxTokens: 2, Params: wire.RemotePrefill(nobody, "p", fmt.Sprint("x", i))})
		if end.Err != nil || end.Cached != 0 {
			t.Errorf("%+v", end)
		}
	}
	if s := d.Stats(); s.LoadedTokens != 0 || s.CachedTokens != 0 || s.PromptTokens != 200 {
		t.Errorf("failed loads: %+v", s)
	}
}

// A request without a prompt, or without a token to generate, is refused with that reason; a request that is too long with another one.
func TestRequestsThatDoNotFit(t *testing.T) {
	e := open(t, engine.Options{KV: geometry(1), MaxModel: 64, MaxSeqs: 1}, "", nil)
	f := func(tokens, most int, want error) {
		t.Helper()
		if _, err := e.Submit(t.Context(), engine.Request{ID: "r", Tokens: prompt(tokens, 1), MaxTokens: most}); !errors.Is(err, want) {
			t.Errorf("%d tokens, %d to generate: %v, want %v", tokens, most, err, want)
		}
	}
	f(0, 16, engine.ErrEmpty)
	f(8, 0, engine.ErrEmpty)
	f(60, 5, engine.ErrTooLong)
}
