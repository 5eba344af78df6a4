// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// startSized starts a server with that chunk size over a pool, as after --cold.
func startSized(t *testing.T, dir string, chunkTokens int) (*node, func()) {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: dir, ChunkTokens: chunkTokens, Cold: true})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{store: store.New(p, store.Options{TrustUnsummed: true}), dir: dir, log: new(logBuffer)}
	n.Server = server.New(n.store, server.Options{ChunkTokens: chunkTokens, Log: slog.New(slog.NewTextHandler(n.log, nil))})
	addr, err := n.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	n.url = "tcp://" + addr
	return n, func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		if err := n.store.Close(); err != nil {
			t.Error(err)
		}
	}
}

// An engine that an earlier server told another chunk size gets no hits, and is
// told why, over as many cold starts as there are; engines that ask this server are
// served beside it.
func TestEnginesOfAnotherChunkSizeGetNoHits(t *testing.T) {
	dir := t.TempDir()
	_, stop := startSized(t, dir, 32)
	stop()
	for range 2 { // the second start has the size of the first: still the engine of 32 may be there
		n, stop := startSized(t, dir, 16)
		young, old := n.dial(t, 0), n.dial(t, 20)
		reg := lmcache.EngineDriven{
			InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 128, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 16,
		}
		id := lmcache.AppendInt(nil, 7)
		key := func(shard int, request string) []byte {
			return (&lmcache.Key{Model: "m", WorldSize: 1, Worker: shard, Tokens: tokens(64, 1), End: 64, RequestID: request, Readers: 1}).Append(nil)
		}
		young.call(21)
		if got, err := lmcache.DecodePool(young.call(14, reg.Append(nil))); err != nil || got.ShmName == "" {
			t.Fatalf("a worker that asked: %+v, %v\n%s", got, err, n.log)
		}
		young.call(16, key(0, "a"), id)
		young.call(17, key(0, "a"), id, lmcache.AppendBytes(nil, nil))
		hit := func(c *oldClient, request string) int64 {
			t.Helper()
			c.call(8, key(lmcache.AllWorkers, request), lmcache.AppendInt(nil, 1))
			got, err := lmcache.DecodeInt(c.call(9, lmcache.AppendString(nil, request)))
			if err != nil {
				t.Fatal(err)
			}
			return got
		}
		if got := hit(young, "b"); got != 4 {
			t.Fatalf("an engine that asked hits %d chunks, want 4", got)
		}
		if got := hit(old, "c"); got != 0 {
			t.Fatalf("an engine that goes by chunks of 32 tokens was told %d chunks", got)
		}
		if got := old.call(16, key(0, "d"), id); strings.Contains(string(got), "offset") {
			t.Errorf("and places: %q", got)
		}
		reg.InstanceID = 8
		if got, err := lmcache.DecodePool(old.call(14, reg.Append(nil))); err != nil || got.ShmName != "" {
			t.Errorf("and the pool: %+v, %v", got, err)
		}
		if !strings.Contains(n.log.String(), "restart the engine, or the server with --chunk-size 32") {
			t.Errorf("it is not said: %s", n.log)
		}
		old.call(21)
		if got := hit(old, "e"); got != 4 {
			t.Errorf("once it asked it hits %d chunks", got)
		}
		stop()
	}
}

// A worker that announces more slots than a chunk has tokens goes by another chunk
// size; one with fewer is served.
func TestMoreSlotsThanTokensAreRefused(t *testing.T) {
	d := newDesk(t, server.Options{})
	f := func(slots int, want bool) {
		t.Helper()
		reg := lmcache.EngineDriven{
			InstanceID: int64(slots), Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 128, DType: "bfloat16", SinglePlane: true, PhysicalSlots: slots,
		}
		got, err := lmcache.DecodePool(d.ask(lmcache.OpRegisterEngineDriven, reg.Append(nil)))
		if err != nil || (got.ShmName != "") != want {
			t.Errorf("%d slots: %+v, %v", slots, got, err)
		}
	}
	f(16, true)
	f(8, true)
	f(32, false)
	if !strings.Contains(d.log.String(), "--chunk-size 32") {
		t.Errorf("it is not said what to do: %s", d.log)
	}
}

// A server, and later ones, serve all connections again when no request came from such engines for
// a while.
func TestFormerChunkSizesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, server.Options{})
		d.stop()
		d.pool.ChunkTokens, d.pool.Cold = 32, true
		d.opts.ChunkTokens = 32
		d.open()
		d.pool.Cold = false
		if got := d.store.Files().FormerChunkTokens(); len(got) != 1 || got[0] != 16 {
			t.Fatalf("former sizes %v", got)
		}
		for range 11 * 60 {
			time.Sleep(time.Second)
			d.Tick(time.Now())
		}
		d.restart()
		if got := d.store.Files().FormerChunkTokens(); len(got) != 0 {
			t.Fatalf("former sizes %v", got)
		}
	})
}
