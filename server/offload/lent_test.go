// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/offload"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// byName is a tier as resp: it has objects by the names that LMCache gives them, and no checksums.
type byName struct {
	names *tier.Names
	mu    sync.Mutex
	of    map[string][]byte
}

func (b *byName) get(k kv.Key) ([]byte, string) {
	n, ok := b.names.Of(k.Namespace)
	if !ok {
		return nil, ""
	}
	name, _ := n.LMCache(k)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of[name], name
}

func (b *byName) Stat(_ context.Context, keys []kv.Key, metas []tier.Meta) error {
	for i, k := range keys {
		v, _ := b.get(k)
		metas[i] = tier.Meta{Len: int64(len(v)), NoSum: len(v) > 0}
	}
	return nil
}

func (b *byName) Read(_ context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	v, _ := b.get(k)
	if len(v) != len(dst) {
		return tier.Meta{}, tier.ErrMissing
	}
	copy(dst, v)
	return tier.Meta{Len: int64(len(v)), NoSum: true}, nil
}

func (b *byName) Write(_ context.Context, k kv.Key, _ tier.Meta, src []byte) error {
	had, name := b.get(k)
	if name == "" {
		return b.names.Unnamed(k)
	}
	if had == nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.of[name] = bytes.Clone(src)
	}
	return nil
}

func (b *byName) Delete(context.Context, []kv.Key) error { return nil }
func (b *byName) Close() error                           { return nil }

// In a tier that has objects by the names of LMCache's layouts, rows of other groups, tenants and configurations are others, although
// their hashes are the same; and a server that just started finds all of them.
func TestRowsInTiersWithNames(t *testing.T) {
	dir, of := t.TempDir(), map[string][]byte{}
	keys := keysOf(0, 4)
	keys[2].Group, keys[3] = 1, vllm.Key{Hash: keys[0].Hash, Group: 1} // of two groups the same hash
	tp2 := helloOf("tp2")
	tp2.Namespace = `{"model_name":"m","tp_size":2}`
	begin := func(at string) *node {
		names := tier.NewNames()
		return start(t, at, setup{
			store: store.Options{Below: &byName{names: names, of: of}, Place: "names"},
			offload: offload.Options{Name: func(ns kv.Namespace, model, salt []byte, layout string) {
				names.AddLayout(ns, string(model), salt, layout)
			}},
		})
	}
	n := begin(dir)
	a := n.connect(helloOf("a"))
	a.store("", keys)
	a.store("team", keys)
	testkit.Eventually(t, "the rows are in the tier", func() bool { return n.store.Stats().WrittenChunks == 8 })
	a.close()
	n.close()

	n = begin(t.TempDir())
	defer n.close()
	a = n.connect(helloOf("a"))
	defer a.close()
	for _, tenant := range []string{"", "team"} {
		if got := a.load(tenant, keys); got != 4 { // it compares bytes
			t.Errorf("%q: %d rows loaded, want 4", tenant, got)
		}
	}
	b := n.connect(tp2)
	defer b.close()
	if got := b.load("", keys); got != 0 {
		t.Errorf("%d rows of another configuration loaded", got)
	}
}

// Keys that come twice in one lookup or store are answered twice, and lent and stored once.
func TestKeysThatComeTwice(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	a := n.connect(helloOf("a"))
	defer a.close()
	twice := append(keysOf(0, 2), keysOf(0, 2)...)
	if got := a.store("", twice); got != 2 {
		t.Errorf("%d rows stored, want 2", got)
	}
	if got := a.load("", twice); got != 4 {
		t.Errorf("%d rows loaded, want 4", got)
	}
	testkit.Eventually(t, "all is released", func() bool { return n.server.Stats().LentBytes == 0 && n.store.Stats().Transfers == 0 })
}

// places asks for places of rows, and fails where one has none.
func (e *engine) places(keys []vllm.Key) []vllm.Place {
	e.t.Helper()
	_, places, err := e.client.Store("", "places", keys, patience)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, p := range places {
		if p.Offset == vllm.NoPlace {
			e.t.Fatalf("no place: %v", places)
		}
	}
	return places
}

// crowd stores many more rows than the pool has, and fails where one gets a place that is another engine's.
func (e *engine) crowd(taken []vllm.Place) {
	e.t.Helper()
	for i := 1000; i < 1100; i += 2 {
		id, places, err := e.client.Store("", "crowd", keysOf(i, i+2), patience)
		if err != nil {
			e.t.Fatal(err)
		}
		for _, p := range places {
			if p.Offset != vllm.NoPlace && slices.Contains(taken, p) {
				e.t.Fatalf("the place at %d was given out a second time", p.Offset)
			}
		}
		if err := e.client.Commit(id, true); err != nil {
			e.t.Fatal(err)
		}
	}
}

// An engine may be stopped in the middle of a copy while the node is restarted in order: what it writes once it goes on is not the
// place of another row.
func TestPlacesOutliveTheNodeThatLentThem(t *testing.T) {
	dir := t.TempDir()
	n := start(t, dir, setup{rows: 16})
	a := n.connect(helloOf("a"))
	defer a.close()
	taken := a.places(keysOf(0, 2))
	n.close()
	<-a.client.Ended()
	n = start(t, dir, setup{rows: 16})
	defer n.close()
	b := n.connect(helloOf("b"))
	defer b.close()
	b.crowd(taken)
	if got := b.load("", keysOf(0, 2)); got != 0 {
		t.Errorf("%d rows loaded that were not committed", got)
	}
}

// An engine that ends its side when the node ends has its places back at once: nothing of it is in quarantine after a restart in order.
func TestPlacesOfAnEngineThatSeesTheEnd(t *testing.T) {
	dir := t.TempDir()
	o := setup{rows: 16, offload: offload.Options{Grace: patience}}
	n := start(t, dir, o)
	a := n.connect(helloOf("a"))
	a.places(keysOf(0, 2))
	var closed sync.WaitGroup
	closed.Go(func() {
		<-a.client.Ended()
		a.close()
	})
	n.close()
	closed.Wait()
	n = start(t, dir, o)
	defer n.close()
	if s := n.store.Stats(); s.Transfers != 0 || s.StagedBytes != 0 || s.CondemnedBytes != 0 {
		t.Errorf("%d transfers, %d bytes staged, %d in quarantine", s.Transfers, s.StagedBytes, s.CondemnedBytes)
	}
}

// A connection that the node ends, for a frame that cannot be read, keeps its places until the engine has closed it, too.
func TestPlacesOfAConnectionThatTheNodeEnds(t *testing.T) {
	n := start(t, t.TempDir(), setup{rows: 16})
	defer n.close()
	b := n.connect(helloOf("b"))
	defer b.close()
	c := n.dialRaw()
	defer c.Close()
	conn, h := vllm.NewConn(c), helloOf("a")
	if err := conn.WriteFile(vllm.TypeHello, h.Append, nil); err != nil {
		t.Fatal(err)
	}
	_, _, pool, err := conn.ReadFirst()
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	ask := vllm.Ask{ID: 1, Keys: keysOf(0, 2)}
	if err := conn.Write(vllm.TypeStore, func(dst []byte) []byte { return vllm.AppendAsk(dst, &ask, 32) }); err != nil {
		t.Fatal(err)
	}
	_, body, err := conn.Read()
	if err != nil {
		t.Fatal(err)
	}
	_, taken, err := vllm.DecodePlaces(body)
	if err != nil || len(taken) != 2 || taken[1].Offset == vllm.NoPlace {
		t.Fatalf("%v, %v", taken, err)
	}
	if err := conn.Write(99, func(dst []byte) []byte { return dst }); err != nil {
		t.Fatal(err)
	}
	if _, _, err := conn.Read(); !errors.Is(err, io.EOF) {
		t.Fatalf("the connection stands: %v", err)
	}
	b.crowd(taken)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the places come back", func() bool { return n.store.Stats().StagedBytes == 0 && len(n.server.Engines()) == 1 })
	if got := b.store("", keysOf(0, 2)); got != 2 {
		t.Errorf("%d rows stored, want 2", got)
	}
}

// A tenant comes from a client of the engine: one that is no name costs that request its hits, and nobody the connection.
func TestTenantThatIsNoName(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	a := n.connect(helloOf("a"))
	defer a.close()
	a.store("", keysOf(0, 2))
	for _, tenant := range []string{"a/b", "a@b", `a\b`, "\x00", strings.Repeat("x", 129)} {
		if got := a.load(tenant, keysOf(0, 2)); got != 0 {
			t.Errorf("%q: %d rows loaded", tenant, got)
		}
		if got := a.store(tenant, keysOf(0, 2)); got != 0 {
			t.Errorf("%q: %d rows stored", tenant, got)
		}
	}
	if got := a.load("", keysOf(0, 2)); got != 2 {
		t.Errorf("%d rows loaded afterwards, want 2", got)
	}
	if s := n.server.Stats(); s.Malformed != 0 || s.Connected != 1 {
		t.Errorf("%+v", s)
	}
}

// An engine that says that it loaded more than it was lent counts for what it was lent.
func TestLoadedRowsAreThoseThatWereLent(t *testing.T) {
	var loaded atomic.Int64
	n := start(t, t.TempDir(), setup{offload: offload.Options{Loaded: func(_ string, _ []byte, _ int64, rows int) { loaded.Add(int64(rows)) }}})
	defer n.close()
	a := n.connect(helloOf("a"))
	defer a.close()
	a.store("", keysOf(0, 2))
	id, _, err := a.client.Lookup("", "r", keysOf(0, 3), patience)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.client.Release(vllm.Released{ID: id, Loaded: 1<<32 - 1}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "it is released", func() bool { return n.server.Stats().LentBytes == 0 && loaded.Load() > 0 })
	if s := n.server.Stats(); s.Loaded != 2 || s.LoadedBytes != 2*rowBytes || loaded.Load() != 2 {
		t.Errorf("%+v, %d rows passed on", s, loaded.Load())
	}
}

// gated is a tier whose reads wait.
type gated struct {
	tier.Tier
	once sync.Once
	open chan struct{}
}

func (g *gated) Release() { g.once.Do(func() { close(g.open) }) }

func (g *gated) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	<-g.open
	return g.Tier.Read(ctx, k, dst)
}

// slow is a node whose tier below answers once it is released. The rows 0 to 11 are there.
func slow(t *testing.T, share float64) (*node, *gated) {
	t.Helper()
	below := &gated{Tier: tier.NewMemory(1 << 30), open: make(chan struct{})}
	n := start(t, t.TempDir(), setup{rows: 32, store: store.Options{Below: below, Place: "memory", LoadTimeout: patience}, offload: offload.Options{Share: share, Patience: patience}})
	a := n.connect(helloOf("a"))
	a.store("", keysOf(0, 6))
	a.store("", keysOf(6, 12))
	testkit.Eventually(t, "the rows are in the tier", func() bool { return n.store.Stats().WrittenChunks == 12 })
	n.store.Clear(false)
	a.close()
	return n, below
}

// An engine's share holds for lookups that wait for the tier below at one time, too.
func TestShareOfLookupsThatWait(t *testing.T) {
	n, below := slow(t, 0.25)
	defer n.close()
	defer below.Release()
	a := n.connect(helloOf("a"))
	defer a.close()
	var hits atomic.Int64
	var all sync.WaitGroup
	for _, from := range []int{0, 6} {
		all.Go(func() {
			_, places, err := a.client.Lookup("", "r", keysOf(from, from+6), patience)
			if err != nil {
				t.Error(err)
			}
			for _, p := range places {
				if p.Offset != vllm.NoPlace {
					hits.Add(1)
				}
			}
		})
	}
	testkit.Eventually(t, "both wait", func() bool { return n.store.Stats().PendingLookups == 2 })
	below.Release()
	all.Wait()
	if got := n.server.Engines()[0].LentBytes; hits.Load() != 8 || got != 8*rowBytes {
		t.Errorf("%d rows lent, %d bytes, want 8: a quarter of the pool", hits.Load(), got)
	}
}

// Of two lookups of one id that wait at one time one is lent rows. All come back when they are released, or when the engine has gone.
func TestLookupsOfOneIDThatWait(t *testing.T) {
	n, below := slow(t, 1)
	defer n.close()
	defer below.Release()
	c := n.dialRaw()
	defer c.Close()
	conn, h := vllm.NewConn(c), helloOf("a")
	if err := conn.WriteFile(vllm.TypeHello, h.Append, nil); err != nil {
		t.Fatal(err)
	}
	_, _, pool, err := conn.ReadFirst()
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for _, from := range []int{0, 6} {
		ask := vllm.Ask{ID: 7, Request: []byte("r"), Keys: keysOf(from, from+6)}
		if err := conn.Write(vllm.TypeLookup, func(dst []byte) []byte { return vllm.AppendAsk(dst, &ask, 32) }); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "both wait", func() bool { return n.store.Stats().PendingLookups == 2 })
	below.Release()
	lent := 0
	for range 2 {
		_, body, err := conn.Read()
		if err != nil {
			t.Fatal(err)
		}
		_, places, err := vllm.DecodePlaces(body)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range places {
			if p.Offset != vllm.NoPlace {
				lent++
			}
		}
	}
	if lent != 6 {
		t.Errorf("%d rows lent, want those of one lookup", lent)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the engine is gone", func() bool { return len(n.server.Engines()) == 0 })
	if s := n.store.Stats(); s.Transfers != 0 {
		t.Errorf("%d transfers are left", s.Transfers)
	}
}

// A canonical row that only the tier below has is found by engines whose rows have another length, as one in the pool is.
func TestCanonicalRowsOfTheTierBelow(t *testing.T) {
	n := start(t, t.TempDir(), setup{rows: 16, store: store.Options{Below: tier.NewMemory(1 << 30), Place: "memory"}})
	defer n.close()
	h := helloOf("tp2")
	h.Canonical = true
	a := n.connect(h)
	defer a.close()
	h.EngineID, h.RowBytes = "tp4", 2*rowBytes
	b := n.connect(h)
	defer b.close()
	a.store("", keysOf(0, 3))
	testkit.Eventually(t, "the rows are in the tier", func() bool { return n.store.Stats().WrittenChunks == 3 })
	n.store.Clear(false)
	id, places, err := b.client.Lookup("", "r", keysOf(0, 3), patience)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range places {
		if p.Bytes != rowBytes || string(b.client.Pool(p)) != string(body(key(i))) {
			t.Errorf("row %d: %+v", i, p)
		}
	}
	if err := b.client.Release(vllm.Released{ID: id, Loaded: 3}); err != nil {
		t.Fatal(err)
	}
}
