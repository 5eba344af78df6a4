// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// drivenNode is a server that copies, asked in process.
type drivenNode struct {
	*server.Server
	t     testing.TB
	store *store.Store
	dir   string
	log   *logBuffer
}

const drivenChunk = 32 // tokens

func startDriven(t testing.TB, dir, poolName string, o server.Options) *drivenNode {
	t.Helper()
	return startDrivenOver(t, dir, poolName, o, store.Options{})
}

// startDrivenOver starts a node whose store has some options.
func startDrivenOver(t testing.TB, dir, poolName string, o server.Options, so store.Options) *drivenNode {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: poolName, Bytes: 4 << 20, Dir: dir, ChunkTokens: drivenChunk})
	if err != nil {
		t.Fatal(err)
	}
	n := &drivenNode{t: t, dir: dir, log: new(logBuffer)}
	o.ChunkTokens, o.ShmDir, o.Log = drivenChunk, dir, slog.New(slog.NewTextHandler(n.log, nil))
	so.ChecksumRate, so.SumAtOnce, so.PopulateRate, so.Log = 1<<40, true, 1<<40, o.Log
	n.store = store.New(p, so)
	n.Server = server.New(n.store, o)
	return n
}

// compare has the store compare all that an earlier server kept.
func (n *drivenNode) compare(t *testing.T) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.store.Run(ctx)
	}()
	testkit.Eventually(t, "comparisons", func() bool { st := n.store.Stats(); return st.VerifiedChunks == st.RestoredChunks })
	cancel()
	<-ended
}

func (n *drivenNode) stop() {
	if err := errors.Join(n.Close(), n.store.Close()); err != nil {
		n.t.Error(err)
	}
}

// call sends one request and returns the result frame.
func (n *drivenNode) call(op lmcache.Op, payloads ...[]byte) []byte {
	n.t.Helper()
	got := n.Answer(append([][]byte{{7}, lmcache.AppendOp(nil, op)}, payloads...))
	if len(got) < 2 || len(got) > 3 || !bytes.Equal(got[0], []byte{7}) {
		n.t.Fatalf("%v: reply %x", op, got)
	}
	if len(got) == 2 {
		return nil
	}
	return got[2]
}

// engine is a worker with groups of layers in shared memory: rows of two planes
// of a block, [2, blocks, 16, 1, 4] of float16, one segment per layer.
type engine struct {
	*drivenNode
	reg    lmcache.KVCache
	layers [][]byte
	segs   []*shm.Segment
}

const (
	engineBlocks = 40
	engineRow    = 8                              // bytes of a token
	engineBlock  = 16 * engineRow                 // bytes of a block of one plane
	engineBytes  = 2 * engineBlocks * engineBlock // bytes of a layer
)

var lastEngine int64

// newEngine makes the segments; groups are lists of layers.
func (n *drivenNode) newEngine(groups ...lmcache.EngineGroup) *engine {
	n.t.Helper()
	lastEngine++
	e := &engine{drivenNode: n, reg: lmcache.KVCache{
		InstanceID: 4000 + lastEngine, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Groups: groups,
	}}
	count := 0
	for _, g := range groups {
		count += len(g.Layers)
	}
	for i := range max(count, 2) {
		name := fmt.Sprintf("lmcache_kv_%d_%d", os.Getpid(), 1000*lastEngine+int64(i))
		seg, err := shm.Create(filepath.Join(n.dir, name), engineBytes)
		if err != nil {
			n.t.Fatal(err)
		}
		n.t.Cleanup(func() { _ = seg.Close() })
		e.segs = append(e.segs, seg)
		e.layers = append(e.layers, seg.Bytes(0, engineBytes))
		e.reg.Descriptors = append(e.reg.Descriptors, descriptor("/"+name))
	}
	return e
}

func descriptor(name string) lmcache.Descriptor {
	return lmcache.Descriptor{
		Type: lmcache.CPUShm, ShmName: name, Bytes: engineBytes, DType: "float16", Shape: []int64{2, engineBlocks, 16, 1, 4},
		Stride: []int64{engineBlocks * 64, 64, 4, 4, 1}, Device: "cpu",
	}
}

func (e *engine) register() {
	e.t.Helper()
	if got := e.call(lmcache.OpRegisterKVCache, e.reg.Frames()...); got != nil {
		e.t.Fatalf("register: %x", got)
	}
}

// block returns one block of one plane of a layer.
func (e *engine) block(layer, plane, id int) []byte {
	at := (plane*engineBlocks + id) * engineBlock
	return e.layers[layer][at : at+engineBlock]
}

// tint fills every block with bytes of its own.
func (e *engine) tint(seed int) {
	for l := range e.layers {
		for plane := range 2 {
			for id := range engineBlocks {
				b := e.block(l, plane, id)
				for i := range b {
					b[i] = byte(seed + 131*l + 71*plane + 37*id + i*i)
				}
			}
		}
	}
}

func (e *engine) key(tokens []uint32, start, end int, request string) *lmcache.Key {
	return &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens, Start: start, End: end, RequestID: request, Readers: 1}
}

func (e *engine) storeBlocks(tokens []uint32, start, end int, blocks ...[]int) lmcache.Copied {
	e.t.Helper()
	got, err := lmcache.DecodeCopied(e.call(lmcache.OpStore, e.key(tokens, start, end, "s").Append(nil),
		lmcache.AppendInt(nil, e.reg.InstanceID), lmcache.AppendBlockIDs(nil, blocks), lmcache.AppendBytes(nil, nil)))
	if err != nil {
		e.t.Fatal(err)
	}
	return got
}

func (e *engine) lookup(tokens []uint32, request string) int {
	e.t.Helper()
	k := e.key(tokens, 0, len(tokens)/drivenChunk*drivenChunk, request)
	k.Worker = lmcache.AllWorkers
	e.call(lmcache.OpLookup, k.Append(nil), lmcache.AppendInt(nil, 1))
	n, err := lmcache.DecodeInt(e.call(lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, request), msgp.AppendFloat64(nil, 60)))
	if err != nil {
		e.t.Fatal(err)
	}
	return int(n)
}

func (e *engine) retrieve(tokens []uint32, start, end, skip int, request string, blocks ...[]int) lmcache.Copied {
	e.t.Helper()
	got, err := lmcache.DecodeCopied(e.call(lmcache.OpRetrieve, e.key(tokens, start, end, request).Append(nil),
		lmcache.AppendInt(nil, e.reg.InstanceID), lmcache.AppendBlockIDs(nil, blocks), lmcache.AppendBytes(nil, nil), lmcache.AppendInt(nil, int64(skip))))
	if err != nil {
		e.t.Fatal(err)
	}
	return got
}

func span(from, n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = from + i
	}
	return out
}

var done = lmcache.Copied{Event: lmcache.StubEvent, OK: true}

// The whole recorded life of workers whose KV the server copies: replies equal
// the reference's, and the bytes are where they belong.
func TestRecordedLMCacheDriven(t *testing.T) {
	var rec testkit.Recording
	testkit.ReadVector(t, "lmcache-mp/lmcache_driven_cpu_shm.json", &rec)
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	const layerBytes = 8192
	var segs [][]byte
	for i := range 4 { // two workers of two layers
		seg, err := shm.Create(filepath.Join(n.dir, fmt.Sprintf("lmcache_kv_7013_%d", i)), layerBytes)
		if err != nil {
			t.Fatal(err)
		}
		defer seg.Close()
		b := seg.Bytes(0, layerBytes)
		for j := range b {
			b[j] = byte(j*7 + j>>8 + i*50)
		}
		segs = append(segs, b)
	}
	before := []([]byte){slices.Clone(segs[2]), slices.Clone(segs[3])}
	differs := map[string]string{"ping_id": "c2", "get_experimental": "90"} // as with engine-driven workers
	cases := 0
	for _, step := range rec.Steps {
		for i, f := range step.Frames {
			if f.Direction != "client_to_server" {
				continue
			}
			cases++
			got := n.Answer(testkit.Frames(f.Hex))
			if want, ok := differs[step.Step]; ok {
				if len(got) != 3 || fmt.Sprintf("%x", got[2]) != want {
					t.Errorf("%s: reply %x, want result %s", step.Step, got, want)
				}
				continue
			}
			compareReply(t, step.Step, f.Hex[1], got, testkit.Frames(step.Frames[i+1].Hex))
		}
		if step.Step == "retrieve_2_of_3" { // stored from blocks 3 and on, into 0 to 3, without the first
			block := func(layer []byte, plane, id int) []byte { return layer[plane*4096+id*256:][:256] }
			for layer := range 2 {
				for plane := range 2 {
					for id := range 16 {
						want := block(before[layer], plane, id)
						if id >= 1 && id <= 3 {
							want = block(segs[layer], plane, 3+id)
						}
						if !bytes.Equal(block(segs[2+layer], plane, id), want) {
							t.Errorf("layer %d, plane %d, block %d: wrong bytes", layer, plane, id)
						}
					}
				}
			}
		}
	}
	if mapped := shm.Mapped(); mapped != 4+2 { // ours, and the pool with its index
		t.Errorf("%d segments are mapped after all workers left", mapped)
	}
	t.Logf("%d cases", cases)
}

// Two KV groups, one with a window, as a gemma: what is kept, found and written.
func TestHybridGroups(t *testing.T) {
	for _, separate := range []bool{false, true} {
		t.Run(fmt.Sprint("separate=", separate), func(t *testing.T) {
			n := startDriven(t, t.TempDir(), "pool", server.Options{SeparateGroups: separate})
			defer n.stop()
			// Window 40 tokens: 2 chunks of 32, and within a chunk all blocks.
			groups := []lmcache.EngineGroup{
				{ID: 0, Layers: []int{0, 1}, TokensPerBlock: 16, WindowTokens: 40}, {ID: 1, Layers: []int{2}, TokensPerBlock: 16, WindowTokens: -1},
			}
			a, b := n.newEngine(groups...), n.newEngine(groups...)
			a.register()
			b.register()
			a.tint(1)
			prompt := tokens(5*drivenChunk+3, 1)
			if got := a.storeBlocks(prompt, 0, 160, span(1, 10), span(11, 10)); got != done {
				t.Fatalf("store: %+v", got)
			}
			if hit := b.lookup(prompt, "r"); hit != 5 {
				t.Fatalf("hit %d", hit)
			}
			b.tint(99)
			before := [][]byte{slices.Clone(b.layers[0]), slices.Clone(b.layers[1]), slices.Clone(b.layers[2])}
			// The engine gives null blocks for what lies before the window.
			window := []int{0, 0, 0, 0, 0, 0, 0, 30, 31, 32}
			if got := b.retrieve(prompt, 0, 160, 16, "r", window, span(20, 10)); got != done {
				t.Fatalf("retrieve: %+v", got)
			}
			b.expect(before, a, map[int][]int{0: window, 1: window, 2: span(20, 10)}, 1, map[int]int{0: 1, 1: 1, 2: 11})
			if got := b.retrieve(prompt, 0, 160, 0, "r", window, span(20, 10)); got.OK || got.Event != lmcache.StubEvent {
				t.Errorf("a second retrieve: %+v", got)
			}
			st := n.store.Stats()
			if want := map[bool]int{false: 5, true: 10}[separate]; st.Resident != want {
				t.Errorf("%d objects, want %d", st.Resident, want)
			}
		})
	}
}

// expect compares all blocks: those of ids hold what `from` stored, ids[i] its
// block first+i; null, skipped and other blocks hold what they did.
func (e *engine) expect(before [][]byte, from *engine, ids map[int][]int, skip int, first map[int]int) {
	e.t.Helper()
	for layer := range e.layers {
		for plane := range 2 {
			for id := range engineBlocks {
				at := (plane*engineBlocks + id) * engineBlock
				want := before[layer][at : at+engineBlock]
				if i := slices.Index(ids[layer], id); i >= skip && id != 0 {
					want = from.block(layer, plane, first[layer]+i)
				}
				if !bytes.Equal(e.block(layer, plane, id), want) {
					e.t.Errorf("layer %d, plane %d, block %d: wrong bytes", layer, plane, id)
				}
			}
		}
	}
}

// A window below a chunk keeps only its last blocks, and of a recurrent group the
// last; chunks of which a needed block is absent are not kept.
func TestSubChunkWindows(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{SeparateGroups: true})
	defer n.stop()
	groups := []lmcache.EngineGroup{
		{Layers: []int{0}, TokensPerBlock: 16, WindowTokens: -1},
		{ID: 1, Layers: []int{1}, TokensPerBlock: 16, WindowTokens: 10},
		{ID: 2, Layers: []int{2}, TokensPerBlock: 16, WindowTokens: 16, Recurrent: true},
		{ID: 3, Layers: []int{3}, TokensPerBlock: 16, WindowTokens: -1, ExtraTag: 1},
	}
	a, b := n.newEngine(groups...), n.newEngine(groups...)
	a.register()
	b.register()
	a.tint(5)
	prompt := tokens(3*drivenChunk, 2)
	// The state of chunk 1 is not there: hits end at 1 or 3 chunks.
	state := []int{21, 22, 23, 0, 0, 24}
	if got := a.storeBlocks(prompt, 0, 96, span(1, 6), span(11, 6), state, make([]int, 6)); got != done {
		t.Fatalf("store: %+v", got)
	}
	chunk := int64(2 * 16 * engineRow) // one block of both planes
	if st := n.store.Stats(); st.Resident != 3+3+2 || int64(st.StoredBytes) != 3*2*chunk+3*chunk+2*chunk {
		t.Errorf("%d objects, %d bytes", st.Resident, st.StoredBytes)
	}
	if hit := b.lookup(prompt[:64], "two"); hit != 1 {
		t.Errorf("hit of two chunks without a state: %d", hit)
	}
	if hit := b.lookup(prompt, "r"); hit != 3 {
		t.Fatalf("hit %d", hit)
	}
	b.tint(77)
	var before [][]byte
	for _, l := range b.layers {
		before = append(before, slices.Clone(l))
	}
	if got := b.retrieve(prompt, 0, 96, 0, "r", span(30, 6), []int{0, 0, 0, 0, 7, 8}, []int{0, 0, 0, 0, 0, 9}, make([]int, 6)); got != done {
		t.Fatalf("retrieve: %+v", got)
	}
	ids := map[int][]int{0: span(30, 6), 1: {0, 0, 0, 0, 0, 8}, 2: {0, 0, 0, 0, 0, 9}}
	b.expect(before, a, ids, 0, map[int]int{0: 1, 1: 11, 2: 19}) // a's blocks 1.., 16, 24
}

// Everything that a peer can get wrong: refused with its reason, nothing written,
// nothing held.
func TestDrivenRefusesCalls(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	e := n.newEngine()
	e.register()
	e.tint(3)
	prompt := tokens(4*drivenChunk, 3)
	before := slices.Clone(e.layers[0])
	known, unknown := lmcache.Copied{Event: lmcache.StubEvent}, lmcache.Copied{}
	f := func(what, reason string, want, got lmcache.Copied) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
		if log := n.log.String(); !strings.Contains(log, reason) {
			t.Errorf("%s: %q is not in the log:\n%s", what, reason, log)
		}
	}
	f("too few ids", "for 2 chunks", known, e.storeBlocks(prompt, 0, 64, span(1, 3)))
	f("an id out of range", "block id 40 is outside 0 to 39", known, e.storeBlocks(prompt, 0, 32, []int{39, 40}))
	f("a negative id", "block id -1 is outside 0 to 39", known, e.storeBlocks(prompt, 0, 32, []int{1, -1}))
	f("a huge id", "is outside 0 to 39", known, e.storeBlocks(prompt, 0, 32, []int{1, math.MaxInt}))
	f("a block twice", "appears twice", known, e.storeBlocks(prompt, 0, 32, []int{5, 5}))
	// Of one reason only five lines per second are logged.
	f("too many groups", "", known, e.storeBlocks(prompt, 0, 32, span(1, 2), span(3, 2)))
	f("no groups", "", known, e.storeBlocks(prompt, 0, 32))
	if got := e.storeBlocks(prompt, 0, 128, span(1, 8)); got != done {
		t.Fatalf("store: %+v", got)
	}
	f("nothing looked up", "no lookup of this request pinned it", known, e.retrieve(prompt, 0, 32, 0, "x", span(1, 2)))
	if hit := e.lookup(prompt, "r"); hit != 4 {
		t.Fatal(hit)
	}
	f("a negative skip", "skip_first_n_tokens -1", known, e.retrieve(prompt, 0, 64, -1, "r", span(1, 4)))
	f("overlapping blocks", "appears twice", known, e.retrieve(prompt, 0, 64, 0, "r", []int{9, 10, 11, 9}))
	if !bytes.Equal(before, e.layers[0]) {
		t.Error("a refused call wrote into the engine's memory")
	}
	if got := e.retrieve(prompt, 0, 64, 1<<40, "r", span(20, 4)); got != done || !bytes.Equal(before, e.layers[0]) {
		t.Errorf("everything skipped: %+v", got)
	}
	if got := e.retrieve(prompt, 64, 128, 0, "r", span(20, 4)); got != done || !bytes.Equal(e.block(0, 1, 20), e.block(0, 1, 5)) {
		t.Errorf("the rest of the hit: %+v", got)
	}
	if p, err := lmcache.DecodePrepareStore(n.call(lmcache.OpPrepareStore, e.key(tokens(32, 9), 0, 32, "p").Append(nil), lmcache.AppendInt(nil, e.reg.InstanceID))); err != nil || len(p.Slots) != 0 {
		t.Errorf("a worker that the server copies for is told offsets: %+v, %v", p, err)
	}
	n.call(lmcache.OpUnregisterKVCache, lmcache.AppendInt(nil, e.reg.InstanceID))
	f("unregistered", "not registered", unknown, e.storeBlocks(prompt, 0, 32, span(1, 2)))
	if st := n.store.Stats(); st.Transfers != 0 || st.StagedBytes != 0 || st.CondemnedBytes != 0 {
		t.Errorf("left over: %+v", st)
	}
}

// Registrations that cannot be served say why; their transfers are declined, and
// none of their memory stays mapped.
func TestDrivenRefusesRegistrations(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	mapped := shm.Mapped()
	f := func(reason string, change func(*engine)) {
		t.Helper()
		e := n.newEngine()
		change(e)
		e.register()
		if !strings.Contains(n.log.String(), reason) {
			t.Errorf("%q is not in the log:\n%s", reason, n.log.String())
		}
		if got := e.storeBlocks(tokens(32, 1), 0, 32, span(1, 2)); got != (lmcache.Copied{}) {
			t.Errorf("%s: a store of a refused worker: %+v", reason, got)
		}
		for _, seg := range e.segs {
			mapped++
			_ = seg
		}
		if got := shm.Mapped(); got != mapped {
			t.Errorf("%s: %d segments are mapped, want %d", reason, got, mapped)
		}
	}
	d := func(change func(*lmcache.Descriptor)) func(*engine) {
		return func(e *engine) { change(&e.reg.Descriptors[1]) }
	}
	f("cuda memory cannot be opened here: set lmcache.mp.mp_transfer_mode=engine_driven", d(func(d *lmcache.Descriptor) { d.Type = "cuda" }))
	f("cuda_vmm memory cannot be opened", d(func(d *lmcache.Descriptor) { d.Type = "cuda_vmm" }))
	f("unknown dtype", d(func(d *lmcache.Descriptor) { d.DType = "float17" }))
	f("does not begin with lmcache_kv_", d(func(d *lmcache.Descriptor) { d.ShmName = "/pool" }))
	f("bad segment name", d(func(d *lmcache.Descriptor) { d.ShmName = "/lmcache_kv_/../pool" }))
	f("no such file", d(func(d *lmcache.Descriptor) { d.ShmName = "/lmcache_kv_1_none" }))
	f("announced are", d(func(d *lmcache.Descriptor) { d.Bytes++ }))
	f("announced are", d(func(d *lmcache.Descriptor) { d.Bytes = math.MaxInt64 }))
	f("announced are", d(func(d *lmcache.Descriptor) { d.Bytes = -1 }))
	f("does not fit into its", d(func(d *lmcache.Descriptor) { d.Offset = 1 }))
	f("does not fit into its", d(func(d *lmcache.Descriptor) { d.Shape[1]++ }))
	f("does not fit into its", d(func(d *lmcache.Descriptor) { d.Shape[1] = math.MaxInt64 }))
	f("3 to 5 dimensions", d(func(d *lmcache.Descriptor) { d.Shape, d.Stride = d.Shape[:2], d.Stride[:2] }))
	f("layers of one group differ", d(func(d *lmcache.Descriptor) { d.Shape[4], d.Stride[4] = 2, 1 }))
	f("different dtypes, float16 and bfloat16", d(func(d *lmcache.Descriptor) { d.DType = "bfloat16" }))
	f("unknown kv_layout", func(e *engine) { e.reg.KVLayout = "XYZ" })
	f("world_size 0", func(e *engine) { e.reg.WorldSize = 0 })
	f("must be a multiple", func(e *engine) {
		e.reg.Groups = []lmcache.EngineGroup{{Layers: []int{0, 1}, TokensPerBlock: 48, WindowTokens: -1}}
	})
	f("does not exist or is in two groups", func(e *engine) {
		e.reg.Groups = []lmcache.EngineGroup{{Layers: []int{0, 2}, WindowTokens: -1}}
	})
	f("does not exist or is in two groups", func(e *engine) {
		e.reg.Groups = []lmcache.EngineGroup{{Layers: []int{0, 0}, WindowTokens: -1}}
	})
	f("no layers", func(e *engine) { e.reg.Groups = []lmcache.EngineGroup{{WindowTokens: -1}} })
	f("sw_size_tokens 0", func(e *engine) { e.reg.Groups = []lmcache.EngineGroup{{Layers: []int{0, 1}}} })

	// A pickle is named, not read.
	e := n.newEngine()
	frames := e.reg.Frames()
	frames[1] = append([]byte{0x91, 0xc7, 3, 1}, "\x80\x05N"...)
	n.call(lmcache.OpRegisterKVCache, frames...)
	if want := "lmcache before 0.5.6"; !strings.Contains(n.log.String(), want) {
		t.Errorf("%q is not in the log", want)
	}
}

// Memory that is cut off under us is a failed call, not our end, and a chunk of
// it is never served.
func TestTruncatedUnderUs(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	e := n.newEngine()
	e.register()
	prompt := tokens(2*drivenChunk, 4)
	if got := e.storeBlocks(prompt, 0, 32, span(1, 2)); got != done || e.lookup(prompt, "r") != 1 {
		t.Fatal(got)
	}
	for _, seg := range e.segs {
		if err := os.Truncate(seg.Path(), 0); err != nil {
			t.Fatal(err)
		}
	}
	if got := e.storeBlocks(prompt, 32, 64, span(3, 2)); got.OK {
		t.Errorf("store: %+v", got)
	}
	if got := e.retrieve(prompt, 0, 32, 0, "r", span(5, 2)); got.OK {
		t.Errorf("retrieve: %+v", got)
	}
	if hit := e.lookup(prompt, "again"); hit != 1 {
		t.Errorf("hit %d, want 1: the failed store is not kept", hit)
	}
	if !strings.Contains(n.log.String(), "memory behind a mapping is gone") {
		t.Error(n.log.String())
	}
	if st := n.store.Stats(); st.Transfers != 0 || st.StagedBytes != 0 || st.CondemnedBytes != 0 {
		t.Errorf("left over: %+v", st)
	}
}

// Workers of both modes share the chunks of a model with one group.
func TestModesShareChunks(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	e := n.newEngine()
	e.register()
	e.tint(8)
	prompt := tokens(drivenChunk, 5)
	if got := e.storeBlocks(prompt, 0, 32, span(1, 2)); got != done {
		t.Fatal(got)
	}
	reg := lmcache.EngineDriven{InstanceID: 77, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 2, Hidden: 4, DType: "float16"}
	p, err := lmcache.DecodePool(n.call(lmcache.OpRegisterEngineDriven, reg.Append(nil)))
	if err != nil || p.ShmName == "" {
		t.Fatal(p, err)
	}
	if hit := e.lookup(prompt, "r"); hit != 1 {
		t.Fatalf("hit %d", hit)
	}
	got, err := lmcache.DecodePrepareRetrieve(n.call(lmcache.OpPrepareRetrieve, e.key(prompt, 0, 32, "r").Append(nil), lmcache.AppendInt(nil, 77)))
	if err != nil || !got.Success || len(got.Slots) != 1 {
		t.Fatal(got, err)
	}
	seg, err := shm.Attach(filepath.Join(n.dir, p.ShmName))
	if err != nil {
		t.Fatal(err)
	}
	defer seg.Close()
	chunk := seg.Bytes(got.Slots[0].Offset, got.Slots[0].Length)
	for plane := range 2 {
		for layer := range 2 {
			for i := range 2 {
				at := ((plane*2+layer)*2 + i) * engineBlock
				if !bytes.Equal(chunk[at:at+engineBlock], e.block(layer, plane, 1+i)) {
					t.Errorf("plane %d, layer %d, block %d: wrong bytes", plane, layer, i)
				}
			}
		}
	}
	if got, want := got.Slots[0].Shape, (kv.Layout{Layers: 2, Slots: 32, Hidden: 4}).Shape(); !slices.Equal(got, want) {
		t.Errorf("shape %v, want %v", got, want)
	}
}
