package store_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/internal/leaks"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
	"github.com/kvasir-kv/kvasir/shm"
	"github.com/kvasir-kv/kvasir/store"
)

func TestMain(m *testing.M) { leaks.Main(m) }

const (
	chunkBytes = 4096
	quarantine = time.Minute
)

type tb interface {
	Helper()
	Fatalf(string, ...any)
	Errorf(string, ...any)
}

// bench is a store with its pool's memory in view, as workers see it.
type bench struct {
	t     tb
	store *store.Store
	mem   *shm.Segment
	stop  func()
}

func newBench(t tb, dir string, chunks int, o store.Options) *bench {
	t.Helper()
	o.Quarantine = quarantine
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: int64(chunks * chunkBytes), Dir: dir, Cold: true})
	if err != nil {
		t.Fatalf("%v", err)
	}
	mem, err := shm.Attach(filepath.Join(dir, "pool"))
	if err != nil {
		t.Fatalf("%v", err)
	}
	b := &bench{t: t, store: store.New(p, o), mem: mem}
	b.stop = func() {
		if err := errors.Join(b.store.Close(), mem.Close()); err != nil {
			t.Errorf("%v", err)
		}
	}
	return b
}

func (b *bench) at(off int64) []byte { return b.mem.Bytes(off, chunkBytes) }

// content of a chunk of a shard, what a correct worker writes.
func content(h kv.Hash, shard int) []byte {
	one := binary.LittleEndian.AppendUint64(slices.Clone(h[:]), uint64(shard))
	return bytes.Repeat(one, chunkBytes/len(one)+1)[:chunkBytes]
}

// prompt returns the chunk hashes of prompt n: some share a prefix.
func prompt(n, chunks int) []kv.Hash {
	tokens := make([]uint32, chunks)
	for i := range tokens {
		tokens[i] = uint32(n % 3)
		if i > 0 {
			tokens[i] = uint32(n)
		}
	}
	return kv.ChunkHashes(tokens, 1)
}

// job is a transfer of one simulated worker between prepare and commit.
type job struct {
	name    store.Transfer
	request string
	hashes  []kv.Hash
	offsets []int64
	indices []int // of a store
	dead    bool  // detached, may still touch its slots
	began   time.Time
}

// model is a machine of random operations with a naive oracle beside the store:
// what was committed, and which bytes of the pool some worker may touch.
type model struct {
	*bench
	r         *rapid.T
	jobs      []*job
	committed map[string]bool // chunk and shard, ever committed
	world     int
	requests  int
}

func id(h kv.Hash, shard int) string { return fmt.Sprint(h, shard) }

func (m *model) shard(i int) store.Shard {
	return store.Shard{Namespace: kv.Namespace{1}, World: m.world, Index: i}
}

// mayTouch fails if a slot handed to somebody now is one that another worker may
// still touch in a way that conflicts.
func (m *model) mayTouch(off int64, writes bool) {
	for _, j := range m.jobs {
		for _, o := range j.offsets {
			if o == off && (writes || !j.name.Load) {
				m.r.Fatalf("offset %d is handed out (to write: %v) while worker %d may touch it (loads: %v, dead: %v)",
					off, writes, j.name.Instance, j.name.Load, j.dead)
			}
		}
	}
}

func (m *model) reserve() {
	hashes := prompt(rapid.IntRange(0, 8).Draw(m.r, "prompt"), rapid.IntRange(1, 6).Draw(m.r, "chunks"))
	j := &job{began: time.Now(), hashes: hashes, request: m.request()}
	shard := rapid.IntRange(0, m.world-1).Draw(m.r, "shard")
	j.name = store.Transfer{
		Instance: int64(rapid.IntRange(1, 3).Draw(m.r, "worker")), Shard: m.shard(shard),
		From: rapid.IntRange(0, len(hashes)-1).Draw(m.r, "from"), To: len(hashes), Last: hashes[len(hashes)-1],
	}
	var p store.Place
	got, err := m.store.Reserve(j.name, []byte(j.request), hashes, chunkBytes, &p)
	if err != nil {
		m.r.Fatalf("Reserve: %v", err)
	}
	if n := got.Cached + got.Staged + got.NoRoom + len(p.Offsets); n != j.name.To-j.name.From {
		m.r.Fatalf("Reserve accounts for %d of %d chunks: %+v", n, j.name.To-j.name.From, got)
	}
	if len(p.Offsets) == 0 {
		return
	}
	for _, off := range p.Offsets {
		m.mayTouch(off, true)
	}
	j.offsets, j.indices = slices.Clone(p.Offsets), slices.Clone(p.Indices)
	m.jobs = append(m.jobs, j)
}

func (m *model) request() string {
	m.requests++
	return fmt.Sprint("r", m.requests)
}

// load looks a prompt up and, when something hits, begins to read it.
func (m *model) load() {
	hashes := prompt(rapid.IntRange(0, 8).Draw(m.r, "prompt"), rapid.IntRange(1, 6).Draw(m.r, "chunks"))
	request := m.request()
	got := m.store.Lookup([]byte(request), m.shard(0), hashes, 1)
	if hit := m.store.TakeHit([]byte(request)); hit != got.Hit {
		m.r.Fatalf("TakeHit = %d, want %d", hit, got.Hit)
	}
	for shard := range m.world {
		for _, h := range hashes[:got.Hit] {
			if !m.committed[id(h, shard)] {
				m.r.Fatalf("hit on a chunk that nobody committed")
			}
		}
	}
	if got.Hit == 0 || rapid.Bool().Draw(m.r, "give up") {
		m.store.EndSession([]byte(request))
		return
	}
	shard := rapid.IntRange(0, m.world-1).Draw(m.r, "shard")
	j := &job{began: time.Now(), hashes: hashes, request: request, name: store.Transfer{
		Instance: int64(rapid.IntRange(1, 3).Draw(m.r, "worker")), Shard: m.shard(shard), To: got.Hit, Last: hashes[got.Hit-1], Load: true,
	}}
	var p store.Place
	if why := m.store.Load([]byte(request), j.name, hashes, &p); why != store.None {
		m.r.Fatalf("a pinned chunk cannot be loaded: %v", why)
	}
	for _, off := range p.Offsets {
		m.mayTouch(off, false)
	}
	j.offsets = slices.Clone(p.Offsets)
	m.jobs = append(m.jobs, j)
	if rapid.Bool().Draw(m.r, "end early") {
		m.store.EndSession([]byte(request))
	}
}

// finish does a job's copy and commits it.
func (m *model) finish() {
	if len(m.jobs) == 0 {
		return
	}
	i := rapid.IntRange(0, len(m.jobs)-1).Draw(m.r, "job")
	j := m.jobs[i]
	m.touch(j)
	m.jobs = slices.Delete(m.jobs, i, i+1)
	if j.name.Load {
		m.store.CommitLoad(j.name, []byte(j.request))
		return
	}
	got := m.store.CommitStore(j.name, []byte(j.request), j.hashes, true)
	if got.Chunks > 0 && j.dead {
		m.r.Fatalf("a dead worker's commit made %d chunks visible", got.Chunks)
	}
	if got.Chunks == 0 {
		return
	}
	for _, idx := range j.indices {
		m.committed[id(j.hashes[j.name.From+idx], j.name.Shard.Index)] = true
	}
}

// touch is the copy of a worker: a write, or a read that must see right bytes.
func (m *model) touch(j *job) {
	for i, off := range j.offsets {
		if !j.name.Load {
			copy(m.at(off), content(j.hashes[j.name.From+j.indices[i]], j.name.Shard.Index))
		} else if !bytes.Equal(m.at(off), content(j.hashes[j.name.From+i], j.name.Shard.Index)) {
			m.r.Fatalf("wrong bytes at %d (dead: %v)", off, j.dead)
		}
	}
}

func (m *model) detach() {
	w := int64(rapid.IntRange(1, 3).Draw(m.r, "worker"))
	m.store.Detach(w)
	for _, j := range m.jobs {
		if j.name.Instance == w {
			j.dead, j.began = true, time.Now()
		}
	}
}

// pass lets time go by: workers whose quarantine is over touch nothing any more.
func (m *model) pass() {
	time.Sleep(time.Duration(rapid.IntRange(1, 70).Draw(m.r, "seconds")) * time.Second)
	m.store.Expire()
	m.jobs = slices.DeleteFunc(m.jobs, func(j *job) bool { return time.Since(j.began) >= quarantine })
}

// Random operations of three workers, one to three shards and many requests on a
// pool that is always full: no slot is handed to two workers that conflict, only
// committed chunks are hits, every byte read is right, and in the end every byte
// of the pool comes back.
func TestStoreAgainstModel(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(r *rapid.T) {
		synctest.Test(t, func(*testing.T) {
			chunks := rapid.IntRange(2, 12).Draw(r, "pool")
			b := newBench(r, dir, chunks, store.Options{SessionIdle: 2 * time.Minute})
			defer b.stop()
			m := &model{bench: b, r: r, committed: map[string]bool{}, world: rapid.IntRange(1, 3).Draw(r, "world")}
			ops := []func(){
				m.reserve, m.reserve, m.load, m.load, m.finish, m.finish, m.finish, m.detach, m.pass,
				func() { b.store.Clear(rapid.Bool().Draw(r, "force")) },
			}
			for range rapid.IntRange(1, 60).Draw(r, "steps") {
				ops[rapid.IntRange(0, len(ops)-1).Draw(r, "op")]()
				checkUsage(r, b)
			}
			for len(m.jobs) > 0 {
				m.finish()
			}
			time.Sleep(3 * time.Minute)
			b.store.Expire()
			b.store.Clear(true)
			if got := b.store.Stats(); got.FreeBytes != got.Bytes || got.Transfers != 0 || got.Sessions != 0 || got.Quarantined != 0 {
				r.Fatalf("something did not come back: %+v", got)
			}
		})
	})
}

func checkUsage(r *rapid.T, b *bench) {
	got := b.store.Stats()
	if got.FreeBytes+got.StagedBytes+got.ResidentBytes+got.CondemnedBytes != got.Bytes {
		r.Fatalf("bytes do not add up: %+v", got)
	}
}
