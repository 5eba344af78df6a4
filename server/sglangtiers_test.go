// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// oldSGLang is SGLang's older client: four planes of its memory, two of K and two of V, that the server copies.
type oldSGLang struct {
	*drivenNode
	reg    lmcache.KVCache
	planes [][]byte
}

func newOldSGLang(n *drivenNode, id int64) *oldSGLang {
	n.t.Helper()
	c := &oldSGLang{drivenNode: n, reg: lmcache.KVCache{InstanceID: id, Model: "m", WorldSize: 1, EngineType: "sglang", ListLayout: "k_v", PageTokens: 16}}
	for i := range 4 {
		lastEngine++
		name := fmt.Sprintf("lmcache_kv_%d_%d", os.Getpid(), 1000*lastEngine)
		seg, err := shm.Create(filepath.Join(n.dir, name), engineBytes/2)
		if err != nil {
			n.t.Fatal(err)
		}
		n.t.Cleanup(func() { _ = seg.Close() })
		c.planes = append(c.planes, seg.Bytes(0, engineBytes/2))
		c.reg.Descriptors = append(c.reg.Descriptors, lmcache.Descriptor{
			Type: lmcache.CPUShm, ShmName: "/" + name, Bytes: engineBytes / 2, DType: "float16", Shape: []int64{engineBlocks * 16, 1, 4}, Stride: []int64{4, 4, 1}, Device: "cpu",
		})
		for j := range c.planes[i] {
			c.planes[i][j] = byte(200 + j*3 + i*31 + j>>8)
		}
	}
	return c
}

// newSGLang registers SGLang's newer client, which copies itself: of the same model a chunk has the same planes, one after the other.
func newSGLang(n *drivenNode, id int64) {
	n.t.Helper()
	reg := lmcache.EngineDriven{InstanceID: id, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 4, Hidden: 4, DType: "float16", SinglePlane: true, PhysicalSlots: drivenChunk}
	if p, err := lmcache.DecodePool(n.call(lmcache.OpRegisterEngineDriven, reg.Append(nil))); err != nil || p.ShmName == "" {
		n.t.Fatalf("%+v, %v\n%s", p, err, n.log)
	}
}

// put stores what chunks hold through the newer client's places in the pool.
func (n *drivenNode) putSGLang(id int64, prompt []uint32, content func(chunk int) []byte) {
	n.t.Helper()
	k := lmcache.Key{Model: "m", WorldSize: 1, Tokens: prompt, End: len(prompt), RequestID: "s", Readers: 1}
	got, err := lmcache.DecodePrepareStore(n.call(lmcache.OpPrepareStore, k.Append(nil), lmcache.AppendInt(nil, id)))
	if err != nil || len(got.Slots) != len(prompt)/drivenChunk {
		n.t.Fatalf("%+v, %v\n%s", got, err, n.log)
	}
	f, err := os.OpenFile(n.store.Files().Path(), os.O_RDWR, 0)
	if err != nil {
		n.t.Fatal(err)
	}
	defer f.Close()
	for i, s := range got.Slots {
		if _, err := f.WriteAt(content(i), s.Offset); err != nil || s.Length != int64(len(content(i))) {
			n.t.Fatal(err, s.Length)
		}
	}
	if ok, err := lmcache.DecodeBool(n.call(lmcache.OpCommitStore, k.Append(nil), lmcache.AppendInt(nil, id), lmcache.AppendBytes(nil, nil))); err != nil || !ok {
		n.t.Fatal(ok, err)
	}
}

// What SGLang's newer client stored, the older one of the same model loads from the tiers after the server and its pool are gone, and each
// byte lies where it belongs. A vLLM of the model's name beside it finds none of it, and its own.
func TestSGLangClientsShareATier(t *testing.T) {
	tiers := map[string]func(dir string, names *tier.Names) (tier.Tier, error){
		"disk": func(dir string, _ *tier.Names) (tier.Tier, error) {
			d, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: dir, Bytes: 256 << 20}}, FirstTouch: true})
			if err == nil {
				<-d.Opened()
			}
			return d, err
		},
		"fs": func(dir string, names *tier.Names) (tier.Tier, error) {
			return fs.Open(fs.Options{Path: dir, Names: names})
		},
	}
	for of, open := range tiers {
		below := t.TempDir()
		n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), generation.FileName)}, open: func(names *tier.Names) tier.Tier {
			d, err := open(below, names)
			if err != nil {
				t.Fatal(err)
			}
			return d
		}}
		prompt := tokens(3*drivenChunk, 6)
		const row = 4 * 2 // bytes of a token of a plane
		content := func(chunk int) []byte {
			b := make([]byte, 4*drivenChunk*row)
			for i := range b {
				b[i] = byte(i*7 + i>>8 + 50*chunk)
			}
			return b
		}
		lose := func() { // the server, and its pool
			n.stop()
			dir := filepath.Dir(n.files[0])
			files, _ := filepath.Glob(filepath.Join(dir, "*pool*")) // the pattern is right
			for _, f := range files {
				if err := os.Remove(f); err != nil {
					t.Fatal(err)
				}
			}
			n.start()
		}
		n.start()
		newSGLang(n.drivenNode, 5)
		n.putSGLang(5, prompt, content)
		testkit.Eventually(t, "writes below", func() bool { return n.store.Stats().WrittenChunks == 3 })
		lose()
		old := newOldSGLang(n.drivenNode, 6)
		e := &engine{drivenNode: n.drivenNode, reg: old.reg}
		e.register()
		load := func(what string) {
			t.Helper()
			if hit := e.lookup(prompt, "r"+what); hit != 3 {
				t.Fatalf("%s, %s: a hit of %d\n%s", of, what, hit, n.log)
			}
			if got := e.retrieve(prompt, 0, len(prompt), 0, "r"+what, span(20, 6)); got != done {
				t.Fatalf("%s, %s: %+v\n%s", of, what, got, n.log)
			}
			for i, plane := range old.planes {
				for c := range 3 {
					at := (20*16 + c*drivenChunk) * row
					if want := content(c)[i*drivenChunk*row : (i+1)*drivenChunk*row]; !bytes.Equal(plane[at:at+len(want)], want) {
						t.Errorf("%s, %s: plane %d, chunk %d has other bytes", of, what, i, c)
					}
				}
				clear(plane[20*16*row:])
			}
		}
		load("alone")
		v := n.newEngine() // of vLLM
		v.register()
		v.tint(3)
		look := func(what string, want int) {
			t.Helper()
			c := n.Connect(sameUser)
			k := v.key(prompt, 0, len(prompt), "v"+what)
			k.Worker = lmcache.AllWorkers
			ask := func(op lmcache.Op, payload ...[]byte) []byte {
				if got := c(append([][]byte{{0}, lmcache.AppendOp(nil, op)}, payload...)); len(got) > 2 {
					return bytes.Clone(got[2])
				}
				return nil
			}
			ask(lmcache.OpGetChunkSize)
			ask(lmcache.OpPing, lmcache.AppendInt(nil, v.reg.InstanceID))
			ask(lmcache.OpLookup, k.Append(nil), lmcache.AppendInt(nil, 1))
			if got, err := lmcache.DecodeInt(ask(lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, "v"+what), msgp.AppendFloat64(nil, 60))); err != nil || int(got) != want {
				t.Errorf("%s, %s: vLLM hits %d chunks, want %d, %v\n%s", of, what, got, want, err, n.log)
			}
		}
		look("nothing of its own", 0)
		if got := v.storeBlocks(prompt, 0, len(prompt), span(1, 6)); got != done {
			t.Fatal(got)
		}
		look("its own", 3)
		_, _ = n.Clear(server.Clear{Tier: server.ClearAll, Force: true, By: "a test"})
		look("after a clear", 0)
		n.stop()
	}
}

// Each rank of SGLang's older client looks up by itself, under one request id: in whatever order they ask, all hit, each loads its own
// shard, and nothing stays pinned.
func TestSGLangRanksLookUpTogether(t *testing.T) {
	for _, order := range []string{"one after the other", "both ask, then both wait", "the second asks while the first has its answer"} {
		n := startDriven(t, t.TempDir(), "pool", server.Options{})
		prompt := tokens(3*drivenChunk, 6)
		type rank struct {
			*oldSGLang
			answer func([][]byte) [][]byte
			before [][]byte
		}
		var ranks []*rank
		who := sameUser
		who.PID = os.Getpid()
		for i := range 2 {
			r := &rank{oldSGLang: newOldSGLang(n, int64(20+i)), answer: n.Connect(who)}
			r.reg.WorldSize = 2
			for j, p := range r.planes {
				for k := range p {
					p[k] = byte(k*3 + j*31 + i*77 + k>>8)
				}
				r.before = append(r.before, bytes.Clone(p))
			}
			ranks = append(ranks, r)
		}
		call := func(r *rank, op lmcache.Op, payload ...[]byte) []byte {
			t.Helper()
			if got := r.answer(append([][]byte{{1}, lmcache.AppendOp(nil, op)}, payload...)); len(got) > 2 {
				return bytes.Clone(got[2])
			}
			return nil
		}
		key := func(worker int, request string) []byte {
			k := lmcache.Key{Model: "m", WorldSize: 2, Worker: worker, Tokens: prompt, End: len(prompt), RequestID: request, Readers: 1}
			return k.Append(nil)
		}
		for _, r := range ranks {
			call(r, lmcache.OpGetChunkSize)
			call(r, lmcache.OpRegisterKVCache, r.reg.Frames()...)
		}
		for i, r := range ranks {
			got, err := lmcache.DecodeCopied(call(r, lmcache.OpStore, key(i, "s"), lmcache.AppendInt(nil, r.reg.InstanceID), lmcache.AppendBlockIDs(nil, [][]int{span(1, 6)}), lmcache.AppendBytes(nil, nil)))
			if err != nil || !got.OK {
				t.Fatalf("%+v, %v\n%s", got, err, n.log)
			}
			call(r, lmcache.OpEndSession, lmcache.AppendString(nil, "s"))
		}
		ask := func(r *rank) { call(r, lmcache.OpLookup, key(lmcache.AllWorkers, "r"), lmcache.AppendInt(nil, 2)) }
		wait := func(r *rank) {
			t.Helper()
			hit, err := lmcache.DecodeInt(call(r, lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, "r"), msgp.AppendFloat64(nil, 10)))
			if err != nil || hit != 3 {
				t.Errorf("%s: rank %d hits %d chunks, %v\n%s", order, r.reg.InstanceID-20, hit, err, n.log)
			}
		}
		switch a, b := ranks[0], ranks[1]; order {
		case "one after the other":
			ask(a)
			wait(a)
			ask(b)
			wait(b)
		case "both ask, then both wait":
			ask(a)
			ask(b)
			wait(b)
			wait(a)
		default:
			ask(a)
			ask(b)
			wait(a)
			wait(b)
		}
		for i, r := range ranks {
			got, err := lmcache.DecodeCopied(call(r, lmcache.OpRetrieve, key(i, "r"), lmcache.AppendInt(nil, r.reg.InstanceID), lmcache.AppendBlockIDs(nil, [][]int{span(20, 6)}), lmcache.AppendBytes(nil, nil), lmcache.AppendInt(nil, 0)))
			if err != nil || !got.OK {
				t.Errorf("%s: rank %d loads %+v, %v\n%s", order, i, got, err, n.log)
			}
			const page = engineBlock
			for j, p := range r.planes {
				if !bytes.Equal(p[20*page:26*page], r.before[j][page:7*page]) {
					t.Errorf("%s: rank %d, plane %d has other bytes", order, i, j)
				}
			}
		}
		for _, r := range ranks {
			call(r, lmcache.OpEndSession, lmcache.AppendString(nil, "r"))
		}
		if st := n.store.Stats(); st.Sessions != 0 {
			t.Errorf("%s: %d requests hold chunks", order, st.Sessions)
		}
		n.stop()
	}
}
