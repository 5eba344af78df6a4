package store_test

import (
	"bytes"
	"cmp"
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
	"github.com/kvasir-kv/kvasir/lease"
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
	pool  pool.Options
	opts  store.Options
	stop  func()
}

// bubbleClock is the time since boot inside a synctest bubble.
func bubbleClock() time.Duration {
	return time.Hour + time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC))
}

func newBench(t tb, dir string, chunks int, o store.Options) *bench {
	t.Helper()
	o.Quarantine = quarantine
	o.WorkerShare, o.PeerShare = cmp.Or(o.WorkerShare, 1), cmp.Or(o.PeerShare, 1) // of pools of a few chunks
	b := &bench{t: t, opts: o, pool: pool.Options{Name: "pool", Bytes: int64(chunks * chunkBytes), Dir: dir, Cold: true, Clock: bubbleClock}}
	b.open()
	mem, err := shm.Attach(filepath.Join(dir, "pool"))
	if err != nil {
		t.Fatalf("%v", err)
	}
	b.mem = mem
	b.stop = func() {
		if err := errors.Join(b.store.Close(), mem.Close()); err != nil {
			t.Errorf("%v", err)
		}
	}
	return b
}

func (b *bench) open() {
	b.t.Helper()
	p, err := pool.Open(b.pool)
	if err != nil {
		b.t.Fatalf("%v", err)
	}
	b.store = store.New(p, b.opts)
}

// restart ends the store, as a kill would, and opens its pool with another.
func (b *bench) restart() {
	b.t.Helper()
	if err := b.store.Close(); err != nil {
		b.t.Fatalf("%v", err)
	}
	b.pool.Cold = false
	b.open()
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
	offsets []int64 // empty once the worker touches nothing any more, or was refused
	indices []int   // of a store
	dead    bool    // nothing of it may become visible
	former  bool    // begun under an earlier store
	began   time.Time
}

// model is a machine of random operations with a naive oracle beside the store:
// which bytes of the pool some worker may touch, and what they must be.
//
// Workers use few request ids, so several transfers of one worker have equal
// names, and their commits come in any order, late or never.
type model struct {
	*bench
	r     *rapid.T
	jobs  []*job
	world int
}

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
	return fmt.Sprint("r", rapid.IntRange(1, 3).Draw(m.r, "request"))
}

// load looks a prompt up and, when something hits, begins to read it.
func (m *model) load() {
	hashes := prompt(rapid.IntRange(0, 8).Draw(m.r, "prompt"), rapid.IntRange(1, 6).Draw(m.r, "chunks"))
	request := m.request()
	got := m.store.Lookup([]byte(request), m.shard(0), store.Hashed(hashes), 1)
	if hit := m.store.TakeHit([]byte(request), lease.Owner{}); hit != got.Hit {
		m.r.Fatalf("TakeHit = %d, want %d", hit, got.Hit)
	}
	if got.Hit == 0 || rapid.Bool().Draw(m.r, "give up") {
		m.store.EndSession([]byte(request), lease.Owner{})
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
	m.touch(j) // a hit holds right bytes from the first moment
	m.jobs = append(m.jobs, j)
	if rapid.Bool().Draw(m.r, "end early") {
		m.store.EndSession([]byte(request), lease.Owner{})
	}
}

// refused asks for a load that must be refused. The worker sends its commit all
// the same, at some time.
func (m *model) refused() {
	hashes := prompt(rapid.IntRange(0, 8).Draw(m.r, "prompt"), rapid.IntRange(1, 6).Draw(m.r, "chunks"))
	j := &job{began: time.Now(), hashes: hashes, request: m.request(), name: store.Transfer{
		Instance: int64(rapid.IntRange(1, 3).Draw(m.r, "worker")), Shard: m.shard(rapid.IntRange(0, m.world-1).Draw(m.r, "shard")),
		To: len(hashes), Last: hashes[len(hashes)-1], Load: true,
	}}
	m.store.EndSession([]byte(j.request), lease.Owner{})
	if rapid.Bool().Draw(m.r, "before the store") {
		m.store.Refuse([]byte(j.request), j.name)
	} else if why := m.store.Load([]byte(j.request), j.name, hashes, &store.Place{}); why == store.None {
		m.r.Fatalf("a load without a lookup was granted")
	}
	m.jobs = append(m.jobs, j)
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
	m.commit(j)
	if rapid.IntRange(0, 3).Draw(m.r, "twice") == 0 && !m.same(j) {
		m.commit(j) // while another of the same name is in progress nobody could tell
	}
}

// same reports whether another job has j's name and request.
func (m *model) same(j *job) bool {
	return slices.ContainsFunc(m.jobs, func(o *job) bool { return o.name == j.name && o.request == j.request })
}

func (m *model) commit(j *job) {
	if j.name.Load {
		m.store.CommitLoad(j.name, []byte(j.request))
		return
	}
	got := m.store.CommitStore(j.name, []byte(j.request), j.hashes, true)
	if got.Chunks > 0 && got.Late {
		m.r.Fatalf("a late commit made %d chunks visible", got.Chunks)
	}
}

// stray sends a commit that no worker owes.
func (m *model) stray() {
	hashes := prompt(rapid.IntRange(0, 8).Draw(m.r, "prompt"), rapid.IntRange(1, 6).Draw(m.r, "chunks"))
	j := &job{hashes: hashes, request: m.request(), name: store.Transfer{
		Instance: int64(rapid.IntRange(1, 3).Draw(m.r, "worker")), Shard: m.shard(rapid.IntRange(0, m.world-1).Draw(m.r, "shard")),
		To: len(hashes), Last: hashes[len(hashes)-1], Load: rapid.Bool().Draw(m.r, "loads"),
	}}
	if !m.same(j) {
		m.commit(j)
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

// reopen restarts the store under its workers, which go on with their copies. The
// names of transfers that had expired before are lost: their commits, which are
// that late, do not come.
func (m *model) reopen() {
	m.restart()
	m.jobs = slices.DeleteFunc(m.jobs, func(j *job) bool { return time.Since(j.began) >= quarantine })
	for _, j := range m.jobs {
		if !j.former {
			j.dead, j.former, j.began = true, true, time.Now()
		}
	}
}

func (m *model) detach() {
	w := int64(rapid.IntRange(1, 3).Draw(m.r, "worker"))
	m.store.Detach(w)
	for _, j := range m.jobs {
		if j.name.Instance == w && !j.former {
			j.dead, j.began = true, time.Now()
		}
	}
}

// pass lets time go by. Workers whose quarantine is over touch nothing any more,
// but may send their commits still.
func (m *model) pass() {
	time.Sleep(time.Duration(rapid.IntRange(1, 70).Draw(m.r, "seconds")) * time.Second)
	m.store.Expire()
	for _, j := range m.jobs {
		if time.Since(j.began) >= quarantine {
			j.offsets, j.dead = nil, true
		}
	}
	m.jobs = slices.DeleteFunc(m.jobs, func(j *job) bool { return time.Since(j.began) >= 2*quarantine })
}

// Random operations of three workers, one to three shards and a few request ids on
// a pool that is always full, with restarts, refusals and commits that are late,
// repeated or of nobody: no slot is handed to two workers that conflict, every hit
// holds right bytes, and in the end every byte of the pool comes back.
func TestStoreAgainstModel(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(r *rapid.T) {
		bubble(t, func() {
			chunks := rapid.IntRange(2, 12).Draw(r, "pool")
			b := newBench(r, dir, chunks, store.Options{SessionIdle: 2 * time.Minute})
			defer func() { b.stop() }()
			m := &model{bench: b, r: r, world: rapid.IntRange(1, 3).Draw(r, "world")}
			ops := []func(){
				m.reserve, m.reserve, m.load, m.load, m.finish, m.finish, m.finish, m.detach, m.pass,
				m.refused, m.stray, m.reopen,
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

// bubble is synctest.Test whose panics reach the caller: rapid shrinks by them.
func bubble(t *testing.T, f func()) {
	var stopped any
	synctest.Test(t, func(*testing.T) {
		defer func() { stopped = recover() }()
		f()
	})
	// rapid tells failures apart by where they come from.
	if fmt.Sprintf("%T", stopped) == "rapid.invalidData" {
		panic(stopped)
	}
	if stopped != nil {
		panic(stopped)
	}
}

func checkUsage(r *rapid.T, b *bench) {
	got := b.store.Stats()
	if got.FreeBytes+got.StagedBytes+got.ResidentBytes+got.CondemnedBytes != got.Bytes {
		r.Fatalf("bytes do not add up: %+v", got)
	}
}
