// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/pickle"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// newPickleServer is newServer with options; it also returns the pool's folder.
func newPickleServer(t testing.TB, chunkTokens int, poolBytes int64, o server.Options) (*server.Server, *store.Store, string) {
	t.Helper()
	dir := t.TempDir()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: poolBytes, Dir: dir, ChunkTokens: chunkTokens})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{TrustUnsummed: true})
	o.ChunkTokens, o.Log = chunkTokens, slog.New(slog.NewTextHandler(io.Discard, nil))
	s := server.New(st, o)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, st, dir
}

// The whole recorded life of workers that pickle, request by request: our replies
// equal the reference's but where they may or must differ; pickled tensors are
// compared as such.
func TestRecordedPickle(t *testing.T) {
	var rec testkit.Recording
	testkit.ReadVector(t, "lmcache-mp/engine_driven_pickle.json", &rec)
	s, st, _ := newPickleServer(t, rec.Meta.ChunkTokens, 256<<20, server.Options{Pickle: server.PickleOnly})
	differs := map[string]string{ // as in TestRecordedEngineDriven, and where the reference is silent
		"ping_id":                        "c2",
		"get_experimental":               "90",
		"prepare_store_unknown_instance": "81a7636f6e7465787482a5736c6f747390ad6368756e6b5f696e646963657390",
		"commit_store_without_prepare":   "c2",
	}
	cases, hits := 0, 0
	for _, step := range rec.Steps {
		for i, f := range step.Frames {
			if f.Direction != "client_to_server" {
				continue
			}
			cases++
			got := s.Answer(testkit.Frames(f.Hex))
			if want, ok := differs[step.Step]; ok {
				if len(got) != 3 || fmt.Sprintf("%x", got[2]) != want {
					t.Errorf("%s: reply %x, want result %s", step.Step, got, want)
				}
				continue
			}
			want := testkit.Frames(step.Frames[i+1].Hex)
			if len(got) != len(want) {
				t.Fatalf("%s: reply %x, want %x", step.Step, got, want)
			}
			for j := range want {
				g, w := got[j], want[j]
				if j == 2 {
					if a, err := lmcache.DecodePrepareRetrieve(w); err == nil && len(a.Data) > 0 {
						hits++
						b, err := lmcache.DecodePrepareRetrieve(g)
						if err != nil || !b.Success || len(b.Slots) != 0 || !sameTensors(t, b.Data, a.Data) {
							t.Errorf("%s: %.80x, %v", step.Step, g, err)
						}
						continue
					}
				}
				if !bytes.Equal(g, w) {
					t.Errorf("%s: frame %d is\n%x, want\n%x", step.Step, j, g, w)
				}
			}
		}
	}
	if got := st.Stats(); got.Transfers != 0 || got.StagedBytes != 0 || hits == 0 {
		t.Errorf("%d hits; %+v", hits, got)
	}
	t.Logf("%d cases", cases)
}

func sameTensors(t *testing.T, a, b []byte) bool {
	t.Helper()
	x, err := pickle.Read(a, 100)
	if err != nil {
		t.Error(err)
	}
	y, err := pickle.Read(b, 100)
	if err != nil {
		t.Error(err)
	}
	return len(x) > 0 && fmt.Sprint(x) == fmt.Sprint(y)
}

// pickler is a worker that pickles, beside a server.
type pickler struct {
	t      testing.TB
	s      *server.Server
	id     byte
	layout kv.Layout
}

// data is what chunk c of prompt seed holds.
func (p *pickler) data(seed, c int) []byte {
	n, err := p.layout.Bytes()
	if err != nil {
		p.t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(uint64(seed), uint64(c)))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return b
}

func (p *pickler) dump(layout kv.Layout, n, seed int) []byte {
	l, ok := pickle.NewLayout(layout.DType, layout.Shape())
	if !ok {
		p.t.Fatal(layout)
	}
	return l.Append(nil, n, func(i int, dst []byte) { copy(dst, p.data(seed, i)) })
}

func (p *pickler) key(seed, chunks int) *lmcache.Key {
	return &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(16*chunks, seed), End: 16 * chunks, RequestID: fmt.Sprint("r", seed), Readers: 1}
}

func (p *pickler) commit(k *lmcache.Key, data []byte) bool {
	p.t.Helper()
	reply := p.s.Answer([][]byte{{0}, {17}, k.Append(nil), {p.id}, lmcache.AppendBytes(nil, data)})
	ok, err := lmcache.DecodeBool(reply[2])
	if err != nil {
		p.t.Fatal(err)
	}
	return ok
}

func (p *pickler) store(seed, chunks int) bool {
	p.t.Helper()
	k := p.key(seed, chunks)
	p.s.Answer([][]byte{{0}, {16}, k.Append(nil), {p.id}})
	return p.commit(k, p.dump(p.layout, chunks, seed))
}

// load looks chunks up and retrieves them; false for a miss.
func (p *pickler) load(seed, chunks int) bool {
	p.t.Helper()
	k := p.key(seed, chunks)
	k.Worker = lmcache.AllWorkers
	p.s.Answer([][]byte{{0}, {8}, k.Append(nil), {1}})
	k = p.key(seed, chunks)
	reply := p.s.Answer([][]byte{{0}, {18}, k.Append(nil), {p.id}})
	got, err := lmcache.DecodePrepareRetrieve(reply[2])
	if err != nil {
		p.t.Fatal(err)
	}
	ok, err := lmcache.DecodeBool(p.s.Answer([][]byte{{0}, {19}, k.Append(nil), {p.id}})[2])
	if err != nil || !ok {
		p.t.Fatalf("commit_retrieve: %v, %v", ok, err)
	}
	if !got.Success {
		return false
	}
	list, err := pickle.Read(got.Data, chunks)
	if err != nil || len(list) != chunks || len(got.Slots) != 0 {
		p.t.Fatalf("%d tensors, %v", len(list), err)
	}
	for c, x := range list {
		if !bytes.Equal(x.Data, p.data(seed, c)) {
			p.t.Fatalf("chunk %d of prompt %d has other bytes", c, seed)
		}
	}
	p.s.Answer([][]byte{{0}, {13}, lmcache.AppendString(nil, k.RequestID)})
	return true
}

// A worker that was offered the pool and could not map it: what it pickles is
// kept, comes back pickled, and is what a worker that maps the pool sees.
func TestPickleFallback(t *testing.T) {
	s, st, dir := newPickleServer(t, 16, 1<<20, server.Options{Pickle: server.PickleOn})
	p := &pickler{t: t, s: s, id: 7, layout: smallLayout}
	if got := register(t, s, 7, smallLayout); got.ShmName == "" {
		t.Fatal("a worker on this host is not offered the pool")
	}
	if p.load(1, 1) {
		t.Fatal("a hit of nothing")
	}
	for i := range 3 {
		for range 2 { // again: all cached
			if !p.store(i, 3) {
				t.Fatalf("store %d", i)
			}
		}
	}
	for i := range 3 {
		if !p.load(i, 3) || !p.load(i, 2) {
			t.Fatalf("load %d", i)
		}
	}
	if got := st.Stats(); got.Transfers != 0 || got.StagedBytes != 0 || got.Resident != 9 {
		t.Fatalf("%+v", got)
	}
	if got := prepareStore(t, s, 7, p.key(9, 1)); got.Slots != nil {
		t.Fatalf("it is told places: %+v", got)
	}

	register(t, s, 8, smallLayout)
	mapped, err := os.ReadFile(filepath.Join(dir, "pool"))
	if err != nil {
		t.Fatal(err)
	}
	k := p.key(1, 3)
	s.Answer([][]byte{{0}, {8}, k.Append(nil), {1}})
	got, err := lmcache.DecodePrepareRetrieve(s.Answer([][]byte{{0}, {18}, k.Append(nil), {8}})[2])
	if err != nil || len(got.Slots) != 3 {
		t.Fatalf("%+v, %v", got, err)
	}
	for c, slot := range got.Slots {
		if !bytes.Equal(mapped[slot.Offset:slot.Offset+slot.Length], p.data(1, c)) {
			t.Fatalf("chunk %d in the pool has other bytes", c)
		}
	}
	s.Answer([][]byte{{0}, {19}, k.Append(nil), {8}})
}

// Pickled tensors that are not what the worker registered are declined whole.
func TestPickleRefused(t *testing.T) {
	s, st, _ := newPickleServer(t, 16, 1<<20, server.Options{Pickle: server.PickleOnly, PickleBytes: 64 << 10})
	if got := register(t, s, 7, smallLayout); got.ShmName != "" || got.Bytes != 0 {
		t.Fatalf("offered %+v", got)
	}
	p := &pickler{t: t, s: s, id: 7, layout: smallLayout}
	other, wide := smallLayout, smallLayout
	other.DType = "int16"
	wide.Slots, wide.Hidden = wide.Slots*2, wide.Hidden/2
	good := p.dump(smallLayout, 2, 1)
	f := func(name string, data []byte) {
		t.Helper()
		if p.commit(p.key(1, 2), data) {
			t.Errorf("%s is stored", name)
		}
		if got := st.Stats(); got.FreeBytes != got.Bytes || got.Transfers != 0 {
			t.Fatalf("%s left %+v", name, got)
		}
	}
	f("a list of one", p.dump(smallLayout, 1, 1))
	f("a list of three", p.dump(smallLayout, 3, 1))
	f("another dtype", p.dump(other, 2, 1))
	f("another shape", p.dump(wide, 2, 1))
	f("half a list", good[:len(good)/2])
	f("another pickle", []byte("\x80\x04]."))
	f("text", []byte("cos\nsystem\n(S'true'\ntR."))
	f("too many bytes", append(good, make([]byte, 64<<10)...))
	if !p.commit(p.key(1, 2), good) || !p.load(1, 2) {
		t.Fatal("the good list is not stored")
	}
	// More than one message may carry is a miss.
	n, _ := smallLayout.Bytes()
	many := int(64<<10/n) + 1
	for c := 1; c < many; c++ {
		k := p.key(5, many)
		k.Start, k.End = c*16-16, c*16
		l, _ := pickle.NewLayout(smallLayout.DType, smallLayout.Shape())
		if !p.commit(k, l.Append(nil, 1, func(_ int, dst []byte) { copy(dst, p.data(5, c-1)) })) {
			t.Fatal(c)
		}
	}
	if !p.load(5, 2) || p.load(5, many-1) {
		t.Fatal("the limit does not hold")
	}
	if got := st.Stats(); got.Transfers != 0 {
		t.Fatalf("%+v", got)
	}
}

// A worker that pickles still does after the server was started anew, and its
// late commit, after it was dropped, stores nothing.
func TestPickleRestart(t *testing.T) {
	dir := t.TempDir()
	start := func() (*server.Server, *store.Store, func()) {
		p, err := pool.Open(pool.Options{Name: "pool", Bytes: 1 << 20, Dir: dir, ChunkTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		st := store.New(p, store.Options{TrustUnsummed: true})
		s := server.New(st, server.Options{ChunkTokens: 16, Pickle: server.PickleOn, WorkerReap: time.Minute, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		return s, st, func() { _ = s.Close(); _ = st.Close() }
	}
	s, _, stop := start()
	register(t, s, 7, smallLayout)
	p := &pickler{t: t, s: s, id: 7, layout: smallLayout}
	if !p.store(1, 2) {
		t.Fatal("store")
	}
	stop()
	s, st, stop := start()
	defer stop()
	p.s = s
	if got := prepareStore(t, s, 7, p.key(2, 1)); got.Slots != nil {
		t.Fatalf("it is told places: %+v", got)
	}
	if !p.load(1, 2) {
		t.Fatal("a miss after the restart")
	}
	s.Answer([][]byte{{0}, {15}, {7}}) // unregistered
	if p.commit(p.key(2, 1), p.dump(smallLayout, 1, 2)) {
		t.Fatal("a worker that is gone stored")
	}
	if got := st.Stats(); got.Resident != 2 || got.Transfers != 0 {
		t.Fatalf("%+v", got)
	}
}

// Whatever a worker sends for tensors is stored as they are, or declined whole.
func FuzzPickledStore(f *testing.F) {
	layout := kv.Layout{SinglePlane: true, Layers: 1, Slots: 16, Hidden: 1, DType: "uint8"}
	p := &pickler{layout: layout}
	l, _ := pickle.NewLayout(layout.DType, layout.Shape())
	for n := range 4 {
		f.Add(l.Append(nil, n, func(i int, dst []byte) { copy(dst, p.data(1, i)) }))
	}
	s, st, _ := newPickleServer(f, 16, 16*4096, server.Options{Pickle: server.PickleOnly})
	registration := lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 1, DType: "uint8", SinglePlane: true}
	s.Answer([][]byte{{0}, {14}, registration.Append(nil)})
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _ = s.Clear(server.Clear{Tier: server.ClearL1, Force: true})
		p := &pickler{t: t, s: s, id: 7, layout: layout}
		stored := p.commit(p.key(1, 2), data)
		got := st.Stats()
		if got.Transfers != 0 || got.StagedBytes != 0 || stored != (got.Resident == 2) || !stored && got.FreeBytes != got.Bytes {
			t.Fatalf("stored %v: %+v", stored, got)
		}
		if list, err := pickle.Read(data, 2); stored && (err != nil || len(list) != 2) {
			t.Fatalf("%d tensors are stored, %v", len(list), err)
		}
	})
}
