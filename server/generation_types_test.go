// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"os"
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// Every answer has the type that the client's release declares for the operation,
// also when the request is declined: up to 0.5.4 another one ends the thread that
// serves all sockets of the client.
func TestAnswersHaveTheDeclaredType(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	number := func(t msgp.Type) bool { return t == msgp.IntType || t == msgp.UintType }
	is := func(want msgp.Type) func(msgp.Type) bool { return func(got msgp.Type) bool { return got == want } }
	declared := map[lmcache.Op]func(msgp.Type) bool{
		lmcache.OpQueryPrefetchStatus: number, lmcache.OpWaitPrefetchStatus: number, lmcache.OpQueryLookupHits: number,
		lmcache.OpGetChunkSize: number, lmcache.OpP2PLookupAndLock: number, lmcache.OpNoop: is(msgp.StrType),
		lmcache.OpPrepareStore: is(msgp.MapType), lmcache.OpPrepareRetrieve: is(msgp.MapType),
		lmcache.OpCommitStore: is(msgp.BoolType), lmcache.OpCommitRetrieve: is(msgp.BoolType), lmcache.OpPing: is(msgp.BoolType),
		lmcache.OpStore: is(msgp.ArrayType), lmcache.OpRetrieve: is(msgp.ArrayType), lmcache.OpStoreQ: is(msgp.ArrayType),
		lmcache.OpGetExperimental: is(msgp.ArrayType), lmcache.OpP2PQueryLookupResults: is(msgp.ArrayType),
	}
	first := map[lmcache.Generation]byte{lmcache.Gen046: 16, lmcache.Gen047: 17, lmcache.Gen050: 18, lmcache.Gen053: 21}
	payloads := [][]byte{
		oldKey(0, 1, 16, "r"), oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(5), text("r"), empty, {0xc0}, {0x80}, {0x90}, {0xc1}, oldRegistration(3),
	}
	answers := 0
	for g, ask := range first {
		for id := byte(1); id <= 40; id++ {
			r, err := lmcache.Only(g).Read([][]byte{{0}, {id}}, nil)
			if err != nil || len(r) != 1 || r[0].Op == lmcache.OpRegisterKVCache {
				continue
			}
			op := r[0].Op
			answer := n.Connect(peercred.Peer{UID: os.Geteuid()})
			answer([][]byte{{0}, {ask}})
			if g == lmcache.Gen053 {
				answer([][]byte{{0}, {40}})
			}
			for i := range 4 * len(payloads) {
				m := [][]byte{{byte(i + 1)}, {id}}
				for j := range i % 4 {
					m = append(m, payloads[(i/4+j*(1+i/7))%len(payloads)])
				}
				got := answer(m)
				if len(got) == 2 || len(got) == 0 && op == lmcache.OpClear { // any answer to a clear is success, so a failed one has none
					continue
				}
				answers++
				want := declared[op]
				if op == lmcache.OpRegisterEngineDriven && g != lmcache.Gen046 {
					want = is(msgp.MapType)
				}
				if got := msgp.NextType(got[2]); want == nil || !want(got) {
					t.Errorf("%v of %v with %x: %v", op, g, m[2:], got)
				}
			}
		}
	}
	if answers < 500 {
		t.Errorf("%d answers", answers)
	}
}

// Any messages of a client that is not known: each gets an echo and at most one
// whole value, or none, and the next is answered.
func FuzzConnection(f *testing.F) {
	for _, release := range []string{"0.4.6", "0.4.7", "0.5.0", "0.5.3", "0.5.5"} {
		var rec struct{ Sockets [2][]recordedMessage }
		testkit.ReadVector(f, "lmcache-mp/generation-"+release+".json", &rec)
		for _, socket := range rec.Sockets {
			var all []byte
			for _, m := range socket {
				frames := testkit.Frames(m.Hex)
				if m.Way == ">" && len(slices.Concat(frames...)) < 1<<12 {
					all = append(all, byte(len(frames)))
					for _, frame := range frames {
						all = append(append(all, byte(len(frame)>>8), byte(len(frame))), frame...)
					}
				}
			}
			f.Add(all)
		}
	}
	f.Fuzz(func(t *testing.T, messages []byte) {
		s, _, _ := newPickleServer(t, 16, 1<<20, server.Options{Pickle: server.PickleOn})
		answer := s.Connect(peercred.Peer{UID: os.Geteuid()})
		for b := messages; len(b) > 0; {
			n := int(b[0] % 8)
			b = b[1:]
			var m [][]byte
			for range n {
				if len(b) < 2 {
					return
				}
				size := min(int(b[0])<<8|int(b[1]), len(b)-2)
				m = append(m, b[2:2+size])
				b = b[2+size:]
			}
			got := answer(m)
			if got == nil {
				continue
			}
			if len(got) < 2 || len(got) > 3 || !bytes.Equal(got[0], m[0]) || !bytes.Equal(got[1], m[1]) {
				t.Fatalf("%x is answered by %x", m, got)
			}
			if len(got) == 3 {
				if rest, err := msgp.Skip(got[2]); err != nil || len(rest) > 0 {
					t.Fatalf("%x is answered by %x: %v", m, got[2], err)
				}
			}
		}
	})
}
