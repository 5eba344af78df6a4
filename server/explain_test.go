// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// asker plays engines over one connection.
type asker struct {
	t *testing.T
	c *lmcache.Client
	s *server.Server
	n int64 // instances so far
}

func (a *asker) register(model string, world int, dtype string) (instance int64) {
	a.t.Helper()
	a.n++
	reg := lmcache.EngineDriven{
		InstanceID: 100 + a.n, Model: model, WorldSize: world, BlockSize: 16, Layers: 1, Hidden: 128, DType: dtype, SinglePlane: true, PhysicalSlots: 16,
	}
	if _, err := a.c.RegisterEngineDriven(a.t.Context(), &reg); err != nil {
		a.t.Fatal(err)
	}
	return reg.InstanceID
}

func keyOf(model, salt, request string, world int, prompt []uint32) *lmcache.Key {
	return &lmcache.Key{Model: model, Salt: salt, RequestID: request, WorldSize: world, Tokens: prompt, End: len(prompt), Readers: 1}
}

func (a *asker) prepare(instance int64, k *lmcache.Key) {
	a.t.Helper()
	if got, err := a.c.PrepareStore(a.t.Context(), k, instance, nil); err != nil || len(got.Slots) != len(k.Tokens)/16 {
		a.t.Fatalf("prepare of %d tokens: %d slots, %v", len(k.Tokens), len(got.Slots), err)
	}
}

func (a *asker) store(instance int64, k *lmcache.Key) {
	a.t.Helper()
	a.prepare(instance, k)
	if ok, err := a.c.CommitStore(a.t.Context(), k, instance); err != nil || !ok {
		a.t.Fatalf("commit: %v, %v", ok, err)
	}
}

// ask looks a prompt up, and returns why its hit ended where it did.
func (a *asker) ask(k *lmcache.Key) (hit int, why explain.Lookup) {
	a.t.Helper()
	k.Worker = lmcache.AllWorkers
	ctx, cancel := context.WithTimeout(a.t.Context(), time.Minute)
	defer cancel()
	hit, err := a.c.Lookup(ctx, k)
	if err == nil {
		err = a.c.EndSession(ctx, k.RequestID)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	if got := a.s.Explain(k.RequestID, 1); len(got.Lookups) == 1 {
		why = got.Lookups[0]
		if got.Advice[why.Reason].Do == "" || got.Reasons[why.Reason] == 0 {
			a.t.Errorf("%s has no advice, or is not counted: %+v", why.Reason, got)
		}
	}
	return hit, why
}

// provoked are the reasons that the tests of this file have seen, by label.
var provoked = map[string]bool{}

// elsewhere are those that other tests provoke, in this package or in store.
var elsewhere = []miss.Reason{
	miss.None, miss.NotPinned, miss.Busy, // of loads, not of lookups
	miss.Corrupt, miss.Unsummed, miss.NotCompared, // after restarts: store/pending_test.go
	miss.BelowSlower,   // store/writeback_test.go
	miss.NoRoom,        // fullpool_test.go
	miss.RequestTTL,    // requestttl_test.go
	miss.Unsigned,      // salts_test.go
	miss.ForeignTenant, // tenantlimits_test.go
}

// TestEachReasonIsExplained provokes each reason for which a hit ends over a socket.
func TestEachReasonIsExplained(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{})
	defer stop()
	a := &asker{t: t, c: newClient(t, n.url), s: n.Server}
	one := a.register("m", 1, "bfloat16")
	prompt := tokens(32, 1)
	check := func(what string, hit int, why explain.Lookup, wantHit int, want miss.Reason, contains ...string) {
		t.Helper()
		provoked[why.Reason] = true
		if hit != wantHit || why.Reason != want.Label() || why.HitTokens != 16*wantHit {
			t.Errorf("%s: a hit of %d, %+v; want %d and %s", what, hit, why, wantHit, want.Label())
		}
		for _, text := range contains {
			if !strings.Contains(why.Text, text) {
				t.Errorf("%s: want %q in %q", what, text, why.Text)
			}
		}
	}
	f := func(what string, k *lmcache.Key, wantHit int, want miss.Reason, contains ...string) explain.Lookup {
		t.Helper()
		hit, why := a.ask(k)
		check(what, hit, why, wantHit, want, contains...)
		if why.Request != k.RequestID || why.Model != k.Model || why.Salt != k.Salt {
			t.Errorf("%s: of %q, %q, %q", what, why.Request, why.Model, why.Salt)
		}
		return why
	}
	f("new", keyOf("m", "", "r1", 1, prompt), 0, miss.NeverStored, "0 of 32 tokens hit")
	f("short", keyOf("m", "", "r2", 1, prompt[:15]), 0, miss.Short, "shorter than a chunk: it has 15 tokens, a chunk has 16")
	f("nobody's model", keyOf("x", "", "r3", 1, prompt), 0, miss.Unregistered, "no worker is registered")
	k := keyOf("m", "", "r4", 1, prompt)
	k.Readers = 0
	skips := keyOf("m", "", "r-skip", 1, prompt)
	skips.SkipLoad = true
	f("skip_load", skips, 0, miss.SkipLoad, "load nothing")
	f("no readers", k, 0, miss.Declined, "num_kv_readers is 0")
	k = keyOf("m", "", "r4s", 1, prompt)
	k.SkipLoad = true
	f("lmcache.skip_load", k, 0, miss.SkipLoad, "asked to load nothing")

	a.store(one, keyOf("m", "", "s1", 1, prompt))
	longer := append(append([]uint32{}, prompt...), tokens(16, 2)...)
	why := f("longer than what was stored", keyOf("m", "", "r5", 1, longer), 2, miss.NeverStored, "32 of 48 tokens hit")
	if want := kv.ChunkHashes(longer, 16)[2].String(); why.Chunk != want {
		t.Errorf("the hit ended at %s, want %s", why.Chunk, want)
	}
	if hit, why := a.ask(keyOf("m", "", "r6", 1, prompt)); hit != 2 || why.Reason != "" {
		t.Errorf("a whole hit: %d, %+v", hit, why)
	}
	f("another salt", keyOf("m", "green", "r7", 1, prompt), 0, miss.OtherSalt, `it is there of model "m", world size 1, no salt`)
	a.register("other", 1, "bfloat16")
	f("another model", keyOf("other", "", "r8", 1, prompt), 0, miss.OtherModel, `it is there of model "m"`)
	a.register("m", 2, "bfloat16")
	a.register("m", 2, "bfloat16")
	why = f("another world size", keyOf("m", "", "r9", 2, prompt), 0, miss.OtherRank, "world size 1")
	if why.Other == nil || *why.Other != (explain.OtherName{Model: "m", WorldSize: 1}) {
		t.Errorf("other: %+v", why.Other)
	}
	half := a.register("m", 1, "float16")
	f("another layout", keyOf("m", "", "r10", 1, prompt), 0, miss.OtherLayout)
	if err := a.c.UnregisterEngineDriven(t.Context(), half); err != nil {
		t.Fatal(err)
	}

	staged := tokens(16, 3)
	two := a.register("m", 1, "bfloat16")
	a.prepare(two, keyOf("m", "", "s2", 1, staged))
	f("being stored", keyOf("m", "", "r11", 1, staged), 0, miss.BeingStored)
	if err := a.c.UnregisterEngineDriven(t.Context(), two); err != nil {
		t.Fatal(err)
	}
	f("not committed", keyOf("m", "", "r12", 1, staged), 0, miss.Failed)

	for seed := range 16 { // more than the pool has
		a.store(one, keyOf("m", "red", "s3", 1, tokens(32, 100+seed)))
	}
	why = f("evicted", keyOf("m", "", "r13", 1, prompt), 0, miss.Evicted, " before, to make room for ", `model m, salt "red"`)
	if why.Gone == nil || why.Gone.By == "" || why.Gone.ByModel != "m" || why.Gone.BySalt != "red" || why.Gone.Before < 0 || why.Gone.Before > 3600 {
		t.Errorf("gone: %+v", why.Gone)
	}
	a.store(one, keyOf("m", "", "s4", 1, prompt))
	if err := a.c.Clear(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	f("cleared", keyOf("m", "", "r14", 1, prompt), 0, miss.Cleared, " before")

	if err := n.store.SetTTL("brief", time.Second); err != nil {
		t.Fatal(err)
	}
	a.store(one, keyOf("m", "brief", "s5", 1, prompt))
	for end := time.Now().Add(time.Minute); n.store.Stats().ExpiredChunks < 2; time.Sleep(20 * time.Millisecond) {
		if n.store.Expire(); time.Now().After(end) {
			t.Fatal("nothing expires")
		}
	}
	f("expired", keyOf("m", "brief", "r15", 1, prompt), 0, miss.Expired, " before")

	if hit, why := a.ask(keyOf("m", "", strings.Repeat("long", 100), 1, prompt)); hit != 0 || !strings.HasPrefix(why.Request, "longlong") || len(why.Request) != 128 {
		t.Errorf("a long request id: %+v", why)
	}
	t.Run("windows", func(t *testing.T) {
		d := startDriven(t, t.TempDir(), "pool", server.Options{SeparateGroups: true})
		defer d.stop()
		e := d.newEngine(lmcache.EngineGroup{Layers: []int{0}, TokensPerBlock: 16, WindowTokens: -1},
			lmcache.EngineGroup{ID: 1, Layers: []int{1}, TokensPerBlock: 16, WindowTokens: 16, Recurrent: true})
		e.register()
		prompt := tokens(2*drivenChunk, 2)
		if got := e.storeBlocks(prompt, 0, 64, span(1, 4), []int{0, 0, 0, 24}); got != done {
			t.Fatalf("store: %+v", got)
		}
		hit := e.lookup(prompt[:drivenChunk], "w") // its state is not there
		got := d.Explain("w", 1)
		if len(got.Lookups) != 1 || hit != 0 || got.Lookups[0].Reason != miss.Window.Label() || got.Lookups[0].Group != 1 || !strings.Contains(got.Lookups[0].Text, "object group 1") {
			t.Fatalf("a hit of %d, %+v", hit, got)
		}
		provoked[got.Lookups[0].Reason] = true
	})
	t.Run("tiers", func(t *testing.T) { explainTiers(t) })
	t.Run("after a restart", func(t *testing.T) {
		dir := t.TempDir()
		n, stop := startNode(t, dir, 16, server.Options{})
		b := &asker{t: t, c: newClient(t, n.url), s: n.Server}
		b.store(b.register("m", 1, "bfloat16"), keyOf("m", "blue", "s", 1, prompt))
		stop()
		n, stop = startNode(t, dir, 16, server.Options{})
		defer stop()
		b = &asker{t: t, c: newClient(t, n.url), s: n.Server}
		b.register("m", 1, "bfloat16")
		hit, why := b.ask(keyOf("m", "", "r", 1, prompt))
		check("another salt, before the restart", hit, why, 0, miss.OtherName)
	})

	for _, r := range elsewhere {
		provoked[r.Label()] = true
	}
	docs, err := os.ReadFile("../docs/operate/explain.md")
	if err != nil {
		t.Fatal(err)
	}
	for r := range miss.NumReasons {
		label := miss.Reason(r).Label()
		if !provoked[label] {
			t.Errorf("%s was not provoked", label)
		}
		if miss.Reason(r) != miss.None && !strings.Contains(string(docs), "| `"+label+"` |") {
			t.Errorf("docs/operate/explain.md has no line for %s", label)
		}
	}
}

// explainTiers has a tier fail in each way.
func explainTiers(t *testing.T) {
	f := func(script string, want miss.Reason) {
		t.Helper()
		memory := tier.NewMemory(1 << 20)
		flaky, err := tiertest.NewFlaky(memory, script)
		if err != nil {
			t.Fatal(err)
		}
		defer flaky.Release()
		p, err := pool.Open(pool.Options{Name: "pool", Bytes: 16 * 4096, Dir: t.TempDir(), ChunkTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		limit := time.Minute
		if strings.HasSuffix(script, "hang") {
			limit = 50 * time.Millisecond
		}
		st := store.New(p, store.Options{Below: flaky, Write: store.WriteNever, LoadTimeout: limit})
		s := server.New(st, server.Options{ChunkTokens: 16, Log: slog.New(slog.DiscardHandler)})
		addr, err := s.Listen(t.Context(), "tcp://127.0.0.1:*")
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			flaky.Release()
			if err := errors.Join(s.Close(), st.Close()); err != nil {
				t.Error(err)
			}
		}()
		a := &asker{t: t, c: newClient(t, "tcp://"+addr), s: s}
		one := a.register("m", 1, "bfloat16")
		prompt := tokens(16, 1)
		a.store(one, keyOf("m", "", "s", 1, prompt))
		for seed := range 16 { // more than the pool has
			a.store(one, keyOf("m", "red", "s", 1, tokens(32, 100+seed)))
		}
		rank, _ := kv.NewRank(1, 0)
		data := make([]byte, 4096)
		key := kv.Key{Namespace: s.Namespaces()[0], Chunk: kv.ChunkHashes(prompt, 16)[0], Rank: rank}
		if err := memory.Write(t.Context(), key, tier.Meta{Len: 4096, Sum: xxh3.Hash(data)}, data); err != nil {
			t.Fatal(err)
		}
		hit, why := a.ask(keyOf("m", "", "r", 1, prompt))
		provoked[why.Reason] = true
		if hit != 0 || why.Reason != want.Label() || why.Model != "m" {
			t.Errorf("%s: a hit of %d, %+v, want %s", script, hit, why, want.Label())
		}
		if strings.Contains(why.Text, "to make room") || want == miss.BelowSlow && why.Gone != nil {
			t.Errorf("%s: %q, %+v: that the pool has evicted it is not why", script, why.Text, why.Gone)
		}
	}
	f("stat * hang", miss.BelowSlow)
	f("read * error", miss.BelowFailed)
	f("read * wrong", miss.BelowCorrupt)
}
