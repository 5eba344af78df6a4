// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// sglRecording is a life of one of SGLang's clients for LMCache (lmcache 0.5.6), with its pages.
type sglRecording struct {
	testkit.Recording
	Meta struct {
		Page, Tokens int
		From         int `json:"store_from_slot"`
		To           int `json:"load_to_slot"`
	}
}

// sglPlay plays a recording on a node, and says what it means for the client's memory.
type sglPlay struct {
	*drivenNode
	t      *testing.T
	name   string
	rec    sglRecording
	reg    lmcache.KVCache
	segs   []*shm.Segment
	planes [][]byte
	pages  [][]byte // what the pages of a plane held that were stored
	chunks [][]byte // what the client wrote into the pool
}

// open makes the segments that the client lends.
func (p *sglPlay) open(frames [][]byte) {
	p.t.Helper()
	d := new(lmcache.Decoder)
	r, err := d.Decode(lmcache.NewMemo(drivenChunk, 0), lmcache.Only(lmcache.Latest), lmcache.OpRegisterKVCache, frames[2:])
	if err != nil {
		p.t.Fatal(err)
	}
	p.reg = *r.(*lmcache.KVCache)
	for i, desc := range p.reg.Descriptors {
		seg, err := shm.Create(filepath.Join(p.dir, desc.ShmName), desc.Bytes)
		if err != nil {
			p.t.Fatal(err)
		}
		p.t.Cleanup(func() { _ = seg.Close() })
		plane := seg.Bytes(0, desc.Bytes)
		for j := range plane {
			plane[j] = byte(j*7 + j>>8 + i*50)
		}
		p.segs, p.planes = append(p.segs, seg), append(p.planes, plane)
		p.pages = append(p.pages, slices.Clone(p.page(i, p.rec.Meta.From, p.rec.Meta.Tokens)))
	}
}

// page returns the bytes of tokens of a plane, from a slot on.
func (p *sglPlay) page(plane, slot, tokens int) []byte {
	shape := p.reg.Descriptors[plane].Shape
	blocks := int(shape[0])
	if p.reg.ListLayout == "k_v" {
		blocks /= p.reg.PageTokens
	}
	size := len(p.planes[plane]) / blocks
	return p.planes[plane][slot/p.rec.Meta.Page*size : (slot+tokens)/p.rec.Meta.Page*size]
}

// loaded checks that each plane has what was stored, of windows the last chunk.
func (p *sglPlay) loaded(step string, from int) {
	p.t.Helper()
	window := map[int]bool{}
	for _, g := range p.reg.Groups {
		for _, l := range g.Layers {
			window[l] = g.WindowTokens > 0
		}
	}
	for i := range p.planes {
		first, n := from, p.rec.Meta.Tokens
		if window[i] {
			first = n - drivenChunk
		}
		size := len(p.pages[i]) / n
		if got := p.page(i, p.rec.Meta.To+first, n-first); !bytes.Equal(got, p.pages[i][first*size:]) {
			p.t.Errorf("%s, %s: plane %d has other bytes", p.name, step, i)
		}
		clear(p.page(i, p.rec.Meta.To, n))
	}
}

// pool does what an engine_driven client does between prepare and commit.
func (p *sglPlay) pool(op lmcache.Op, step string, reply [][]byte) {
	p.t.Helper()
	f, err := os.OpenFile(p.store.Files().Path(), os.O_RDWR, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	if op == lmcache.OpPrepareStore {
		got, err := lmcache.DecodePrepareStore(reply[2])
		if err != nil {
			p.t.Fatal(err)
		}
		for i, s := range got.Slots {
			chunk := bytes.Repeat([]byte{byte(0x51 + i)}, int(s.Length))
			p.chunks = append(p.chunks, chunk)
			if _, err := f.WriteAt(chunk, s.Offset); err != nil {
				p.t.Fatal(err)
			}
		}
		return
	}
	got, err := lmcache.DecodePrepareRetrieve(reply[2])
	if err != nil || !got.Success || len(got.Slots) == 0 {
		p.t.Fatalf("%s, %s: %+v, %v", p.name, step, got, err)
	}
	for i, s := range got.Slots {
		b := make([]byte, s.Length)
		if _, err := f.ReadAt(b, s.Offset); err != nil || !bytes.Equal(b, p.chunks[len(p.chunks)-len(got.Slots)+i]) {
			p.t.Errorf("%s, %s: chunk %d has other bytes, %v", p.name, step, i, err)
		}
	}
}

// The recorded lives of SGLang's two clients: replies equal those of LMCache's server, and loaded pages have the bytes of the
// stored ones. So they do where the server restarts in between, as neither client registers again.
func TestRecordedSGLang(t *testing.T) {
	for _, kind := range []string{"mha2_engine_driven", "mha2_lmcache_driven", "mha16_lmcache_driven", "mla_lmcache_driven", "swa_lmcache_driven", "dsa_lmcache_driven", "old2_lmcache_driven", "old16_lmcache_driven"} {
		for _, restart := range []bool{false, true} {
			playSGLang(t, kind, restart)
		}
	}
}

func playSGLang(t *testing.T, kind string, restart bool) {
	t.Helper()
	p := &sglPlay{t: t, name: fmt.Sprintf("%s, restart %v", kind, restart)}
	testkit.ReadVector(t, "lmcache-sglang/"+kind+".json", &p.rec)
	o, dir := server.Options{SeparateGroups: true, SGLangCPUViews: true}, t.TempDir()
	p.drivenNode = startDriven(t, dir, "pool", o)
	defer func() { p.stop() }()
	old := strings.HasPrefix(kind, "old")
	replies := 0
	for _, step := range p.rec.Steps {
		if restart && step.Step == "lookup, all there" {
			p.stop()
			p.drivenNode = startDriven(t, dir, "pool", o)
			p.compare(t)
		}
		var asked [][]byte
		for _, f := range step.Frames {
			frames := testkit.Frames(f.Hex)
			if f.Direction == "server_to_client" {
				continue
			}
			op, err := lmcache.ParseOp(frames[1])
			if err != nil {
				t.Fatal(err)
			}
			if op == lmcache.OpRegisterKVCache {
				p.open(frames)
			}
			asked = slices.Clone(p.Answer(frames))
			for i := range asked {
				asked[i] = bytes.Clone(asked[i])
			}
			replies++
			switch op {
			case lmcache.OpStore, lmcache.OpRetrieve:
				if got, err := lmcache.DecodeCopied(asked[2]); err != nil || !got.OK {
					t.Fatalf("%s, %s: %+v, %v\n%s", p.name, step.Step, got, err, p.log)
				}
			case lmcache.OpPrepareStore, lmcache.OpPrepareRetrieve:
				p.pool(op, step.Step, asked)
			case lmcache.OpQueryPrefetchStatus, lmcache.OpWaitPrefetchStatus:
				want := p.rec.Meta.Tokens / drivenChunk
				if strings.Contains(step.Step, "nothing there") || strings.Contains(step.Step, "another salt") {
					want = 0
				}
				if n, err := lmcache.DecodeInt(asked[2]); err != nil || int(n) != want {
					t.Fatalf("%s, %s: a hit of %d chunks, want %d, %v\n%s", p.name, step.Step, n, want, err, p.log)
				}
			}
			if want := replyTo(&p.rec.Recording, frames[0]); !old && op != lmcache.OpQueryPrefetchStatus {
				compareReply(t, p.name+", "+step.Step, f.Hex[1], asked, want)
			}
		}
		switch {
		case strings.HasPrefix(step.Step, "load") && p.segs != nil:
			p.loaded(step.Step, 0)
		case strings.HasPrefix(step.Step, "lookup, engine has") && p.segs != nil:
			p.loaded(step.Step, drivenChunk)
		case kind == "old2_lmcache_driven" && step.Step == "lookup, all there": // the recorded server had no hit
			k := lmcache.Key{Model: p.reg.Model, WorldSize: 1, Tokens: sglTokens(p.rec.Meta.Tokens), End: p.rec.Meta.Tokens, RequestID: "r2", Readers: 1}
			p.call(lmcache.OpRetrieve, k.Append(nil), lmcache.AppendInt(nil, p.reg.InstanceID),
				lmcache.AppendBlockIDs(nil, [][]int{span(p.rec.Meta.To/p.rec.Meta.Page, p.rec.Meta.Tokens/p.rec.Meta.Page)}), lmcache.AppendBytes(nil, nil), lmcache.AppendInt(nil, 0))
			p.loaded(step.Step, 0)
		}
	}
	if replies < 10 {
		t.Errorf("%s: %d requests were played", p.name, replies)
	}
	if st := p.Status(); len(st.Declined) > 0 || len(st.TurnedAway) > 0 {
		t.Errorf("%s: declined %v, %v", p.name, st.Declined, st.TurnedAway)
	}
}

// sglTokens returns the tokens of the recordings.
func sglTokens(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(1000 + i)
	}
	return out
}

// replyTo returns the recorded reply to a request.
func replyTo(rec *testkit.Recording, uid []byte) [][]byte {
	for _, step := range rec.Steps {
		for _, f := range step.Frames {
			if f.Direction == "server_to_client" && bytes.Equal(f.Hex[0], uid) {
				return testkit.Frames(f.Hex)
			}
		}
	}
	return nil
}

// The newer client that lends the memory of a CPU is refused at once unless the server is told otherwise; the older one is served.
func TestSGLangViewsAreRefused(t *testing.T) {
	for kind, refused := range map[string]bool{"mha2_lmcache_driven": true, "mla_lmcache_driven": true, "swa_lmcache_driven": true, "dsa_lmcache_driven": true, "old16_lmcache_driven": false} {
		p := &sglPlay{t: t, name: kind}
		testkit.ReadVector(t, "lmcache-sglang/"+kind+".json", &p.rec)
		p.drivenNode = startDriven(t, t.TempDir(), "pool", server.Options{SeparateGroups: true})
		var last [][]byte
		for _, step := range p.rec.Steps {
			for _, f := range step.Frames {
				if f.Direction == "server_to_client" {
					continue
				}
				frames := testkit.Frames(f.Hex)
				if op, _ := lmcache.ParseOp(frames[1]); op == lmcache.OpRegisterKVCache {
					p.open(frames)
				}
				last = p.Answer(frames)
				if len(last) < 2 {
					t.Fatalf("%s, %s: no answer", kind, step.Step)
				}
				if op, _ := lmcache.ParseOp(frames[1]); op == lmcache.OpStore {
					if got, err := lmcache.DecodeCopied(last[2]); err != nil || got.OK == refused {
						t.Errorf("%s: a store: %+v, %v", kind, got, err)
					}
					if w := p.Status().Workers; len(w) != 1 || strings.Contains(w[0].Refused, "set lmcache.mp.mp_transfer_mode: engine_driven") != refused {
						t.Errorf("%s: %+v", kind, w)
					}
				}
			}
		}
		p.stop()
	}
}

// SGLang's older client beside a vLLM of the same model, both with memory that the server copies: each loads its own bytes.
func TestLentPlanesBesideVLLM(t *testing.T) {
	dir := t.TempDir()
	n := startDriven(t, dir, "pool", server.Options{})
	v := n.newEngine()
	who := sameUser
	who.PID = os.Getpid() // it lends segments of its own
	var vc, sched, sc func([][]byte) [][]byte
	var name string
	s := lmcache.KVCache{InstanceID: 7, Model: "m", WorldSize: 1, EngineType: "sglang", ListLayout: "k_v", PageTokens: 16}
	var planes [][]byte
	for i := range 4 { // two layers, as the vLLM has
		name = fmt.Sprintf("lmcache_kv_%d_%d", os.Getpid(), 900000+i)
		seg, err := shm.Create(filepath.Join(dir, name), engineBytes/2)
		if err != nil {
			t.Fatal(err)
		}
		defer seg.Close()
		plane := seg.Bytes(0, engineBytes/2)
		for j := range plane {
			plane[j] = byte(200 + j*3 + i*31 + j>>8)
		}
		planes = append(planes, plane)
		s.Descriptors = append(s.Descriptors, lmcache.Descriptor{
			Type: lmcache.CPUShm, ShmName: "/" + name, Bytes: engineBytes / 2, DType: "float16", Shape: []int64{engineBlocks * 16, 1, 4}, Stride: []int64{4, 4, 1}, Device: "cpu",
		})
	}
	call := func(answer func([][]byte) [][]byte, op lmcache.Op, payload ...[]byte) []byte {
		t.Helper()
		if got := answer(append([][]byte{{1}, lmcache.AppendOp(nil, op)}, payload...)); len(got) > 2 {
			return bytes.Clone(got[2])
		}
		return nil
	}
	connect := func() {
		vc, sched, sc = n.Connect(who), n.Connect(who), n.Connect(who)
		for _, c := range []func([][]byte) [][]byte{vc, sched, sc} {
			call(c, lmcache.OpGetChunkSize)
		}
	}
	connect()
	v.tint(1)
	call(vc, lmcache.OpRegisterKVCache, v.reg.Frames()...)
	call(sc, lmcache.OpRegisterKVCache, s.Frames()...)
	prompt := tokens(2*drivenChunk, 3)
	key := func(worker int, request string) []byte {
		k := v.key(prompt, 0, len(prompt), request)
		k.Worker = worker
		return k.Append(nil)
	}
	copied := func(what string, answer func([][]byte) [][]byte, op lmcache.Op, id int64, request string, blocks []int, more ...[]byte) {
		t.Helper()
		got, err := lmcache.DecodeCopied(call(answer, op, append([][]byte{key(0, request), lmcache.AppendInt(nil, id), lmcache.AppendBlockIDs(nil, [][]int{blocks}), lmcache.AppendBytes(nil, nil)}, more...)...))
		if err != nil || !got.OK {
			t.Fatalf("%s: %+v, %v\n%s", what, got, err, n.log)
		}
	}
	hit := func(what string, answer func([][]byte) [][]byte, request string) {
		t.Helper()
		call(answer, lmcache.OpLookup, key(lmcache.AllWorkers, request), lmcache.AppendInt(nil, 1))
		if n, err := lmcache.DecodeInt(call(answer, lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, request))); err != nil || n != 2 {
			t.Fatalf("%s: a hit of %d, %v\n%s", what, n, err, v.log)
		}
	}
	copied("the vLLM stores", vc, lmcache.OpStore, v.reg.InstanceID, "s", span(1, 4))
	copied("the SGLang stores", sc, lmcache.OpStore, 7, "s", span(1, 4))
	for _, what := range []string{"same life", "restart"} {
		hit(what, sched, "v"+what)
		hit(what, sc, "s"+what)
		for _, l := range v.layers {
			clear(l[20*engineBlock : 24*engineBlock])
		}
		for _, pl := range planes {
			clear(pl[20*engineBlock : 24*engineBlock])
		}
		copied("the vLLM loads", vc, lmcache.OpRetrieve, v.reg.InstanceID, "v"+what, span(20, 4), lmcache.AppendInt(nil, 0))
		copied("the SGLang loads", sc, lmcache.OpRetrieve, 7, "s"+what, span(20, 4), lmcache.AppendInt(nil, 0))
		for l := range v.layers {
			for plane := range 2 {
				for b := range 4 {
					if !bytes.Equal(v.block(l, plane, 20+b), v.block(l, plane, 1+b)) {
						t.Errorf("%s: layer %d, plane %d, block %d of the vLLM", what, l, plane, b)
					}
				}
			}
		}
		for i, pl := range planes {
			if !bytes.Equal(pl[20*engineBlock:24*engineBlock], pl[engineBlock:5*engineBlock]) {
				t.Errorf("%s: plane %d of the SGLang", what, i)
			}
		}
		n.stop()
		n = startDriven(t, dir, "pool", server.Options{})
		n.compare(t)
		connect()
		call(sc, lmcache.OpPing, lmcache.AppendInt(nil, 7))
	}
	n.stop()
}

// A SGLang with attention and states (Mamba): of a hit all pages and the last state are loaded.
func TestSGLangStates(t *testing.T) {
	const blocks, page, state = 20, 16 * 2 * 4 * 2, 96 // bytes
	dir := t.TempDir()
	n := startDriven(t, dir, "pool", server.Options{SeparateGroups: true, SGLangCPUViews: true})
	defer n.stop()
	reg := lmcache.KVCache{InstanceID: 9, Model: "m", WorldSize: 1, EngineType: "sglang", ListLayout: "unified", Groups: []lmcache.EngineGroup{
		{ID: 0, Layers: []int{0, 1}, TokensPerBlock: 16, WindowTokens: -1}, {ID: 1, Layers: []int{2}, TokensPerBlock: drivenChunk, WindowTokens: -1, Recurrent: true},
	}}
	var planes [][]byte
	for i, size := range []int64{page, page, state} {
		name := fmt.Sprintf("lmcache_kv_%d_%d", os.Getpid(), 910000+i)
		seg, err := shm.Create(filepath.Join(dir, name), blocks*size)
		if err != nil {
			t.Fatal(err)
		}
		defer seg.Close()
		plane := seg.Bytes(0, blocks*size)
		for j := range plane {
			plane[j] = byte(j*5 + j>>7 + i*77)
		}
		planes = append(planes, plane)
		d := lmcache.Descriptor{Type: lmcache.CPUShm, ShmName: "/" + name, Bytes: blocks * size, DType: "float16", Shape: []int64{blocks, 16, 2, 4}, Stride: []int64{128, 8, 4, 1}, Device: "cpu"}
		if i == 2 {
			d.DType, d.Shape, d.Stride = "float32", []int64{blocks, 1, 1, state / 4}, []int64{state / 4, state / 4, state / 4, 1}
		}
		reg.Descriptors = append(reg.Descriptors, d)
	}
	n.call(lmcache.OpRegisterKVCache, reg.Frames()...)
	prompt := tokens(3*drivenChunk, 4)
	e := &engine{drivenNode: n, reg: reg}
	if got := e.storeBlocks(prompt, 0, len(prompt), span(1, 6), span(1, 3)); got != done {
		t.Fatalf("%+v\n%s", got, n.log)
	}
	if hit := e.lookup(prompt, "r"); hit != 3 {
		t.Fatalf("a hit of %d chunks\n%s", hit, n.log)
	}
	if got := e.retrieve(prompt, 0, len(prompt), 0, "r", span(10, 6), []int{0, 0, 12}); got != done {
		t.Fatalf("%+v\n%s", got, n.log)
	}
	for i, plane := range planes[:2] {
		if !bytes.Equal(plane[10*page:16*page], plane[page:7*page]) {
			t.Errorf("plane %d has other bytes", i)
		}
	}
	if !bytes.Equal(planes[2][12*state:13*state], planes[2][3*state:4*state]) {
		t.Error("the last state has other bytes")
	}
	if w := n.Status().Workers; len(w) != 1 || w[0].ObjectGroups != 2 {
		t.Errorf("%+v", w)
	}
}
