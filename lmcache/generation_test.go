// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// generationOf maps releases to generations.
var generationOf = map[string]lmcache.Generation{
	"0.4.6": lmcache.Gen046, "0.4.7": lmcache.Gen047, "0.5.0": lmcache.Gen050, "0.5.2": lmcache.Gen050,
	"0.5.3": lmcache.Gen053, "0.5.4": lmcache.Gen053, "0.5.5": lmcache.Gen055,
}

// recordedGeneration is what the sockets of a real client and a real server of one
// release sent: the scheduler's and the worker's.
type recordedGeneration struct {
	ChunkTokens int `json:"chunk_tokens"`
	Sockets     [][]struct {
		Way string
		Hex []testkit.Hex
	}
}

// requests calls f with each request of a recorded generation.
func requests(t *testing.T, release string, f func(socket, i int, m [][]byte)) {
	t.Helper()
	var rec recordedGeneration
	testkit.ReadVector(t, "lmcache-mp/generation-"+release+".json", &rec)
	for socket, messages := range rec.Sockets {
		n := 0
		for _, m := range messages {
			if m.Way == ">" {
				f(socket, n, testkit.Frames(m.Hex))
				n++
			}
		}
	}
}

// chunkTokensOf is what the server of a recorded generation told.
func chunkTokensOf(t *testing.T, release string) int {
	t.Helper()
	var rec recordedGeneration
	testkit.ReadVector(t, "lmcache-mp/generation-"+release+".json", &rec)
	return rec.ChunkTokens
}

var recordedReleases = []string{"0.4.6", "0.4.7", "0.5.0", "0.5.3", "0.5.5"}

// The table numbers every operation as the enumeration of each release does.
func TestGenerationNumbers(t *testing.T) {
	var enumerations map[string][]string
	testkit.ReadVector(t, "lmcache-mp/generation-operations.json", &enumerations)
	renamed := map[string]string{
		"register_kv_cache_non_gpu_context":   "register_kv_cache_engine_driven_context",
		"unregister_kv_cache_non_gpu_context": "unregister_kv_cache_engine_driven_context",
	}
	checked := 0
	for release, names := range enumerations {
		g := lmcache.Only(generationOf[release])
		seen := map[lmcache.Op]bool{}
		for i, name := range names {
			r, err := g.Read([][]byte{{0}, lmcache.AppendInt(nil, int64(i+1))}, nil)
			if err != nil || len(r) > 1 {
				t.Fatalf("%s: %d is %v, %v", release, i+1, r, err)
			}
			if to, ok := renamed[name]; ok {
				name = to
			}
			if len(r) == 0 {
				if name[:3] != "cb_" {
					t.Errorf("%s: %d is nothing, not %s", release, i+1, name)
				}
				continue
			}
			checked++
			seen[r[0].Op] = true
			if r[0].Op.String() != name {
				t.Errorf("%s: %d is %v, not %s", release, i+1, r[0].Op, name)
			}
		}
		for _, op := range []lmcache.Op{lmcache.OpLookup, lmcache.OpPrepareStore, lmcache.OpCommitRetrieve, lmcache.OpPing} {
			if !seen[op] {
				t.Errorf("%s has no %v", release, op)
			}
		}
	}
	if checked < 170 {
		t.Errorf("%d numbers checked", checked)
	}
}

// What a client sends first tells its generation from all others that matter, and
// every later message is then read as what it is.
func TestFirstRequestIdentifiesGeneration(t *testing.T) {
	for _, release := range recordedReleases {
		of := generationOf[release]
		connections := map[int]lmcache.Generations{}
		requests(t, release, func(socket, i int, m [][]byte) {
			s, ok := connections[socket]
			if !ok {
				s = lmcache.AllGenerations
			}
			r, err := s.Read(m, nil)
			if err != nil || len(r) != 1 || !r[0].Generations.Has(of) {
				t.Fatalf("%s: request %d %x: %v, %v", release, i, m[1], r, err)
			}
			if i == 0 && (r[0].Op != lmcache.OpGetChunkSize || !r[0].Generations.Settled()) {
				t.Errorf("%s: the first request is %v of %v", release, r[0].Op, r[0].Generations)
			}
			if err := r[0].Generations.CheckPayloads(r[0].Op, len(m)-2); err != nil {
				t.Errorf("%s: request %d: %v", release, i, err)
			}
			connections[socket] = r[0].Generations
		})
	}
}

// Of a client that outlived its server any message can be the first. None is read
// as one operation that it is not.
func TestNoMessageIsMisread(t *testing.T) {
	alone, shared := 0, 0
	for _, release := range recordedReleases {
		of := generationOf[release]
		requests(t, release, func(_, i int, m [][]byte) {
			truth, _ := lmcache.Only(of).Read(m, nil)
			r, err := lmcache.AllGenerations.Read(m, nil)
			at := slices.IndexFunc(r, func(r lmcache.Reading) bool { return r.Generations.Has(of) })
			if err != nil || at < 0 || r[at].Op != truth[0].Op {
				t.Errorf("%s: request %d %x is %v, not among %v, %v", release, i, m[1], truth, r, err)
			}
			if len(r) > 1 {
				shared++
			} else {
				alone++
			}
		})
	}
	if alone == 0 || shared == 0 {
		t.Errorf("%d messages with one reading, %d with several", alone, shared)
	}
	// A message with a key of 0.5.5, which has num_kv_readers, has one reading only.
	requests(t, "0.5.5", func(socket, i int, m [][]byte) {
		if r, _ := lmcache.AllGenerations.Read(m, nil); len(r) > 1 && len(m) > 3 {
			t.Errorf("request %d of socket %d: %v", i, socket, r)
		}
	})
}

// Number 17 without payloads is 0.4.7's get_chunk_size or 0.4.6's ping. The count
// of a client's requests tells which.
func TestFirstCallIsGetChunkSize(t *testing.T) {
	f := func(uid, id byte, want lmcache.Op, of lmcache.Generations) {
		t.Helper()
		r, err := lmcache.AllGenerations.Read([][]byte{{uid}, {id}}, nil)
		if err != nil || len(r) != 1 || r[0] != (lmcache.Reading{Op: want, Generations: of}) {
			t.Errorf("%d as request %d: %v, %v", id, uid, r, err)
		}
	}
	modern := lmcache.Only(lmcache.Gen053) | lmcache.Only(lmcache.Gen055) | lmcache.Only(lmcache.Gen056) | lmcache.Only(lmcache.Gen057)
	f(0, 16, lmcache.OpGetChunkSize, lmcache.Only(lmcache.Gen046))
	f(0, 17, lmcache.OpGetChunkSize, lmcache.Only(lmcache.Gen047))
	f(9, 17, lmcache.OpPing, lmcache.Only(lmcache.Gen046))
	for _, zero := range [][]byte{{0xcc, 0}, {0xd3, 0, 0, 0, 0, 0, 0, 0, 0}} {
		if r, _ := lmcache.AllGenerations.Read([][]byte{zero, {17}}, nil); len(r) != 1 || r[0].Op != lmcache.OpGetChunkSize {
			t.Errorf("17 as request %x: %v", zero, r)
		}
	}
	f(0, 18, lmcache.OpGetChunkSize, lmcache.Only(lmcache.Gen050))
	f(9, 18, lmcache.OpPing, lmcache.Only(lmcache.Gen047))
	f(0, 21, lmcache.OpGetChunkSize, modern)
	f(9, 21, lmcache.OpGetChunkSize, modern)
	f(1, 40, lmcache.OpGetExperimental, lmcache.Only(lmcache.Gen053))
	f(1, 32, lmcache.OpGetExperimental, lmcache.Only(lmcache.Gen055)|lmcache.Only(lmcache.Gen056)|lmcache.Only(lmcache.Gen057))
}

// A worker's key names its shard, a scheduler's does not: 12 is prepare_store of
// 0.4.7 with the one and free_lookup_locks of 0.5.3 with the other.
func TestKeysOfWorkersAndSchedulers(t *testing.T) {
	keys := map[bool][]byte{}
	requests(t, "0.4.7", func(_, _ int, m [][]byte) {
		switch m[1][0] {
		case 12:
			keys[true] = m[2]
		case 8:
			keys[false] = m[2]
		}
	})
	for worker, want := range map[bool]lmcache.Reading{
		true:  {Op: lmcache.OpPrepareStore, Generations: lmcache.Only(lmcache.Gen047)},
		false: {Op: lmcache.OpFreeLookupLocks, Generations: lmcache.Only(lmcache.Gen053)},
	} {
		r, err := lmcache.AllGenerations.Read([][]byte{{9}, {12}, keys[worker], {1}}, nil)
		if err != nil || len(r) != 1 || r[0] != want {
			t.Errorf("12 with a worker's key %v: %v, %v", worker, r, err)
		}
	}
}

// A message with several readings is declined only with what all of them decode.
func TestAmbiguousAnswers(t *testing.T) {
	f := func(want string, ops ...lmcache.Op) {
		t.Helper()
		var r []lmcache.Reading
		for i, op := range ops {
			r = append(r, lmcache.Reading{Op: op, Generations: 1 << i})
		}
		b, result, safe := lmcache.AppendAmbiguous(nil, r)
		got := map[bool]string{false: "none"}[result]
		if result {
			store, err1 := lmcache.DecodePrepareStore(b)
			retrieve, err2 := lmcache.DecodePrepareRetrieve(b)
			if err1 == nil && err2 == nil && store.Slots != nil && len(store.Slots) == 0 && !retrieve.Success {
				got = "both"
			}
		}
		if !safe {
			got = "no answer"
		}
		if got != want {
			t.Errorf("%v: %s %x, want %s", ops, got, b, want)
		}
	}
	f("none", lmcache.OpFreeLookupLocks, lmcache.OpLookup)
	f("none", lmcache.OpEndSession, lmcache.OpQueryPrefetchStatus)
	f("both", lmcache.OpPrepareRetrieve, lmcache.OpPrepareStore)
	f("no answer", lmcache.OpCommitRetrieve, lmcache.OpPrepareRetrieve)
	f("no answer", lmcache.OpPrepareStore, lmcache.OpLookup)
	f("no answer", lmcache.OpCommitRetrieve, lmcache.OpPrepareStore)
}

func TestParseGenerations(t *testing.T) {
	for s := lmcache.Generations(0); s <= lmcache.AllGenerations; s++ {
		if got, err := lmcache.ParseGenerations(s.String()); got != s || err != nil {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
	if got, err := lmcache.ParseGenerations("0.4.6 or 0.9"); err == nil {
		t.Errorf("0.9 is %v", got)
	}
}

func TestEarly(t *testing.T) {
	for id, want := range map[byte]string{7: "0.3.11 to 0.3.13", 11: "0.4.3 to 0.4.5", 16: "", 17: "", 21: ""} {
		if got := lmcache.Early([][]byte{{0}, {id}}); got != want {
			t.Errorf("get_chunk_size as %d: %q, want %q", id, got, want)
		}
		r, err := lmcache.AllGenerations.Read([][]byte{{0}, {id}}, nil)
		if err != nil || (len(r) == 0) != (want != "") {
			t.Errorf("%d without payloads: %v, %v", id, r, err)
		}
	}
	if got := lmcache.Early([][]byte{{0}, {11}, {1}}); got != "" {
		t.Errorf("a request with a payload is taken for %q", got)
	}
}

// Before 0.5.5 a key does not say how many workers read an object. With a single
// plane, or fewer shards than ranks, all ranks do.
func TestReadersBeforeTheyWereSent(t *testing.T) {
	f := func(readers, world int, tensorParallel int64, singlePlane bool, want int) {
		t.Helper()
		k := lmcache.KeyView{Readers: readers, WorldSize: world}
		if got := k.ReadersOf(tensorParallel, singlePlane); got != want {
			t.Errorf("readers %d, world %d, tp %d, MLA %v: %d, want %d", readers, world, tensorParallel, singlePlane, got, want)
		}
	}
	f(lmcache.ReadersUnsaid, 1, 1, false, 1)
	f(lmcache.ReadersUnsaid, 4, 4, false, 1)
	f(lmcache.ReadersUnsaid, 1, 4, false, 4)
	f(lmcache.ReadersUnsaid, 4, 4, true, 4) // four stages of four ranks
	f(lmcache.ReadersUnsaid, 1, -3, true, 1)
	f(lmcache.ReadersUnsaid, 1, 1<<40, false, lmcache.MaxKVReaders)
	f(3, 1, 4, true, 3)
	f(0, 1, 4, true, 0)
}

// Whatever arrives, the readings are of generations that were possible, each of
// one operation, and a message that is read as one is not lost by another set.
func FuzzRead(f *testing.F) {
	f.Add(uint8(63), []byte{0}, []byte{17}, []byte(nil), []byte(nil), uint8(0))
	for _, release := range recordedReleases {
		var rec recordedGeneration
		testkit.ReadVector(f, "lmcache-mp/generation-"+release+".json", &rec)
		for _, socket := range rec.Sockets {
			for _, m := range socket {
				frames := testkit.Frames(m.Hex)
				frames = append(frames, nil, nil)
				f.Add(uint8(63), frames[0], frames[1], frames[2], frames[3], uint8(len(frames)-4))
			}
		}
	}
	f.Fuzz(func(t *testing.T, set uint8, uid, op, a, b []byte, n uint8) {
		s := lmcache.Generations(set) & lmcache.AllGenerations
		m := [][]byte{uid, op, a, b}[:2+min(n, 2)]
		r, err := s.Read(m, nil)
		var all lmcache.Generations
		for i, x := range r {
			if x.Generations == 0 || x.Generations&^s != 0 || x.Generations&all != 0 {
				t.Fatalf("readings %v of %v", r, s)
			}
			all |= x.Generations
			if slices.ContainsFunc(r[:i], func(y lmcache.Reading) bool { return y.Op == x.Op }) {
				t.Fatalf("readings %v repeat one", r)
			}
			_, _, _ = x.Op.Names(m[2:])
			if again, _ := x.Generations.Read(m, nil); len(again) != 1 || again[0].Op != x.Op {
				t.Fatalf("%v alone is %v", x, again)
			}
		}
		if err != nil && len(r) > 0 {
			t.Fatalf("%v and %v", r, err)
		}
		_ = lmcache.Early(m)
	})
}
