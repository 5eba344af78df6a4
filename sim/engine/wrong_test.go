// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// Changed bytes fail the request that begins with them, once. Afterwards no lookup finds those blocks,
// and nothing of the failed request is stored for others.
func TestWrongBytesAreFoundOnce(t *testing.T) {
	for name, groups := range hybrids {
		n := startNode(t, 8<<20)
		e := open(t, engine.Options{KV: geometry(2), Groups: groups, MaxModel: 512, ShmDir: n.dir}, lmcacheConfig(n.url, "lmcache_driven"), nil)
		r := engine.Request{ID: "a", Tokens: prompt(100, 1), MaxTokens: 4}
		want, _ := ask(t, e, r)
		idle(t, e)
		e.Spoil()
		longer := prompt(180, 1) // its further chunks would be stored
		if _, end := ask(t, e, engine.Request{ID: "b", Tokens: longer, MaxTokens: 4}); !errors.Is(end.Err, engine.ErrWrongBytes) {
			t.Fatalf("%s: %+v", name, end)
		}
		r.ID = "c"
		if got, end := ask(t, e, r); end.Err != nil || !slices.Equal(got, want) {
			t.Fatalf("%s: the wrong blocks are still found: %v, %+v", name, got, end)
		}
		testkit.Eventually(t, "all blocks are free", func() bool { s := e.Stats(); return s.Free == s.Blocks && s.Kept == 0 })
		if s := e.Stats(); s.WrongBytes != 1 || s.Failed != 1 || s.Finished != 2 {
			t.Fatalf("%s: %+v", name, s)
		}
		other := open(t, engine.Options{KV: geometry(2), Groups: groups, MaxModel: 512, ShmDir: n.dir}, lmcacheConfig(n.url, "lmcache_driven"), nil)
		if _, end := ask(t, other, engine.Request{ID: "d", Tokens: longer, MaxTokens: 4}); end.Err != nil || end.Cached > 96 {
			t.Fatalf("%s: %+v", name, end)
		}
		idle(t, other)
	}
}

// Bytes that change while requests run fail each request that shares them, at its end. The engine does not check
// blocks that have left all windows by then.
func TestWrongBytesAtTheEnd(t *testing.T) {
	for name, groups := range hybrids {
		if name == "one window" {
			continue
		}
		var e *engine.Engine
		var streams []*engine.Stream
		for step := time.Millisecond; ; step *= 2 { // until both run while the bytes are changed
			e = open(t, engine.Options{KV: geometry(2), Groups: groups, MaxModel: 512, StepTime: step}, "", nil)
			streams = nil
			for i := range 2 {
				s, err := e.Submit(t.Context(), engine.Request{ID: fmt.Sprint("r", i), Tokens: prompt(100, 1), MaxTokens: 100})
				if err != nil {
					t.Fatal(err)
				}
				if _, _, err := s.Next(t.Context()); err != nil {
					t.Fatal(err)
				}
				streams = append(streams, s)
			}
			e.Spoil()
			if e.Stats().Running == 2 {
				break
			}
		}
		for _, s := range streams {
			if _, end, err := s.Wait(t.Context()); err != nil || !errors.Is(end.Err, engine.ErrWrongBytes) {
				t.Fatalf("%s: %+v, %v", name, end, err)
			}
		}
		if _, end := ask(t, e, engine.Request{ID: "next", Tokens: prompt(100, 1), MaxTokens: 2}); end.Err != nil {
			t.Fatalf("%s: %+v", name, end)
		}
		if s := e.Stats(); s.WrongBytes != 2 || s.Free != s.Blocks {
			t.Fatalf("%s: %+v", name, s)
		}
	}
}

// An engine that waits for its cache server stops when its context ends, and leaves no segment of shared memory.
func TestInterruptedStart(t *testing.T) {
	port := testkit.FreePort(t)
	c, err := kvconfig.Parse([]byte(lmcacheConfig(fmt.Sprintf("tcp://127.0.0.1:%d", port), "lmcache_driven")))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	o := engine.Options{KV: geometry(1), MaxModel: 512, Connectors: c, ShmDir: dir}
	time.AfterFunc(50*time.Millisecond, cancel)
	e, err := engine.Open(ctx, o)
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("%v, %v", e, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Fatalf("segments are left: %v, %v", left, err)
	}
}

// A model that does not fit is refused with one line that says what to change, before anything is
// allocated and before the engine asks a server. A model that just fits is served.
func TestModelsThatDoNotFit(t *testing.T) {
	f := func(want string, change func(o *engine.Options)) {
		t.Helper()
		c, err := kvconfig.Parse([]byte(lmcacheConfig(fmt.Sprintf("tcp://127.0.0.1:%d", testkit.FreePort(t)), "lmcache_driven"))) // no server is there
		if err != nil {
			t.Fatal(err)
		}
		o := engine.Options{KV: geometry(1), MaxModel: 1024, Connectors: c, ShmDir: t.TempDir()}
		change(&o)
		e, err := engine.Open(t.Context(), o)
		if err == nil {
			e.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v, want %q", err, want)
		}
		if left, err := os.ReadDir(o.ShmDir); err != nil || len(left) > 0 {
			t.Errorf("allocated before it was refused: %v, %v", left, err)
		}
	}
	f("of memory available: take fewer blocks", func(o *engine.Options) {
		o.KV = kvmem.Geometry{Layers: 64, Heads: 8, HeadBytes: 512, BlockTokens: 16, Blocks: 200_000, TPSize: 1}
	})
	f("199 KV blocks", func(o *engine.Options) { o.KV.Blocks, o.MaxModel = 199, 199*16 })
	f("take more blocks, or a shorter model length", func(o *engine.Options) { o.MaxModel = 4096 })
	f("a window of 1 tokens", func(o *engine.Options) { o.Groups = []sched.Group{{}, {Window: 1}} })
	f("of a state", func(o *engine.Options) { o.Groups = []sched.Group{{}, {Window: 9, State: true}} })

	exact := geometry(1)
	exact.Blocks = 1 + 16
	e := open(t, engine.Options{KV: exact, MaxModel: 256}, "", nil)
	if _, end := ask(t, e, engine.Request{ID: "r", Tokens: prompt(200, 1), MaxTokens: 56}); end.Err != nil {
		t.Fatal(end.Err)
	}
	if e := open(t, engine.Options{KV: exact}, "", nil); e.MaxModel() != 256 {
		t.Fatalf("a model that does not say how long it is takes %d tokens", e.MaxModel())
	}
	for name, groups := range hybrids { // the longest sequence of a hybrid model goes through, twice at a time
		g := geometry(1)
		g.Blocks = 60
		e := open(t, engine.Options{KV: g, Groups: groups, MaxTokens: 64}, "", nil)
		n := e.MaxModel()
		if n < 200 || n > 59*16 && name != "one window" {
			t.Fatalf("%s: %d", name, n)
		}
		var streams []*engine.Stream
		for i := range 2 {
			s, err := e.Submit(t.Context(), engine.Request{ID: fmt.Sprint("r", i), Tokens: prompt(n-5, uint32(i)), MaxTokens: 5})
			if err != nil {
				t.Fatal(err)
			}
			streams = append(streams, s)
		}
		for _, s := range streams {
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			if _, end, err := s.Wait(ctx); err != nil || end.Err != nil {
				t.Fatalf("%s, %d tokens: %+v, %v", name, n, end, err)
			}
			cancel()
		}
		idle(t, e)
	}
}
