// SPDX-License-Identifier: Apache-2.0

package server

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// said counts a line in a log that grows.
func said(log *strings.Builder, what string) int { return strings.Count(log.String(), what) }

// A note that cannot be written is said once, and once more when it could be written in
// between; each failure is counted.
func TestNoteWriteFailureIsLoggedOnce(t *testing.T) {
	var log strings.Builder
	s, st := newBareServerWith(t, &log, 64*4096, Options{ChunkTokens: 4})
	home := filepath.Dir(st.Files().Path())
	rename := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	for round := range 2 {
		rename(home, home+".away")
		s.writeNote()
		s.writeNote()
		rename(home+".away", home)
		s.writeNote()
		if n := said(&log, "registrations of workers are not kept"); n != round+1 || s.n.noteFailures.Load() != uint64(2*round+2) {
			t.Errorf("said %d times after %d failures in a row, %d counted", n, 2, s.n.noteFailures.Load())
		}
	}
	if n := said(&log, "do not fit into the note"); n != 0 {
		t.Errorf("an empty note is too long:\n%s", log.String())
	}
}

// A server says what it took over from an earlier one, chunks or workers, and nothing
// where there was none.
func TestTakeoverIsLogged(t *testing.T) {
	dir := t.TempDir()
	serve := func(taken string, life func(e *engine)) {
		t.Helper()
		var log strings.Builder
		p, err := pool.Open(pool.Options{Dir: dir, Name: "p", Bytes: 64 * 4096, ChunkTokens: 4})
		if err != nil {
			t.Fatal(err)
		}
		st := store.New(p, store.Options{TrustUnsummed: true})
		s := New(st, Options{ChunkTokens: 4, Log: slog.New(slog.NewTextHandler(&log, nil))})
		if n := said(&log, "took over"); (n == 1) != (taken != "") || said(&log, taken) == 0 {
			t.Errorf("want %q said once, said %d times:\n%s", taken, n, log.String())
		}
		life(&engine{t, s})
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	}
	serve("", func(*engine) {})
	serve("", func(e *engine) { e.register(7) })
	serve("chunks=0 bytes=0 workers=1", func(e *engine) { e.store(7, "a", 1, 0, 2) })
	serve("chunks=2 bytes=8192 workers=1", func(e *engine) { e.call(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 7)) })
	serve("chunks=2 bytes=8192 workers=0", func(*engine) {})
}

// Workers of one model that cannot hit together are named when the second one registers;
// equal ones are not.
func TestUnlikeLayoutsOfAModelAreLogged(t *testing.T) {
	var log strings.Builder
	s, _ := newBareServerWith(t, &log, 64*4096, Options{ChunkTokens: 4})
	e := &engine{t, s}
	e.register(7)
	e.register(8)
	const line = "workers of one model have unlike layouts"
	if n := said(&log, line); n != 0 {
		t.Errorf("equal layouts are said to be unlike:\n%s", log.String())
	}
	if n := said(&log, "a worker registered"); n != 2 {
		t.Errorf("%d registrations are said", n)
	}
	e.call(lmcache.OpRegisterEngineDriven, (&lmcache.EngineDriven{
		InstanceID: 9, Model: "m", WorldSize: 1, BlockSize: 4, Layers: 2, Hidden: 256, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 4,
	}).Append(nil))
	if n := said(&log, line); n != 1 {
		t.Errorf("unlike layouts are said %d times:\n%s", n, log.String())
	}
	e.register(8) // again: nothing is new
	if n := said(&log, "a worker registered"); n != 3 {
		t.Errorf("%d registrations are said, want 3", n)
	}
}
