// SPDX-License-Identifier: Apache-2.0

package workers_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/server/workers"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var alice, bob = access.Principal{User: true, UID: 1001}, access.Principal{User: true, UID: 1002}

func worker(id int64, by access.Principal, world, layers int) *workers.Worker {
	return workerOf("m", id, by, world, layers)
}

func workerOf(model string, id int64, by access.Principal, world, layers int) *workers.Worker {
	l := kv.Layout{SinglePlane: true, Layers: layers, Slots: 16, Hidden: 64, DType: "bfloat16"}
	n, err := l.Bytes()
	if err != nil {
		panic(err)
	}
	w := workers.New(id, model, world, 16, []kv.Layout{l}, n, l.Fingerprint(), object.FullAttention(16, n))
	w.BelongsTo(by)
	return w
}

// query is a lookup of a model whose connection has named no worker.
func query(model string, by access.Principal, from *workers.Client) *workers.Query {
	return &workers.Query{Model: []byte(model), World: 1, Chunk: 16, By: by, From: from}
}

// loaders returns how many workers can load what is looked up; 0 where nothing is known to search in.
func loaders(r *workers.Registry, q *workers.Query, need int) int {
	target, _ := r.Target(q, need)
	return target.Loaders
}

func add(t *testing.T, r *workers.Registry, w *workers.Worker) *workers.Worker {
	t.Helper()
	old, _, err := r.Add(w)
	if err != nil {
		t.Fatal(err)
	}
	return old
}

// Two users' workers of one id are two: each is found, replaced and removed by its
// own user alone, and has a name of its own in the store.
func TestEqualIDsOfTwoUsers(t *testing.T) {
	r := workers.NewRegistry(10)
	a, b := worker(7, alice, 1, 1), worker(7, bob, 1, 2)
	if add(t, r, a) != nil || add(t, r, b) != nil {
		t.Error("one replaced the other")
	}
	if a.Key == b.Key {
		t.Error("both have one name in the store")
	}
	for _, w := range []*workers.Worker{a, b} {
		if got, err := r.Get(7, w.By); err != nil || got != w {
			t.Errorf("%v finds %v, %v", w.By, got, err)
		}
	}
	again := worker(7, alice, 1, 1)
	if add(t, r, again) != a {
		t.Error("a second registration replaced another worker")
	}
	if r.RemoveThis(a) || !r.RemoveThis(again) {
		t.Error("what was replaced was removed, or what is registered was not")
	}
	if _, err := r.Get(7, alice); !errors.Is(err, workers.ErrUnknown) {
		t.Errorf("removed: %v", err)
	}
	if _, err := r.Get(7, bob); err != nil {
		t.Errorf("bob's went with alice's: %v", err)
	}
}

// A full table makes room with the worker of the user with most workers that is silent longest,
// never with a worker of a user that has fewer.
func TestCrowd(t *testing.T) {
	r := workers.NewRegistry(3)
	now := time.Now()
	for id := range int64(3) {
		w := worker(id, alice, 1, 1)
		add(t, r, w)
		r.Saw(w, now.Add(time.Duration(id)*time.Second))
	}
	first, _ := r.Get(1, alice)
	r.Saw(first, now.Add(-time.Hour))
	if got := r.Crowd(worker(9, bob, 1, 1)); got != first {
		t.Errorf("%+v gives way", got)
	}
	if got := r.Crowd(worker(9, alice, 1, 1)); got != nil {
		t.Errorf("%+v of the same user gives way", got)
	}
	if _, _, err := r.Add(worker(9, alice, 1, 1)); !errors.Is(err, workers.ErrTooMany) {
		t.Errorf("a fourth one: %v", err)
	}
}

// Of two workers only the silent one falls asleep, and none after this process stood
// still. Its next request wakes it.
func TestSilence(t *testing.T) {
	r := workers.NewRegistry(10)
	quiet, lively := worker(1, alice, 1, 1), worker(2, alice, 1, 1)
	for _, w := range []*workers.Worker{quiet, lively} {
		add(t, r, w)
		w.Pinged.Store(true)
	}
	start := time.Now()
	tick := func(after time.Duration) int {
		r.Saw(lively, start.Add(after))
		return len(r.Silent(start.Add(after), 20*time.Second, time.Hour))
	}
	for s := range 20 {
		if n := tick(time.Duration(s) * time.Second); n != 0 {
			t.Fatalf("%d fell asleep after %d s", n, s)
		}
	}
	if n := tick(time.Hour); n != 0 {
		t.Errorf("%d fell asleep after a gap", n)
	}
	dropped := 0
	for s := range 25 {
		dropped += tick(time.Hour + time.Duration(s)*time.Second)
	}
	if dropped != 1 || !quiet.Asleep() || lively.Asleep() {
		t.Errorf("%d fell asleep; the silent one %v, the lively one %v", dropped, quiet.Asleep(), lively.Asleep())
	}
	if got := loaders(r, query("m", alice, nil), 1); got != 1 {
		t.Errorf("%d workers can load, want 1", got)
	}
	if _, err := r.Get(1, alice); err != nil || quiet.Asleep() || loaders(r, query("m", alice, nil), 1) != 2 {
		t.Errorf("a request did not wake the worker: %v", err)
	}
	if _, err := r.Get(2, alice); err != nil {
		t.Errorf("the lively one: %v", err)
	}
}

// The first ping of an id that its user did not register is answered false, once, and
// again after a registration was tried.
func TestPings(t *testing.T) {
	r := workers.NewRegistry(10)
	ping := func(by access.Principal, want bool) {
		t.Helper()
		if ok, _ := r.Ping(5, by); ok != want {
			t.Errorf("ping: %v, want %v", ok, want)
		}
	}
	ping(alice, false)
	ping(alice, true)
	ping(bob, false)
	r.ForgetUnknown(5, alice)
	ping(alice, false)
	w := worker(5, alice, 1, 1)
	add(t, r, w)
	if ok, news := r.Ping(5, alice); !ok || !news {
		t.Error("the first ping of a registered worker is no news")
	}
	if ok, news := r.Ping(5, alice); !ok || news {
		t.Error("the second one is")
	}
}

// Lookups of a model follow the layouts of the asking user's own workers where that
// user has one per shard, and what a client can be is told by its own user's workers.
func TestLayoutsByUser(t *testing.T) {
	r := workers.NewRegistry(10)
	if _, err := r.Target(query("m", alice, nil), 1); !errors.Is(err, workers.ErrNoWorker) {
		t.Errorf("a model without a worker: %v", err)
	}
	a, b := worker(1, alice, 1, 1), worker(2, bob, 1, 2)
	a.Generations, b.Generations = lmcache.Only(lmcache.Gen055), lmcache.Only(lmcache.Gen056)
	add(t, r, a)
	add(t, r, b)
	for _, w := range []*workers.Worker{a, b} {
		q := query("m", w.By, nil)
		q.Salt = []byte("tenant")
		target, err := r.Target(q, 1)
		sh := target.Shard
		if err != nil || sh.Namespace != w.NamespaceOf([]byte("tenant")) || sh.Namespace == w.NamespaceOf(nil) {
			t.Errorf("%v looks in %+v", w.By, sh)
		}
		if got := r.GenerationsOf(0, w.By, []byte("m"), 1); got != w.Generations {
			t.Errorf("a client of %v is of %v", w.By, got)
		}
	}
	if a.Shard() != -1 || !r.NoteShard(a, 0) || a.Shard() != 0 || r.NoteShard(a, 0) {
		t.Errorf("shard %d", a.Shard())
	}
}

// A note holds two users' workers of one id, says the same when it is read again, and
// leaves out the largest where there is no room. In another PID namespace its process
// numbers mean nothing.
func TestNote(t *testing.T) {
	r := workers.NewRegistry(10)
	a, b := worker(7, alice, 2, 1), worker(7, bob, 1, 2)
	b.Model = strings.Repeat("long", 100)
	a.Generations = lmcache.Only(lmcache.Gen055)
	a.SetShard(1)
	a.TakeSide(workers.Places)
	a.Process.Store(&peercred.Process{PID: 9, Started: 5})
	for _, w := range []*workers.Worker{a, b} {
		add(t, r, w)
	}
	refused := worker(8, bob, 1, 1)
	refused.Refused = "no"
	add(t, r, refused)
	left := []lent.Segment{{Name: "lmcache_kv_1_0", Inode: 4, Owner: peercred.Process{PID: 9, Started: 5}}}
	read := func(b []byte, want int) *workers.Note {
		t.Helper()
		note, err := workers.DecodeNote(b)
		if err != nil || len(note.Workers) != want {
			t.Fatalf("%d workers, %v, want %d", len(note.Workers), err, want)
		}
		return &note
	}
	whole, n, err := r.Encode(workers.Note{Remains: left}, 1<<20)
	if err != nil || n != 0 {
		t.Fatal(n, err)
	}
	note := read(whole, 2)
	w, err := note.Worker(0)
	if err != nil || w.ID != 7 || w.By != alice || w.World != 2 || w.Shard != 2 || w.Side != workers.Places || w.Client != "0.5.5" || w.Process.PID != 9 {
		t.Errorf("%+v, %v", w, err)
	}
	if len(note.Remains) != 1 || note.Remains[0] != left[0] {
		t.Errorf("segments left: %+v", note.Remains)
	}
	short, n, err := r.Encode(workers.Note{Remains: left}, 1700)
	if err != nil || n != 1 {
		t.Fatalf("%d left out, %v", n, err)
	}
	if w, err := read(short, 1).Worker(0); err != nil || w.By != alice {
		t.Errorf("the smaller one is left out: %+v, %v", w, err)
	}
	elsewhere := read([]byte(strings.Replace(string(whole), `"PIDs":"`, `"PIDs":"x`, 1)), 2)
	if w, err := elsewhere.Worker(0); err != nil || w.Process.PID != 0 || elsewhere.Remains[0].Owner.PID != 0 {
		t.Errorf("in another namespace: %+v, %+v, %v", w, elsewhere.Remains, err)
	}
	if _, err := workers.DecodeNote([]byte("{")); err == nil {
		t.Error("half a note is read")
	}
}

// What a client's lookups of one model show of its workers says nothing of another model: there
// workers whose process is not known, as those that lend memory, count until its own are seen.
func TestRelativesAreOfOneModel(t *testing.T) {
	r := workers.NewRegistry(10)
	self, ok := peercred.Running(os.Getpid())
	if !ok {
		t.Skip("processes cannot be told apart here")
	}
	known, unknown := workerOf("m", 1, alice, 1, 1), workerOf("n", 2, alice, 1, 1)
	known.IsOf(self)
	add(t, r, known)
	add(t, r, unknown)
	c := r.NewClient(&access.Caller{By: alice, Peer: peercred.Peer{PID: os.Getpid()}})
	for range 2 {
		for _, model := range []string{"m", "n"} {
			if got := loaders(r, query(model, alice, c), 1); got != 1 {
				t.Errorf("model %s: %d workers can load, want 1", model, got)
			}
		}
	}
	other := workerOf("m", 3, alice, 1, 1)
	add(t, r, other)
	if got := loaders(r, query("m", alice, c), 2); got != 2 {
		t.Errorf("%d of 2 can load", got)
	}
	r.Remove(1, alice)
	if got := loaders(r, query("m", alice, c), 1); got != 0 {
		t.Errorf("the client's own worker is gone: %d can load", got)
	}
}

// A worker that registers over the connection of the client that looks up is of the client's
// process, also before anybody has found that process.
func TestWorkersOfTheClientsConnection(t *testing.T) {
	r := workers.NewRegistry(10)
	if _, ok := peercred.Running(os.Getpid()); !ok {
		t.Skip("processes cannot be told apart here")
	}
	here := access.Caller{By: alice, Peer: peercred.Peer{PID: os.Getpid(), Socket: 77}}
	first := workerOf("m", 1, alice, 1, 1)
	first.CameFrom(&here)
	add(t, r, first)
	c := r.NewClient(&here)
	if got := loaders(r, query("m", alice, c), 1); got != 1 {
		t.Fatalf("%d workers can load, want 1", got)
	}
	r.Remove(1, alice)
	second := workerOf("m", 2, alice, 1, 1)
	second.Socket = 77 // its process is still looked for
	add(t, r, second)
	other := workerOf("m", 3, alice, 1, 1)
	other.Socket = 78
	add(t, r, other)
	if got := loaders(r, query("m", alice, c), 1); got != 1 {
		t.Errorf("after another registration %d workers can load, want 1", got)
	}
}

// However many workers a user has, the server forgets nothing about the workers of another user.
func TestPagesOfWorkersAreNotForgottenForAnotherUsers(t *testing.T) {
	r := workers.NewRegistry(10)
	r.PinsOther(7, alice)
	if ok, _ := r.Ping(8, alice); ok {
		t.Fatal("a worker that is not known is not asked to register")
	}
	for id := range int64(5000) {
		r.PinsOther(id, bob)
		r.Ping(id, bob)
	}
	if !r.MayPinOther(7, alice, 0) {
		t.Error("that a worker of alice pins other pages is forgotten")
	}
	if !r.MayPinOther(8, alice, 0) {
		t.Error("that a worker of alice comes back is forgotten")
	}
	if r.MayPinOther(0, bob, 0) || !r.MayPinOther(4999, bob, 0) {
		t.Error("of bob's workers not the oldest are forgotten")
	}
}

// Where the engine that had other pages has ended, the next one may get its id: in a container the numbers of processes repeat. That
// one is offered the pool. It is so too after a restart of the server.
func TestNextProcessOfAnIDHasNoOtherPages(t *testing.T) {
	r, now := workers.NewRegistry(10), peercred.Ticks()
	r.PinsOther(7, alice)
	for _, where := range []string{"first server", "next server", "server in another PID namespace"} {
		for started, want := range map[uint64]bool{0: true, now - 1000: true, now: true, now + 100000: where == "server in another PID namespace"} {
			if got := r.MayPinOther(7, alice, started); got != want {
				t.Errorf("%s: a process that started at %d, %d later: %v", where, started, int64(started-now), got)
			}
		}
		b, _, err := r.Encode(workers.Note{}, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		if where == "next server" {
			b = []byte(strings.Replace(string(b), `"PIDs":"`, `"PIDs":"x`, 1))
		}
		n, err := workers.DecodeNote(b)
		if err != nil {
			t.Fatal(err)
		}
		r = workers.NewRegistry(10)
		r.PinnedOther(n.Pages)
	}
}
