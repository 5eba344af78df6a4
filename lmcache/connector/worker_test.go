// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// fakeServer answers as it is told. It has a pool of its own.
type fakeServer struct {
	t      *testing.T
	dir    string
	url    string
	pool   *shm.Segment
	router *zmtp.Router
	wg     sync.WaitGroup

	mu      sync.Mutex
	answers map[lmcache.Op]func(m [][]byte) []byte // nil: no reply
	gate    chan struct{}                          // prepare_store waits for it
	seen    []lmcache.Op
}

const poolBytes = 1 << 16

func newFakeServer(t *testing.T) *fakeServer {
	t.Helper()
	s := &fakeServer{t: t, dir: t.TempDir(), answers: map[lmcache.Op]func([][]byte) []byte{}}
	var err error
	if s.pool, err = shm.Create(filepath.Join(s.dir, "pool"), poolBytes); err != nil {
		t.Fatal(err)
	}
	yes := func([][]byte) []byte { return lmcache.AppendBool(nil, true) }
	s.answers[lmcache.OpPing], s.answers[lmcache.OpCommitStore], s.answers[lmcache.OpCommitRetrieve] = yes, yes, yes
	s.answers[lmcache.OpRegisterEngineDriven] = func([][]byte) []byte {
		return lmcache.Pool{ShmName: "pool", Bytes: poolBytes}.Append(nil)
	}
	s.listen("tcp://127.0.0.1:*")
	t.Cleanup(func() {
		s.router.Close()
		s.wg.Wait()
		if err := s.pool.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *fakeServer) listen(endpoint string) {
	s.t.Helper()
	s.router = zmtp.NewRouter(s.serve, zmtp.RouterOptions{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	addr, err := s.router.Listen(s.t.Context(), endpoint)
	if err != nil {
		s.t.Fatal(err)
	}
	s.url = "tcp://" + addr.String()
}

func (s *fakeServer) serve(p *zmtp.Peer, m zmtp.Message) {
	frames := make([][]byte, len(m))
	for i := range m {
		frames[i] = bytes.Clone(m[i])
	}
	op, _ := lmcache.ParseOp(frames[1])
	s.mu.Lock()
	s.seen = append(s.seen, op)
	answer, gate := s.answers[op], s.gate
	s.mu.Unlock()
	if op != lmcache.OpPrepareStore {
		gate = nil
	}
	s.wg.Go(func() {
		if gate != nil {
			<-gate
		}
		reply := frames[:2:2]
		if answer != nil {
			b := answer(frames)
			if b == nil {
				return
			}
			reply = append(reply, b)
		}
		_ = p.Send(reply...)
	})
}

func (s *fakeServer) set(op lmcache.Op, f func([][]byte) []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[op] = f
}

func (s *fakeServer) count(op lmcache.Op) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, o := range s.seen {
		if o == op {
			n++
		}
	}
	return n
}

// slots offers the places of the chunks 0 to n-1 of an operation.
func slots(p *connector.Paged, chunkTokens, n int) *lmcache.Slots {
	layout, _ := p.Layout(chunkTokens)
	size, _ := layout.Bytes()
	s := &lmcache.Slots{Layouts: []kv.Layout{layout}, Lengths: []int64{size}}
	for i := range n {
		s.Offsets = append(s.Offsets, int64(i)*4096)
		s.Indices = append(s.Indices, i)
	}
	return s
}

func openAdapter(t *testing.T, s *fakeServer, p *connector.Paged, change func(*connector.WorkerOptions)) *connector.Worker {
	t.Helper()
	c, err := lmcache.NewClient(s.url)
	if err != nil {
		t.Fatal(err)
	}
	o := connector.WorkerOptions{
		Model: "m", Cache: p, ChunkTokens: 8, ShmDir: s.dir, NoHeartbeat: true, CallTimeout: time.Minute,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	if change != nil {
		change(&o)
	}
	a, err := connector.OpenWorker(t.Context(), c, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = a.Close(ctx) // the server may be gone
		_ = c.Close()
	})
	return a
}

func op(d lmcache.Direction, id string, start, end int, blocks ...int) lmcache.LoadStore {
	return lmcache.LoadStore{Direction: d, RequestID: id, Tokens: make([]uint32, 64), Blocks: [][]int{blocks}, Start: start, End: end}
}

func flushWorker(t *testing.T, a *connector.Worker) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if err := a.Flush(ctx); err != nil {
		t.Fatal(err)
	}
}

// Stores of one request that wait become one. The request is reported as sent once, when all of
// them have ended. Flush waits for them.
func TestBatching(t *testing.T) {
	s, p := newFakeServer(t), newPaged(paged.PlanesNHD, 1, 16, 4, 1, 8)
	for i := range p.Layers[0] {
		p.Layers[0][i] = byte(i * 7)
	}
	s.set(lmcache.OpPrepareStore, func([][]byte) []byte { return lmcache.AppendPrepareStore(nil, slots(p, 8, 1)) })
	gate := make(chan struct{})
	s.gate = gate
	a := openAdapter(t, s, p, func(o *connector.WorkerOptions) { o.Concurrency, o.MaxEvents = 1, 2 })
	a.Save([]lmcache.LoadStore{op(lmcache.Store, "other", 0, 8, 1, 2), op(lmcache.Retrieve, "never", 0, 8, 1, 2)})
	testkit.Eventually(t, "first operation", func() bool { return a.Stats().Running == 1 })
	a.Save([]lmcache.LoadStore{op(lmcache.Store, "r", 0, 8, 3, 4)})
	a.Save([]lmcache.LoadStore{op(lmcache.Store, "r", 8, 16, 5, 6)})
	a.Save([]lmcache.LoadStore{op(lmcache.Store, "r", 24, 32, 5, 6)}) // does not follow
	if st := a.Stats(); st.Merged != 1 || st.Queued != 2 {
		t.Errorf("%+v", st)
	}
	if f := a.Finished([]string{"r", "idle"}); !slices.Equal(f.Sent, []string{"idle"}) || len(f.Received) > 0 {
		t.Errorf("%+v", f)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := a.Flush(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Flush = %v", err)
	}
	close(gate)
	flushWorker(t, a)
	if f := a.Finished([]string{"r", "idle"}); !slices.Equal(f.Sent, []string{"r"}) {
		t.Errorf("%+v", f)
	}
	if f := a.Finished([]string{"r", "idle"}); len(f.Sent) > 0 {
		t.Errorf("told twice: %+v", f)
	}
	if n := s.count(lmcache.OpCommitStore); n != 3 {
		t.Errorf("%d commits", n)
	}
	chunk := make([]byte, 2*8*16)
	p.Gather([]int{5, 6}, chunk)
	if !bytes.Equal(chunk, s.pool.Bytes(0, int64(len(chunk)))) {
		t.Error("the pool does not hold the last chunk stored")
	}
	events, lost := a.Events()
	hashes := kv.ChunkHashes(make([]uint32, 64), 8)
	if lost != 1 || len(events) != 3 || events[0].Kind != connector.Cleared || events[2].Hash != hashes[3] || events[2].Parent != hashes[2] || events[2].First || len(events[2].Tokens) != 8 {
		t.Errorf("%d lost, %+v", lost, events)
	}
}

// Two ranks are given the same operations: what one of them merges does not change the other's.
func TestRanksShareOperations(t *testing.T) {
	s, p := newFakeServer(t), newPaged(paged.PlanesNHD, 1, 16, 4, 1, 8)
	s.set(lmcache.OpPrepareStore, func([][]byte) []byte { return lmcache.AppendPrepareStore(nil, slots(p, 8, 0)) })
	gate := make(chan struct{})
	s.gate = gate
	one := func(o *connector.WorkerOptions) { o.Concurrency = 1 }
	a, b := openAdapter(t, s, p, one), openAdapter(t, s, p, one)
	busy := []lmcache.LoadStore{op(lmcache.Store, "other", 0, 8, 1, 2)}
	first, second := []lmcache.LoadStore{op(lmcache.Store, "r", 0, 8, 3, 4)}, []lmcache.LoadStore{op(lmcache.Store, "r", 8, 16, 5, 6)}
	for _, w := range []*connector.Worker{a, b} {
		w.Save(busy)
		testkit.Eventually(t, "first operation", func() bool { return w.Stats().Running == 1 })
	}
	for _, ops := range [][]lmcache.LoadStore{first, second} {
		a.Save(ops)
		b.Save(ops)
	}
	for _, w := range []*connector.Worker{a, b} {
		if st := w.Stats(); st.Merged != 1 || st.Queued != 1 || st.StoresDropped > 0 {
			t.Errorf("%+v", st)
		}
	}
	if !slices.Equal(first[0].Blocks[0], []int{3, 4}) || !slices.Equal(second[0].Blocks[0], []int{5, 6}) {
		t.Errorf("a worker changed the operations: %v, %v", first[0].Blocks, second[0].Blocks)
	}
	close(gate)
	flushWorker(t, a)
	flushWorker(t, b)
}

// A server that copies out of and into the engine's memory may do so until it answers or its
// connection ends: a slow one turns unhealthy, but the blocks stay in use.
func TestLentBlocksStayInUse(t *testing.T) {
	s, p := newFakeServer(t), newPaged(paged.FusedNHD, 1, 16, 4, 1, 8)
	var beats sync.Map
	s.set(lmcache.OpPing, func([][]byte) []byte {
		if _, silent := beats.Load("silent"); silent {
			return nil
		}
		return lmcache.AppendBool(nil, true)
	})
	gate := make(chan struct{})
	answer := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(answer) // before the server's end waits for its answers
	s.set(lmcache.OpStore, func([][]byte) []byte { <-gate; return lmcache.Copied{Event: lmcache.StubEvent, OK: true}.Append(nil) })
	s.set(lmcache.OpRetrieve, func([][]byte) []byte { return nil }) // it dies in the middle
	a := openAdapter(t, s, p, func(o *connector.WorkerOptions) {
		o.Segments, o.NoHeartbeat, o.Heartbeat, o.CallTimeout = []string{"layer"}, false, 100*time.Millisecond, 500*time.Millisecond
	})
	a.Save([]lmcache.LoadStore{op(lmcache.Store, "stored", 0, 8, 1, 2)})
	a.Load([]lmcache.LoadStore{op(lmcache.Retrieve, "loaded", 0, 8, 3, 4)})
	testkit.Eventually(t, "both operations", func() bool { return s.count(lmcache.OpStore) == 1 && s.count(lmcache.OpRetrieve) == 1 })
	beats.Store("silent", true)
	testkit.Eventually(t, "the server counts as unhealthy", func() bool { return !a.Healthy() })
	for range 5 { // some calls' time
		time.Sleep(200 * time.Millisecond)
		if f := a.Finished([]string{"stored", "loaded"}); len(f.Sent)+len(f.Received) > 0 {
			t.Fatalf("blocks are given back while the server copies: %+v", f)
		}
	}
	answer()
	testkit.Eventually(t, "the store has ended", func() bool { return slices.Equal(a.Finished(nil).Sent, []string{"stored"}) })
	if f := a.Finished(nil); len(f.Received) > 0 {
		t.Fatalf("%+v", f)
	}
	s.router.Close()
	testkit.Eventually(t, "the load has ended", func() bool { return slices.Equal(a.Finished(nil).Received, []string{"loaded"}) })
	if e := a.LoadErrors(); !slices.Equal(e.Requests, []string{"loaded"}) {
		t.Errorf("%+v", e)
	}
}

// Loads that fail, by refusal, silence or bad slots: received, with the blocks
// that may have been written; the commit follows all the same.
func TestLoadErrors(t *testing.T) {
	f := func(what string, answer func(p *connector.Paged) []byte) {
		t.Helper()
		s, p := newFakeServer(t), newPaged(paged.PlanesNHD, 1, 16, 4, 1, 8)
		asked := make(chan struct{}) // the first Finished was called
		s.set(lmcache.OpPrepareRetrieve, func([][]byte) []byte { <-asked; return answer(p) })
		a := openAdapter(t, s, p, func(o *connector.WorkerOptions) {
			if what == "silence" {
				o.CallTimeout = 200 * time.Millisecond
			}
		})
		load := op(lmcache.Retrieve, "r", 0, 16, 9, 3, 5, 7)
		load.SkipFirst = 4
		a.Load([]lmcache.LoadStore{load, op(lmcache.Store, "r", 0, 8, 1, 2)})
		first := a.Finished([]string{"r"}) // before the load ends, or after CallTimeout on a busy machine
		if len(first.Sent) > 0 {
			t.Errorf("%s: sent while its blocks are being written: %+v", what, first)
		}
		close(asked)
		testkit.Eventually(t, "end of load and store", func() bool { st := a.Stats(); return st.Queued+st.Running == 0 })
		last := a.Finished(nil)
		if !slices.Equal(slices.Concat(first.Received, last.Received), []string{"r"}) || len(last.Sent) > 0 {
			t.Errorf("%s: %+v, then %+v", what, first, last)
		}
		if n := s.count(lmcache.OpPrepareRetrieve); n != 1 && what != "silence" {
			t.Errorf("%s: %d prepares", what, n)
		}
		if e := a.LoadErrors(); !slices.Equal(e.Requests, []string{"r"}) || !slices.Equal(e.Blocks, []int{3, 5, 7}) {
			t.Errorf("%s: %+v", what, e)
		}
		if e := a.LoadErrors(); len(e.Requests)+len(e.Blocks) > 0 {
			t.Errorf("%s: told twice: %+v", what, e)
		}
		// On a busy machine CallTimeout can pass before the prepare is sent: then no commit is owed.
		testkit.Eventually(t, what+": a commit for the prepare", func() bool { return s.count(lmcache.OpCommitRetrieve) == s.count(lmcache.OpPrepareRetrieve) })
		for _, b := range p.Layers[0] {
			if b != 0 {
				t.Fatalf("%s: something was written", what)
			}
		}
	}
	f("refusal", func(*connector.Paged) []byte { return lmcache.AppendPrepareRetrieve(nil, nil) })
	f("silence", func(*connector.Paged) []byte { return nil })
	f("garbage", func(*connector.Paged) []byte { return []byte{0xc1} })
	f("too few slots", func(p *connector.Paged) []byte { return lmcache.AppendPrepareRetrieve(nil, slots(p, 8, 1)) })
	f("slots outside the pool", func(p *connector.Paged) []byte {
		s := slots(p, 8, 2)
		s.Offsets[1] = poolBytes - 8
		return lmcache.AppendPrepareRetrieve(nil, s)
	})
	f("another layout", func(p *connector.Paged) []byte {
		s := slots(p, 8, 2)
		s.Layouts[0].DType = "bfloat16"
		return lmcache.AppendPrepareRetrieve(nil, s)
	})
}

// Operations that would touch memory they must not are refused; a full queue
// drops stores and fails loads; ranks that keep copies do not store.
func TestRefusedOperations(t *testing.T) {
	s, p := newFakeServer(t), newPaged(paged.FusedNHD, 1, 16, 4, 1, 8)
	gate := make(chan struct{})
	s.gate = gate
	s.set(lmcache.OpPrepareStore, func([][]byte) []byte { return lmcache.AppendPrepareStore(nil, slots(p, 8, 0)) })
	a := openAdapter(t, s, p, func(o *connector.WorkerOptions) { o.MaxQueue, o.Concurrency = 1, 1 })
	bad := []lmcache.LoadStore{
		op(lmcache.Store, "id", 0, 8, 1, 16), op(lmcache.Store, "few", 0, 8, 1), op(lmcache.Store, "odd", 0, 9, 1, 2),
		op(lmcache.Store, "long", 0, 72, make([]int, 18)...), op(lmcache.Store, "empty", 8, 8), op(lmcache.Store, "negative", -8, 0, 1, 2),
	}
	a.Save(bad)
	if st := a.Stats(); st.StoresDropped != uint64(len(bad)) || st.Queued+st.Running > 0 {
		t.Errorf("%+v", st)
	}
	a.Save([]lmcache.LoadStore{op(lmcache.Store, "runs", 0, 8, 1, 2)})
	testkit.Eventually(t, "first operation", func() bool { return a.Stats().Running == 1 })
	a.Save([]lmcache.LoadStore{op(lmcache.Store, "waits", 0, 8, 1, 2), op(lmcache.Store, "dropped", 0, 8, 1, 2)})
	a.Load([]lmcache.LoadStore{op(lmcache.Retrieve, "fails", 0, 8, 5, 6)})
	if f := a.Finished([]string{"dropped"}); !slices.Equal(f.Sent, []string{"dropped"}) || !slices.Equal(f.Received, []string{"fails"}) {
		t.Errorf("%+v", f)
	}
	if e := a.LoadErrors(); !slices.Equal(e.Blocks, []int{5, 6}) {
		t.Errorf("%+v", e)
	}
	close(gate)
	flushWorker(t, a)

	b := openAdapter(t, s, p, func(o *connector.WorkerOptions) { o.Parallel = lmcache.Parallel{World: 4, TP: 4, Rank: 1, MLA: true} })
	b.Save([]lmcache.LoadStore{op(lmcache.Store, "copy", 0, 8, 1, 2)})
	if f := b.Finished([]string{"copy"}); !slices.Equal(f.Sent, []string{"copy"}) {
		t.Errorf("%+v", f)
	}
}

// A false ping, silence, and a new connection each lead to a registration.
func TestHealth(t *testing.T) {
	s, p := newFakeServer(t), newPaged(paged.FusedNHD, 1, 16, 4, 1, 8)
	a := openAdapter(t, s, p, func(o *connector.WorkerOptions) { o.NoHeartbeat, o.Heartbeat = false, 20*time.Millisecond })
	var once sync.Once
	s.set(lmcache.OpPing, func(m [][]byte) []byte {
		known := true
		if _, err := lmcache.DecodeInt(m[2]); err == nil { // a new connection pings without an id
			once.Do(func() { known = false })
		}
		return lmcache.AppendBool(nil, known)
	})
	testkit.Eventually(t, "registration after false", func() bool { return s.count(lmcache.OpRegisterEngineDriven) >= 2 }) // one more where a ping took longer than the heartbeat
	testkit.Eventually(t, "healthy", a.Healthy)

	registered := s.count(lmcache.OpRegisterEngineDriven)
	s.set(lmcache.OpPing, func([][]byte) []byte { return nil })
	testkit.Eventually(t, "unhealthy", func() bool { return !a.Healthy() })
	a.Load([]lmcache.LoadStore{op(lmcache.Retrieve, "r", 0, 8, 1, 2)})
	if f := a.Finished(nil); !slices.Equal(f.Received, []string{"r"}) {
		t.Errorf("%+v", f)
	}
	s.set(lmcache.OpPing, func([][]byte) []byte { return lmcache.AppendBool(nil, true) })
	testkit.Eventually(t, "healthy again", a.Healthy)
	if n := s.count(lmcache.OpRegisterEngineDriven); n <= registered {
		t.Errorf("%d registrations, %d before the silence", n, registered)
	}

	// Restarted between two pings, with an operation before the next one.
	b := openAdapter(t, s, p, nil)
	before := s.count(lmcache.OpRegisterEngineDriven)
	s.router.Close()
	s.listen(s.url)
	s.set(lmcache.OpPrepareStore, func([][]byte) []byte { return lmcache.AppendPrepareStore(nil, slots(p, 8, 1)) })
	testkit.Eventually(t, "registration on a new connection", func() bool {
		b.Save([]lmcache.LoadStore{op(lmcache.Store, "x", 0, 8, 1, 2)})
		flushWorker(t, b)
		return b.Stats().Registrations >= 1
	})
	if n := s.count(lmcache.OpRegisterEngineDriven); n <= before {
		t.Errorf("%d registrations, %d before", n, before)
	}

	// The same without an operation: the next ping is answered true, but by a
	// server that has never seen the worker.
	idle := openAdapter(t, s, p, func(o *connector.WorkerOptions) { o.NoHeartbeat, o.Heartbeat = false, 300*time.Millisecond })
	s.router.Close()
	s.listen(s.url)
	testkit.Eventually(t, "registration of an idle worker", func() bool { return idle.Stats().Registrations >= 1 })
}

// Slots that were named before the worker registered again are places in another
// pool: nothing is written and nothing committed.
func TestStaleSlots(t *testing.T) {
	s, p := newFakeServer(t), newPaged(paged.PlanesNHD, 1, 16, 4, 1, 8)
	for i := range p.Layers[0] {
		p.Layers[0][i] = 0xaa
	}
	gate := make(chan struct{})
	s.gate = gate
	s.set(lmcache.OpPrepareStore, func([][]byte) []byte { return lmcache.AppendPrepareStore(nil, slots(p, 8, 1)) })
	a := openAdapter(t, s, p, nil)
	a.Save([]lmcache.LoadStore{op(lmcache.Store, "r", 0, 8, 1, 2)})
	testkit.Eventually(t, "prepare", func() bool { return s.count(lmcache.OpPrepareStore) == 1 })
	if err := a.Pool().Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(gate)
	flushWorker(t, a)
	if n, st := s.count(lmcache.OpCommitStore), a.Stats(); n != 0 || st.StoresFailed != 1 {
		t.Errorf("%d commits, %+v", n, st)
	}
	if bytes.Contains(s.pool.Bytes(0, poolBytes), []byte{0xaa}) {
		t.Error("a stale slot was written")
	}
}
