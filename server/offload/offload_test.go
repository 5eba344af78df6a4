// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/server/offload"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// What one engine stores, another one loads; rows of other groups, tenants, lengths and configurations are misses.
func TestEnginesShareRows(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	a, b := n.connect(helloOf("a")), n.connect(helloOf("b"))
	defer a.close()
	defer b.close()
	keys := keysOf(0, 4)
	keys[3].Group = 1
	if got := a.store("", keys); got != 4 {
		t.Fatalf("%d rows stored, want 4", got)
	}
	if got := a.store("", keys); got != 0 {
		t.Errorf("%d rows stored again", got)
	}
	if got := b.load("", keys); got != 4 {
		t.Errorf("%d rows loaded, want 4", got)
	}
	if got := b.load("", append(keysOf(50, 53), keys[1])); got != 1 {
		t.Errorf("%d rows loaded behind misses, want 1", got)
	}
	other := key(0)
	other.Group = 1
	outside := key(0)
	outside.Group = 2
	if got := b.load("", []vllm.Key{other, outside}); got != 0 {
		t.Errorf("%d rows of another group loaded", got)
	}
	if got := b.load("team-a", keys); got != 0 {
		t.Errorf("%d rows of another tenant loaded", got)
	}
	tp2, longer, canonical := helloOf("c"), helloOf("d"), helloOf("e")
	tp2.Namespace, longer.RowBytes, canonical.Canonical = `{"model_name":"m","tp_size":2}`, 2*rowBytes, true
	for _, h := range []vllm.Hello{tp2, longer, canonical} {
		e := n.connect(h)
		if got := e.load("", keys); got != 0 {
			t.Errorf("%+v loaded %d rows", h, got)
		}
		e.close()
	}
}

// Engines of unlike parallelism whose layout is canonical share rows, also where their rows have other lengths.
func TestCanonicalRowsOfOtherLengths(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	h := helloOf("tp2")
	h.Canonical = true
	a := n.connect(h)
	defer a.close()
	h.EngineID, h.RowBytes = "tp4", 2*rowBytes
	b := n.connect(h)
	defer b.close()
	a.store("", keysOf(0, 3))
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

// What a lookup found stays in place until it is released, whatever else is stored; then it may go.
func TestFoundRowsAreLentUntilReleased(t *testing.T) {
	n := start(t, t.TempDir(), setup{rows: 16, offload: offload.Options{Share: 0.5}})
	defer n.close()
	a, b := n.connect(helloOf("a")), n.connect(helloOf("b"))
	defer a.close()
	defer b.close()
	a.store("", keysOf(0, 4))
	id, places, err := b.client.Lookup("", "r", keysOf(0, 4), patience)
	if err != nil || places[3].Offset == vllm.NoPlace {
		t.Fatalf("%v, %v", places, err)
	}
	for i := 100; i < 160; i += 4 { // more than the pool has, many times
		a.store("", keysOf(i, i+4))
	}
	n.store.Clear(true)
	n.store.Expire()
	for i := 200; i < 240; i += 4 {
		a.store("", keysOf(i, i+4))
	}
	for i, p := range places {
		if string(b.client.Pool(p)) != string(body(key(i))) {
			t.Fatalf("row %d, which is lent, was written to", i)
		}
	}
	if err := b.client.Release(vllm.Released{ID: id}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the lookup is released", func() bool { return n.server.Engines()[1].LentBytes == 0 })
	if got := b.load("", keysOf(0, 4)); got != 0 {
		t.Errorf("%d rows are there after a clear", got)
	}
}

// One engine has no more than its share lent.
func TestShareOfOneEngine(t *testing.T) {
	n := start(t, t.TempDir(), setup{rows: 32, offload: offload.Options{Share: 0.25, MaxLent: 2}})
	defer n.close()
	a := n.connect(helloOf("a"))
	defer a.close()
	a.store("", keysOf(0, 7))
	a.store("", keysOf(7, 12))
	count := func(from, to int) (hits int) {
		t.Helper()
		_, places, err := a.client.Lookup("", "r", keysOf(from, to), patience)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range places {
			if p.Offset != vllm.NoPlace {
				hits++
			}
		}
		return hits
	}
	if got := count(0, 7); got != 7 {
		t.Fatalf("%d rows found, want 7", got)
	}
	if got := count(7, 12); got != 1 {
		t.Errorf("%d further rows lent, want 1: a quarter of the pool has 8", got)
	}
	if got := count(0, 1); got != 0 {
		t.Errorf("%d rows lent by a third lookup", got)
	}
}

// A store that was not committed is never visible, and its places come back: given up, or its engine gone.
func TestUncommittedStores(t *testing.T) {
	n := start(t, t.TempDir(), setup{rows: 16})
	defer n.close()
	a, b := n.connect(helloOf("a")), n.connect(helloOf("b"))
	defer b.close()
	id, places, err := a.client.Store("", "r1", keysOf(0, 2), patience)
	if err != nil || places[1].Offset == vllm.NoPlace {
		t.Fatalf("%v, %v", places, err)
	}
	if err := a.client.Commit(id, false); err != nil {
		t.Fatal(err)
	}
	if _, places, err = a.client.Store("", "r2", keysOf(0, 2), patience); err != nil || places[1].Offset == vllm.NoPlace {
		t.Fatalf("the rows of a store that was given up have no place: %v, %v", places, err)
	}
	if got := b.load("", keysOf(0, 2)); got != 0 {
		t.Errorf("%d rows loaded that were not committed", got)
	}
	a.close()
	testkit.Eventually(t, "the engine is gone", func() bool { return len(n.server.Engines()) == 1 })
	if s := n.store.Stats(); s.Transfers != 0 || s.StagedBytes != 0 || s.CondemnedBytes != 0 {
		t.Errorf("after the engine is gone: %d transfers, %d bytes staged, %d in quarantine", s.Transfers, s.StagedBytes, s.CondemnedBytes)
	}
	if got := b.store("", keysOf(0, 2)); got != 2 {
		t.Errorf("%d rows stored, want 2", got)
	}
}

// After a restart with the pool the rows are compared with their checksums first: what changed meanwhile is a miss.
func TestRestartComparesRows(t *testing.T) {
	dir := t.TempDir()
	n := start(t, dir, setup{})
	a := n.connect(helloOf("a"))
	a.store("", keysOf(0, 6))
	id, places, err := a.client.Lookup("", "r", keysOf(0, 6), patience)
	if err != nil {
		t.Fatal(err)
	}
	_ = a.client.Release(vllm.Released{ID: id}) // the connection ends
	a.close()
	n.close()
	seg, err := shm.Attach(filepath.Join(dir, "kvasir_t"))
	if err != nil {
		t.Fatal(err)
	}
	one, two := seg.Bytes(int64(places[1].Offset), rowBytes), seg.Bytes(int64(places[2].Offset), rowBytes)
	for i := range one { // swapped
		one[i], two[i] = two[i], one[i]
	}
	seg.Bytes(int64(places[4].Offset), rowBytes)[17]++ // stale
	if err := seg.Close(); err != nil {
		t.Fatal(err)
	}

	n = start(t, dir, setup{})
	defer n.close()
	b := n.connect(helloOf("b"))
	defer b.close()
	if got := b.load("", keysOf(0, 6)); got != 3 {
		t.Errorf("%d rows loaded after the restart, want 3 of 6", got)
	}
}

// Rows that only the tier below has come up for a lookup; a row that was cut or swapped there is a miss.
func TestRowsOfTheTierBelow(t *testing.T) {
	below := tier.NewMemory(1 << 30)
	dir := t.TempDir()
	o := setup{rows: 16, store: store.Options{Below: below, Place: "memory"}}
	n := start(t, dir, o)
	a := n.connect(helloOf("a"))
	a.store("", keysOf(0, 4))
	testkit.Eventually(t, "the rows are in the tier", func() bool { return n.store.Stats().WrittenChunks == 4 })
	for i := 100; i < 140; i += 4 {
		a.store("", keysOf(i, i+4))
	}
	if got := a.load("", keysOf(0, 4)); got != 4 {
		t.Errorf("%d rows came up, want 4", got)
	}
	if s := n.store.Stats(); s.BelowChunks < 1 {
		t.Errorf("%d rows came from the tier", s.BelowChunks)
	}
	a.close()
	n.close()
}

// A tier that names rows by their model gives them to the first lookups of a new server, before any store.
func TestFirstLookupFindsRowsThatATierNamesByTheirModel(t *testing.T) {
	files := t.TempDir()
	begin := func() *node {
		names := tier.NewNames()
		below, err := fs.Open(fs.Options{Path: files, Names: names})
		if err != nil {
			t.Fatal(err)
		}
		return start(t, t.TempDir(), setup{
			store: store.Options{Below: below, Place: "fs"},
			offload: offload.Options{Name: func(ns kv.Namespace, model, salt []byte, layout string) {
				names.AddLayout(ns, string(model), salt, layout)
			}},
		})
	}
	keys := keysOf(0, 4)
	keys[3].Group = 1
	n := begin()
	a := n.connect(helloOf("a"))
	for _, tenant := range []string{"", "team"} {
		a.store(tenant, keys)
	}
	testkit.Eventually(t, "the rows are in the tier", func() bool { return n.store.Stats().WrittenChunks == 8 })
	a.close()
	n.close()
	n = begin()
	defer n.close()
	a = n.connect(helloOf("a"))
	defer a.close()
	for _, tenant := range []string{"", "team"} {
		if got := a.load(tenant, keys); got != 4 {
			t.Errorf("tenant %q: %d rows came up, want 4", tenant, got)
		}
	}
}

// How a lookup ended is passed on as for other clients.
func TestLookupsAreExplained(t *testing.T) {
	ended := make(chan lookup.Outcome, 8)
	n := start(t, t.TempDir(), setup{offload: offload.Options{Ended: func(o *lookup.Outcome) { ended <- *o }}})
	defer n.close()
	a := n.connect(helloOf("a"))
	defer a.close()
	a.store("team", keysOf(0, 2))
	a.load("team", keysOf(0, 3))
	o := <-ended
	if string(o.Request) != "load" || string(o.Model) != "m" || string(o.Salt) != "team" || o.AskedTokens() != 48 || o.HitTokens() != 32 || o.Why != miss.NeverStored || !o.HashesOnly {
		t.Errorf("%+v", o)
	}
}

// What cannot be served is refused with a reason: another user, an engine id that is no file name, a region of another size.
func TestRefusals(t *testing.T) {
	var stranger atomic.Bool
	n := start(t, t.TempDir(), setup{offload: offload.Options{Identify: func(_ net.Conn, number uint64) (access.Caller, bool) {
		c := access.Self()
		c.Number = number
		return c, !stranger.Load()
	}}})
	defer n.close()
	f := func(h vllm.Hello, bytes int64, want string) {
		t.Helper()
		if e, err := n.try(h, bytes); err == nil || !errors.Is(err, vllm.ErrRefused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", h, err, want)
			if e != nil {
				e.close()
			}
		}
	}
	f(helloOf("a/b"), rowBytes*rows, "engine id")
	f(helloOf("../b"), rowBytes*rows, "engine id")
	f(helloOf("short"), rowBytes*rows-4096, "its region has")
	large := helloOf("large")
	large.RowBytes = 1 << 30
	large.Rows = 1
	if _, err := vllm.Dial(n.socket(), large, nil, 32); err == nil || !strings.Contains(err.Error(), "the pool") {
		t.Errorf("a row larger than the pool: %v", err)
	}
	stranger.Store(true)
	f(helloOf("stranger"), rowBytes*rows, "own user")
	if s := n.server.Stats(); s.Refused != 5 || s.Engines != 0 {
		t.Errorf("%+v", s)
	}
}

// Frames that cannot be read end their connection, and nothing else.
func TestMalformedFrames(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	a := n.connect(helloOf("a"))
	defer a.close()
	a.store("", keysOf(0, 2))
	h := helloOf("bad")
	greeting := vllm.AppendFrame(nil, vllm.TypeHello, h.Append(nil))
	for name, frames := range map[string][]byte{
		"no Hello":     vllm.AppendFrame(nil, vllm.TypeCommit, vllm.AppendCommit(nil, 1, true)),
		"too long":     {0xff, 0xff, 0xff, 0xff, 4},
		"empty":        {0, 0, 0, 0, 0},
		"unknown type": vllm.AppendFrame(greeting[:len(greeting):len(greeting)], 99, nil),
		"cut lookup":   vllm.AppendFrame(greeting[:len(greeting):len(greeting)], vllm.TypeLookup, []byte{1, 2, 3}),
		"cut release":  vllm.AppendFrame(greeting[:len(greeting):len(greeting)], vllm.TypeRelease, []byte{1}),
		"bad JSON":     vllm.AppendFrame(nil, vllm.TypeHello, []byte("{")),
	} {
		c := n.dialRaw()
		if _, err := c.Write(frames); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		_ = c.SetReadDeadline(time.Now().Add(patience))
		buf := make([]byte, 1<<16)
		var err error
		for err == nil {
			_, err = c.Read(buf)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: the connection stays", name)
		}
		_ = c.Close()
	}
	if got := a.load("", keysOf(0, 2)); got != 2 {
		t.Errorf("%d rows loaded beside them, want 2", got)
	}
}

// An engine that starts again under the same id, in the same region, is served beside what is left of the first connection.
func TestSameIDAgain(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	a := n.connect(helloOf("a"))
	defer a.close()
	a.store("", keysOf(0, 2))
	f, err := os.OpenFile(filepath.Join(n.dir, "vllm_offload_a.mmap"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	again, err := vllm.Dial(n.socket(), helloOf("a"), f, 32)
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t, client: again}
	if got := e.load("", keysOf(0, 2)); got != 2 {
		t.Errorf("%d rows loaded, want 2", got)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
	testkit.Eventually(t, "the second connection is gone", func() bool { return len(n.server.Engines()) == 1 })
	n.server.Tick()
	if left := n.server.Left(); len(left) != 0 {
		t.Errorf("a region in use is called left: %+v", left)
	}
}

const engineEnv = "KVASIR_TEST_VLLM_ENGINE"

// runEngine is an engine's process: it makes a region, stores row 0, has rows 1 and 2 staged and row 0 lent, says so, and lives
// until it is killed.
func runEngine(dir string) {
	region, err := shm.Create(filepath.Join(dir, "vllm_offload_killed.mmap"), rowBytes*rows)
	fail := func(err error) {
		if err != nil {
			os.Stdout.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
	}
	fail(err)
	f, err := os.OpenFile(region.Path(), os.O_RDWR, 0)
	fail(err)
	c, err := vllm.Dial(filepath.Join(dir, "tier.sock"), helloOf("killed"), f, 32)
	fail(err)
	id, places, err := c.Store("", "r", keysOf(0, 1), patience)
	fail(err)
	copy(c.Pool(places[0]), body(key(0)))
	fail(c.Commit(id, true))
	_, _, err = c.Store("", "r2", keysOf(1, 3), patience)
	fail(err)
	_, _, err = c.Lookup("", "r3", keysOf(0, 1), patience)
	fail(err)
	os.Stdout.WriteString("ready\n")
	select {}
}

// A killed engine leaves nothing: what it had staged and lent comes back, and its region goes once its process has ended.
func TestKilledEngine(t *testing.T) {
	n := start(t, t.TempDir(), setup{rows: 16})
	defer n.close()
	cmd := child(t, engineEnv, n.dir)
	if s := n.store.Stats(); s.StagedBytes != 2*rowBytes {
		t.Errorf("%d bytes staged", s.StagedBytes)
	}
	region := filepath.Join(n.dir, "vllm_offload_killed.mmap")
	n.server.Tick()
	if _, err := os.Stat(region); err != nil {
		t.Fatalf("the region of a living engine: %v", err)
	}
	held, err := shm.Attach(region) // as a worker of the engine that still runs
	if err != nil {
		t.Fatal(err)
	}
	kill(cmd)
	testkit.Eventually(t, "the engine is gone and its region is left", func() bool { return len(n.server.Engines()) == 0 && len(n.server.Left()) == 1 })
	if s := n.store.Stats(); s.Transfers != 0 || s.StagedBytes != 0 || s.CondemnedBytes != 0 {
		t.Errorf("%d transfers, %d bytes staged, %d in quarantine", s.Transfers, s.StagedBytes, s.CondemnedBytes)
	}
	n.server.Tick()
	if left := n.server.Left(); len(left) != 1 || !strings.Contains(left[0].Why, "map it") {
		t.Errorf("a region that a process maps: %+v", left)
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	n.server.Tick()
	if _, err := os.Stat(region); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the region is still there: %v", err)
	}
	if left, s := n.server.Left(), n.server.Stats(); len(left) != 0 || s.RegionsFreed != 1 {
		t.Errorf("%+v, %+v", left, s)
	}
	b := n.connect(helloOf("b"))
	defer b.close()
	if got := b.load("", keysOf(0, 3)); got != 1 {
		t.Errorf("%d rows loaded, want the committed one", got)
	}
}

// A region whose name leads to another file is not removed.
func TestRegionOfAnotherInode(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	a := n.connect(helloOf("a"))
	_ = a.client.Close()
	testkit.Eventually(t, "the engine is gone and its region is left", func() bool { return len(n.server.Left()) == 1 })
	if err := a.region.Unlink(); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(n.dir, "vllm_offload_a.mmap")
	if err := os.WriteFile(other, []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.server.Tick()
	if _, err := os.Stat(other); err != nil {
		t.Errorf("the file of another engine: %v", err)
	}
	for _, r := range n.server.Left() { // it may be named as one of an engine that was never connected
		if r.PID != 0 {
			t.Errorf("%+v", r)
		}
	}
	if err := a.region.Close(); err != nil {
		t.Fatal(err)
	}
}

// A region of an engine that was never connected is named, not removed.
func TestStrangersRegion(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	path := filepath.Join(n.dir, "vllm_offload_stranger.mmap")
	if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	used, err := shm.Create(filepath.Join(n.dir, "vllm_offload_used.mmap"), 4096)
	if err != nil {
		t.Fatal(err)
	}
	n.server.Tick()
	if left := n.server.Left(); len(left) != 1 || left[0].Name != "vllm_offload_stranger.mmap" || left[0].Bytes != 4096 || left[0].Why == "" {
		t.Errorf("%+v", left)
	}
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
	if err := errors.Join(used.Unlink(), used.Close()); err != nil {
		t.Error(err)
	}
}

// A node that ends closes its connections; one that starts again over the pool serves the same rows.
func TestNodeEnds(t *testing.T) {
	dir := t.TempDir()
	n := start(t, dir, setup{})
	a := n.connect(helloOf("a"))
	a.store("", keysOf(0, 2))
	_, places, err := a.client.Lookup("", "r", keysOf(0, 2), patience)
	if err != nil || places[0].Offset == vllm.NoPlace {
		t.Fatalf("%v, %v", places, err)
	}
	n.close()
	<-a.client.Ended()
	if _, _, err := a.client.Lookup("", "r", keysOf(0, 2), patience); err == nil {
		t.Error("a lookup without a node has an answer")
	}
	a.close()
	n = start(t, dir, setup{})
	defer n.close()
	b := n.connect(helloOf("a"))
	defer b.close()
	if got := b.load("", keysOf(0, 2)); got != 2 {
		t.Errorf("%d rows loaded, want 2", got)
	}
}
