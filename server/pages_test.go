// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// pinning is a server whose workers use a device.
func pinning(t *testing.T, chunks int) *resizing {
	t.Helper()
	r := &resizing{t: t, dir: t.TempDir(), url: fmt.Sprint("tcp://127.0.0.1:", testkit.FreePort(t)), uses: func(int) bool { return true }}
	r.start(chunks)
	t.Cleanup(func() { r.stop() })
	return r
}

// deviceWorker is a worker over a connection of its own.
type deviceWorker struct {
	t  *testing.T
	c  *lmcache.Client
	id int64
}

// register registers the worker, and reports whether it was offered the pool.
func (w *deviceWorker) register() bool {
	w.t.Helper()
	pool, err := w.c.RegisterEngineDriven(w.t.Context(), &lmcache.EngineDriven{
		InstanceID: w.id, Model: "m", WorldSize: 1, BlockSize: 16,
		Layers: smallLayout.Layers, Hidden: smallLayout.Hidden, DType: smallLayout.DType, SinglePlane: smallLayout.SinglePlane, PhysicalSlots: smallLayout.Slots,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return pool.ShmName != ""
}

func (w *deviceWorker) ping() bool {
	w.t.Helper()
	ok, err := w.c.Ping(w.t.Context(), w.id)
	if err != nil {
		w.t.Fatal(err)
	}
	return ok
}

func newDeviceWorker(t *testing.T, r *resizing, id int64) *deviceWorker {
	t.Helper()
	return &deviceWorker{t, newClient(t, r.url), id}
}

// A worker whose device writes to other pages than the pool's commits places that nobody wrote: nothing of them is served, the worker is
// asked to register again, and its chunks pass through the socket. What it stores and loads then is right.
func TestStoreThatDidNotReachThePoolIsNotServed(t *testing.T) {
	r := pinning(t, 64)
	ctx := t.Context()
	newest := func() *lmcache.Client { // whose chunks can pass through the socket
		c := newClient(t, r.url)
		if _, err := c.Negotiate(ctx, 16); err != nil {
			t.Fatal(err)
		}
		return c
	}
	w, err := connector.OpenPoolClient(ctx, newest(), connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: r.dir})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close(ctx)
	content := func(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, 4096) }
	for seed, c := range []struct {
		name string
		fill func(i int, b []byte)
	}{
		{"nothing is written", func(int, []byte) {}},
		{"one chunk is not written", func(i int, b []byte) {
			if i != 2 {
				copy(b, content(i))
			}
		}},
		{"an end is not written", func(i int, b []byte) { copy(b[:4080], content(i)) }},
		{"a beginning is not written", func(i int, b []byte) { copy(b[16:], content(i)) }},
	} {
		name, fill := c.name, c.fill
		key := func(request string) lmcache.Key {
			return lmcache.Key{Tokens: tokens(4*16, seed+1), End: 4 * 16, RequestID: request}
		}
		other, err := connector.OpenPoolClient(ctx, newest(), connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: r.dir})
		if err != nil {
			t.Fatal(err)
		}
		if stored, _ := other.Store(ctx, key(name), 16, fill); stored != 0 {
			t.Errorf("%s: %d chunks count as stored", name, stored)
		}
		if hit, err := w.Lookup(ctx, key(name+", looked up")); err != nil || hit != 0 {
			t.Errorf("%s: %d chunks hit, %v", name, hit, err)
		}
		if ok, err := newClient(t, r.url).Ping(ctx, other.InstanceID()); err != nil || ok {
			t.Errorf("%s: the worker is not asked to register again: %v, %v", name, ok, err)
		}
		if err := other.Register(ctx); err != nil {
			t.Fatal(err)
		}
		if stored, err := other.Store(ctx, key(name+", again"), 16, func(i int, b []byte) { copy(b, content(i)) }); err != nil || stored != 4 {
			t.Errorf("%s: through the socket %d chunks, %v", name, stored, err)
		}
		k := key(name + ", found")
		if hit, err := w.Lookup(ctx, k); err != nil || hit != 4 {
			t.Fatalf("%s: %d chunks hit afterwards, %v", name, hit, err)
		}
		if ok, err := w.Retrieve(ctx, k, 16, func(i int, b []byte) {
			if !bytes.Equal(b, content(i)) {
				t.Errorf("%s: other bytes of chunk %d", name, i)
			}
		}); err != nil || !ok {
			t.Errorf("%s: %v, %v", name, ok, err)
		}
		if err := other.Close(ctx); err != nil {
			t.Error(err)
		}
	}
	if got := r.Stats().Declined["elsewhere"]; got != 4 {
		t.Errorf("%d commits declined, want 4", got)
	}
}

// A worker with a device that comes back may copy to the pages of an earlier pool: it is offered the pool only where that has the
// same pages.
func TestWorkerWithADeviceIsOfferedThePagesThatItHasPinned(t *testing.T) {
	for _, c := range []struct {
		name    string
		device  bool
		restart func(r *resizing)
		pings   bool // the worker is still known
		offered bool
	}{
		{"same pool", true, func(r *resizing) { r.stop(); r.start(64) }, true, true},
		{"larger pool", true, func(r *resizing) { r.stop(); r.start(80) }, false, false},
		{"larger pool, no device", false, func(r *resizing) { r.stop(); r.start(80) }, false, true},
		{"smaller pool", true, func(r *resizing) { r.stop(); r.start(40) }, true, true},
		{"smaller and larger pool", true, func(r *resizing) { r.stop(); r.start(40); r.stop(); r.start(64) }, false, false},
		{"smaller and larger pool, and a restart", true, func(r *resizing) {
			r.stop()
			r.start(40)
			r.stop()
			r.start(64)
			r.stop()
			r.start(64)
		}, false, false},
		{"another pool", true, func(r *resizing) { r.stop(); r.cold = true; r.start(64) }, false, false},
		{"another pool, twice", true, func(r *resizing) { r.stop(); r.cold = true; r.start(64); r.stop(); r.start(64) }, false, false},
		{"another pool, no device", false, func(r *resizing) { r.stop(); r.cold = true; r.start(64) }, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := pinning(t, 64)
			r.stop()
			r.uses = func(int) bool { return c.device }
			r.start(64)
			w := newDeviceWorker(t, r, 7)
			if !w.register() || !w.ping() {
				t.Fatal("a new worker is not offered the pool")
			}
			if !w.register() {
				t.Fatal("a worker that registers again is not offered the same pool")
			}
			c.restart(r)
			answered(t, w.c)
			if known := w.ping(); known != c.pings {
				t.Errorf("the worker is known: %v", known)
			}
			for n := range 3 { // its answers do not change
				if offered := w.register(); offered != c.offered {
					t.Errorf("registration %d: offered %v, want %v", n, offered, c.offered)
				}
				w.ping()
			}
			r.cold = false
			r.stop()
			r.start(int(r.store.Files().Bytes() / 4096))
			answered(t, w.c)
			if offered := w.register(); offered != c.offered {
				t.Errorf("after one more restart: offered %v, want %v", offered, c.offered)
			}
			fresh := newDeviceWorker(t, r, 8)
			if !fresh.register() {
				t.Error("the worker of another engine is not offered the pool")
			}
		})
	}
}

// A worker registers again while its commit is looked at: that it copies elsewhere counts for the new registration.
func TestWorkerThatRegistersDuringACommitIsNotOfferedThePoolAfterIt(t *testing.T) {
	r := pinning(t, 16)
	w := newDeviceWorker(t, r, 7)
	if !w.register() {
		t.Fatal("a new worker is not offered the pool")
	}
	after := r.CopiesElsewhere(7)
	if !w.register() {
		t.Fatal("a worker that registers again is not offered the same pool")
	}
	after()
	if w.ping() {
		t.Error("the worker is not asked to register again")
	}
	if w.register() {
		t.Error("the worker is offered the pool")
	}
	after()
	if !w.ping() {
		t.Error("a worker that is not offered the pool is asked to register again")
	}
}

// Workers with devices register, store what they do not write and ping, all at once: nothing of it is kept, and no place stays taken.
func TestStoresThatDidNotReachThePoolLeaveNoPlaceTaken(t *testing.T) {
	r := pinning(t, 64)
	var wg sync.WaitGroup
	for id := range int64(4) {
		w := newDeviceWorker(t, r, id%2+1)
		wg.Go(func() {
			for n := range 20 {
				k := &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(4*16, 100*int(id)+n+1), End: 4 * 16, RequestID: fmt.Sprint(id, n)}
				w.id = 100*id + int64(n) + 1
				w.register()
				if _, err := w.c.PrepareStore(t.Context(), k, w.id, nil); err == nil {
					_, _ = w.c.CommitStore(t.Context(), k, w.id)
				}
				w.ping()
			}
		})
	}
	wg.Wait()
	if st := r.store.Stats(); st.Resident != 0 || st.Transfers != 0 || st.StagedBytes != 0 || st.CondemnedBytes != 0 || st.FreeBytes != st.Bytes {
		t.Errorf("something is kept: %+v", st.Usage)
	}
	if n := r.Stats().Declined["elsewhere"]; n == 0 {
		t.Error("no commit was declined")
	}
}
