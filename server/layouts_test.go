// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// desk is a server that is asked in-process and can be restarted over its pool.
// Chunks have 16 tokens.
type desk struct {
	*server.Server
	t     *testing.T
	store *store.Store
	opts  server.Options
	pool  pool.Options
	so    store.Options
	log   *logBuffer
}

func newDesk(t *testing.T, o server.Options) *desk {
	t.Helper()
	d := &desk{t: t, opts: o, log: new(logBuffer)}
	d.pool = pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: t.TempDir(), ChunkTokens: 16}
	d.opts.ChunkTokens = 16
	d.opts.Log = slog.New(slog.NewTextHandler(d.log, nil))
	d.open()
	t.Cleanup(d.stop)
	return d
}

func (d *desk) open() {
	d.t.Helper()
	p, err := pool.Open(d.pool)
	if err != nil {
		d.t.Fatal(err)
	}
	d.so.TrustUnsummed = true
	d.store = store.New(p, d.so)
	d.Server = server.New(d.store, d.opts)
}

func (d *desk) stop() {
	if err := errors.Join(d.Close(), d.store.Close()); err != nil {
		d.t.Error(err)
	}
}

func (d *desk) restart() { d.stop(); d.open() }

// ask returns the result frame of an operation, nil when there is none.
func (d *desk) ask(op lmcache.Op, payload ...[]byte) []byte {
	d.t.Helper()
	reply := d.Answer(append([][]byte{{0}, lmcache.AppendOp(nil, op)}, payload...))
	if len(reply) < 3 {
		return nil
	}
	return bytes.Clone(reply[2])
}

func (d *desk) ping(id int64) bool {
	d.t.Helper()
	ok, err := lmcache.DecodeBool(d.ask(lmcache.OpPing, lmcache.AppendInt(nil, id)))
	if err != nil {
		d.t.Fatal(err)
	}
	return ok
}

// register announces a worker of model "m" whose chunks have that many layers.
func (d *desk) register(id int64, world, layers int) lmcache.Pool {
	d.t.Helper()
	reg := lmcache.EngineDriven{
		InstanceID: id, Model: "m", WorldSize: world, BlockSize: 16, Layers: layers, Hidden: 64, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 16,
	}
	got, err := lmcache.DecodePool(d.ask(lmcache.OpRegisterEngineDriven, reg.Append(nil)))
	if err != nil {
		d.t.Fatal(err)
	}
	return got
}

func deskKey(world, shard, chunks int, request string) *lmcache.Key {
	return &lmcache.Key{Model: "m", WorldSize: world, Worker: shard, Tokens: tokens(16*chunks, 1), End: 16 * chunks, RequestID: request, Readers: 1}
}

// put stores a prompt's chunks of one shard and returns how many were new.
func (d *desk) put(id int64, k *lmcache.Key) int {
	d.t.Helper()
	p, err := lmcache.DecodePrepareStore(d.ask(lmcache.OpPrepareStore, k.Append(nil), lmcache.AppendInt(nil, id)))
	if err != nil {
		d.t.Fatal(err)
	}
	if len(p.Slots) == 0 {
		return 0
	}
	ok, err := lmcache.DecodeBool(d.ask(lmcache.OpCommitStore, k.Append(nil), lmcache.AppendInt(nil, id), lmcache.AppendBytes(nil, nil)))
	if err != nil || !ok {
		d.t.Fatalf("commit: %v, %v", ok, err)
	}
	return len(p.Slots)
}

// hit looks a prompt up and returns the chunks that hit; the session stays open.
func (d *desk) hit(world, chunks int, request string) int {
	d.t.Helper()
	k := deskKey(world, lmcache.AllWorkers, chunks, request)
	d.ask(lmcache.OpLookup, k.Append(nil), lmcache.AppendInt(nil, 1))
	n, err := lmcache.DecodeInt(d.ask(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, request)))
	if err != nil {
		d.t.Fatal(err)
	}
	return int(n)
}

func (d *desk) loads(id int64, world, shard, chunks int, request string) bool {
	d.t.Helper()
	k := deskKey(world, shard, chunks, request).Append(nil)
	p, err := lmcache.DecodePrepareRetrieve(d.ask(lmcache.OpPrepareRetrieve, k, lmcache.AppendInt(nil, id)))
	if err != nil {
		d.t.Fatal(err)
	}
	d.ask(lmcache.OpCommitRetrieve, k, lmcache.AppendInt(nil, id))
	return p.Success && len(p.Slots) == chunks
}

// Stages of a pipeline hold unlike numbers of layers under one model name. Each
// shard is looked up in its own worker's layout: in one life, over a restart, and
// for the workers of an engine that was started anew.
func TestStagesOfUnequalDepthHit(t *testing.T) {
	d := newDesk(t, server.Options{})
	d.register(1, 2, 4)
	d.register(2, 2, 3)
	for shard := range 2 {
		if n := d.put(int64(1+shard), deskKey(2, shard, 2, "a")); n != 2 {
			t.Fatalf("shard %d: %d chunks stored", shard, n)
		}
	}
	check := func(when, request string, first int64) {
		t.Helper()
		if n := d.hit(2, 2, request); n != 2 {
			t.Fatalf("%s: %d chunks hit, want 2\n%s", when, n, d.log)
		}
		for shard := range 2 {
			if !d.loads(first+int64(shard), 2, shard, 2, request) {
				t.Errorf("%s: shard %d cannot be loaded", when, shard)
			}
		}
	}
	check("same life", "b", 1)
	d.restart()
	check("server restarted", "c", 1)
	for id := range int64(2) { // the engine ends
		d.ask(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 1+id))
	}
	d.register(11, 2, 4)
	d.register(12, 2, 3)
	check("engine restarted", "d", 11)
	d.register(22, 2, 3) // a second engine, last stage first
	d.register(21, 2, 4)
	check("second engine", "e", 21)
	check("first engine beside it", "f", 11)
}

// Of two engines with unlike layouts of which nothing says whose scheduler asks no hit is promised, in whatever order they
// register and transfer, also after restarts of the server. What is left when one has gone hits.
func TestUnlikeLayoutsPromiseNothing(t *testing.T) {
	d := newDesk(t, server.Options{})
	d.register(1, 1, 4)
	d.put(1, deskKey(1, 0, 2, "a"))
	if n := d.hit(1, 2, "b"); n != 2 {
		t.Fatalf("%d chunks hit", n)
	}
	d.register(2, 1, 3)
	none := func(when string) {
		t.Helper()
		if n := d.hit(1, 2, "c"+when); n != 0 {
			t.Fatalf("%s: %d chunks hit", when, n)
		}
	}
	none("registered")
	d.put(1, deskKey(1, 0, 3, "d"))
	none("the older one stored")
	for i := range 20 {
		d.restart()
		none(fmt.Sprint("restart ", i))
	}
	d.put(2, deskKey(1, 0, 1, "e"))
	none("the newer one stored")
	d.ask(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 1))
	if n := d.hit(1, 2, "g"); n != 1 {
		t.Fatalf("only the newer one is left: %d chunks hit, want 1", n)
	}
	d.register(1, 1, 4)
	none("the older one is back")
	d.ask(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 2))
	if n := d.hit(1, 2, "h"); n != 2 {
		t.Fatalf("only the older one is left: %d chunks hit, want 2", n)
	}
}

// The ping of a worker that is asleep wakes it, each time. The ping of a worker that a
// cold server does not know is answered false: stock workers then register again.
func TestPingWakesAWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, server.Options{WorkerReap: 5 * time.Second})
		for drop := range 3 {
			if drop == 0 {
				d.register(7, 1, 4)
			}
			if !d.ping(7) {
				t.Fatal("a registered worker's ping")
			}
			for range 7 {
				time.Sleep(time.Second)
				d.Tick(time.Now())
			}
			if !d.Status().Workers[0].Asleep {
				t.Fatalf("sleep %d: a silent worker is awake", drop)
			}
			if !d.ping(7) {
				t.Fatalf("sleep %d: the ping of a worker that is asleep was answered false", drop)
			}
			if d.Status().Workers[0].Asleep {
				t.Fatalf("sleep %d: a ping did not wake the worker", drop)
			}
		}
		d.pool.Cold = true
		d.restart()
		if d.ping(7) {
			t.Error("a cold restart: the ping of an unknown worker was answered true")
		}
	})
}

// After a standstill of the server, or a jump of its wall clock, no worker counts as silent for
// that.
func TestStandstillDropsNoWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, server.Options{WorkerReap: 5 * time.Second, RegistrationGrace: 5 * time.Second})
		d.register(7, 1, 4)
		d.register(8, 1, 4)
		d.ping(7)
		d.Tick(time.Now())
		time.Sleep(time.Hour)
		d.Tick(time.Now())
		for range 4 {
			time.Sleep(time.Second)
			d.Tick(time.Now())
		}
		if n := d.put(8, deskKey(1, 0, 1, "a")); n != 1 {
			t.Fatalf("the worker was dropped: %s", d.log)
		}
		for range 3 {
			time.Sleep(time.Second)
			d.Tick(time.Now())
		}
		if w := d.Status().Workers; !w[0].Asleep || w[1].Asleep {
			t.Errorf("a worker that sent nothing for its whole period is awake: %+v", w)
		}
	})
}

// Two workers whose groups hold other layers, or the same in another order, share
// no chunk.
func TestLayersArePartOfTheLayout(t *testing.T) {
	group := func(layers ...int) lmcache.EngineGroup { return lmcache.EngineGroup{Layers: layers, WindowTokens: -1} }
	window := func(layers ...int) lmcache.EngineGroup {
		return lmcache.EngineGroup{Layers: layers, WindowTokens: 32}
	}
	f := func(name string, same bool, a, b []lmcache.EngineGroup) {
		t.Helper()
		for _, separate := range []bool{false, true} {
			n := startDriven(t, t.TempDir(), "pool", server.Options{SeparateGroups: separate})
			x, y := n.newEngine(a...), n.newEngine(b...)
			x.register()
			if got := x.storeBlocks(tokens(32, 1), 0, 32, slices.Repeat([][]int{span(1, 2)}, len(a))...); !got.OK {
				t.Fatalf("%s: %+v\n%s", name, got, n.log)
			}
			y.register()
			if got := y.lookup(tokens(32, 1), "r") == 32/drivenChunk; got != same {
				t.Errorf("%s (separate groups %v): the other worker's chunk is a hit: %v", name, separate, got)
			}
			n.stop()
		}
	}
	f("equal", true, []lmcache.EngineGroup{group(0, 2), window(1, 3)}, []lmcache.EngineGroup{group(0, 2), window(1, 3)})
	f("other layers", false, []lmcache.EngineGroup{group(0, 2), window(1, 3)}, []lmcache.EngineGroup{group(0, 1), window(2, 3)})
	f("other order", false, []lmcache.EngineGroup{group(0, 1, 2, 3)}, []lmcache.EngineGroup{group(1, 0, 2, 3)})
	f("all in order", true, []lmcache.EngineGroup{group(0, 1)}, nil)
	f("swapped groups", false, []lmcache.EngineGroup{group(0, 1), group(2, 3)}, []lmcache.EngineGroup{group(2, 3), group(0, 1)})
}

// An engine of SGLang registers once. Where the server does not know it any more, its heartbeats go on, and the operator hears what to do.
func TestHeartbeatsWithoutRegistration(t *testing.T) {
	for what, change := range map[string]func(*pool.Options){
		"cold": func(o *pool.Options) { o.Cold = true }, "a larger pool": func(o *pool.Options) { o.Bytes *= 2 },
	} {
		d := newDesk(t, server.Options{})
		d.register(7, 1, 4)
		change(&d.pool)
		d.restart()
		found := func() bool {
			return slices.ContainsFunc(d.Status().Findings, func(f server.Finding) bool {
				return strings.Contains(f.What, "worker 7") && strings.Contains(f.Do, "restart the engine: SGLang") && strings.Contains(f.Do, "a larger --l1-size-gb")
			})
		}
		d.ping(7)
		if found() {
			t.Errorf("%s: after one heartbeat, to which a vLLM answers with its registration", what)
		}
		d.ping(7)
		d.ping(7)
		for range 3 {
			d.Tick(time.Now())
		}
		log := d.log.String()
		if n := strings.Count(log, "does not register again"); !found() || n != 1 {
			t.Errorf("%s: %+v, %d warnings", what, d.Status().Findings, n)
		}
		if what != "cold" && !strings.Contains(log, "one of SGLang when its engine is restarted") {
			t.Errorf("%s: %s", what, log)
		}
		d.register(7, 1, 4)
		if d.Tick(time.Now()); found() {
			t.Errorf("%s: it is registered again", what)
		}
	}
}

// A lookup over the connection of a worker that is asleep is a request of that worker, as with SGLang, which does all over one connection.
func TestLookupWakesItsWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, server.Options{WorkerReap: 5 * time.Second, RegistrationGrace: 5 * time.Second})
		c := d.Connect(sameUser)
		ask := func(op lmcache.Op, payload ...[]byte) []byte {
			if got := c(append([][]byte{{0}, lmcache.AppendOp(nil, op)}, payload...)); len(got) > 2 {
				return bytes.Clone(got[2])
			}
			return nil
		}
		ask(lmcache.OpGetChunkSize)
		reg := lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 4, Hidden: 64, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 16}
		if _, err := lmcache.DecodePool(ask(lmcache.OpRegisterEngineDriven, reg.Append(nil))); err != nil {
			t.Fatal(err)
		}
		k := deskKey(1, 0, 2, "a")
		if p, err := lmcache.DecodePrepareStore(ask(lmcache.OpPrepareStore, k.Append(nil), lmcache.AppendInt(nil, 7))); err != nil || len(p.Slots) != 2 {
			t.Fatalf("%+v, %v", p, err)
		}
		ask(lmcache.OpCommitStore, k.Append(nil), lmcache.AppendInt(nil, 7), lmcache.AppendBytes(nil, nil))
		d.Tick(time.Now())
		for range 9 {
			time.Sleep(time.Second)
			d.Tick(time.Now())
		}
		if w := d.Status().Workers; len(w) != 1 || !w[0].Asleep {
			t.Fatalf("%+v", w)
		}
		ask(lmcache.OpLookup, deskKey(1, lmcache.AllWorkers, 2, "b").Append(nil), lmcache.AppendInt(nil, 1))
		n, err := lmcache.DecodeInt(ask(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, "b")))
		if w := d.Status().Workers; err != nil || n != 2 || w[0].Asleep {
			t.Errorf("a hit of %d, %v, %+v", n, err, w)
		}
	})
}
