// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// A server that takes over maps the workers' memory again; a worker whose memory
// is gone or is another's is asked to register by a false ping.
func TestDrivenRestart(t *testing.T) {
	dir := t.TempDir()
	n := startDriven(t, dir, "pool", server.Options{})
	groups := []lmcache.EngineGroup{{Layers: []int{0}, WindowTokens: 40}, {ID: 1, Layers: []int{1}, WindowTokens: -1}}
	stays, gone, other := n.newEngine(groups...), n.newEngine(groups...), n.newEngine(groups...)
	prompt := tokens(3*drivenChunk, 6)
	for _, e := range []*engine{stays, gone, other} {
		e.register()
	}
	stays.tint(4)
	if got := stays.storeBlocks(prompt, 0, 96, span(1, 6), span(11, 6)); got != done {
		t.Fatal(got)
	}
	n.stop()
	if err := errors.Join(os.Remove(gone.segs[1].Path()), os.Remove(other.segs[0].Path())); err != nil {
		t.Fatal(err)
	}
	taken, err := shm.Create(other.segs[0].Path(), engineBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()

	n = startDriven(t, dir, "pool", server.Options{})
	defer n.stop()
	n.compare(t)
	ping := func(e *engine) bool {
		ok, err := lmcache.DecodeBool(n.call(lmcache.OpPing, lmcache.AppendInt(nil, e.reg.InstanceID)))
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if !ping(stays) || ping(gone) || ping(other) {
		t.Errorf("pings: want true, false, false\n%s", n.log.String())
	}
	stays.drivenNode = n
	before := [][]byte{slices.Clone(stays.layers[0]), slices.Clone(stays.layers[1])}
	if hit := stays.lookup(prompt, "r"); hit != 3 {
		t.Fatalf("hit %d after the restart", hit)
	}
	if got := stays.retrieve(prompt, 0, 96, 0, "r", []int{0, 0, 0, 0, 25, 26}, span(30, 6)); got != done {
		t.Fatalf("retrieve after the restart: %+v", got)
	}
	old := *stays
	old.layers = before
	stays.expect(before, &old, map[int][]int{0: {0, 0, 0, 0, 25, 26}, 1: span(30, 6)}, 0, map[int]int{0: 1, 1: 11})
	for _, b := range taken.Bytes(0, engineBytes) {
		if b != 0 {
			t.Fatal("another's memory was touched")
		}
	}
}

// lender starts a process that lends a segment.
func lender(t *testing.T, dir string) (name string, end func()) {
	t.Helper()
	pid, end := start(t, "KVASIR_TEST_LEND="+dir)
	return fmt.Sprintf("lmcache_kv_%d_0", pid), end
}

// start starts this test binary with more variables; it waits for its first line.
// end kills it and waits for its end.
func start(t *testing.T, variables ...string) (pid int, end func()) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), variables...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || strings.Contains(line, " ") {
		t.Fatalf("%q, %v", line, err)
	}
	ended := false
	end = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			_ = in.Close()
		}
	}
	t.Cleanup(end)
	return cmd.Process.Pid, end
}

// What a killed engine leaves is removed once its process has ended, by the server it was
// registered with and by no other; an engine that lives keeps its memory, also
// over a restart of the server.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	n := startDriven(t, dir, "pool", server.Options{WorkerReap: time.Millisecond, RegistrationGrace: time.Millisecond})
	other := startDriven(t, dir, "other", server.Options{WorkerReap: time.Millisecond, RegistrationGrace: time.Millisecond})
	defer other.stop()
	name, end := lender(t, dir)
	stranger, endStranger := lender(t, dir) // never registered anywhere
	endStranger()
	path := filepath.Join(dir, name)
	e := &engine{drivenNode: n, reg: lmcache.KVCache{
		InstanceID: 9, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{descriptor("/" + name)},
	}}
	e.register()
	time.Sleep(5 * time.Millisecond)
	n.Tick(time.Now()) // silent for too long, but its process lives
	if got := e.storeBlocks(tokens(32, 1), 0, 32, span(1, 2)); !got.OK {
		t.Fatalf("a silent worker whose process lives was dropped: %+v", got)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatal("a living engine's memory was removed")
	}
	n.stop()
	n = startDriven(t, dir, "pool", server.Options{})
	defer n.stop()
	end()
	other.Tick(time.Now())
	if _, err := os.Stat(path); err != nil {
		t.Fatal("another server's segment was removed")
	}
	n.Tick(time.Now())
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a dead engine's memory stays: %v\n%s", err, n.log.String())
	}
	if _, err := os.Stat(filepath.Join(dir, stranger)); err != nil {
		t.Error("a segment that was never registered here was removed")
	}
	if st := n.store.Stats(); st.Transfers != 0 {
		t.Errorf("%+v", st)
	}
}

// A killed engine that was still registered at the server's restart is swept too.
func TestSweepAfterRestart(t *testing.T) {
	dir := t.TempDir()
	n := startDriven(t, dir, "pool", server.Options{})
	name, end := lender(t, dir)
	e := &engine{drivenNode: n, reg: lmcache.KVCache{
		InstanceID: 9, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{descriptor("/" + name)},
	}}
	e.register()
	n.stop()
	end()
	n = startDriven(t, dir, "pool", server.Options{RegistrationGrace: time.Millisecond})
	defer n.stop()
	time.Sleep(5 * time.Millisecond)
	n.Tick(time.Now())
	if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a dead engine's memory stays: %v\n%s", err, n.log.String())
	}
}

// Checksums are made and compared by the running server: a chunk that something
// changed while no server ran is a miss, counted and said; the others are served.
func TestChecksumsInTheBackground(t *testing.T) {
	dir := t.TempDir()
	prompt := tokens(4*drivenChunk, 7)
	life := func(f func(n *drivenNode)) {
		n := startDriven(t, dir, "pool", server.Options{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			n.Run(ctx)
		}()
		f(n)
		cancel()
		<-ended
		n.stop()
	}
	until := func(what string, f func() bool) {
		t.Helper()
		for deadline := time.Now().Add(60 * time.Second); !f(); time.Sleep(2 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: never came", what)
			}
		}
	}
	var e *engine
	life(func(n *drivenNode) {
		e = n.newEngine()
		e.register()
		e.tint(6)
		if got := e.storeBlocks(prompt, 0, 128, span(1, 8)); got != done {
			t.Fatal(got)
		}
		until("checksums", func() bool { return n.store.Stats().SummedChunks == 4 })
	})
	seg, err := shm.Attach(filepath.Join(dir, "pool"))
	if err != nil {
		t.Fatal(err)
	}
	defer seg.Close()
	seg.Bytes(2*4096, 1)[0] ^= 1 // the third chunk
	life(func(n *drivenNode) {
		e.drivenNode = n
		if hit := e.lookup(prompt, "r"); hit != 2 {
			t.Errorf("hit %d, want 2", hit)
		}
		before := [][]byte{slices.Clone(e.layers[0]), slices.Clone(e.layers[1])}
		if got := e.retrieve(prompt, 0, 64, 0, "r", span(20, 4)); got != done {
			t.Fatal(got)
		}
		old := *e
		old.layers = before
		e.expect(before, &old, map[int][]int{0: span(20, 4), 1: span(20, 4)}, 0, map[int]int{0: 1, 1: 1})
		until("the line", func() bool { return strings.Contains(n.log.String(), "differed from their checksums") })
		if st := n.store.Stats(); st.CorruptChunks != 1 || st.Resident != 3 {
			t.Errorf("%+v", st)
		}
	})
}
