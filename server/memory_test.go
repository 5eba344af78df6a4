// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

const mib = 1 << 20

var mibLayout = kv.Layout{SinglePlane: true, Layers: 1, Slots: 16, Hidden: 32 << 10, DType: "bfloat16"} // 1 MiB

// provider is a server whose pool is in a small file system.
type provider struct {
	*server.Server
	t     *testing.T
	store *store.Store
	mem   *shm.Segment // as an engine maps the pool
	log   *logBuffer
	stop  func()
}

func startProvider(t *testing.T, dir, name string, bytes int64, so store.Options, o server.Options) *provider {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: name, Bytes: bytes, Dir: dir, ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	n := &provider{t: t, log: new(logBuffer)}
	o.ChunkTokens, o.Log = 16, slog.New(slog.NewTextHandler(n.log, nil))
	so.Log = o.Log
	n.store = store.New(p, so)
	n.Server = server.New(n.store, o)
	if n.mem, err = shm.Attach(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
	n.stop = func() {
		if err := errors.Join(n.Close(), n.store.Close(), n.mem.Close()); err != nil {
			t.Error(err)
		}
	}
	register(t, n.Server, 7, mibLayout)
	return n
}

// run does the background work until the returned function is called.
func (n *provider) run() (end func()) {
	ctx, cancel := context.WithCancel(n.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.Run(ctx)
	}()
	return func() { cancel(); <-ended }
}

// write stores prompts of one chunk as an engine does: it writes where it is told,
// and nothing guards it. It returns how many chunks of 1 MiB the pool then keeps.
func (n *provider) write(seed, prompts int) int {
	n.t.Helper()
	for i := range prompts {
		k := promptKey(100*seed+i, 1)
		got := prepareStore(n.t, n.Server, 7, k)
		if len(got.Slots) != 1 {
			n.t.Fatalf("prompt %d: %d places", i, len(got.Slots))
		}
		slot := got.Slots[0]
		if err := shm.Guard(func() {
			b := n.mem.Bytes(slot.Offset, slot.Length)
			for i := range b {
				b[i] = byte(seed)
			}
		}); err != nil {
			n.t.Errorf("an engine that writes at %d would be killed: %v", slot.Offset, err)
		}
		if !commitStore(n.Server, 7, k) {
			n.t.Errorf("the commit of prompt %d is declined", i)
		}
	}
	return n.store.Stats().Resident
}

// health returns whether the server is healthy, and why not.
func (n *provider) health() (int, string) {
	if n.Healthy() {
		return 200, ""
	}
	return 503, strings.Join(n.Unhealthy(), "; ")
}

// status returns a number of the pool's status.
func (n *provider) pool(name string) int64 {
	b, err := json.Marshal(n.Status())
	var body struct {
		L1 map[string]any `json:"l1"`
	}
	if err = errors.Join(err, json.Unmarshal(b, &body)); err != nil {
		n.t.Fatal(err)
	}
	v, ok := body.L1[name].(float64)
	if !ok {
		n.t.Fatalf("no %s in %v", name, body.L1)
	}
	return int64(v)
}

// Two servers whose pools fit one by one and not together: the second hands out only
// what has memory, says so in health, status and log, and takes the rest when there
// is memory again. No engine is killed, in either.
func TestOvercommittedMemoryIsNotHandedOut(t *testing.T) {
	testkit.SmallFS(t, 40*mib, func(t *testing.T, dir string) {
		a := startProvider(t, dir, "a", 24*mib, store.Options{TrustUnsummed: true, PopulateRate: 1 << 40}, server.Options{})
		b := startProvider(t, dir, "b", 24*mib, store.Options{TrustUnsummed: true, PopulateRate: 1 << 40}, server.Options{})
		defer b.stop()
		endA := a.run()
		testkit.Eventually(t, "a's memory", func() bool { return a.pool("usable_bytes") == 24*mib })
		endB := b.run()
		defer endB()
		testkit.Eventually(t, "b's trouble", func() bool { return !b.Healthy() })
		usable := b.pool("usable_bytes")
		if usable <= 0 || usable >= 24*mib {
			t.Errorf("%d bytes are usable", usable)
		}
		if code, why := b.health(); code != 503 || !strings.Contains(why, "has no memory for the whole pool") {
			t.Errorf("health %d, %q", code, why)
		}
		testkit.Eventually(t, "the line", func() bool { return strings.Contains(b.log.String(), "level=ERROR") })
		if code, why := a.health(); code != 200 || why != "" {
			t.Errorf("a: health %d, %q", code, why)
		}
		for seed := range 3 { // the second and third evict what was before
			if got := b.write(seed+1, 24); int64(got)*mib != usable {
				t.Errorf("b keeps %d chunks of 1 MiB, %d bytes are usable", got, usable)
			}
			if got := a.write(seed+1, 24); got != 24 {
				t.Errorf("a keeps %d chunks", got)
			}
		}
		endA()
		if err := a.store.Files().Remove(); err != nil {
			t.Fatal(err)
		}
		a.stop()
		for b.pool("usable_bytes") < 24*mib {
			if err := b.ProvideMore(); err != nil {
				t.Fatal(err)
			}
		}
		if code, why := b.health(); code != 200 {
			t.Errorf("with memory again: health %d, %q", code, why)
		}
		if got := b.write(9, 24); got != 24 {
			t.Errorf("with memory again: %d chunks", got)
		}
	})
}

// A file system that others fill before the pool has its memory, or after: stores
// are declined or done, and nobody is killed.
func TestFileSystemFilledByOthers(t *testing.T) {
	testkit.SmallFS(t, 40*mib, func(t *testing.T, dir string) {
		early := startProvider(t, dir, "early", 16*mib, store.Options{TrustUnsummed: true, PopulateRate: 1 << 20}, server.Options{})
		defer early.stop()
		late := startProvider(t, dir, "late", 8*mib, store.Options{TrustUnsummed: true, PopulateRate: 1 << 40}, server.Options{Pickle: server.PickleOn})
		defer late.stop()
		end := late.run()
		defer end()
		testkit.Eventually(t, "its memory", func() bool { return late.pool("usable_bytes") == 8*mib })
		if got := early.write(1, 2); got != 2 {
			t.Fatalf("%d chunks", got)
		}
		first := early.pool("usable_bytes")
		other := filepath.Join(dir, "other")
		testkit.FillFS(t, dir, other, 0)
		for seed := range 3 {
			if got := early.write(seed+2, 16); int64(got)*mib != first {
				t.Errorf("%d chunks where %d bytes have memory", got, first)
			}
			if got := late.write(seed+2, 8); got != 8 {
				t.Errorf("%d chunks where 8 MiB have memory", got)
			}
		}
		if early.Healthy() || !late.Healthy() {
			t.Errorf("health %v, %v; want false, true", early.Healthy(), late.Healthy())
		}
		if err := os.Remove(other); err != nil {
			t.Fatal(err)
		}
		if err := early.ProvideMore(); err != nil || !early.Healthy() {
			t.Errorf("memory again: %v, healthy %v", err, early.Healthy())
		}
	})
}

// A request that needs more than has been provided gets it at once, without a server
// that runs in the background: nothing is evicted while the pool is not used up.
func TestMemoryIsProvidedAheadOfRequests(t *testing.T) {
	dir := t.TempDir()
	n := startProvider(t, dir, "p", 64*mib, store.Options{TrustUnsummed: true, PopulateRate: 1}, server.Options{})
	for seed := range 8 {
		if got := n.write(seed, 8); got != 8*(seed+1) {
			t.Errorf("%d chunks after %d", got, 8*(seed+1))
		}
	}
	if st := n.store.Stats(); st.EvictedChunks != 0 || st.Resident != 64 {
		t.Errorf("%+v", st)
	}
	n.stop()
	n = startProvider(t, dir, "p", 64*mib, store.Options{TrustUnsummed: true, PopulateRate: 1}, server.Options{})
	defer n.stop()
	if got := n.pool("usable_bytes"); got != 64*mib {
		t.Errorf("after a restart %d bytes are usable", got)
	}
	v, hits := &visitor{t, n.Server, sameUser, 7}, 0
	for seed := range 8 {
		for i := range 8 {
			hits += v.lookup(*promptKey(100*seed+i, 1))
		}
	}
	if hits != 64 {
		t.Errorf("%d chunks of 64 are hits after a restart", hits)
	}
}

// Memory for the chunks without memory for the index is no memory: nothing is handed
// out, health says so, and it goes on when there is some.
func TestIndexWithoutMemory(t *testing.T) {
	testkit.SmallFS(t, 8*mib, func(t *testing.T, dir string) {
		p, err := pool.Open(pool.Options{Name: "p", Bytes: 2 * mib, Align: 64, Dir: dir, ChunkTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		st := store.New(p, store.Options{TrustUnsummed: true, PopulateRate: 1})
		s := server.New(st, server.Options{ChunkTokens: 16, Log: slog.New(slog.DiscardHandler)})
		defer func() {
			if err := errors.Join(s.Close(), st.Close()); err != nil {
				t.Error(err)
			}
		}()
		register(t, s, 7, smallLayout)
		other := filepath.Join(dir, "other")
		testkit.FillFS(t, dir, other, 2*mib)
		if err := s.ProvideMore(); err == nil || s.Healthy() {
			t.Errorf("%v, healthy %v", err, s.Healthy())
		}
		if got := prepareStore(t, s, 7, promptKey(1, 1)); len(got.Slots) != 0 {
			t.Errorf("%d places", len(got.Slots))
		}
		if err := os.Remove(other); err != nil {
			t.Fatal(err)
		}
		if err := s.ProvideMore(); err != nil || !s.Healthy() {
			t.Errorf("%v, healthy %v", err, s.Healthy())
		}
		if got := prepareStore(t, s, 7, promptKey(2, 1)); len(got.Slots) != 1 {
			t.Errorf("%d places with memory", len(got.Slots))
		}
	})
}

// With populating off everything is handed out, and nothing is unhealthy.
func TestWithoutPopulatingEverythingIsHandedOut(t *testing.T) {
	n := startProvider(t, t.TempDir(), "p", 16*mib, store.Options{TrustUnsummed: true}, server.Options{})
	defer n.stop()
	if got := n.write(1, 16); got != 16 || !n.Healthy() {
		t.Errorf("%d chunks, healthy %v", got, n.Healthy())
	}
}
