// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim/demo"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

var smallLayout = kv.Layout{SinglePlane: true, Layers: 1, Slots: 16, Hidden: 128, DType: "bfloat16"} // 4096 bytes

// node is a server on a free port, in its own folder instead of /dev/shm.
type node struct {
	*server.Server
	store *store.Store
	url   string
	dir   string
	log   *logBuffer
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func startNode(t *testing.T, dir string, chunks int, o server.Options) (*node, func()) {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: int64(chunks) * 4096, Dir: dir, ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{store: store.New(p, store.Options{TrustUnsummed: true}), dir: dir, log: new(logBuffer)}
	o.ChunkTokens = 16
	o.Log = slog.New(slog.NewTextHandler(n.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	n.Server = server.New(n.store, o)
	addr, err := n.Listen(t.Context(), fmt.Sprint("tcp://127.0.0.1:", testkit.FreePort(t))) // tests listen there again
	if err != nil {
		t.Fatal(err)
	}
	n.url = "tcp://" + addr
	return n, func() {
		if err := errors.Join(n.Close(), n.store.Close()); err != nil {
			t.Error(err)
		}
	}
}

func newClient(t *testing.T, url string) *lmcache.Client {
	t.Helper()
	c, err := lmcache.NewClient(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// answered waits for an answer of the server that was started last: a client may have been connected to one before, and calls over
// that connection fail.
func answered(t *testing.T, c *lmcache.Client) {
	t.Helper()
	testkit.Eventually(t, "the server answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := c.ChunkTokens(ctx)
		return err == nil
	})
}

func tokens(n, seed int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i*31 + seed*1000003)
	}
	return out
}

// Two workers, store and retrieve, every byte; then the workload player.
func TestStoreAndRetrieve(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	ctx := t.Context()
	c := newClient(t, n.url)
	o := connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: n.dir}
	a, err := connector.OpenPoolClient(ctx, c, o)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close(ctx)
	b, err := connector.OpenPoolClient(ctx, c, o)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close(ctx)
	k := lmcache.Key{Tokens: tokens(70, 1), End: 64, RequestID: "r"}
	stored, err := a.Store(ctx, k, 16, func(i int, p []byte) {
		for j := range p {
			p[j] = byte(i + j)
		}
	})
	if err != nil || stored != 4 {
		t.Fatalf("stored %d, %v", stored, err)
	}
	if stored, err = b.Store(ctx, k, 16, func(int, []byte) { t.Error("a chunk was stored twice") }); err != nil || stored != 0 {
		t.Fatalf("stored %d again, %v", stored, err)
	}
	if hit, err := b.Lookup(ctx, k); err != nil || hit != 4 {
		t.Fatalf("hit %d, %v", hit, err)
	}
	wrong := 0
	ok, err := b.Retrieve(ctx, k, 16, func(i int, p []byte) {
		for j := range p {
			if p[j] != byte(i+j) {
				wrong++
			}
		}
	})
	if err != nil || !ok || wrong > 0 {
		t.Fatalf("retrieve %v, %v, %d wrong bytes", ok, err, wrong)
	}
	if ok, err := b.Retrieve(ctx, k, 16, func(int, []byte) {}); err != nil || ok {
		t.Fatalf("retrieve without a pin: %v, %v", ok, err)
	}
	if !strings.Contains(n.log.String(), "level=DEBUG msg=stored request=r tokens=64 chunks=4 bytes=16384") {
		t.Errorf("log:\n%s", n.log)
	}
}

func TestPlayWorkload(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 2000, server.Options{})
	defer stop()
	r, err := demo.Play(t.Context(), workload.Each(workload.Chats(60, workload.ChatOptions{Seed: 3, Turns: 1 << 10})), demo.PlayOptions{URL: n.url, Model: "m", Layout: smallLayout, Workers: 3, ShmDir: n.dir})
	if err != nil {
		t.Fatal(err)
	}
	if r.Requests != 60 || r.WrongBytes != 0 || r.HitTokens == 0 || r.LoadedBytes == 0 {
		t.Fatalf("%+v", r)
	}
	if st := n.store.Stats(); st.Transfers != 0 || st.Sessions != 0 {
		t.Fatalf("left %+v", st)
	}
}

// A workload is played in memory that does not grow with the names of its blocks: here 2,000 requests whose names would take 32 MB. An error of the
// requests is that of the play, which keeps what was done.
func TestPlayWorkloadInBoundedMemory(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 200, server.Options{})
	defer stop()
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	const requests = 2000
	broken := errors.New("line 7 is bad")
	before, most, end := int64(0), int64(0), error(nil)
	made := func(yield func(workload.Request, error) bool) {
		for i := range int64(requests) {
			q := workload.Request{Input: 32, BlockTokens: 16, Blocks: make([]int64, 2000)}
			q.Blocks[0], q.Blocks[1] = i%50, i%50+50
			switch {
			case i == requests/10:
				before = heap()
			case i > requests/10 && i%400 == 0:
				most = max(most, heap()-before)
			case i == 20 && end != nil:
				yield(workload.Request{}, end)
				return
			}
			if !yield(q, nil) {
				return
			}
		}
	}
	play := func() (*demo.PlayReport, error) {
		return demo.Play(t.Context(), made, demo.PlayOptions{URL: n.url, Model: "m", Layout: smallLayout, Workers: 2, ShmDir: n.dir})
	}
	if r, err := play(); err != nil || r.Requests != requests || len(r.Lookups) != requests || r.WrongBytes != 0 || r.HitTokens < 1900*32 {
		t.Fatalf("%+v, %v", r, err)
	}
	if most > 8<<20 {
		t.Errorf("%d bytes of heap more than at the tenth part, 8 MiB are allowed", most)
	}
	end = broken
	if r, err := play(); !errors.Is(err, broken) || r == nil || r.Requests != 20 {
		t.Errorf("%+v, %v", r, err)
	}
}

// The server is killed and comes back, empty or with its pool. Calls fail in
// between. An empty one makes the worker register again by its first heartbeat;
// one with its pool knows the worker and its chunks.
func TestServerRestart(t *testing.T) {
	for _, cold := range []bool{true, false} {
		t.Run(fmt.Sprint("cold ", cold), func(t *testing.T) { restart(t, cold) })
	}
}

func restart(t *testing.T, cold bool) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 16, server.Options{})
	ctx := t.Context()
	c := newClient(t, n.url)
	w, err := connector.OpenPoolClient(ctx, c, connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close(ctx)
	fill := func(_ int, b []byte) { copy(b, "content") }
	old := lmcache.Key{Tokens: tokens(32, 7), End: 32, RequestID: "old"}
	if stored, err := w.Store(ctx, old, 16, fill); err != nil || stored != 2 {
		t.Fatal(stored, err)
	}
	port := n.url[strings.LastIndex(n.url, ":"):]
	stop()
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := c.Call(short, lmcache.OpNoop); err == nil {
		t.Fatal("a dead server answered")
	}
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 16 * 4096, Dir: dir, ChunkTokens: 16, Cold: cold})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{TrustUnsummed: true})
	again := server.New(st, server.Options{ChunkTokens: 16, Log: slog.New(slog.DiscardHandler)})
	defer func() { _ = errors.Join(again.Close(), st.Close()) }()
	if _, err := again.Listen(ctx, "tcp://127.0.0.1"+port); err != nil {
		t.Fatal(err)
	}
	answered(t, c)
	k := lmcache.Key{Tokens: tokens(16, 1), End: 16, RequestID: "r"}
	if cold {
		if stored, err := w.Store(ctx, k, 16, fill); err != nil || stored != 0 {
			t.Fatalf("an unknown worker stored %d, %v", stored, err)
		}
		if err := w.Beat(ctx); err != nil {
			t.Fatal(err)
		}
	} else {
		if hit, err := w.Lookup(ctx, old); err != nil || hit != 2 {
			t.Fatalf("hit %d, %v", hit, err)
		}
		ok, err := w.Retrieve(ctx, old, 16, func(_ int, b []byte) {
			if string(b[:7]) != "content" {
				t.Errorf("wrong bytes %q", b[:7])
			}
		})
		if err != nil || !ok {
			t.Fatalf("retrieve %v, %v", ok, err)
		}
	}
	if stored, err := w.Store(ctx, k, 16, fill); err != nil || stored != 1 {
		t.Fatalf("after the restart: stored %d, %v", stored, err)
	}
}

// A stop lets transfers in progress commit and begins no new ones.
func TestDrain(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{})
	defer stop()
	ctx := t.Context()
	c := newClient(t, n.url)
	w, err := connector.OpenPoolClient(ctx, c, connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: n.dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		gone, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		_ = w.Close(gone) // the server has stopped: only the mapping is left to close
	}()
	done := make(chan error, 1)
	k := lmcache.Key{Tokens: tokens(16, 1), End: 16, RequestID: "r"}
	stored, err := w.Store(ctx, k, 16, func(_ int, b []byte) {
		go func() { done <- n.Shutdown(ctx) }()
		for n.Healthy() { // until the drain has begun
			time.Sleep(time.Millisecond)
		}
		k2 := k
		k2.Tokens = tokens(16, 2)
		if stored, err := w.Store(ctx, k2, 16, func(int, []byte) {}); err != nil || stored != 0 {
			t.Errorf("a new store began: %d, %v", stored, err)
		}
	})
	if err != nil || stored != 1 {
		t.Fatalf("the commit under way: %d, %v", stored, err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// A load that a lookup has promised is served while the server stops, and the server waits for it. A new lookup promises nothing.
func TestPromisedLoadsAreServedWhileTheServerStops(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{})
	defer stop()
	ctx := t.Context()
	w, err := connector.OpenPoolClient(ctx, newClient(t, n.url), connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: n.dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		gone, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		defer cancel()
		_ = w.Close(gone)
	}()
	k := lmcache.Key{Tokens: tokens(16, 1), End: 16, RequestID: "r"}
	if stored, err := w.Store(ctx, k, 16, func(_ int, b []byte) { b[0] = 7 }); err != nil || stored != 1 {
		t.Fatal(stored, err)
	}
	promised := k
	promised.RequestID = "promised"
	if hit, err := w.Lookup(ctx, promised); err != nil || hit != 1 {
		t.Fatal(hit, err)
	}
	done := make(chan error, 1)
	other := lmcache.Key{Tokens: tokens(16, 2), End: 16, RequestID: "other"}
	stored, err := w.Store(ctx, other, 16, func(int, []byte) { // a transfer in progress: the server waits for it
		go func() { done <- n.Shutdown(ctx) }()
		for n.Healthy() {
			time.Sleep(time.Millisecond)
		}
		late := k
		late.RequestID = "late"
		if hit, err := w.Lookup(ctx, late); err != nil || hit != 0 {
			t.Errorf("a lookup while the server stops: %d, %v", hit, err)
		}
		got := byte(0)
		if ok, err := w.Retrieve(ctx, promised, 16, func(_ int, b []byte) { got = b[0] }); err != nil || !ok || got != 7 {
			t.Errorf("a promised load while the server stops: %v, %v, %d", ok, err, got)
		}
	})
	if err != nil || stored != 1 {
		t.Errorf("the store in progress: %d, %v", stored, err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// A store that began before a clear, with tiers or without, leaves nothing that a later lookup finds; one that begins after it does.
func TestStoreInProgressAtAClearIsForgotten(t *testing.T) {
	for i := range 4 {
		tiers, force := i%2 == 0, i < 2
		var o server.Options
		if tiers {
			book, err := generation.Open([]string{filepath.Join(t.TempDir(), generation.FileName)}, tier.NewNames(), slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			o.Generations = book
		}
		n, stop := startNode(t, t.TempDir(), 16, o)
		ctx := t.Context()
		w, err := connector.OpenPoolClient(ctx, newClient(t, n.url), connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: n.dir})
		if err != nil {
			t.Fatal(err)
		}
		lookups := 0
		f := func(during func(), want int) {
			t.Helper()
			k := lmcache.Key{Tokens: tokens(16, 1), End: 16, RequestID: "r"}
			if _, err := w.Store(ctx, k, 16, func(int, []byte) { during() }); err != nil {
				t.Fatal(err)
			}
			lookups++
			k.RequestID = fmt.Sprint("l", lookups)
			if hit, err := w.Lookup(ctx, k); err != nil || hit != want {
				t.Errorf("tiers %v, force %v: hit %d, want %d, %v", tiers, force, hit, want, err)
			}
		}
		f(func() {
			if _, err := n.Clear(server.Clear{Tier: server.ClearAll, Force: force, By: "a test"}); err != nil {
				t.Error(err)
			}
		}, 0)
		f(func() {}, 1)
		if err := w.Close(ctx); err != nil {
			t.Error(err)
		}
		stop()
	}
}

// register sends a registration the bare way and returns the reply's pool.
func register(t *testing.T, s *server.Server, id int64, layout kv.Layout) lmcache.Pool {
	t.Helper()
	p := lmcache.EngineDriven{
		InstanceID: id, Model: "m", WorldSize: 1, BlockSize: 16, Layers: layout.Layers, Hidden: layout.Hidden,
		DType: layout.DType, SinglePlane: layout.SinglePlane, PhysicalSlots: layout.Slots,
	}
	reply := s.Answer([][]byte{{0}, {14}, p.Append(nil)})
	pool, err := lmcache.DecodePool(reply[2])
	if err != nil {
		t.Fatal(err)
	}
	return pool
}

func prepareStore(t *testing.T, s *server.Server, id int64, k *lmcache.Key) lmcache.PrepareStore {
	t.Helper()
	reply := s.Answer([][]byte{{0}, {16}, k.Append(nil), lmcache.AppendInt(nil, id)})
	p, err := lmcache.DecodePrepareStore(reply[2])
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func commitStore(s *server.Server, id int64, k *lmcache.Key) bool {
	reply := s.Answer([][]byte{{0}, {17}, k.Append(nil), lmcache.AppendInt(nil, id), lmcache.AppendBytes(nil, nil)})
	ok, err := lmcache.DecodeBool(reply[2])
	return err == nil && ok
}

// A worker falls asleep between prepare and commit. Its commit frees its slots and
// publishes nothing.
func TestSleepBetweenPrepareAndCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := pool.Open(pool.Options{Name: "pool", Bytes: 2 * 4096, Dir: t.TempDir(), ChunkTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		st := store.New(p, store.Options{TrustUnsummed: true, Quarantine: time.Hour})
		s := server.New(st, server.Options{ChunkTokens: 16, Log: slog.New(slog.DiscardHandler)})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { s.Run(ctx) })
		defer func() {
			cancel()
			wg.Wait()
			_ = errors.Join(s.Close(), st.Close())
		}()
		register(t, s, 7, smallLayout)
		s.Answer([][]byte{{0}, {22}, {7}}) // it pings, so it falls asleep early
		k := &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(16, 1), End: 16, RequestID: "r", Readers: 1}
		if got := prepareStore(t, s, 7, k); len(got.Slots) != 1 {
			t.Fatalf("%+v", got)
		}
		time.Sleep(119 * time.Second)
		if st.Stats().Quarantined != 0 {
			t.Fatal("asleep too early")
		}
		time.Sleep(3 * time.Second)
		if got := st.Stats(); got.Quarantined != 1 || got.CondemnedBytes != 4096 {
			t.Fatalf("%+v", got)
		}
		if commitStore(s, 7, k) {
			t.Fatal("the late commit was confirmed")
		}
		if got := st.Stats(); got.Quarantined != 0 || got.FreeBytes != got.Bytes {
			t.Fatalf("%+v", got)
		}
		if got := prepareStore(t, s, 7, k); len(got.Slots) != 1 {
			t.Fatalf("a worker that its late commit woke got no slots: %+v", got)
		}
	})
}

// A worker that sends pickled tensors cannot map the pool: it is told no.
func TestPickleClient(t *testing.T) {
	s, st := newServer(t, 16, 1<<20, store.Options{TrustUnsummed: true})
	register(t, s, 7, smallLayout)
	k := &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(16, 1), End: 16, RequestID: "r", Readers: 1}
	if got := prepareStore(t, s, 7, k); len(got.Slots) != 1 {
		t.Fatalf("%+v", got)
	}
	reply := s.Answer([][]byte{{0}, {17}, k.Append(nil), {7}, lmcache.AppendBytes(nil, []byte("pickle"))})
	if ok, err := lmcache.DecodeBool(reply[2]); err != nil || ok {
		t.Fatalf("%v, %v", ok, err)
	}
	if got := st.Stats(); got.FreeBytes != got.Bytes {
		t.Fatalf("%+v", got)
	}
	if got := prepareStore(t, s, 7, k); len(got.Slots) != 0 {
		t.Fatalf("it got slots again: %+v", got)
	}
}

func TestRegistrationRefused(t *testing.T) {
	s, _ := newServer(t, 16, 1<<20, store.Options{TrustUnsummed: true})
	big := smallLayout
	big.Hidden = 1 << 20
	if p := register(t, s, 1, big); p.ShmName != "" || p.Bytes != 0 {
		t.Errorf("a chunk larger than the pool was accepted: %+v", p)
	}
	odd := smallLayout
	odd.DType = "float3"
	if p := register(t, s, 2, odd); p.ShmName != "" {
		t.Errorf("an unknown dtype was accepted: %+v", p)
	}
	if p := register(t, s, 3, smallLayout); p.ShmName == "" {
		t.Error("a good worker was refused")
	}
}

// A server that has shut down is not healthy.
func TestShutdownIsUnhealthy(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{})
	defer stop()
	if !n.Healthy() {
		t.Errorf("unhealthy: %v", n.Unhealthy())
	}
	if err := n.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n.Healthy() {
		t.Error("healthy after shutdown")
	}
}

func BenchmarkAnswer(b *testing.B) {
	s, _ := newServer(b, 256, 256*4096, store.Options{TrustUnsummed: true})
	answer := s.Answerer()
	run := func(name string, m ...[]byte) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				answer(m)
			}
		})
	}
	run("noop", []byte{1}, []byte{24})
	run("ping", []byte{1}, []byte{22}, []byte{0xc0})
	k := (&lmcache.Key{Model: "m", WorldSize: 1, Worker: -1, Tokens: tokens(32768, 1), End: 32768, RequestID: "r", Readers: 1}).Append(nil)
	run("lookup 32k", []byte{1}, []byte{8}, k, []byte{1})
}
