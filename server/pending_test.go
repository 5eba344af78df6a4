// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// restartedNode is a server that has taken over prompts of four chunks, which are still
// to be compared: nothing does so before run.
func restartedNode(t *testing.T, prompts int, so store.Options, o server.Options) (n *node, run func() (end func())) {
	t.Helper()
	dir := t.TempDir()
	so.ChecksumRate, so.SumAtOnce = 1<<40, true
	start := func() *node {
		p, err := pool.Open(pool.Options{Name: "pool", Bytes: 256 * 4096, Dir: dir, ChunkTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		n := &node{store: store.New(p, so), dir: dir, log: new(logBuffer)}
		o.ChunkTokens, o.Log = 16, slog.New(slog.NewTextHandler(n.log, nil))
		n.Server = server.New(n.store, o)
		return n
	}
	background := func(n *node) (end func()) {
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			n.Run(ctx)
		}()
		return func() { cancel(); <-ended }
	}
	n = start()
	register(t, n.Server, 7, smallLayout)
	end := background(n)
	for i := range prompts {
		k := promptKey(i, 4)
		if got := prepareStore(t, n.Server, 7, k); len(got.Slots) != 4 || !commitStore(n.Server, 7, k) {
			t.Fatal("not stored")
		}
	}
	testkit.Eventually(t, "checksums", func() bool { return n.store.Stats().SummedChunks == uint64(4*prompts) })
	end()
	if err := errors.Join(n.Close(), n.store.Close()); err != nil {
		t.Fatal(err)
	}
	n = start()
	n.url = "ipc://" + filepath.Join(dir, "socket")
	if _, err := n.Listen(t.Context(), n.url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(n.Close(), n.store.Close()); err != nil {
			t.Error(err)
		}
	})
	return n, func() func() { return background(n) }
}

// socketClient is a client that makes single calls.
type socketClient struct {
	t *testing.T
	*lmcache.Client
}

func (c socketClient) must(op lmcache.Op, payloads ...[]byte) []byte {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	got, err := c.Call(ctx, op, payloads...)
	if err != nil {
		c.t.Fatal(op, err)
	}
	return got
}

func (c socketClient) lookup(seed int) {
	c.t.Helper()
	k := promptKey(seed, 4)
	k.Worker = lmcache.AllWorkers
	if got := c.must(lmcache.OpLookup, k.Append(nil), lmcache.AppendInt(nil, 1)); got != nil {
		c.t.Fatalf("lookup: %x", got)
	}
}

// status is query_prefetch_status; -1 while the lookup is pending.
func (c socketClient) status(seed int) int64 {
	c.t.Helper()
	return c.count(c.must(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, fmt.Sprint("r", seed))))
}

func (c socketClient) wait(seed int, timeout float64) int64 {
	c.t.Helper()
	return c.count(c.must(lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, fmt.Sprint("r", seed)), msgp.AppendFloat64(nil, timeout)))
}

func (c socketClient) count(frame []byte) int64 {
	c.t.Helper()
	if frame == nil {
		return -1
	}
	n, err := lmcache.DecodeInt(frame)
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

// A lookup is acknowledged at once, asked for without a result as often as one likes
// while it is pending, waited for without holding up the connection, and its count comes
// once. Two clients with requests of one id are told each its own.
func TestPendingLookupOverTheWire(t *testing.T) {
	n, run := restartedNode(t, 3, store.Options{LoadTimeout: time.Hour}, server.Options{})
	a, b := socketClient{t, newClient(t, n.url)}, socketClient{t, newClient(t, n.url)}
	a.lookup(0)
	b.lookup(0)
	for range 3 {
		if got := a.status(0); got != -1 {
			t.Fatalf("status %d of a lookup that is pending", got)
		}
	}
	waited := make(chan int64)
	go func() { waited <- a.wait(0, 60) }()
	began := time.Now()
	if got := b.wait(0, 0.05); got != -1 || time.Since(began) < 50*time.Millisecond {
		t.Errorf("a wait of 50 ms: %d after %v", got, time.Since(began))
	}
	for range 100 { // the connection that waits goes on
		if ok, err := a.PingServer(t.Context()); err != nil || !ok {
			t.Fatal(ok, err)
		}
	}
	a.lookup(1)
	select {
	case got := <-waited:
		t.Fatalf("the wait ended early: %d", got)
	default:
	}
	defer run()()
	if got := <-waited; got != 4 {
		t.Errorf("waited for %d chunks", got)
	}
	if got := a.wait(1, 60); got != 4 {
		t.Errorf("the second lookup of one client: %d", got)
	}
	testkit.Eventually(t, "b's result", func() bool { return b.status(0) == 4 })
	for _, c := range []socketClient{a, b} {
		if got := c.status(0); got != 0 {
			t.Errorf("taken twice: %d", got)
		}
		if got := c.wait(0, 60); got != 0 {
			t.Errorf("waited for what was taken: %d", got)
		}
	}
	testkit.Eventually(t, "the background", func() bool { return n.store.Stats().VerifiedChunks == 12 })
	if got := n.store.Stats(); got.Pending != 0 || got.ComparedBytes != 12*4096 || got.Sessions != 3 {
		t.Errorf("%+v", got)
	}
}

// An engine that vanishes between the lookup and its result leaves no pins, whether
// something waits for it or not; what another one waits for comes.
func TestEngineVanishesWhileItsLookupIsPending(t *testing.T) {
	n, run := restartedNode(t, 2, store.Options{LoadTimeout: time.Hour}, server.Options{})
	gone, stays := socketClient{t, newClient(t, n.url)}, socketClient{t, newClient(t, n.url)}
	gone.lookup(0)
	gone.lookup(1)
	stays.lookup(1)
	go func() { // no answer will come
		_, _ = gone.Call(t.Context(), lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, "r0"), msgp.AppendFloat64(nil, 3600))
	}()
	testkit.Eventually(t, "the wait", func() bool { return n.Waits() == 1 && n.store.Stats().Pending == 3 })
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the end", func() bool { return n.Waits() == 0 && n.store.Stats().Pending == 1 && n.store.Stats().Sessions == 1 })
	defer run()()
	if got := stays.wait(1, 60); got != 4 {
		t.Errorf("who stays: %d", got)
	}
	stays.must(lmcache.OpEndSession, lmcache.AppendString(nil, "r1"))
	testkit.Eventually(t, "the pins", func() bool { return n.store.Stats().EvictableObjs == 8 })
}

// The same after the result was there and before it was asked for.
func TestEngineVanishesBeforeItTakesItsResult(t *testing.T) {
	n, run := restartedNode(t, 1, store.Options{LoadTimeout: time.Hour}, server.Options{})
	c := socketClient{t, newClient(t, n.url)}
	c.lookup(0)
	defer run()()
	testkit.Eventually(t, "the result", func() bool { return n.store.Stats().Lookups == 1 })
	if got := n.store.Stats(); got.EvictableObjs != 0 {
		t.Errorf("%+v", got)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the pins", func() bool { return n.store.Stats().EvictableObjs == 4 && n.store.Stats().Sessions == 0 })
}

// A client that waits very often is declined beyond its share, as a miss, and its
// connection goes on. When it goes, its waits end.
func TestWaitsAreBounded(t *testing.T) {
	n, _ := restartedNode(t, 1, store.Options{LoadTimeout: time.Hour}, server.Options{})
	c := socketClient{t, newClient(t, n.url)}
	c.lookup(0)
	declined := make(chan struct{}, 2000)
	for range 2000 {
		go func() {
			got, err := c.Call(t.Context(), lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, "r0"), msgp.AppendFloat64(nil, 3600))
			if err == nil && got != nil {
				declined <- struct{}{}
			}
		}()
	}
	testkit.Eventually(t, "refusals", func() bool { return len(declined)+n.Waits() == 2000 })
	if got := n.Waits(); got < 256 || got > 1024 {
		t.Errorf("%d waits of one client", got)
	}
	if ok, err := c.PingServer(t.Context()); err != nil || !ok {
		t.Error(ok, err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the end", func() bool { return n.Waits() == 0 })
}

// A server that shuts down answers who waits, with a miss: without a result the client
// would go on asking.
func TestShutdownAnswersWhoWaits(t *testing.T) {
	n, _ := restartedNode(t, 1, store.Options{LoadTimeout: time.Hour}, server.Options{})
	c := socketClient{t, newClient(t, n.url)}
	c.lookup(0)
	waited := make(chan int64)
	go func() { waited <- c.wait(0, 3600) }()
	testkit.Eventually(t, "the wait", func() bool { return n.Waits() == 1 })
	ended := make(chan error)
	go func() { ended <- n.Shutdown(t.Context()) }()
	if got := <-waited; got != 0 {
		t.Errorf("waited for %d chunks", got)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// What a lookup asked for counts when it has its answer, together with what hit: a hit rate of any moment is at most 1, and a lookup whose
// result nobody asks for is no miss.
func TestAskedTokensCountWithTheirHit(t *testing.T) {
	n, run := restartedNode(t, 2, store.Options{LoadTimeout: time.Hour}, server.Options{})
	a := socketClient{t, newClient(t, n.url)}
	a.lookup(0)
	a.lookup(1)
	if _, asked, hit := n.LookedUp(); asked != 0 || hit != 0 {
		t.Errorf("two lookups are pending: %d tokens asked for, %d hit", asked, hit)
	}
	defer run()()
	if got := a.wait(0, 60); got != 4 {
		t.Fatalf("a hit of %d", got)
	}
	if _, asked, hit := n.LookedUp(); asked != 64 || hit != 64 {
		t.Errorf("%d tokens asked for, %d hit", asked, hit)
	}
	if st := n.Status(); st.Lookup.AskedTokens != 64 || st.Lookup.HitTokens != 64 || st.Recent.AskedTokens != 64 || st.Recent.HitTokens != 64 {
		t.Errorf("%+v, %+v", st.Lookup, st.Recent)
	}
}
