// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// Random requests of clients of 0.5.7 and 0.5.6 with one group and with several, in chunks of three sizes over one pool, whose objects
// pass through the socket: none meets a bug, each has an answer, what is loaded is what was stored of those tokens, size and
// group, and nothing is left once all have ended.
func TestRandomRequestsInSeveralSizes(t *testing.T) {
	stores, loads := 0, 0
	for seed := range uint64(max(3, testkit.Volume(30))) {
		r := rand.New(rand.NewPCG(seed, 57))
		s, st := newBareServerWith(t, io.Discard, 256<<10, Options{ChunkTokens: 16, Pickle: PickleOnly})
		type engine struct {
			*client57
			id      int64
			chunk   int
			groups  []lmcache.GroupLayout
			layouts []kv.Layout
		}
		var engines []*engine
		for i, alignment := range []int64{8, 24, 40, 24} {
			e := &engine{client57: newClient57(t, s), id: int64(1 + i)}
			e.model = fmt.Sprint("m", i%3) // m0 has two sizes
			e.chunk = e.negotiate(alignment)
			if i%2 == 1 {
				e.groups = []lmcache.GroupLayout{
					{Layers: 1, Hidden: 2, DType: "float16", WindowTokens: 8, Planes: 1, WindowChunks: 1}, {Layers: 2, Hidden: 2, DType: "float16", Planes: 2},
				}
			}
			reg := lmcache.EngineDriven{Layers: 1, Hidden: 2, DType: "float16", Groups: e.groups}
			var err error
			if e.layouts, err = reg.Layouts(e.chunk); err != nil {
				t.Fatal(err)
			}
			e.register(e.id, e.groups...)
			engines = append(engines, e)
		}
		prompts := [][]uint32{prompt57(240), append(prompt57(100), prompt57(140)...), make([]uint32, 240)}
		object := func(e *engine, p []uint32, chunk, group int) []byte {
			n, err := e.layouts[group].Bytes()
			if err != nil {
				t.Fatal(err)
			}
			h := kv.ChunkHashes(p[:(chunk+1)*e.chunk], e.chunk)[chunk]
			return bytes.Repeat(append(h[:7:7], byte(group)), int(n)/8+1)[:n]
		}
		for range 150 {
			e := engines[r.IntN(len(engines))]
			e.packed = len(e.groups) > 0 || r.IntN(4) > 0
			p, request, id := prompts[r.IntN(len(prompts))], fmt.Sprint("r", r.IntN(3)), lmcache.AppendInt(nil, e.id)
			from := r.IntN(len(p) / e.chunk)
			to := from + 1 + r.IntN(len(p)/e.chunk-from)
			worker := e.key(p, from*e.chunk, to*e.chunk, 0, request)
			switch r.IntN(8) {
			case 0, 1: // a store of what some objects lack
				env := &lmcache.Envelope{Groups: make([]lmcache.EnvelopeGroup, len(e.layouts))}
				for g := range e.layouts {
					for c := from; c < to; c++ {
						if len(e.layouts) > 1 && r.IntN(4) == 0 {
							continue
						}
						env.Groups[g].Chunks = append(env.Groups[g].Chunks, c-from)
						env.Groups[g].Data = append(env.Groups[g].Data, object(e, p, c, g))
					}
				}
				data := lmcache.AppendEnvelope(nil, e.layouts, env)
				good := r.IntN(5) > 0 && e.packed
				if !good {
					data = data[:r.IntN(len(data))]
				}
				ok, err := lmcache.DecodeBool(e.call(lmcache.OpCommitStore, worker, id, lmcache.AppendBytes(nil, data)))
				if err != nil || !good && ok && len(data) > 0 {
					t.Fatalf("seed %d: an envelope of which %v is whole: %v, %v", seed, good, ok, err)
				}
				if ok {
					stores++
				}
			case 2, 3, 4: // a lookup, and mostly its load
				start := from * e.chunk
				if !e.packed {
					start = 0
				}
				e.call(lmcache.OpLookup, e.key(p, start+r.IntN(e.chunk), to*e.chunk+r.IntN(3), lmcache.AllWorkers, request), lmcache.AppendInt(nil, 1))
				frame := e.call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, request))
				n, err := lmcache.DecodeInt(frame)
				hit := int(n)
				if err != nil || hit < start/e.chunk && hit != 0 || hit > to {
					t.Fatalf("seed %d: a hit of %d from %d to %d, %v", seed, hit, start/e.chunk, to, err)
				}
				if hit <= start/e.chunk || r.IntN(4) == 0 || !e.packed {
					break
				}
				got, err := lmcache.DecodePrepareRetrieve(e.call(lmcache.OpPrepareRetrieve, e.key(p, start, hit*e.chunk, 0, request), id))
				if err != nil || !got.Success {
					t.Fatalf("seed %d: the load of [%d, %d): %+v, %v", seed, start/e.chunk, hit, got, err)
				}
				loads++
				env, err := lmcache.DecodeEnvelope(got.Data, e.layouts, hit-start/e.chunk)
				if err != nil {
					t.Fatal(err)
				}
				for g := range env.Groups {
					for i, c := range env.Groups[g].Chunks {
						if !bytes.Equal(env.Groups[g].Data[i], object(e, p, start/e.chunk+c, g)) {
							t.Fatalf("seed %d: chunk %d of group %d has other bytes", seed, start/e.chunk+c, g)
						}
					}
				}
			case 5:
				free := [][]byte{e.key(p, r.IntN(2)*from*e.chunk, to*e.chunk-r.IntN(2), lmcache.AllWorkers, request), lmcache.AppendInt(nil, 1)}
				if e.packed {
					free = append(free, lmcache.AppendBlockIDs(nil, [][]int{{from * e.chunk, to * e.chunk}, {(to - 1) * e.chunk, to * e.chunk}}[:r.IntN(3)]))
				}
				e.call(lmcache.OpFreeLookupLocks, free...)
			case 6:
				prepare := [][]byte{worker, id}
				if e.packed {
					skipped := [][]int{}
					for range r.IntN(2) * len(e.layouts) {
						skipped = append(skipped, []int{r.IntN(to - from + 1)})
					}
					prepare = append(prepare, lmcache.AppendBlockIDs(nil, skipped))
				}
				if got, err := lmcache.DecodePrepareStore(e.call(lmcache.OpPrepareStore, prepare...)); err != nil || len(got.Slots) > 0 {
					t.Fatalf("seed %d: places for a worker without the pool: %+v, %v", seed, got, err)
				}
			case 7:
				e.call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
			}
		}
		for i := range 3 {
			engines[0].call(lmcache.OpEndSession, lmcache.AppendString(nil, fmt.Sprint("r", i)))
		}
		if got := st.Stats(); got.Transfers != 0 || got.EvictableObjs != got.Resident || got.Sessions != 0 {
			t.Errorf("seed %d: %d transfers, %d of %d objects can be evicted, %d sessions", seed, got.Transfers, got.EvictableObjs, got.Resident, got.Sessions)
		}
		if n := s.n.panics.Load(); n > 0 {
			t.Errorf("seed %d: %d requests met a bug", seed, n)
		}
	}
	if stores < 30 || loads < 10 {
		t.Errorf("only %d stores and %d loads", stores, loads)
	}
	t.Logf("%d stores, %d loads", stores, loads)
}
