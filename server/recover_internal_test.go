// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/invariant"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

func newBareServer(t *testing.T, log io.Writer) *Server {
	t.Helper()
	s, _ := newBareServerWith(t, log, 1<<20, Options{ChunkTokens: 4})
	return s
}

func newBareServerWith(t *testing.T, log io.Writer, bytes int64, o Options) (*Server, *store.Store) {
	t.Helper()
	p, err := pool.Open(pool.Options{Dir: t.TempDir(), Name: "p", Bytes: bytes, ChunkTokens: o.ChunkTokens})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	s := New(st, o)
	t.Cleanup(func() { _, _ = s.Close(), st.Close() })
	return s, st
}

// A bug that one request meets costs that request: it gets the negative answer,
// is counted, and the log shows the stack once. Others are served.
func TestPanicCostsOneRequest(t *testing.T) {
	if invariant.Enabled {
		t.Skip("this build lets panics go on, so that tests find them")
	}
	var log bytes.Buffer
	s := newBareServer(t, &log)
	memo := s.own.memo
	s.own.memo = nil // what decodes keys panics now
	key := lmcache.Key{Model: "m", WorldSize: 1, Worker: 0, Tokens: []uint32{1, 2, 3, 4}, End: 4, RequestID: "r", Readers: 1}
	lookup := [][]byte{{1}, lmcache.AppendOp(nil, lmcache.OpLookup), key.Append(nil), lmcache.AppendInt(nil, 1)}
	for range 3 {
		if got := s.Answer(lookup); len(got) < 2 || !bytes.Equal(got[0], lookup[0]) {
			t.Fatalf("the lookup got %q", got)
		}
	}
	if n := s.n.panics.Load(); n != 3 {
		t.Errorf("%d panics counted, want 3", n)
	}
	if n := strings.Count(log.String(), "stack="); n != 1 {
		t.Errorf("%d stacks logged, want 1:\n%s", n, log.String())
	}
	noop := [][]byte{{2}, lmcache.AppendOp(nil, lmcache.OpNoop)}
	if got := s.Answer(noop); len(got) != 3 {
		t.Errorf("noop got %q", got)
	}
	s.own.memo = memo
	if s.Answer(lookup); s.n.panics.Load() != 3 {
		t.Error("a lookup after them panicked")
	}
}
