// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// client57 is a client of 0.5.7, or of 0.5.6 where packed is false, over one connection.
type client57 struct {
	t      *testing.T
	s      *Server
	who    *caller
	uid    byte
	model  string
	packed bool
}

func newClient57(t *testing.T, s *Server) *client57 {
	return &client57{t: t, s: s, who: connected(s), model: "m", packed: true}
}

// call returns the result frame.
func (c *client57) call(op lmcache.Op, payloads ...[]byte) []byte {
	c.t.Helper()
	c.uid++
	m := append([][]byte{{c.uid}, lmcache.AppendOp(nil, op)}, payloads...)
	got := c.who.ask(c.s, m)
	if len(got) < 2 {
		c.t.Fatalf("%v: no reply", op)
	}
	if len(got) == 2 {
		return nil
	}
	return got[2]
}

func (c *client57) negotiate(alignment int64) int {
	c.t.Helper()
	n, err := lmcache.DecodeInt(c.call(lmcache.OpNegotiateChunkSize, lmcache.AppendInt(nil, alignment)))
	if err != nil {
		c.t.Fatal(err)
	}
	return int(n)
}

func (c *client57) register(id int64, groups ...lmcache.GroupLayout) lmcache.Pool {
	c.t.Helper()
	r := lmcache.EngineDriven{InstanceID: id, Model: c.model, WorldSize: 1, BlockSize: 8, Layers: 1, Hidden: 2, DType: "float16", HasGroups: c.packed, Groups: groups}
	frame := c.call(lmcache.OpRegisterEngineDriven, r.Append(nil))
	if frame == nil { // of a client that may be of 0.4.6
		return lmcache.Pool{}
	}
	p, err := lmcache.DecodePool(frame)
	if err != nil {
		c.t.Fatal(err)
	}
	return p
}

func (c *client57) key(prompt []uint32, start, end, worker int, request string) []byte {
	k := lmcache.Key{Model: c.model, WorldSize: 1, Worker: worker, Tokens: prompt, Start: start, End: end, RequestID: request, Readers: 1, Packed: c.packed}
	return k.Append(nil)
}

// store stores [0, end) of a prompt and returns the number of places.
func (c *client57) store(id int64, prompt []uint32, end int, request string) int {
	c.t.Helper()
	k := c.key(prompt, 0, end, 0, request)
	payloads := [][]byte{k, lmcache.AppendInt(nil, id)}
	if c.packed {
		payloads = append(payloads, []byte{0x90})
	}
	p, err := lmcache.DecodePrepareStore(c.call(lmcache.OpPrepareStore, payloads...))
	if err != nil {
		c.t.Fatal(err)
	}
	if len(p.Slots) > 0 {
		if ok, err := lmcache.DecodeBool(c.call(lmcache.OpCommitStore, k, lmcache.AppendInt(nil, id), lmcache.AppendBytes(nil, nil))); err != nil || !ok {
			c.t.Fatal(ok, err)
		}
	}
	c.call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
	return len(p.Slots)
}

// lookup returns the hit in chunks of [start, end).
func (c *client57) lookup(prompt []uint32, start, end int, request string) int {
	c.t.Helper()
	c.call(lmcache.OpLookup, c.key(prompt, start, end, lmcache.AllWorkers, request), lmcache.AppendInt(nil, 1))
	var frame []byte
	testkit.Eventually(c.t, "the lookup has its result", func() bool {
		frame = c.call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, request))
		return frame != nil
	})
	n, err := lmcache.DecodeInt(frame)
	if err != nil {
		c.t.Fatal(err)
	}
	c.call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
	return int(n)
}

func prompt57(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(1000 + 7*i)
	}
	return out
}

// Connections go by chunks of several sizes over one pool. Each finds what was stored in its own size, and a connection
// that has not asked is declined where it could be of either.
func TestChunkSizesOfConnections(t *testing.T) {
	var log bytes.Buffer
	s, _ := newBareServerWith(t, &log, 4<<20, Options{ChunkTokens: 16})
	plain, hybrid, other := newClient57(t, s), newClient57(t, s), newClient57(t, s)
	if a, b, c := plain.negotiate(8), hybrid.negotiate(24), other.negotiate(5); a != 16 || b != 24 || c != 20 {
		t.Fatal(a, b, c)
	}
	other.model = "o"
	p := prompt57(96)
	plain.register(1)
	hybrid.register(2)
	other.register(3)
	if a, b, c := plain.store(1, p, 96, "a"), hybrid.store(2, p, 96, "b"), other.store(3, p, 80, "c"); a != 6 || b != 4 || c != 4 {
		t.Fatalf("%d, %d and %d places", a, b, c)
	}
	if a, b, c := plain.lookup(p, 0, 96, "a"), hybrid.lookup(p, 0, 96, "b"), other.lookup(p, 0, 96, "c"); a != 6 || b != 4 || c != 4 {
		t.Errorf("hits of %d, %d and %d chunks", a, b, c)
	}
	older := newClient57(t, s)
	older.packed = false
	if n, _ := lmcache.DecodeInt(older.call(lmcache.OpGetChunkSize)); n != 16 {
		t.Errorf("get_chunk_size answers %d", n)
	}
	if n := older.lookup(p, 0, 96, "d"); n != 6 {
		t.Errorf("a client of 0.5.6 finds %d chunks", n)
	}
	silent := newClient57(t, s)
	if n := silent.lookup(p, 0, 96, "e"); n != 0 {
		t.Errorf("a connection that has not asked finds %d chunks", n)
	}
	if !strings.Contains(log.String(), "has not asked for its size") {
		t.Errorf("no reason in the log:\n%s", &log)
	}
	// A worker whose connection goes by another size is declined.
	if p, err := lmcache.DecodePrepareStore(plain.call(lmcache.OpPrepareStore, plain.key(p, 0, 48, 0, "f"), lmcache.AppendInt(nil, 2), []byte{0x90})); err != nil || len(p.Slots) > 0 {
		t.Errorf("%+v, %v", p, err)
	}
}

// What cannot be negotiated is answered with the connection's size, with one line in the log.
func TestNegotiationThatCannotBeMet(t *testing.T) {
	var log bytes.Buffer
	s, _ := newBareServerWith(t, &log, 4<<20, Options{ChunkTokens: 16})
	c := newClient57(t, s)
	for _, a := range []int64{0, -1, 1 << 31, -1 << 62, 1<<62 + 1, 1<<16 + 1} {
		for range 2 {
			if n := c.negotiate(a); n != 16 {
				t.Errorf("%d: %d", a, n)
			}
		}
	}
	if n := strings.Count(log.String(), "do not fit the chunk size"); n != 6 {
		t.Errorf("%d lines for 6 alignments", n)
	}
	if n := c.negotiate(17); n != 17 {
		t.Errorf("a prime: %d", n)
	}
	if n := c.negotiate(8); n != 17 {
		t.Errorf("after it is fixed: %d", n)
	}
	if n := newClient57(t, s).negotiate(1 << 16); n != 1<<16 {
		t.Errorf("the largest: %d", n)
	}
}

// Both forms of keys on one connection mean the same chunks.
func TestBothKeyFormsOnOneConnection(t *testing.T) {
	s, _ := newBareServerWith(t, io.Discard, 4<<20, Options{ChunkTokens: 16})
	c := newClient57(t, s)
	c.negotiate(16)
	c.register(1)
	p := prompt57(70)
	if n := c.store(1, p, 32, "a"); n != 2 {
		t.Fatal(n)
	}
	c.packed = false
	if n := c.lookup(p, 0, 64, "b"); n != 2 {
		t.Errorf("a key of 0.5.6 finds %d chunks", n)
	}
	if n := c.store(1, p, 64, "c"); n != 2 {
		t.Errorf("%d places for what is new", n)
	}
	c.packed = true
	if n := c.lookup(p, 0, 64, "d"); n != 4 {
		t.Errorf("a key of 0.5.7 finds %d chunks", n)
	}
	// Packed bytes that are also a list of small integers are other tokens.
	zero := make([]uint32, 16)
	c.store(1, zero, 16, "e")
	c.packed = false
	if n := c.lookup(make([]uint32, 64), 0, 64, "f"); n != 1 {
		t.Errorf("%d chunks of zeros", n)
	}
}

// A bad key is declined with a reason, and the next request is served.
func TestBadPackedKeys(t *testing.T) {
	var log bytes.Buffer
	s, _ := newBareServerWith(t, &log, 4<<20, Options{ChunkTokens: 16})
	c := newClient57(t, s)
	c.negotiate(16)
	c.register(1)
	p := prompt57(32)
	c.store(1, p, 32, "a")
	good := c.key(p, 0, 32, lmcache.AllWorkers, "b")
	header := []byte{0xc4, 128}
	at := bytes.Index(good, header)
	for n := 1; n < 4; n++ {
		bad := append(append(append([]byte{}, good[:at]...), 0xc4, byte(128-n)), good[at+2:at+2+128-n]...)
		bad = append(bad, good[at+2+128:]...)
		c.call(lmcache.OpLookup, bad, lmcache.AppendInt(nil, 1))
	}
	if n := strings.Count(log.String(), "no whole number of tokens"); n < 1 {
		t.Errorf("no reason in the log:\n%s", &log)
	}
	if n := c.lookup(p, 0, 32, "c"); n != 2 {
		t.Errorf("%d chunks afterwards", n)
	}
}

// Group layouts that contradict each other are refused with words.
func TestGroupLayoutsThatContradict(t *testing.T) {
	full := lmcache.GroupLayout{Layers: 1, Hidden: 2, DType: "float16", WindowTokens: 16, Planes: 2}
	for what, g := range map[string]lmcache.GroupLayout{
		"keeps 17 tokens of a chunk of 16": {Layers: 1, Hidden: 2, DType: "float16", WindowTokens: 17, WindowChunks: 1},
		"a hit needs 2 chunks of it":       {Layers: 1, Hidden: 2, DType: "float16", WindowTokens: 8, WindowChunks: 2},
		"a hit needs 0 chunks of it":       {Layers: 1, Hidden: 2, DType: "float16", WindowTokens: 8},
		"unknown dtype":                    {Layers: 1, Hidden: 2, DType: "float17"},
		"dimension 0":                      {Hidden: 2, DType: "float16"},
		"dimension -1":                     {Layers: 1, Hidden: -1, DType: "float16"},
		"is outside 0 to 2":                {Layers: 1, Hidden: 2, DType: "float16", Planes: 3},
		"over 4294967296 bytes":            {Layers: 8000, Hidden: 1 << 40, DType: "float16"},
	} {
		var log bytes.Buffer
		s, _ := newBareServerWith(t, &log, 4<<20, Options{ChunkTokens: 16})
		c := newClient57(t, s)
		if p := c.register(1, full, g); p.ShmName != "" || !strings.Contains(log.String(), what) {
			t.Errorf("%q: %+v\n%s", what, p, &log)
		}
		if p := c.register(2, full, full); p.ShmName == "" {
			t.Errorf("after %q a good one is refused", what)
		}
	}
}

// An operation of a later release is named in one line.
func TestClientOfALaterRelease(t *testing.T) {
	var log bytes.Buffer
	s, _ := newBareServerWith(t, &log, 4<<20, Options{ChunkTokens: 16})
	c := connected(s)
	for i := range 5 {
		if got := c.ask(s, [][]byte{{byte(i)}, lmcache.AppendString(nil, "agree_on_everything"), {1}}); len(got) != 2 {
			t.Fatalf("%x", got)
		}
	}
	if n := strings.Count(log.String(), "an operation of a later lmcache"); n != 1 {
		t.Errorf("%d lines:\n%s", n, &log)
	}
}

// After a restart a connection that has not asked goes by the size of its model's saved registrations. Where there are several
// it is declined until it asks.
func TestChunkSizesOverARestart(t *testing.T) {
	dir := t.TempDir()
	life := func(log io.Writer) (*Server, func()) {
		p, err := pool.Open(pool.Options{Dir: dir, Name: "p", Bytes: 4 << 20, ChunkTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		st := store.New(p, store.Options{TrustUnsummed: true})
		s := New(st, Options{ChunkTokens: 16, Log: slog.New(slog.NewTextHandler(log, nil))})
		return s, func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if err := st.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	prompt := prompt57(96)
	s, end := life(io.Discard)
	for i, a := range []int64{24, 16, 24} { // model m0 has chunks of 24 tokens, m1 of 16 and 24
		c := newClient57(t, s)
		c.model = fmt.Sprint("m", min(i, 1))
		size := c.negotiate(a)
		c.register(int64(1 + i))
		if n := c.store(int64(1+i), prompt, 96, "a"); n != 96/size {
			t.Fatal(n, size)
		}
	}
	end()
	var log bytes.Buffer
	s, end = life(&log)
	defer end()
	c := newClient57(t, s)
	c.model = "m0"
	if n := c.lookup(prompt, 0, 96, "b"); n != 4 {
		t.Errorf("a hit of %d chunks of 24 tokens", n)
	}
	if n := c.negotiate(24); n != 24 {
		t.Errorf("asked again: %d", n)
	}
	d := newClient57(t, s)
	d.model = "m1"
	if n := d.lookup(prompt, 0, 96, "c"); n != 0 || !strings.Contains(log.String(), "chunks of [16 24] tokens") {
		t.Errorf("a hit of %d chunks of which size?\n%s", n, &log)
	}
	if n := d.negotiate(24); n != 24 {
		t.Fatal(n)
	}
	if n := d.lookup(prompt, 0, 96, "d"); n != 4 {
		t.Errorf("after it asked: %d chunks", n)
	}
	w := newClient57(t, s) // a worker names itself
	w.model = "m1"
	if n := w.store(2, prompt, 96, "e"); n != 0 {
		t.Errorf("%d of its chunks were lost", n)
	}
	stranger := newClient57(t, s) // of a model without a registration: its engine may go by either size
	stranger.model = "m9"
	if p := stranger.register(9); p.ShmName != "" {
		t.Errorf("a connection that has not asked registers: %+v", p)
	}
	stranger.negotiate(16)
	if p := stranger.register(9); p.ShmName == "" {
		t.Error("and is refused after it asked")
	}
}
