// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/invariant"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/pickle"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/zmtp"
)

var update = flag.Bool("update", false, "write the golden figures anew")

// engine plays the calls of engines on one server, whose chunks are 4 tokens and
// 4,096 bytes.
type engine struct {
	t *testing.T
	s *Server
}

func (e *engine) call(op lmcache.Op, p ...[]byte) []byte {
	reply := e.s.Answer(append([][]byte{{9}, lmcache.AppendOp(nil, op)}, p...))
	if len(reply) < 3 {
		return nil
	}
	return bytes.Clone(reply[2])
}

func (e *engine) register(id int64) {
	e.call(lmcache.OpRegisterEngineDriven, (&lmcache.EngineDriven{
		InstanceID: id, Model: "m", WorldSize: 1, BlockSize: 4, Layers: 1, Hidden: 512, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 4,
	}).Append(nil))
}

// key names chunks [from, to) of prompt number seed.
func (e *engine) key(request string, seed uint32, from, to int) *lmcache.Key {
	k := &lmcache.Key{Model: "m", WorldSize: 1, Start: 4 * from, End: 4 * to, RequestID: request, Readers: 1}
	for i := range uint32(4 * to) {
		k.Tokens = append(k.Tokens, seed<<16+i)
	}
	return k
}

func (e *engine) prepare(id int64, request string, seed uint32, from, to int) int {
	got, err := lmcache.DecodePrepareStore(e.call(lmcache.OpPrepareStore, e.key(request, seed, from, to).Append(nil), lmcache.AppendInt(nil, id)))
	if err != nil {
		e.t.Fatal(err)
	}
	return len(got.Slots)
}

func (e *engine) commit(id int64, request string, seed uint32, from, to int, data []byte) {
	e.call(lmcache.OpCommitStore, e.key(request, seed, from, to).Append(nil), lmcache.AppendInt(nil, id), lmcache.AppendBytes(nil, data))
}

func (e *engine) store(id int64, request string, seed uint32, from, to int) {
	if e.prepare(id, request, seed, from, to) > 0 {
		e.commit(id, request, seed, from, to, nil)
	}
	e.call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
}

// lookup asks for chunks of a prompt and checks how many hit.
func (e *engine) lookup(request string, seed uint32, chunks, want int) {
	k := e.key(request, seed, 0, chunks)
	k.Worker = lmcache.AllWorkers
	e.call(lmcache.OpLookup, k.Append(nil), lmcache.AppendInt(nil, 1))
	got, err := lmcache.DecodeInt(e.call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, request)))
	if err != nil || int(got) != want {
		e.t.Errorf("lookup %s: %d of %d chunks, %v, want %d", request, got, chunks, err, want)
	}
}

func (e *engine) retrieve(id int64, request string, seed uint32, from, to int) {
	k := e.key(request, seed, from, to).Append(nil)
	e.call(lmcache.OpPrepareRetrieve, k, lmcache.AppendInt(nil, id))
	e.call(lmcache.OpCommitRetrieve, k, lmcache.AppendInt(nil, id))
	e.call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
}

// pickled is chunks as one worker sends them through the socket.
func (e *engine) pickled(chunks int) []byte {
	layout, ok := pickle.NewLayout("bfloat16", kv.Layout{SinglePlane: true, Layers: 1, Slots: 4, Hidden: 512, DType: "bfloat16"}.Shape())
	if !ok {
		e.t.Fatal("no layout")
	}
	return layout.Append(nil, chunks, func(_ int, dst []byte) { clear(dst) })
}

// lend registers a worker that lends one layer, whose chunks are 4,096 bytes.
func (e *engine) lend(id int64, dir string) {
	const name, blocks = "lmcache_kv_lent", 4
	if err := os.WriteFile(filepath.Join(dir, name), make([]byte, blocks*4096), 0o600); err != nil {
		e.t.Fatal(err)
	}
	reg := lmcache.KVCache{InstanceID: id, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{{
		Type: lmcache.CPUShm, ShmName: "/" + name, Bytes: blocks * 4096, DType: "bfloat16", Device: "cpu",
		Shape: []int64{2, blocks, 4, 1, 256}, Stride: []int64{blocks * 1024, 1024, 256, 256, 1},
	}}}
	e.call(lmcache.OpRegisterKVCache, reg.Frames()...)
}

// blocks has the server copy chunks [0, n) of a prompt, out of or into blocks 0 to n.
func (e *engine) blocks(op lmcache.Op, request string, seed uint32, n int) {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = i
	}
	p := [][]byte{e.key(request, seed, 0, n).Append(nil), lmcache.AppendInt(nil, 2), lmcache.AppendBlockIDs(nil, [][]int{ids}), lmcache.AppendBytes(nil, nil)}
	if op == lmcache.OpRetrieve {
		p = append(p, lmcache.AppendInt(nil, 0))
	}
	if got, err := lmcache.DecodeCopied(e.call(op, p...)); err != nil || !got.OK {
		e.t.Errorf("%v: %+v, %v", op, got, err)
	}
}

// deadProcess is one that has ended.
func deadProcess(t *testing.T) peercred.Process {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Skip("no sleep to run: ", err)
	}
	p, ok := peercred.Running(cmd.Process.Pid)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !ok {
		t.Skip("processes are not seen here")
	}
	return p
}

// A reply whose client is gone is counted, whoever writes it.
func TestDroppedReplies(t *testing.T) {
	s := newBareServer(t, io.Discard)
	done := make(chan error, 1)
	router := zmtp.NewRouter(func(p *zmtp.Peer, m zmtp.Message) {
		p.Close()
		s.reply(p, m)
		s.send(p, m[0], m[1])
		done <- nil
	}, zmtp.RouterOptions{Identify: s.identify})
	defer router.Close()
	addr, err := router.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	c, err := lmcache.NewClient("tcp://" + addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	go func() { _, err := c.Call(ctx, lmcache.OpNoop); done <- err }()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	cancel()
	<-done
	if n := s.Stats().RepliesDropped; n < 2 {
		t.Errorf("%d replies counted as dropped", n)
	}
}

// Every figure of metrics and status after a life with stores, hits, misses of
// several reasons, a refused worker, an eviction, a silent worker, one that pickles
// and a contained bug. What depends on the clock is left out: the golden file has
// all the rest.
func TestFigures(t *testing.T) {
	if invariant.Enabled {
		t.Skip("this build lets panics go on, so that tests find them")
	}
	dir := t.TempDir() // of what workers lend
	s, st := newBareServerWith(t, io.Discard, 8*4096, Options{ChunkTokens: 4, Pickle: PickleOn, Version: "v0", ShmDir: dir})
	e := &engine{t, s}
	e.call(lmcache.OpGetChunkSize)
	e.call(lmcache.OpNoop)
	e.register(7)
	e.call(lmcache.OpPing, lmcache.AppendInt(nil, 7))
	e.call(lmcache.OpPing, lmcache.AppendNil(nil))
	e.lookup("unknown model", 1, 0, 0) // shorter than a chunk

	e.store(7, "a", 1, 0, 3)
	e.store(7, "b", 1, 0, 3) // all there
	e.lookup("c", 1, 4, 3)
	e.retrieve(7, "c", 1, 0, 3)
	e.lookup("d", 1, 2, 2) // a whole hit
	e.retrieve(7, "d", 1, 1, 2)
	e.retrieve(7, "e", 1, 0, 1) // nothing looked up
	e.lookup("f", 2, 5, 0)      // never stored
	e.store(7, "g", 2, 0, 6)    // of which one finds no room
	e.lookup("h", 1, 3, 3)
	e.retrieve(7, "h", 1, 0, 1)
	e.lookup("i", 2, 6, 5) // pins most
	if n := e.prepare(7, "j", 3, 0, 5); n == 0 || n == 5 {
		t.Errorf("%d of 5 chunks found room beside the pinned ones", n)
	}
	e.call(lmcache.OpEndSession, lmcache.AppendString(nil, "i"))
	e.commit(7, "k", 3, 0, 2, nil) // nobody prepared it

	cuda := lmcache.KVCache{InstanceID: 8, Model: "m", WorldSize: 1, EngineType: "vllm", Descriptors: []lmcache.Descriptor{{Type: "cuda", Device: "cpu"}}}
	e.call(lmcache.OpRegisterKVCache, cuda.Frames()...)
	e.prepare(8, "l", 4, 0, 1)
	e.prepare(6, "l", 4, 0, 1)                                 // not registered
	e.call(lmcache.OpLookup, []byte{0xc1}, []byte{1})          // does not decode
	e.call(lmcache.OpEndSession)                               // nor that
	e.call(lmcache.OpServerModuleCall, lmcache.AppendNil(nil)) // not served
	e.s.Answer([][]byte{{9}})                                  // no operation
	e.s.Answer([][]byte{{9}, {0xcc, 0xc8}})                    // unknown
	e.s.Answer([][]byte{make([]byte, maxUID+1), {24}})         // long uid
	e.call(lmcache.OpPrepareStore, e.key("m", 1, 0, 1).Append(nil), lmcache.AppendString(nil, "x"))
	none := e.key("n", 1, 0, 1)
	none.Worker, none.Readers = lmcache.AllWorkers, 0
	e.call(lmcache.OpLookup, none.Append(nil), lmcache.AppendInt(nil, 1))

	e.register(5)
	e.prepare(5, "o", 5, 0, 2)
	e.commit(5, "o", 5, 0, 2, e.pickled(2))
	e.lookup("p", 5, 2, 2)
	e.retrieve(5, "p", 5, 0, 2)
	e.commit(5, "q", 5, 0, 2, e.pickled(1)) // one tensor for two chunks

	e.register(4)
	e.call(lmcache.OpPing, lmcache.AppendInt(nil, 4))
	if e.prepare(4, "r", 6, 0, 1) != 1 {
		t.Error("no room for a chunk of worker 4")
	}
	for start, second := time.Now(), 0; second <= 130; second += 5 {
		now := start.Add(time.Duration(second) * time.Second)
		e.call(lmcache.OpPing, lmcache.AppendInt(nil, 7))
		for _, in := range s.registry.List() {
			if in.ID == 7 {
				s.registry.Saw(in, now)
			}
		}
		s.Tick(now)
	}
	e.commit(4, "r", 6, 0, 1, nil) // late
	e.register(9)
	e.call(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 9))

	e.register(3)
	e.prepare(3, "u", 7, 0, 1)
	e.call(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 3)) // its slot waits in quarantine
	e.lookup("v", 2, 6, 3)                                              // the others were evicted
	e.call(lmcache.OpEndSession, lmcache.AppendString(nil, "v"))

	e.call(lmcache.OpClear, lmcache.AppendBool(nil, false))
	e.lend(2, dir)
	e.blocks(lmcache.OpStore, "w", 8, 2)
	e.blocks(lmcache.OpStore, "w", 8, 2) // all there
	e.lookup("x", 8, 2, 2)
	e.blocks(lmcache.OpRetrieve, "x", 8, 2)
	e.call(lmcache.OpUnregisterKVCache, lmcache.AppendInt(nil, 2))

	dead := deadProcess(t)
	e.register(1)
	w, err := s.registry.Get(1, self.By)
	if err != nil {
		t.Fatal(err)
	}
	w.Process.Store(&dead)
	left := filepath.Join(dir, "lmcache_kv_left")
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	inode, err := shm.InodeOf(left)
	if err != nil {
		t.Fatal(err)
	}
	s.leftovers.Add([]lent.Segment{{Name: filepath.Base(left), Inode: inode, Owner: dead}})
	s.Tick(time.Now())

	home := filepath.Dir(st.Files().Path())
	if err := os.Rename(home, home+".away"); err != nil { // the note cannot be written
		t.Fatal(err)
	}
	s.saving.Changed()
	s.saving.Flush()
	if err := os.Rename(home+".away", home); err != nil {
		t.Fatal(err)
	}

	memo := s.own.memo
	s.own.memo = nil // what decodes keys panics now
	e.call(lmcache.OpLookup, e.key("s", 1, 0, 1).Append(nil), lmcache.AppendInt(nil, 1))
	s.own.memo = memo
	e.call(lmcache.OpClear, lmcache.AppendBool(nil, false))
	e.lookup("t", 2, 2, 0) // cleared

	var out strings.Builder
	stats := s.Stats()
	if err := errors.Join(metrics.Write(&out, stats), metrics.Write(&out, s.ByModel())); err != nil {
		t.Fatal(err)
	}
	status, err := json.MarshalIndent(s.Status(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	out.Write(append(status, '\n'))
	got := timeless.ReplaceAllString(out.String(), "")
	got = clocked.ReplaceAllString(got, `$1 0`)

	const golden = "testdata/figures.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, string(want), got)
	if timed := stats.Durations["lookup"]; timed.Total() != stats.Requests["lookup"] || timed.Sum <= 0 {
		t.Errorf("%d lookups took %v", timed.Total(), timed.Sum)
	}
	if got := st.Stats(); got.Transfers != stats.Transfers {
		t.Errorf("%d transfers, %d in the store", stats.Transfers, got.Transfers)
	}
}

var (
	timeless = regexp.MustCompile(`(?m)^\w+_bucket\{.*le="[^+].*\n|^\w+_sum\{.*\n`)
	clocked  = regexp.MustCompile(`("(?:pid|started|uptime_s|silent_s|peer|seconds|last)":) [^,\n]+`)
)

// diff shows the lines in which two texts differ.
func diff(t *testing.T, want, got string) {
	t.Helper()
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		a, b := "", ""
		if i < len(w) {
			a = w[i]
		}
		if i < len(g) {
			b = g[i]
		}
		if a != b {
			t.Errorf("line %d is\n\t%s\nwant\n\t%s", i+1, b, a)
		}
	}
}

// Every reason has a label of its own, and every label a counter.
func TestLabels(t *testing.T) {
	s, _ := newBareServerWith(t, io.Discard, 1<<20, Options{ChunkTokens: 4})
	seen := map[string]bool{malformed: true}
	for _, r := range refusals {
		if seen[r.label] || r.text == "" {
			t.Errorf("%q is there twice, or has no text", r.label)
		}
		seen[r.label] = true
		if got := refusalLabel(r); got != r.label {
			t.Errorf("%q has label %q", r, got)
		}
	}
	for _, o := range reasonsElsewhere {
		if seen[o.label] {
			t.Errorf("%q is there twice", o.label)
		}
		seen[o.label] = true
	}
	st := s.Stats()
	if len(st.Declined) != len(seen) || len(st.Requests) < 30 || len(st.LookupEnded) != miss.NumReasons-1 {
		t.Errorf("%d of %d reasons, %d operations, %d of %d ends of lookups are counted from the start",
			len(st.Declined), len(seen), len(st.Requests), len(st.LookupEnded), miss.NumReasons-1)
	}
	for reason := range st.LookupEnded {
		if reason == "" || strings.ContainsAny(reason, " ,") {
			t.Errorf("%q is no label", reason)
		}
	}
}
