// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

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
	t      tb
	store  *store.Store
	mem    *shm.Segment
	pool   pool.Options
	opts   store.Options
	policy string       // by name, of tenants too; default lru
	memory *tier.Memory // what lies below, failing by script
	script string
	flaky  *tiertest.Flaky
	stop   func()

	between func() // while no store is open, in restart and kill; may be nil

	tenants map[kv.Namespace]string // salts
}

// bubbleClock is the time since boot inside a synctest bubble.
func bubbleClock() time.Duration {
	return time.Hour + time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC))
}

func newBench(t tb, dir string, chunks int, o store.Options) *bench {
	t.Helper()
	o.Quarantine = quarantine
	o.TrustUnsummed = o.TrustUnsummed || o.ChecksumRate == 0                      // without checksums nothing else would outlive a restart
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
	if b.opts.Policy, err = evict.New(cmp.Or(b.policy, "lru"), b.pool.Bytes); err != nil {
		b.t.Fatalf("%v", err)
	}
	b.opts.TenantPolicy = func(quota int64) evict.Policy {
		p, err := evict.New(cmp.Or(b.policy, "lru"), max(quota, chunkBytes))
		if err != nil {
			b.t.Fatalf("%v", err)
		}
		return p
	}
	if b.memory != nil {
		if b.flaky, err = tiertest.NewFlaky(b.memory, b.script); err != nil {
			b.t.Fatalf("%v", err)
		}
		b.opts.Below = b.flaky
	}
	b.store = store.New(p, b.opts)
}

// release ends what hangs below.
func (b *bench) release() {
	if b.flaky != nil {
		b.flaky.Release()
	}
}

// restart ends the store and opens its pool with another.
func (b *bench) restart() { b.reopen((*store.Store).Close) }

// kill does the same to a store that has no time to end.
func (b *bench) kill() { b.reopen((*store.Store).Kill) }

func (b *bench) reopen(end func(*store.Store) error) {
	b.t.Helper()
	b.release()
	if err := end(b.store); err != nil {
		b.t.Fatalf("%v", err)
	}
	if b.between != nil {
		b.between()
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
	name    hold.Transfer
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
	hopes []hope
	world int

	quotas map[string]int64
	limits map[string]int64 // of pins
}

// hope is a lookup that is pending, or was when it was made.
type hope struct {
	space   kv.Namespace
	request string
	hashes  []kv.Hash
}

// forgetHope forgets what a session waits for: it has ended, or has another lookup.
func (m *model) forgetHope(request string) {
	m.hopes = slices.DeleteFunc(m.hopes, func(h hope) bool { return h.request == request })
}

func (m *model) shard(i int) object.Shard {
	return object.Shard{Namespace: kv.Namespace{1}, World: m.world, Index: i, Groups: full}
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
	space := m.tenant()
	j.name = hold.Transfer{
		Instance: int64(rapid.IntRange(1, 3).Draw(m.r, "worker")), Shard: m.shardOf(space, shard),
		From: rapid.IntRange(0, len(hashes)-1).Draw(m.r, "from"), To: len(hashes), Last: hashes[len(hashes)-1],
	}
	if rapid.Bool().Draw(m.r, "looked up") {
		m.store.NotePrompt([]byte(j.request), nobody, rapid.IntRange(0, len(hashes)).Draw(m.r, "chunks of the prompt"))
	}
	var p store.Transfer
	before := m.store.Tenants()
	got, err := m.store.BeginStore(j.name, []byte(j.request), hashes, &p)
	m.kept(before, space)
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
	m.forgetHope(request)
	space := m.tenant()
	got := m.store.Lookup([]byte(request), m.shardOf(space, 0), store.Hashed(hashes), 1)
	if got.State == store.Pending {
		m.hopes = append(m.hopes, hope{space, request, hashes})
		return
	}
	if hit := m.store.Result([]byte(request), lease.Owner{}).Hit; hit != got.Hit {
		m.r.Fatalf("Result.Hit = %d, want %d", hit, got.Hit)
	}
	m.loadHit(space, request, hashes, got)
}

// take asks for the result of a lookup that was pending.
func (m *model) take() {
	if len(m.hopes) == 0 {
		return
	}
	synctest.Wait()
	h := rapid.SampledFrom(m.hopes).Draw(m.r, "hope")
	if got := m.store.Result([]byte(h.request), lease.Owner{}); got.State != store.Pending {
		m.forgetHope(h.request)
		m.loadHit(h.space, h.request, h.hashes, got)
	}
}

// fillTier puts some prompts below the pool, in a tier that fails now and then: it is
// late, wrong, has lost them, or never answers.
func (m *model) fillTier() {
	m.memory = tier.NewMemory(1 << 20)
	for n := range 9 {
		hashes := prompt(n, 6)
		keep(m.r, m.memory, m.shard(0), hashes[:rapid.IntRange(0, 6).Draw(m.r, "below")]...)
	}
	for range rapid.IntRange(0, 4).Draw(m.r, "faults") {
		call := rapid.SampledFrom([]string{"read", "read", "stat", "write", "write"}).Draw(m.r, "call")
		what := rapid.SampledFrom([]string{"error", "missing", "wrong", "slow 1s", "slow 5s", "hang", "notkept"}).Draw(m.r, "fault")
		which := fmt.Sprint(rapid.IntRange(1, 10).Draw(m.r, "which"))
		if rapid.IntRange(0, 5).Draw(m.r, "always") == 0 && what != "hang" { // full, or gone
			which = "*"
		}
		m.script += fmt.Sprintf("%s %s %s;", call, which, what)
	}
	m.opts.WriteAnswers = rapid.SampledFrom([]store.AnswerPolicy{store.AnswersAsPrompts, store.AnswersAfterHit, store.AnswersNever}).Draw(m.r, "policy of answers")
	m.opts.Write = rapid.SampledFrom([]store.WritePolicy{store.WriteAtCommit, store.WriteAtFirstHit}).Draw(m.r, "policy of writing")
	m.restart()
}

// writeBack writes some of what waits to be written below, and harms what lies there.
func (m *model) writeBack() {
	if m.memory == nil {
		return
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for range rapid.IntRange(1, 4).Draw(m.r, "writes") {
		if !m.store.WriteNext(ended) {
			break
		}
	}
	if rapid.Bool().Draw(m.r, "at once") {
		synctest.Wait()
	}
	if rapid.IntRange(0, 3).Draw(m.r, "harm") > 0 {
		return
	}
	hashes := prompt(rapid.IntRange(0, 8).Draw(m.r, "prompt"), 6)
	k := objectKey(m.shard(0), rapid.IntRange(0, m.world-1).Draw(m.r, "shard"), hashes[rapid.IntRange(0, 5).Draw(m.r, "chunk")])
	data := make([]byte, chunkBytes)
	meta, err := m.memory.Read(context.Background(), k, data)
	if err != nil {
		return
	}
	if rapid.Bool().Draw(m.r, "torn") {
		meta.Len /= 2
	} else {
		data[rapid.IntRange(0, chunkBytes-1).Draw(m.r, "byte")] ^= 1
	}
	if err := m.memory.Write(context.Background(), k, meta, data[:meta.Len]); err != nil {
		m.r.Fatalf("%v", err)
	}
}

// compare compares or computes one checksum.
func (m *model) compare() {
	synctest.Wait() // for what lookups want
	m.store.SumNext()
	synctest.Wait()
}

// loadHit begins to read what a lookup has promised, or gives it up.
func (m *model) loadHit(space kv.Namespace, request string, hashes []kv.Hash, got store.LookupResult) {
	if got.Hit == 0 || rapid.Bool().Draw(m.r, "give up") {
		m.store.EndSession([]byte(request), lease.Owner{})
		return
	}
	shard := rapid.IntRange(0, m.world-1).Draw(m.r, "shard")
	j := &job{began: time.Now(), hashes: hashes, request: request, name: hold.Transfer{
		Instance: int64(rapid.IntRange(1, 3).Draw(m.r, "worker")), Shard: m.shardOf(space, shard), To: got.Hit, Last: hashes[got.Hit-1], Load: true,
	}}
	var p store.Transfer
	if why := m.store.BeginLoad([]byte(request), j.name, hashes, &p); why != miss.None {
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
	j := &job{began: time.Now(), hashes: hashes, request: m.request(), name: hold.Transfer{
		Instance: int64(rapid.IntRange(1, 3).Draw(m.r, "worker")), Shard: m.shard(rapid.IntRange(0, m.world-1).Draw(m.r, "shard")),
		To: len(hashes), Last: hashes[len(hashes)-1], Load: true,
	}}
	m.forgetHope(j.request)
	m.store.EndSession([]byte(j.request), lease.Owner{})
	if rapid.Bool().Draw(m.r, "before the store") {
		m.store.Refuse([]byte(j.request), j.name)
	} else if why := m.store.BeginLoad([]byte(j.request), j.name, hashes, &store.Transfer{}); why == miss.None {
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
	j := &job{hashes: hashes, request: m.request(), name: hold.Transfer{
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
			copy(m.at(off), bytesOf(j.name.Shard, j.hashes[j.name.From+j.indices[i]]))
		} else if !bytes.Equal(m.at(off), bytesOf(j.name.Shard, j.hashes[j.name.From+i])) {
			m.r.Fatalf("wrong bytes at %d (dead: %v)", off, j.dead)
		}
	}
}

// reopen restarts the store under its workers, which go on with their copies. The
// names of transfers that had expired before are lost: their commits, which are
// that late, do not come.
func (m *model) reopen() {
	m.hopes = nil
	clear(m.quotas) // which a store does not keep
	clear(m.limits)
	if rapid.Bool().Draw(m.r, "damage") {
		for m.store.SumNext() > 0 {
		}
		m.damage()
	}
	m.restart()
	m.jobs = slices.DeleteFunc(m.jobs, func(j *job) bool { return time.Since(j.began) >= quarantine })
	for _, j := range m.jobs {
		if !j.former {
			j.dead, j.former, j.began = true, true, time.Now()
		}
	}
}

// damage changes a byte that no worker may touch: where a chunk is kept, it has its
// checksum already.
func (m *model) damage() {
	off := int64(rapid.IntRange(0, int(m.pool.Bytes/chunkBytes)-1).Draw(m.r, "damaged")) * chunkBytes
	for _, j := range m.jobs {
		if slices.Contains(j.offsets, off) {
			return
		}
	}
	m.at(off)[rapid.IntRange(0, chunkBytes-1).Draw(m.r, "byte")] ^= 1
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
// a pool that is always full, with restarts, refusals, commits that are late,
// repeated or of nobody, chunks that an earlier store kept, which are compared
// late, wrong or never, and a tier below that is written and read and fails, is full, torn
// or gone, of three tenants with quotas, times to live and pins that come and go: no slot is handed to two workers that
// conflict, every hit holds right bytes, no store takes from another tenant what is within
// its quota or what is pinned, and in the end every byte of the pool comes back.
func TestStoreAgainstModel(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(r *rapid.T) {
		bubble(t, func() {
			chunks := rapid.IntRange(2, 12).Draw(r, "pool")
			b := newBench(r, dir, chunks, store.Options{SessionIdle: 2 * time.Minute, ChecksumRate: 1 << 40, SumAtOnce: true})
			b.policy = rapid.SampledFrom(evict.Names).Draw(r, "policy")
			b.restart()
			defer func() { b.release(); b.stop() }()
			b.tenants = salts
			m := &model{bench: b, r: r, world: rapid.IntRange(1, 3).Draw(r, "world"), quotas: map[string]int64{}, limits: map[string]int64{}}
			if rapid.Bool().Draw(r, "a tier below") {
				m.fillTier()
			}
			ops := []func(){
				m.reserve, m.reserve, m.load, m.load, m.finish, m.finish, m.finish, m.detach, m.pass,
				m.refused, m.stray, m.reopen, m.quota, m.quota, m.ttl, m.limitPins, m.pin, m.pin, m.take, m.take, m.compare, m.writeBack, m.writeBack,
				func() { b.store.Clear(rapid.Bool().Draw(r, "force")) },
			}
			for range rapid.IntRange(1, 60).Draw(r, "steps") {
				ops[rapid.IntRange(0, len(ops)-1).Draw(r, "op")]()
				checkUsage(r, b)
			}
			for len(m.jobs) > 0 {
				m.finish()
			}
			b.release()
			time.Sleep(3 * time.Minute)
			b.store.Expire()
			b.store.Clear(true)
			if got := b.store.Stats(); got.FreeBytes != got.Bytes || got.Transfers != 0 || got.Sessions != 0 || got.Quarantined != 0 {
				r.Fatalf("something did not come back: %+v", got)
			}
			if err := b.store.CheckIdle(); err != nil {
				r.Fatalf("%v", err)
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
	if err := b.store.CheckBooks(b.tenants); err != nil {
		r.Fatalf("%v", err)
	}
	if err := b.store.CheckTenants(b.tenants); err != nil {
		r.Fatalf("%v", err)
	}
}
