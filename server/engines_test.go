// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/events"
)

// form is how an engine lays out a chunk of a model.
type form struct {
	single bool
	layers int
	hidden int
	dtype  string
	world  int
}

// One model of two layers, as vLLM and SGLang register it with engine_driven: as many bytes, in another order.
var (
	vllmForm   = form{false, 2, 64, "bfloat16", 1}
	fusedForm  = form{true, 2, 128, "bfloat16", 1} // K and V of a token side by side, as on CPUs
	sglangForm = form{true, 4, 64, "bfloat16", 1}
)

// peerEngine is an engine of a desk's model. A SGLang asks over one connection. The scheduler and the workers of a vLLM have
// connections of their own.
type peerEngine struct {
	*desk
	form
	id     int64
	who    peercred.Peer
	worker func(m [][]byte) [][]byte
	sched  func(m [][]byte) [][]byte
	number int  // of requests
	fill   byte // of its chunks
}

func (d *desk) vllm(id int64, f form) *peerEngine {
	e := &peerEngine{desk: d, form: f, id: id, who: sameUser, fill: byte(0x40 + id)}
	e.connect()
	return e
}

func (d *desk) sglang(id int64, f form) *peerEngine {
	e := d.vllm(id, f)
	e.sched = nil
	e.connect()
	return e
}

// connect connects the engine to the server that runs now. Its release is known, as by earlier requests.
func (e *peerEngine) connect() {
	one := e.sched == nil && e.worker != nil
	e.worker = e.Connect(e.who)
	e.sched = e.worker
	if !one {
		e.sched = e.Connect(e.who)
	}
	for _, c := range []func(m [][]byte) [][]byte{e.worker, e.sched} {
		c([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpGetChunkSize)})
	}
	if one {
		e.sched = nil
	}
}

// over sends a request over one of the engine's connections and returns the result frame, nil when there is none.
func (e *peerEngine) over(sched bool, op lmcache.Op, payload ...[]byte) []byte {
	e.t.Helper()
	answer := e.worker
	if sched && e.sched != nil {
		answer = e.sched
	}
	reply := answer(append([][]byte{{1}, lmcache.AppendOp(nil, op)}, payload...))
	if len(reply) < 3 {
		return nil
	}
	return bytes.Clone(reply[2])
}

func (e *peerEngine) register() *peerEngine {
	e.t.Helper()
	reg := lmcache.EngineDriven{
		InstanceID: e.id, Model: "m", WorldSize: e.world, BlockSize: 16, Layers: e.layers, Hidden: e.hidden, DType: e.dtype, SinglePlane: e.single, PhysicalSlots: 16,
	}
	if _, err := lmcache.DecodePool(e.over(false, lmcache.OpRegisterEngineDriven, reg.Append(nil))); err != nil {
		e.t.Fatal(err)
	}
	return e
}

func (e *peerEngine) unregister() {
	e.over(false, lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, e.id))
}

func (e *peerEngine) ping() bool {
	e.t.Helper()
	ok, err := lmcache.DecodeBool(e.over(false, lmcache.OpPing, lmcache.AppendInt(nil, e.id)))
	if err != nil {
		e.t.Fatal(err)
	}
	return ok
}

func (e *peerEngine) key(seed, chunks int, salt string, worker int) []byte {
	k := lmcache.Key{Model: "m", WorldSize: e.world, Worker: worker, Tokens: tokens(16*chunks, seed), End: 16 * chunks, RequestID: e.request(), Readers: 1, Salt: salt}
	return k.Append(nil)
}

func (e *peerEngine) request() string { return fmt.Sprintf("r%d-%d", e.id, e.number) }

// put stores a prompt and returns how many chunks were new.
func (e *peerEngine) put(seed, chunks int, salt string) int {
	e.t.Helper()
	e.number++
	k, id := e.key(seed, chunks, salt, 0), lmcache.AppendInt(nil, e.id)
	p, err := lmcache.DecodePrepareStore(e.over(false, lmcache.OpPrepareStore, k, id))
	if err != nil {
		e.t.Fatal(err)
	}
	if len(p.Slots) == 0 {
		return 0
	}
	f, err := os.OpenFile(e.store.Files().Path(), os.O_RDWR, 0)
	if err != nil {
		e.t.Fatal(err)
	}
	defer f.Close()
	for _, s := range p.Slots {
		if _, err := f.WriteAt(bytes.Repeat([]byte{e.fill}, int(s.Length)), s.Offset); err != nil {
			e.t.Fatal(err)
		}
	}
	if ok, err := lmcache.DecodeBool(e.over(false, lmcache.OpCommitStore, k, id, lmcache.AppendBytes(nil, nil))); err != nil || !ok {
		e.t.Fatalf("commit: %v, %v\n%s", ok, err, e.log)
	}
	return len(p.Slots)
}

// hit looks a prompt up. What hits is loaded, byte for byte what the engine stored.
func (e *peerEngine) hit(seed, chunks int, salt string) int {
	e.t.Helper()
	e.number++
	e.over(true, lmcache.OpLookup, e.key(seed, chunks, salt, lmcache.AllWorkers), lmcache.AppendInt(nil, 1))
	n, err := lmcache.DecodeInt(e.over(true, lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, e.request())))
	if err != nil {
		e.t.Fatal(err)
	}
	if n > 0 {
		k, id := e.key(seed, int(n), salt, 0), lmcache.AppendInt(nil, e.id)
		p, err := lmcache.DecodePrepareRetrieve(e.over(false, lmcache.OpPrepareRetrieve, k, id))
		if err != nil || !p.Success || len(p.Slots) != int(n) {
			e.t.Errorf("engine %d: a hit of %d chunks cannot be loaded: %+v, %v", e.id, n, p, err)
		}
		f, err := os.Open(e.store.Files().Path())
		if err != nil {
			e.t.Fatal(err)
		}
		defer f.Close()
		for _, s := range p.Slots {
			b := make([]byte, s.Length)
			if _, err := f.ReadAt(b, s.Offset); err != nil || !bytes.Equal(b, bytes.Repeat([]byte{e.fill}, len(b))) {
				e.t.Errorf("engine %d: a chunk begins with %x, %v", e.id, b[0], err)
			}
		}
		e.over(false, lmcache.OpCommitRetrieve, k, id)
	}
	e.over(true, lmcache.OpEndSession, lmcache.AppendString(nil, e.request()))
	return int(n)
}

func (e *peerEngine) want(what string, hit, of int) {
	e.t.Helper()
	if got := e.hit(1, of, ""); got != hit {
		e.t.Errorf("%s: engine %d hits %d of %d chunks, want %d\n%s", what, e.id, got, of, hit, e.log)
	}
}

// A vLLM and a SGLang under one model name on one server have chunks of their own and both hit, whichever registered last, over a
// restart of the server and of each of them.
func TestVLLMAndSGLangShareAModelName(t *testing.T) {
	for i, first := range []string{"vllm", "sglang", "vllm, fused", "sglang, fused"} {
		d := newDesk(t, server.Options{})
		v, s := d.vllm(1, []form{vllmForm, fusedForm}[i/2]), d.sglang(2, sglangForm)
		if i%2 == 0 {
			v.register()
			s.register()
		} else {
			s.register()
			v.register()
		}
		both := func(what string, vHit, sHit int) {
			t.Helper()
			v.want(first+" first, "+what, vHit, 3)
			s.want(first+" first, "+what, sHit, 3)
		}
		both("nothing is stored", 0, 0)
		if n := v.put(1, 2, ""); n != 2 {
			t.Fatalf("%d chunks stored", n)
		}
		both("the vLLM has stored", 2, 0)
		if n := s.put(1, 3, ""); n != 3 {
			t.Fatalf("the SGLang stores %d chunks, the vLLM's are not its own", n)
		}
		both("both have stored", 2, 3)

		d.restart()
		v.connect()
		s.connect()
		if !s.ping() {
			t.Error("a saved registration is unknown")
		}
		both("restart", 2, 3)
		s.unregister()
		v.want("the SGLang has gone", 2, 3)
		s.register()
		both("the SGLang is back", 2, 3)
		v.unregister()
		s.want("the vLLM has gone", 3, 3)
		v.register()
		both("the vLLM is back", 2, 3)
		if !strings.Contains(d.log.String(), "each layout has chunks of its own") || d.Status().Declined["several_layouts"] != 0 {
			t.Errorf("%v\n%s", d.Status().Declined, d.log)
		}

		// What one has and the other lacks is there under another layout. A clear forgets both.
		s.put(5, 1, "")
		v.hit(5, 1, "")
		if ends := d.Explain(v.request(), 1); len(ends.Lookups) != 1 || ends.Lookups[0].Reason != "other_layout" {
			t.Errorf("%+v", ends)
		}
		v.put(7, 1, "tenant")
		if got, other := v.hit(7, 1, "tenant"), s.hit(7, 1, "tenant"); got != 1 || other != 0 {
			t.Errorf("with a salt the vLLM hits %d, the SGLang %d", got, other)
		}
		if _, err := d.Clear(server.Clear{Tier: server.ClearAll, Force: true}); err != nil {
			t.Error(err)
		}
		both("cleared", 0, 0)
	}
}

// A SGLang that has not named its worker since the server's restart gets no hit that it cannot load, and no wrong bytes.
func TestSGLangBeforeItsFirstPing(t *testing.T) {
	d := newDesk(t, server.Options{})
	v, s := d.vllm(1, vllmForm).register(), d.sglang(2, sglangForm).register()
	v.put(1, 2, "")
	d.restart()
	v.connect()
	s.connect()
	s.number++
	k := s.key(1, 2, "", lmcache.AllWorkers)
	s.over(true, lmcache.OpLookup, k, lmcache.AppendInt(nil, 1)) // in vLLM's layout: nothing says otherwise
	p, err := lmcache.DecodePrepareRetrieve(s.over(false, lmcache.OpPrepareRetrieve, s.key(1, 2, "", 0), lmcache.AppendInt(nil, 2)))
	if err != nil || p.Success || len(p.Slots) > 0 {
		t.Errorf("%+v, %v", p, err)
	}
	s.over(true, lmcache.OpEndSession, lmcache.AppendString(nil, s.request()))
	s.put(1, 3, "") // names the worker
	s.want("after a store", 3, 3)
}

// A client whose worker is not registered, or is refused, is promised nothing of another engine's: it could not load it.
func TestClientsOfUnknownWorkersHitNothing(t *testing.T) {
	d := newDesk(t, server.Options{})
	v, s := d.vllm(1, vllmForm).register(), d.sglang(2, sglangForm)
	v.put(1, 2, "")
	if s.ping() {
		t.Error("the ping of an unknown worker is true")
	}
	s.want("it has named a worker that is not registered", 0, 2)
	s.over(false, lmcache.OpRegisterKVCache, (&lmcache.KVCache{InstanceID: 2, Model: "m", WorldSize: 1, EngineType: "sglang"}).Frames()...)
	if w := d.Status().Workers; len(w) != 2 || w[1].Refused == "" {
		t.Fatalf("%+v", w)
	}
	s.want("its worker is refused", 0, 2)
	s.register()
	s.want("it is registered", 0, 2)
	s.put(1, 2, "")
	s.want("it has stored", 2, 2)
	v.want("the vLLM", 2, 2)
}

// Of two layouts of vLLM a lookup over a connection that has named no worker is declined, and a finding says so. One that has
// named its worker is not.
func TestTwoLayoutsOfVLLM(t *testing.T) {
	eight := vllmForm
	eight.dtype = "float8_e4m3fn"
	f := func(a, b form) {
		t.Helper()
		d := newDesk(t, server.Options{})
		v, w, s := d.vllm(1, a).register(), d.vllm(2, b).register(), d.sglang(3, b)
		s.fill = w.fill
		s.register()
		v.put(1, 2, "")
		w.put(1, 2, "")
		if n := s.put(1, 3, ""); n != 1 {
			t.Errorf("%d chunks are new, two of this layout are there", n)
		}
		s.want("its connection has named its worker", 3, 3)
		v.want("two layouts", 0, 2)
		w.want("two layouts", 0, 2)
		st := d.Status()
		if st.Declined["several_layouts"] != 2 {
			t.Errorf("declined: %v", st.Declined)
		}
		found := false
		for _, x := range st.Findings {
			found = found || strings.Contains(x.What, "several layouts")
		}
		if !found || !strings.Contains(d.log.String(), "are declined: give the engines unlike model names") {
			t.Errorf("%+v\n%s", st.Findings, d.log)
		}
		if ends := d.Explain(w.request(), 1); len(ends.Lookups) != 1 || ends.Lookups[0].Reason != "declined" || !strings.Contains(ends.Lookups[0].Text, "several layouts") {
			t.Errorf("%+v", ends)
		}
		w.unregister()
		s.unregister()
		v.want("one layout is left", 2, 2)
	}
	f(vllmForm, eight)
	f(eight, vllmForm)
	wide, slim := sglangForm, sglangForm // MLA, of which nothing says whose it is
	slim.dtype = "float8_e4m3fn"
	f(wide, slim)
	f(vllmForm, form{false, 4, 32, "bfloat16", 1})
}

// Two vLLMs of unlike layouts whose processes are seen both hit: a scheduler looks up in the layout of its own process's workers.
func TestTwoLayoutsOfProcesses(t *testing.T) {
	d := newDesk(t, server.Options{})
	process := func() peercred.Peer {
		c := exec.Command("sleep", "1000")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = c.Process.Kill()
			_ = c.Wait()
		})
		who := sameUser
		who.PID = c.Process.Pid
		return who
	}
	eight := vllmForm
	eight.dtype = "float8_e4m3fn"
	engines := []*peerEngine{d.vllm(1, vllmForm), d.vllm(2, eight), d.sglang(3, sglangForm)}
	for _, e := range engines {
		e.who = process()
		e.connect()
		e.register()
		e.put(1, 2, "")
	}
	for range 2 {
		for _, e := range engines {
			e.want("processes are seen", 2, 2)
		}
		d.restart()
		for _, e := range engines {
			e.connect() // and no ping
		}
	}
	stranger := d.vllm(1, vllmForm) // its process is not known
	stranger.want("a scheduler of an unknown process", 0, 2)
}

// Stages of a pipeline are one layout beside an engine of another.
func TestPipelineBesideSGLang(t *testing.T) {
	d := newDesk(t, server.Options{})
	deep, flat, other := vllmForm, vllmForm, sglangForm
	deep.world, flat.world, other.world, flat.layers = 2, 2, 2, 3
	stages := []*peerEngine{d.vllm(1, deep).register(), d.vllm(2, flat).register()}
	sglangs := []*peerEngine{d.sglang(3, other).register(), d.sglang(4, other).register()}
	put := func(list []*peerEngine, seed int) {
		t.Helper()
		for shard, e := range list {
			e.number++
			k, id := e.key(seed, 2, "", shard), lmcache.AppendInt(nil, e.id)
			if p, err := lmcache.DecodePrepareStore(e.over(false, lmcache.OpPrepareStore, k, id)); err != nil || len(p.Slots) != 2 {
				t.Fatalf("%+v, %v", p, err)
			}
			e.over(false, lmcache.OpCommitStore, k, id, lmcache.AppendBytes(nil, nil))
		}
	}
	hits := func(what string, e *peerEngine, seed, want int) {
		t.Helper()
		e.number++
		e.over(true, lmcache.OpLookup, e.key(seed, 2, "", lmcache.AllWorkers), lmcache.AppendInt(nil, 1))
		if n, err := lmcache.DecodeInt(e.over(true, lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, e.request()))); err != nil || int(n) != want {
			t.Errorf("%s: engine %d hits %d, want %d, %v\n%s", what, e.id, n, want, err, d.log)
		}
		e.over(true, lmcache.OpEndSession, lmcache.AppendString(nil, e.request()))
	}
	put(stages, 1)
	put(sglangs, 2)
	for _, what := range []string{"same life", "restart"} {
		for seed, want := range map[int][2]int{1: {2, 0}, 2: {0, 2}} {
			hits(what, stages[0], seed, want[0])
			hits(what, sglangs[0], seed, want[1])
		}
		d.restart()
		for _, e := range append(stages, sglangs...) {
			e.connect()
		}
		sglangs[0].ping()
	}
	// A pipeline that is cut elsewhere is another engine: what one of them would find the other could not load.
	d.vllm(5, flat).register()
	cut := []*peerEngine{d.vllm(5, flat), d.vllm(6, deep).register()}
	put(cut, 3)
	hits("two cuts", stages[0], 1, 0)
	hits("two cuts", sglangs[0], 2, 2)
}

// Stages of unequal depth whose K and V lie side by side are vLLM's beside those of a SGLang, in whatever order the stages register.
func TestUnequalStagesBesideSGLang(t *testing.T) {
	for _, order := range [][2]int{{0, 1}, {1, 0}} {
		d := newDesk(t, server.Options{})
		of := func(f form, layers int) form {
			f.world, f.layers = 2, layers
			return f
		}
		stages := []*peerEngine{d.vllm(1, of(fusedForm, 2)).register(), d.vllm(2, of(fusedForm, 3)).register()}
		sglangs := []*peerEngine{d.sglang(3, of(sglangForm, 4)), d.sglang(4, of(sglangForm, 6))}
		for _, i := range order {
			sglangs[i].register()
		}
		for seed, list := range [][]*peerEngine{stages, sglangs} {
			for shard, e := range list {
				e.number++
				k, id := e.key(seed, 2, "", shard), lmcache.AppendInt(nil, e.id)
				if p, err := lmcache.DecodePrepareStore(e.over(false, lmcache.OpPrepareStore, k, id)); err != nil || len(p.Slots) != 2 {
					t.Fatalf("%+v, %v", p, err)
				}
				e.over(false, lmcache.OpCommitStore, k, id, lmcache.AppendBytes(nil, nil))
			}
		}
		for of, list := range [][]*peerEngine{stages, sglangs} {
			for seed := range 2 {
				e, want := list[0], map[bool]int{true: 2}[of == seed]
				e.number++
				e.over(true, lmcache.OpLookup, e.key(seed, 2, "", lmcache.AllWorkers), lmcache.AppendInt(nil, 1))
				if n, err := lmcache.DecodeInt(e.over(true, lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, e.request()))); err != nil || int(n) != want {
					t.Errorf("order %v: engine %d hits %d chunks of engines %d, want %d, %v\n%s", order, e.id, n, seed, want, err, d.log)
				}
				e.over(true, lmcache.OpEndSession, lmcache.AppendString(nil, e.request()))
			}
		}
	}
}

// Engines whose chunks have equal bytes share them, whatever their type: MLA has one plane in a vLLM and in a SGLang.
func TestMLAIsShared(t *testing.T) {
	d := newDesk(t, server.Options{})
	mla := form{true, 3, 64, "bfloat16", 1}
	v, s := d.vllm(1, mla).register(), d.sglang(2, mla).register()
	v.put(1, 2, "")
	if n := s.put(1, 2, ""); n != 0 {
		t.Errorf("%d chunks are stored again", n)
	}
	v.want("MLA", 2, 2)
	if l := d.Registry().List(); l[0].NamespaceOf(nil) != l[1].NamespaceOf(nil) {
		t.Error("two namespaces")
	}
}

// Tiers whose names do not tell layouts apart take nothing of a model that has two layouts with chunks of equal length, also after a restart.
func TestTwoLayoutsHaveNoNamesInLMCachesLayout(t *testing.T) {
	d := newDesk(t, server.Options{})
	v, s := d.vllm(1, vllmForm).register(), d.sglang(2, sglangForm)
	named := func(want bool) {
		t.Helper()
		for _, in := range d.Registry().List() {
			ns := in.NamespaceOf(nil)
			n, ok := d.NameOf(ns)
			if _, has := n.LMCache(kv.Key{Namespace: ns}); !ok || has != want {
				t.Errorf("worker %d: known %v, has a name %v, want %v", in.ID, ok, has, want)
			}
		}
	}
	v.put(1, 1, "")
	named(true)
	s.register()
	s.put(1, 1, "")
	named(false)
	d.restart()
	named(false)
	v.connect()
	v.unregister() // what it wrote there may be there still
	d.restart()
	named(false)
	half := vllmForm
	half.hidden /= 2
	d = newDesk(t, server.Options{})
	d.vllm(1, vllmForm).register().put(1, 1, "")
	d.vllm(2, half).register().put(1, 1, "")
	named(true) // their lengths tell them apart
}

// The chunks of two layouts count for one tenant, whose quota keeps both; subscribers see a chunk of either once.
func TestTenantsAndEventsOfTwoLayouts(t *testing.T) {
	d := newDesk(t, server.Options{})
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	book := events.New(d.store, events.Options{})
	d.opts.Events = book
	d.Server = server.New(d.store, d.opts)
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() { book.Run(ctx) })
	defer run.Wait()
	defer cancel()
	book.Activate()

	v, s := d.vllm(1, vllmForm).register(), d.sglang(2, sglangForm).register()
	const chunk = 8192 // bytes
	if err := d.store.SetQuota("tenant", 5*chunk); err != nil {
		t.Fatal(err)
	}
	v.put(1, 2, "tenant")
	s.put(1, 3, "tenant")
	used := func() (n int64) {
		for _, u := range d.store.Tenants() {
			if u.Salt == "tenant" {
				n = u.Bytes
			}
		}
		return n
	}
	if used() != 5*chunk {
		t.Errorf("the tenant has %d bytes, want %d", used(), 5*chunk)
	}
	seen := func() int { chunks, _ := book.Snapshot("m", false); return len(chunks) }
	testkit.Eventually(t, "three chunks are seen", func() bool { return seen() == 3 })
	for seed := range 40 { // more than the pool has room for
		v.put(100+seed, 1, "")
	}
	if got, want := [2]int{v.hit(1, 3, "tenant"), s.hit(1, 3, "tenant")}, [2]int{2, 3}; got != want || used() != 5*chunk {
		t.Errorf("under a flood of others the tenant's prompt hits %v, want %v; it has %d bytes", got, want, used())
	}
	if _, err := d.Clear(server.Clear{Tier: server.ClearAll, Force: true}); err != nil {
		t.Error(err)
	}
	testkit.Eventually(t, "no chunk is seen", func() bool { return seen() == 0 })
	if used() != 0 {
		t.Errorf("%d bytes after a clear", used())
	}
}
