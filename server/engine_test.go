// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// miniEngine is an engine without a model: a scheduler, a worker and paged KV whose
// right content follows from the tokens. It writes down what happens.
type miniEngine struct {
	t      *testing.T
	client *lmcache.Client
	cache  *connector.ServerCache
	track  *connector.Scheduler
	worker *connector.Worker
	kv     *connector.Paged
	shard  int // which of a chunk's shards the worker keeps
	next   int // block ids are not used twice
	story  []string
}

const (
	miniBlock = 16
	miniChunk = 32
)

// miniOptions configures a miniEngine.
type miniOptions struct {
	url, shmDir string
	model       string // default: one of its own
	form        paged.Form
	heartbeat   time.Duration
	parallel    lmcache.Parallel
}

func newMiniEngine(t *testing.T, o miniOptions) *miniEngine {
	t.Helper()
	e := &miniEngine{t: t, kv: &connector.Paged{Form: o.form, Blocks: 512, BlockTokens: miniBlock, Heads: 2, HeadSize: 8, DType: "float16"}, next: 1}
	planes := 2
	if o.form == paged.FusedNHD {
		planes = 1
	}
	for range 3 {
		e.kv.Layers = append(e.kv.Layers, make([]byte, planes*512*miniBlock*32))
	}
	parallel, err := o.parallel.Check()
	if err != nil {
		t.Fatal(err)
	}
	e.shard = parallel.Shard()
	if e.client, err = lmcache.NewClient(o.url); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	model := cmp.Or(o.model, fmt.Sprintf("mini-%d-%d", o.form, time.Now().UnixNano()))
	e.worker, err = connector.OpenWorker(ctx, e.client, connector.WorkerOptions{
		Model: model, Cache: e.kv, ShmDir: o.shmDir, Heartbeat: o.heartbeat, CallTimeout: 10 * time.Second, MaxEvents: 1000, Log: quiet,
		Parallel: parallel,
	})
	if err != nil {
		t.Fatal(err)
	}
	e.cache, err = connector.NewServerCache(e.client, connector.ServerCacheOptions{
		Model: model, Parallel: parallel, ChunkTokens: miniChunk, InstanceID: e.worker.InstanceID(), Heartbeat: o.heartbeat, Log: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	e.track, err = connector.NewScheduler(e.cache, connector.SchedulerOptions{BlockTokens: miniBlock, ChunkTokens: miniChunk})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *miniEngine) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	e.cache.Close()
	if err := errors.Join(e.worker.Close(ctx), e.client.Close()); err != nil {
		e.t.Error(err)
	}
}

func (e *miniEngine) say(format string, args ...any) {
	e.story = append(e.story, fmt.Sprintf(format, args...))
}

// until waits for what other goroutines do; the real server needs real time.
func (e *miniEngine) until(what string, f func() bool) {
	e.t.Helper()
	for deadline := time.Now().Add(40 * time.Second); !f(); {
		if time.Now().After(deadline) {
			e.t.Fatalf("%s: never came; so far:\n%s", what, strings.Join(e.story, "\n"))
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// fill makes the right content of the block of tokens [i, i+1) x miniBlock.
func fill(layer, plane, n int, tokens []uint32) []byte {
	h := kv.ChunkHashes(tokens[:n*miniBlock+miniBlock], miniBlock)[n]
	out := make([]byte, miniBlock*32)
	x := binary.LittleEndian.Uint64(h[:]) + uint64(layer*7919+plane*104729)
	for i := range out {
		x = x*6364136223846793005 + 1442695040888963407
		out[i] = byte(x >> 56)
	}
	return out
}

// blockOf returns a block's bytes. It does not use the package under test.
func (e *miniEngine) blockOf(layer, plane, id int) []byte {
	at := id
	switch e.kv.Form {
	case paged.PlanesNHD:
		at = plane*e.kv.Blocks + id
	case paged.BlocksNHD:
		at = id*2 + plane
	}
	return e.kv.Layers[layer][at*miniBlock*32:][:miniBlock*32]
}

func (e *miniEngine) each(f func(layer, plane int)) {
	for layer := range e.kv.Layers {
		f(layer, 0)
		if e.kv.Form != paged.FusedNHD {
			f(layer, 1)
		}
	}
}

// compute writes the right content of r's whole blocks [from, to).
func (e *miniEngine) compute(r *miniRequest, from, to int) {
	for n := from; n < to; n++ {
		e.each(func(layer, plane int) {
			copy(e.blockOf(layer, plane, r.blocks[n]), fill(layer+100*e.shard, plane, n, r.Tokens))
		})
	}
}

// check compares r's whole blocks [from, to) with what they should hold.
func (e *miniEngine) check(r *miniRequest, from, to int) {
	e.t.Helper()
	for n := from; n < to; n++ {
		e.each(func(layer, plane int) {
			if !bytes.Equal(e.blockOf(layer, plane, r.blocks[n]), fill(layer+100*e.shard, plane, n, r.Tokens)) {
				e.t.Errorf("%s: block %d, layer %d, plane %d: wrong bytes", r.ID, n, layer, plane)
			}
		})
	}
	e.say("%s: blocks %d to %d are right", r.ID, from, to)
}

// spoil overwrites r's blocks, as their next owner would.
func (e *miniEngine) spoil(r *miniRequest) {
	for _, id := range r.blocks {
		e.each(func(layer, plane int) { copy(e.blockOf(layer, plane, id), bytes.Repeat([]byte{0xee}, miniBlock*32)) })
	}
}

type miniRequest struct {
	connector.Request
	blocks []int
}

func (e *miniEngine) request(id string, tokens []uint32) *miniRequest {
	return &miniRequest{Request: connector.Request{ID: id, Tokens: tokens, Hashes: len(tokens) / miniBlock}}
}

// match asks until the lookup has ended.
func (e *miniEngine) match(r *miniRequest, computed int) connector.Matched {
	e.t.Helper()
	var m connector.Matched
	e.until("lookup of "+r.ID, func() bool {
		var err error
		if m, err = e.track.Match(&r.Request, computed); err != nil {
			e.t.Fatal(err)
		}
		return !m.Pending
	})
	e.say("%s: %d computed, %d more in the cache", r.ID, computed, m.Tokens)
	return m
}

// alloc gives r fresh blocks for all its tokens.
func (e *miniEngine) alloc(r *miniRequest, external int) {
	e.t.Helper()
	r.blocks = nil
	for range (len(r.Tokens) + miniBlock - 1) / miniBlock {
		r.blocks = append(r.blocks, e.next)
		e.next++
	}
	if err := e.track.Allocated(&r.Request, [][]int{r.blocks}, external); err != nil {
		e.t.Fatal(err)
	}
}

func (e *miniEngine) step(s *connector.Step) {
	e.t.Helper()
	ops, err := e.track.Step(s)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, op := range ops {
		e.say("%s: %s [%d, %d) skip %d", op.RequestID, op.Direction, op.Start, op.End, op.SkipFirst)
	}
	e.worker.Load(ops)
	e.worker.Save(ops)
}

// load emits r's load and waits for its end; it reports whether it succeeded.
func (e *miniEngine) load(r *miniRequest) bool {
	e.t.Helper()
	e.step(&connector.Step{})
	e.until("load of "+r.ID, func() bool { return slices.Contains(e.worker.Finished(nil).Received, r.ID) })
	bad := e.worker.LoadErrors()
	e.say("%s: loaded, errors %v in %d blocks", r.ID, bad.Requests, len(bad.Blocks))
	for _, id := range bad.Requests {
		e.track.LoadFailed(id)
	}
	return len(bad.Requests) == 0
}

// run computes r from `computed` tokens on, in one step, and stores.
func (e *miniEngine) run(r *miniRequest, computed int, resumed bool) {
	e.t.Helper()
	e.compute(r, computed/miniBlock, len(r.Tokens)/miniBlock)
	s := connector.Step{Scheduled: map[string]int{r.ID: len(r.Tokens) - computed}}
	if resumed {
		s.Cached = []connector.CachedRequest{{ID: r.ID, NewBlocks: [][]int{r.blocks}, Resumed: true, Computed: computed}}
		r.Preempted = false
	} else {
		s.New = []connector.NewRequest{{ID: r.ID, Computed: computed}}
	}
	e.step(&s)
}

// finish ends r and waits until nothing touches its blocks and the server knows.
func (e *miniEngine) finish(r *miniRequest) {
	e.t.Helper()
	if _, err := e.track.Finish(&r.Request); err != nil {
		e.t.Fatal(err)
	}
	ended, seen := []string{r.ID}, 0
	e.until("end of "+r.ID, func() bool {
		seen += len(e.worker.Finished(ended).Sent)
		return seen > 0
	})
	if again := e.worker.Finished(ended); len(again.Sent)+len(again.Received) > 0 {
		e.t.Errorf("%s ended twice: %+v", r.ID, again)
	}
	e.settle()
}

func (e *miniEngine) settle() {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), 10*time.Second)
	defer cancel()
	if err := errors.Join(e.worker.Flush(ctx), e.cache.Flush(ctx)); err != nil {
		e.t.Fatal(err)
	}
}

// serve plays a whole request that is computed after `computed` own tokens.
func (e *miniEngine) serve(r *miniRequest) {
	e.t.Helper()
	m := e.match(r, 0)
	e.alloc(r, m.Tokens)
	if m.Async {
		if !e.load(r) {
			e.t.Errorf("%s: load failed", r.ID)
		}
		e.check(r, 0, m.Tokens/miniBlock)
	}
	e.run(r, m.Tokens, false)
	e.finish(r)
}

func (e *miniEngine) clear(force bool) {
	e.t.Helper()
	if err := e.client.Clear(e.t.Context(), force); err != nil {
		e.t.Fatal(err)
	}
}

func miniTokens(n int, seed uint32) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i)*2654435761>>15 ^ seed
	}
	return out
}

// miniScript is the script that every server must play alike: store, partial hit,
// preemption, abort, failed load.
func miniScript(e *miniEngine) {
	e.t.Helper()
	prompt := miniTokens(100, 1)
	miniHits(e, prompt)
	miniLosses(e, prompt)
	e.clear(true)
}

// miniHits is the script's part in which all goes well.
func miniHits(e *miniEngine, prompt []uint32) {
	e.t.Helper()
	e.serve(e.request("cold", prompt))
	stored, lost := e.worker.Events()
	e.say("events: %d, %d lost", len(stored), lost)

	// The first block is in the engine's own prefix cache, shared with others: the
	// load of its chunk leaves it alone.
	r := e.request("partial", append(slices.Clone(prompt[:64]), miniTokens(40, 9)...))
	m := e.match(r, 16)
	e.alloc(r, m.Tokens)
	e.spoil(r)
	guard := bytes.Clone(e.blockOf(1, 0, r.blocks[0]))
	e.load(r)
	e.check(r, 1, 4)
	if !bytes.Equal(e.blockOf(1, 0, r.blocks[0]), guard) {
		e.t.Error("the load wrote to a block it must skip")
	}
	e.compute(r, 0, 1)
	e.run(r, 64, false)
	e.finish(r)

	other := e.request("other tenant", prompt)
	other.Salt = "tenant"
	e.serve(other)

	// The engine finds no use for the hit: what the lookup pinned is free again.
	r = e.request("declined", prompt)
	e.match(r, 0)
	e.alloc(r, 0)
	e.run(r, 0, false)
	e.finish(r)
	r = e.request("aborted", prompt)
	e.match(r, 0)
	_, _ = e.track.Finish(&r.Request)
	e.settle()
	e.clear(false)
	e.serve(e.request("after clear", prompt))
}

// miniLosses is the script's part in which blocks and chunks are lost.
func miniLosses(e *miniEngine, prompt []uint32) {
	e.t.Helper()
	// Preempted in the middle of decoding: its blocks go, its tokens come back.
	r := e.request("preempted", slices.Clone(prompt))
	m := e.match(r, 0)
	e.alloc(r, m.Tokens)
	e.load(r)
	e.run(r, m.Tokens, false)
	r.Tokens = append(r.Tokens, miniTokens(30, 77)...)
	r.Hashes = len(r.Tokens) / miniBlock
	fresh := []int{e.next}
	e.next++
	r.blocks = append(r.blocks, fresh...)
	e.compute(r, 6, 8)
	e.step(&connector.Step{
		Cached:    []connector.CachedRequest{{ID: r.ID, NewBlocks: [][]int{fresh}, Computed: 100}},
		Scheduled: map[string]int{r.ID: 28},
	})
	r.Preempted = true
	e.settle() // before the blocks are reused
	e.spoil(r)
	m = e.match(r, 0)
	e.alloc(r, m.Tokens)
	e.load(r)
	e.check(r, 0, m.Tokens/miniBlock)
	e.run(r, m.Tokens, true)
	e.finish(r)

	// The chunks vanish between lookup and load.
	r = e.request("unlucky", prompt)
	m = e.match(r, 0)
	e.alloc(r, m.Tokens)
	e.clear(true)
	if e.load(r) {
		e.t.Error("a load of vanished chunks succeeded")
	}
	e.match(r, 0)
	e.alloc(r, 0)
	e.run(r, 0, false)
	e.finish(r)
	e.serve(e.request("after failure", prompt))
}

var miniStory = []string{
	"cold: 0 computed, 0 more in the cache",
	"cold: STORE [0, 96) skip 0",
	"events: 3, 0 lost",
	"partial: 16 computed, 48 more in the cache",
	"partial: RETRIEVE [0, 64) skip 16",
	"partial: loaded, errors [] in 0 blocks",
	"partial: blocks 1 to 4 are right",
	"partial: STORE [64, 96) skip 0",
	"other tenant: 0 computed, 0 more in the cache",
	"other tenant: STORE [0, 96) skip 0",
	"declined: 0 computed, 96 more in the cache",
	"aborted: 0 computed, 96 more in the cache",
	"after clear: 0 computed, 0 more in the cache",
	"after clear: STORE [0, 96) skip 0",
	"preempted: 0 computed, 96 more in the cache",
	"preempted: RETRIEVE [0, 96) skip 0",
	"preempted: loaded, errors [] in 0 blocks",
	"preempted: STORE [96, 128) skip 0",
	"preempted: 0 computed, 128 more in the cache",
	"preempted: RETRIEVE [0, 128) skip 0",
	"preempted: loaded, errors [] in 0 blocks",
	"preempted: blocks 0 to 8 are right",
	"unlucky: 0 computed, 96 more in the cache",
	"unlucky: RETRIEVE [0, 96) skip 0",
	"unlucky: loaded, errors [unlucky] in 6 blocks",
	"unlucky: 0 computed, 0 more in the cache",
	"unlucky: STORE [0, 96) skip 0",
	"after failure: 0 computed, 96 more in the cache",
	"after failure: RETRIEVE [0, 96) skip 0",
	"after failure: loaded, errors [] in 0 blocks",
	"after failure: blocks 0 to 6 are right",
}

// miniRestart is the script's second part, with the server down in between.
func miniRestart(e *miniEngine, stop, start func()) {
	e.t.Helper()
	prompt := miniTokens(100, 2)
	before := e.request("before", prompt)
	e.serve(before)
	e.clear(true)
	stop()
	e.until("down", func() bool { return !e.worker.Healthy() && !e.cache.Healthy() })
	r := e.request("while down", prompt)
	e.match(r, 0)
	e.alloc(r, 0)
	e.run(r, 0, false)
	_, _ = e.track.Finish(&r.Request)
	if f := e.worker.Finished([]string{r.ID}); !slices.Equal(f.Sent, []string{r.ID}) {
		e.t.Errorf("a dropped store is still waited for: %+v", f)
	}
	if s := e.worker.Stats(); s.StoresDropped != 1 {
		e.t.Errorf("%+v", s)
	}
	e.worker.Load([]lmcache.LoadStore{{Direction: lmcache.Retrieve, RequestID: "down", Tokens: prompt, Blocks: [][]int{{1, 2}}, End: 32, SkipFirst: 16}})
	if f, bad := e.worker.Finished(nil), e.worker.LoadErrors(); !slices.Equal(f.Received, []string{"down"}) || !slices.Equal(bad.Blocks, []int{2}) {
		e.t.Errorf("a load without a server: %+v, %+v", f, bad)
	}
	start()
	e.until("up", func() bool { return e.worker.Healthy() && e.cache.Healthy() })
	e.serve(e.request("first after restart", prompt))
	e.serve(e.request("second after restart", prompt))
	e.clear(true)
}

var miniRestartStory = []string{
	"before: 0 computed, 0 more in the cache",
	"before: STORE [0, 96) skip 0",
	"while down: 0 computed, 0 more in the cache",
	"while down: STORE [0, 96) skip 0",
	"first after restart: 0 computed, 0 more in the cache",
	"first after restart: STORE [0, 96) skip 0",
	"second after restart: 0 computed, 96 more in the cache",
	"second after restart: RETRIEVE [0, 96) skip 0",
	"second after restart: loaded, errors [] in 0 blocks",
	"second after restart: blocks 0 to 6 are right",
}

func (e *miniEngine) compare(want []string) {
	e.t.Helper()
	if !slices.Equal(e.story, want) {
		e.t.Errorf("story:\n%s\nwant:\n%s", strings.Join(e.story, "\n"), strings.Join(want, "\n"))
	}
	e.t.Logf("%d lines of the story are as they should be", len(want))
	e.story = nil
}

// startMini starts a server of ours in dir; endpoint may name a port to reuse.
func startMini(t *testing.T, dir, endpoint string) (url string, st *store.Store, stop func()) {
	t.Helper()
	return startMiniSized(t, dir, endpoint, 4<<20)
}

func startMiniSized(t *testing.T, dir, endpoint string, poolBytes int64) (url string, st *store.Store, stop func()) {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: poolBytes, Dir: dir, ChunkTokens: miniChunk})
	if err != nil {
		t.Fatal(err)
	}
	st = store.New(p, store.Options{TrustUnsummed: true})
	s := server.New(st, server.Options{ChunkTokens: miniChunk, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	addr, err := s.Listen(t.Context(), endpoint)
	if err != nil {
		t.Fatal(err)
	}
	return "tcp://" + addr, st, func() {
		if err := errors.Join(s.Close(), st.Close()); err != nil {
			t.Error(err)
		}
	}
}

// Scheduler and worker drive our server, in every form of paged KV.
func TestEngineScript(t *testing.T) {
	for _, form := range []paged.Form{paged.PlanesNHD, paged.BlocksNHD, paged.FusedNHD} {
		dir := t.TempDir()
		url, st, stop := startMini(t, dir, "tcp://127.0.0.1:*")
		e := newMiniEngine(t, miniOptions{url: url, shmDir: dir, form: form, heartbeat: 500 * time.Millisecond})
		miniScript(e)
		e.compare(miniStory)
		if s := st.Stats(); s.Transfers != 0 {
			t.Errorf("%d transfers are left", s.Transfers)
		}
		again := 0
		miniRestart(e, func() { stop() }, func() {
			again++
			url, st, stop = startMini(t, dir, url)
		})
		e.compare(miniRestartStory)
		if s := e.worker.Stats(); s.Registrations == 0 {
			t.Errorf("the worker did not register again: %+v", s)
		}
		e.close()
		stop()
	}
}

// The same against a real lmcache server, which listens at $KVASIR_LMCACHE_URL
// with --chunk-size 32 and offers a shared-memory pool. With the shell commands
// $KVASIR_LMCACHE_STOP and $KVASIR_LMCACHE_START it is restarted, too.
// interop/lmcache/connector.sh does all of that.
func TestEngineScriptReal(t *testing.T) {
	url := os.Getenv("KVASIR_LMCACHE_URL")
	if url == "" {
		t.Skip("KVASIR_LMCACHE_URL names no lmcache server; interop/lmcache/connector.sh starts one")
	}
	e := newMiniEngine(t, miniOptions{url: url, heartbeat: time.Second})
	defer e.close()
	miniScript(e)
	e.compare(miniStory)
	stop, start := os.Getenv("KVASIR_LMCACHE_STOP"), os.Getenv("KVASIR_LMCACHE_START")
	if stop == "" || start == "" {
		t.Log("no restart: KVASIR_LMCACHE_STOP and KVASIR_LMCACHE_START are not both set")
		return
	}
	shell := func(command string) func() {
		return func() {
			if out, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", command, err, out)
			}
		}
	}
	miniRestart(e, shell(stop), shell(start))
	e.compare(miniRestartStory)
}
