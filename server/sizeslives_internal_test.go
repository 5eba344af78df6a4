// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// startLife starts a server with chunks of 16 tokens over the pool in dir, and takes it over from the server before.
func startLife(t *testing.T, dir string, poolBytes int64, log io.Writer) (s *Server, end func()) {
	t.Helper()
	p, err := pool.Open(pool.Options{Dir: dir, Name: "p", Bytes: poolBytes, ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{TrustUnsummed: true})
	s = New(st, Options{ChunkTokens: 16, Log: slog.New(slog.NewTextHandler(log, nil))})
	return s, func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	}
}

// over gives the client another connection, over a listener of that chunk size (0: the server's), as that user where uid is not 0.
func (c *client57) over(s *Server, base, uid int) *client57 {
	d := *c
	d.s, d.who = s, connected(s)
	d.who.conn.base = base
	if uid != 0 {
		d.who.By.UID, d.who.Name = uid, "another user"
		d.who.Peer.UID = uid
	}
	return &d
}

// ping returns what the heartbeat of a scheduler, or of a worker where id is not 0, is answered.
func (c *client57) ping(id int64) bool {
	c.t.Helper()
	who := lmcache.AppendNil(nil)
	if id != 0 {
		who = lmcache.AppendInt(nil, id)
	}
	ok, err := lmcache.DecodeBool(c.call(lmcache.OpPing, who))
	if err != nil {
		c.t.Fatal(err)
	}
	return ok
}

// A client whose connection breaks while the server lives connects again and asks nothing. Its worker is served in the size that it
// registered. Its scheduler, whose size is not known, is told once by its heartbeat that the server was gone: then it asks.
func TestClientsThatConnectAgain(t *testing.T) {
	s, _ := newBareServerWith(t, io.Discard, 4<<20, Options{ChunkTokens: 16})
	c := newClient57(t, s)
	if n := c.negotiate(24); n != 24 {
		t.Fatal(n)
	}
	c.register(1)
	p := prompt57(96)
	if n := c.store(1, p[:48], 48, "a"); n != 2 {
		t.Fatal(n)
	}
	worker, scheduler := c.over(s, 0, 0), c.over(s, 0, 0)
	if n := worker.store(1, p, 96, "b"); n != 2 {
		t.Errorf("the worker got %d places for the 2 chunks that are new", n)
	}
	if !worker.ping(1) {
		t.Error("the worker is served, and told to register again")
	}
	if !scheduler.ping(0) {
		t.Error("the scheduler, of which nothing was declined, is told that the server was gone")
	}
	if n := scheduler.lookup(p, 0, 96, "c"); n != 0 {
		t.Errorf("a hit of %d chunks of which size?", n)
	}
	if scheduler.ping(0) {
		t.Error("the scheduler does not learn that it must ask")
	}
	for range 3 {
		if !scheduler.ping(0) {
			t.Error("the scheduler is told more than once")
		}
	}
	if n := scheduler.negotiate(24); n != 24 {
		t.Errorf("asked again: %d", n)
	}
	if n := scheduler.lookup(p, 0, 96, "d"); n != 4 {
		t.Errorf("once it asked it finds %d chunks", n)
	}
	// One of 0.5.6 would not ask.
	old := c.over(s, 0, 0)
	old.packed, old.who.conn.generations = false, lmcache.Only(lmcache.Gen056)
	if n := old.lookup(p, 0, 96, "e"); n != 0 {
		t.Errorf("a client of 0.5.6 finds %d chunks", n)
	}
	if !old.ping(0) {
		t.Error("a client of 0.5.6 is told to ask, which it cannot")
	}
}

// Engines of one model go by two listeners and what they negotiated there. After a restart each connection that has not asked goes by the
// size of the workers of its listener.
func TestSizesOfListenersOverARestart(t *testing.T) {
	dir, p := t.TempDir(), prompt57(96)
	s, end := startLife(t, dir, 4<<20, io.Discard)
	c := newClient57(t, s)
	plain, listener, hybrid := c.over(s, 0, 0), c.over(s, 12, 0), c.over(s, 20, 0)
	if a, b, c := plain.negotiate(8), listener.negotiate(4), hybrid.negotiate(16); a != 16 || b != 12 || c != 32 {
		t.Fatal(a, b, c)
	}
	for id, c := range []*client57{plain, listener, hybrid} {
		c.register(int64(1 + id))
		if n := c.store(int64(1+id), p, 96, "a"); n != 96/[]int{16, 12, 32}[id] {
			t.Fatal(id, n)
		}
	}
	end()
	s, end = startLife(t, dir, 4<<20, io.Discard)
	defer end()
	for id, base := range []int{0, 12, 20} {
		size := []int{16, 12, 32}[id]
		if n := c.over(s, base, 0).lookup(p, 0, 96, "b"); n != 96/size {
			t.Errorf("over the listener of %d tokens: a hit of %d chunks, want %d of %d tokens", base, n, 96/size, size)
		}
		if n := c.over(s, base, 0).store(int64(1+id), p, 96, "c"); n != 0 {
			t.Errorf("over the listener of %d tokens: %d of the worker's chunks were lost", base, n)
		}
	}
}

// A worker of an earlier server that registers again is still that engine's: its scheduler, which has not asked, goes by its size.
func TestSizeAfterTheWorkerRegisteredAgain(t *testing.T) {
	dir, p := t.TempDir(), prompt57(96)
	s, end := startLife(t, dir, 4<<20, io.Discard)
	c := newClient57(t, s)
	c.negotiate(24)
	c.register(1)
	c.store(1, p, 96, "a")
	end()
	s, end = startLife(t, dir, 4<<20, io.Discard)
	defer end()
	worker := c.over(s, 0, 0)
	for range 2 {
		worker.negotiate(24)
		worker.register(1)
	}
	if n := c.over(s, 0, 0).lookup(p, 0, 96, "b"); n != 4 {
		t.Errorf("its scheduler finds %d chunks", n)
	}
}

// Of several sizes of a model a scheduler that has not asked goes by that of the workers of its own process, whatever its release.
func TestSizeOfTheOwnProcessesWorkers(t *testing.T) {
	dir, p := t.TempDir(), prompt57(96)
	s, end := startLife(t, dir, 4<<20, io.Discard)
	c := newClient57(t, s)
	for id, size := range []int{24, 32} {
		d := c.over(s, 0, 0)
		if id == 0 {
			d.who.Peer.PID = os.Getpid()
		}
		if n := d.negotiate(int64(size)); n != size {
			t.Fatal(n)
		}
		d.register(int64(1 + id))
		if n := d.store(int64(1+id), p, 96, "a"); n != 96/size {
			t.Fatal(n)
		}
	}
	end()
	s, end = startLife(t, dir, 4<<20, io.Discard)
	defer end()
	for _, packed := range []bool{true, false} {
		d := c.over(s, 0, 0)
		d.packed, d.who.Peer.PID = packed, os.Getpid()
		if n := d.lookup(p, 0, 96, "b"); n != 4 {
			t.Errorf("packed %v: a hit of %d chunks of its engine's 24 tokens", packed, n)
		}
		if d = c.over(s, 0, 0); d.lookup(p, 0, 96, "c") != 0 {
			t.Errorf("packed %v: a hit in chunks of which size?", packed)
		}
	}
}

// Another user's workers of the same model do not decide by what size a connection goes.
func TestSizesOfAnotherUsersWorkers(t *testing.T) {
	dir, p := t.TempDir(), prompt57(96)
	s, end := startLife(t, dir, 4<<20, io.Discard)
	own := newClient57(t, s)
	own.negotiate(24)
	own.register(1)
	if n := own.store(1, p, 96, "a"); n != 4 {
		t.Fatal(n)
	}
	other := own.over(s, 0, 4242)
	other.negotiate(32)
	other.register(1)
	end()
	s, end = startLife(t, dir, 4<<20, io.Discard)
	defer end()
	if n := own.over(s, 0, 0).lookup(p, 0, 96, "b"); n != 4 {
		t.Errorf("a hit of %d chunks beside another user's engine", n)
	}
}

// A worker of an earlier server that is not taken over, since the pool is larger, registers again over a connection that has not
// asked, as one of 0.5.6 does: in the size that it had.
func TestSizeOfAWorkerThatIsNotTakenOver(t *testing.T) {
	dir, p := t.TempDir(), prompt57(96)
	s, end := startLife(t, dir, 4<<20, io.Discard)
	hybrid := newClient57(t, s)
	hybrid.negotiate(24)
	hybrid.register(2)
	old := newClient57(t, s)
	old.packed = false
	if n, err := lmcache.DecodeInt(old.call(lmcache.OpGetChunkSize)); n != 16 || err != nil {
		t.Fatal(n, err)
	}
	old.model = "o"
	old.register(1)
	if n := old.store(1, p, 96, "a"); n != 6 {
		t.Fatal(n)
	}
	end()
	var log bytes.Buffer
	s, end = startLife(t, dir, 8<<20, &log)
	defer end()
	if len(s.registry.List()) != 0 {
		t.Fatal("a worker that maps the smaller pool was taken over")
	}
	old = old.over(s, 0, 0)
	if old.ping(1) {
		t.Error("the worker is not asked to register again")
	}
	if got := old.register(1); got.ShmName == "" {
		t.Fatalf("the worker is refused:\n%s", &log)
	}
	if n := old.store(1, p, 96, "b"); n != 0 {
		t.Errorf("%d of its chunks were lost", n)
	}
	if n := old.over(s, 0, 0).lookup(p, 0, 96, "c"); n != 6 {
		t.Errorf("its scheduler finds %d chunks", n)
	}
}

// The size that a connection was taken to have does not decide what its client negotiates: an engine gets the size that it got when it
// started.
func TestNegotiationAfterAnotherEnginesSize(t *testing.T) {
	dir, p := t.TempDir(), prompt57(96)
	s, end := startLife(t, dir, 4<<20, io.Discard)
	c := newClient57(t, s)
	c.negotiate(48)
	c.register(1)
	c.store(1, p, 96, "a")
	end()
	s, end = startLife(t, dir, 4<<20, io.Discard)
	defer end()
	for alignment, want := range map[int64]int{16: 16, 24: 24, 48: 48, 12: 24, 5: 20} {
		d := c.over(s, 0, 0)
		if n := d.lookup(p, 0, 96, "b"); n != 2 { // as its model's only worker
			t.Fatalf("a hit of %d chunks", n)
		}
		d.call(lmcache.OpLookup, d.key(p, 0, 96, lmcache.AllWorkers, "open"), lmcache.AppendInt(nil, 1))
		if n := d.negotiate(alignment); n != want {
			t.Errorf("blocks of %d tokens: %d, the first time %d", alignment, n, want)
		}
		if n := d.negotiate(alignment); n != want {
			t.Errorf("blocks of %d tokens, again: %d, want %d", alignment, n, want)
		}
	}
}

// An alignment that is no number is answered with the size, as one that cannot be met. However many there are, few are remembered.
func TestAlignmentsWithoutEnd(t *testing.T) {
	var log bytes.Buffer
	s, _ := newBareServerWith(t, &log, 4<<20, Options{ChunkTokens: 16})
	c := newClient57(t, s)
	c.negotiate(16)
	for _, frame := range [][]byte{{0xc0}, {0xa1, 'x'}, {0x90}, {0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {0x01, 0x01}, {}, lmcache.AppendInt(nil, -7)} {
		if n, err := lmcache.DecodeInt(c.call(lmcache.OpNegotiateChunkSize, frame)); err != nil || n != 16 {
			t.Errorf("alignment %x: %d, %v", frame, n, err)
		}
	}
	if n, err := lmcache.DecodeInt(c.call(lmcache.OpNegotiateChunkSize)); err != nil || n != 16 {
		t.Errorf("no alignment: %d, %v", n, err)
	}
	for a := range int64(2000) {
		c.negotiate(100 + a)
	}
	kept := 0
	s.n.misfits.Range(func(any, any) bool { kept++; return true })
	if lines := strings.Count(log.String(), "do not fit the chunk size"); kept > maxMisfits || lines > maxMisfits {
		t.Errorf("%d alignments are remembered, %d lines", kept, lines)
	}
}

// Another node finds the objects of a model in each of its chunk sizes, and those of listeners.
func TestNamesOfPeersInSeveralSizes(t *testing.T) {
	s, _ := newBareServerWith(t, io.Discard, 4<<20, Options{ChunkTokens: 16})
	p := prompt57(96)
	c := newClient57(t, s)
	want := map[kv.Hash]int{}
	for id, of := range []struct{ base, alignment, size int }{{0, 8, 16}, {0, 24, 24}, {12, 4, 12}} {
		d := c.over(s, of.base, 0)
		if n := d.negotiate(int64(of.alignment)); n != of.size {
			t.Fatal(n)
		}
		d.register(int64(1 + id))
		d.store(int64(1+id), p, of.size, "a")
		want[kv.ChunkHashes(p, of.size)[0]] = of.size
	}
	rank, _ := kv.NewRank(1, 0)
	find := s.keysFor(&scratch{inProcess: connected(s)}, lmcache.OpP2PLookupAndLock)
	for hash, size := range want {
		k, ok := find(&lmcache.ObjectKey{Model: []byte("m"), Rank: rank, Chunk: hash})
		sh := s.registry.EachShardsOf(&workers.Query{Model: []byte("m"), World: 1, Chunk: size})
		if !ok || len(sh) != 1 || k.Namespace != sh[0].Namespace || k.Chunk != hash {
			t.Errorf("the chunk of %d tokens: %v, %v", size, k, ok)
		}
	}
	if _, ok := find(&lmcache.ObjectKey{Model: []byte("n"), Rank: rank}); ok {
		t.Error("an object of an unknown model")
	}
}
