// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// script is fuzzer input read as requests: an operation, a number of payloads, and
// for each a kind. Most kinds are well-formed payloads of a small world, so that
// requests reach each other's state; some are the input's own bytes.
type script struct{ rest []byte }

func (s *script) byte() byte {
	if len(s.rest) == 0 {
		return 0
	}
	b := s.rest[0]
	s.rest = s.rest[1:]
	return b
}

// payload returns one frame.
func (s *script) payload() []byte {
	switch kind := s.byte() % 12; kind {
	case 0, 1, 2, 3: // a key
		a, b := s.byte(), s.byte()
		k := lmcache.Key{
			Model: "m", WorldSize: 1, Worker: int(a&1) - 1, Tokens: tokens(16*(1+int(a>>1&3)), int(a>>3&1)),
			RequestID: fmt.Sprint("r", a>>4&3), Readers: 1 + int(a>>6&1),
		}
		k.Start = 16 * int(b&3)
		k.End = 16 * int(b>>2&7)
		if b&0x80 != 0 {
			k.Salt = "tenant"
		}
		return k.Append(nil)
	case 4: // a worker
		return lmcache.AppendInt(nil, 7+int64(s.byte()&1))
	case 5:
		return lmcache.AppendInt(nil, int64(int8(s.byte())))
	case 6:
		return lmcache.AppendString(nil, fmt.Sprint("r", s.byte()&3))
	case 7:
		return lmcache.AppendBytes(nil, nil)
	case 8:
		return lmcache.AppendBool(nil, s.byte()&1 == 1)
	case 9: // a registration
		b := s.byte()
		reg := lmcache.EngineDriven{
			InstanceID: 7 + int64(b&1), Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1 + int(b>>1&1), Hidden: 128, DType: "bfloat16",
			SinglePlane: true, PhysicalSlots: 16,
		}
		return reg.Append(nil)
	case 10: // a valid key that is cut
		k := (&lmcache.Key{Model: "m", WorldSize: 1, Tokens: []uint32{1, 70000, 80000, 90000}, End: 4, RequestID: "r0", Readers: 1}).Append(nil)
		return k[:len(k)*int(s.byte())/256]
	}
	n := min(int(s.byte()), len(s.rest))
	b := s.rest[:n]
	s.rest = s.rest[n:]
	return b
}

// Random requests of every operation against one server, up to 24 in a row: each
// gets an answer, the pool's bytes add up, and once workers and sessions have ended
// nothing is left behind but cached chunks. A failure follows from its input alone.
func FuzzAnswer(f *testing.F) {
	for op := byte(0); op < 42; op += byte(42 / testkit.Volume(42)) {
		f.Add([]byte{op, 1, 0, 1, 4})
		f.Add([]byte{op, 2, 1, 0, 1, 4, 0})
		f.Add([]byte{op, 3, 0, 7, 9, 4, 0, 7})
	}
	stored := []byte{14, 1, 9, 0, 16, 2, 0, 7, 12, 4, 0, 17, 3, 0, 7, 12, 4, 0, 7}
	f.Add(stored)
	f.Add(append(stored[:len(stored):len(stored)], 8, 2, 0, 6, 12, 5, 1, 9, 1, 6, 0, 18, 2, 0, 7, 12, 4, 0, 19, 2, 0, 7, 12, 4, 0))
	f.Add([]byte{8, 2, 10, 250, 5, 1})
	dir, err := os.MkdirTemp("/dev/shm", "kvasir-fuzz") // memory: an input opens a pool
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = os.RemoveAll(dir) })
	f.Fuzz(func(t *testing.T, input []byte) {
		p, err := pool.Open(pool.Options{Name: "pool", Bytes: 16 * 4096, Dir: dir, ChunkTokens: 16, Cold: true})
		if err != nil {
			t.Fatal(err)
		}
		st := store.New(p, store.Options{})
		s := server.New(st, server.Options{ChunkTokens: 16, MemoBytes: 64 << 10, Pickle: server.PickleOn, Log: slog.New(slog.DiscardHandler)})
		defer func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if err := st.Close(); err != nil {
				t.Error(err)
			}
		}()
		register(t, s, 7, smallLayout)
		in := script{input}
		for n := 0; n < 24 && len(in.rest) > 0; n++ {
			op := []byte{in.byte()}
			m := [][]byte{{1}, op}
			for range in.byte() % 8 {
				m = append(m, in.payload())
			}
			got := s.Answer(m)
			if lmcache.Op(op[0]) == lmcache.OpClear && got == nil { // one that failed gets no answer
				continue
			}
			if len(got) < 2 || !bytes.Equal(got[0], m[0]) || !bytes.Equal(got[1], op) {
				t.Fatalf("request %d, %x: reply %x", n, m, got)
			}
			checkBytes(t, st)
		}
		for id := range int64(2) {
			s.Answer([][]byte{{1}, lmcache.AppendOp(nil, lmcache.OpUnregisterEngineDriven), lmcache.AppendInt(nil, 7+id)})
		}
		_, _ = s.Clear(server.Clear{Tier: server.ClearL1, Force: true})
		if got := checkBytes(t, st); got.ResidentBytes != 0 || got.StagedBytes != 0 || got.Sessions > 8 {
			t.Fatalf("left behind: %+v", got)
		}
	})
}

func checkBytes(t *testing.T, st *store.Store) store.Stats {
	got := st.Stats()
	if got.FreeBytes+got.StagedBytes+got.ResidentBytes+got.CondemnedBytes != got.Bytes {
		t.Fatalf("bytes do not add up: %+v", got)
	}
	return got
}
