// SPDX-License-Identifier: Apache-2.0

package offload_test

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
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server/offload"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

const nodeEnv = "KVASIR_TEST_VLLM_NODE"

// runNode is a node's process: it serves a pool of 32 rows in dir until it is killed.
func runNode(dir string) {
	fail := func(err error) {
		if err != nil {
			os.Stdout.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
	}
	p, err := pool.Open(pool.Options{Name: "kvasir_t", Bytes: 32 * rowBytes, Dir: dir})
	fail(err)
	st := store.New(p, store.Options{ChecksumRate: 1 << 30, SumAtOnce: true})
	s := offload.New(st, offload.Options{Dir: dir})
	fail(s.Listen(context.Background(), dir+"/tier.sock"))
	os.Stdout.WriteString("ready\n")
	st.Run(context.Background())
}

// child starts this test as another process, and waits until it is ready.
func child(t *testing.T, env, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), env+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill() // it may have ended
	_ = cmd.Wait()         // it was killed
}

// stop stops a process, and waits until all of its threads are.
func stop(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "all threads are stopped", func() bool {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", cmd.Process.Pid))
		return err == nil && len(tasks) > 0 && !slices.ContainsFunc(tasks, func(name string) bool {
			stat, err := os.ReadFile(name)
			return err != nil || !strings.Contains(string(stat), ") T ")
		})
	})
}

// A node that is killed costs misses: what it lent counts no more, and the next node over its pool serves what has a checksum.
func TestKilledNode(t *testing.T) {
	dir := t.TempDir()
	cmd := child(t, nodeEnv, dir)
	n := &node{t: t, dir: dir}
	a := n.connect(helloOf("a"))
	a.store("", keysOf(0, 4))
	_, places, err := a.client.Lookup("", "r", keysOf(0, 4), patience)
	if err != nil || places[3].Offset == vllm.NoPlace {
		t.Fatalf("%v, %v", places, err)
	}
	if _, staged, err := a.client.Store("", "r2", keysOf(10, 12), patience); err != nil || staged[1].Offset == vllm.NoPlace {
		t.Fatalf("%v, %v", staged, err)
	}
	kill(cmd)
	<-a.client.Ended()
	if _, _, err := a.client.Lookup("", "r", keysOf(0, 4), patience); err == nil {
		t.Error("a killed node answers")
	}
	cmd = child(t, nodeEnv, dir)
	defer func() { kill(cmd) }()
	a.close()
	b := n.connect(helloOf("b"))
	defer b.close()
	b.load("", keysOf(0, 4)) // compares their bytes
	if got := b.load("", keysOf(10, 12)); got != 0 {
		t.Errorf("%d rows loaded that were not committed", got)
	}
	for i := 100; i < 160; i += 4 { // beside what the first engine may still touch
		b.store("", keysOf(i, i+4))
	}
	if got := b.load("", keysOf(156, 160)); got != 4 {
		t.Errorf("%d rows loaded, want 4", got)
	}
}

// A frozen node costs its engine the patience, and nothing more: what it answers later is given back.
func TestFrozenNode(t *testing.T) {
	dir := t.TempDir()
	cmd := child(t, nodeEnv, dir)
	defer func() { kill(cmd) }()
	n := &node{t: t, dir: dir}
	a := n.connect(helloOf("a"))
	defer a.close()
	a.store("", keysOf(0, 4))
	stop(t, cmd)
	inode, err := shm.InodeOf(dir + "/kvasir_t")
	if err != nil {
		t.Fatal(err)
	}
	if !peercred.MapperStopped("kvasir_t", inode) {
		t.Error("a process that maps the pool is stopped, and not seen to be")
	}
	began := time.Now()
	if _, _, err := a.client.Lookup("", "r", keysOf(0, 4), 50*time.Millisecond); !errors.Is(err, vllm.ErrSlow) {
		t.Errorf("%v", err)
	}
	if _, _, err := a.client.Store("", "s", keysOf(20, 22), 50*time.Millisecond); !errors.Is(err, vllm.ErrSlow) {
		t.Errorf("%v", err)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("a frozen node kept its engine for %v", took)
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "no process is stopped any more", func() bool { return !peercred.MapperStopped("kvasir_t", inode) })
	testkit.Eventually(t, "the places of the store that was given up come back", func() bool { return a.store("", keysOf(20, 22)) == 2 })
	if got := a.load("", keysOf(0, 4)); got != 4 {
		t.Errorf("%d rows loaded, want 4", got)
	}
}

// A stopped engine keeps what it found, however much another one stores and whatever is cleared meanwhile.
func TestStoppedEngine(t *testing.T) {
	n := start(t, t.TempDir(), setup{rows: 16})
	defer n.close()
	cmd := child(t, engineEnv, n.dir)
	defer func() { kill(cmd) }()
	stop(t, cmd)
	b := n.connect(helloOf("b"))
	defer b.close()
	for i := 100; i < 160; i += 4 {
		b.store("", keysOf(i, i+4))
	}
	n.store.Clear(true)
	n.store.Expire()
	if s := n.store.Stats(); s.StagedBytes+s.CondemnedBytes < 3*rowBytes {
		t.Errorf("of a stopped engine %d bytes are kept, want 3 rows", s.StagedBytes+s.CondemnedBytes)
	}
	kill(cmd)
	testkit.Eventually(t, "the engine is gone", func() bool { return len(n.server.Engines()) == 1 })
	if s := n.store.Stats(); s.Transfers != 0 || s.StagedBytes != 0 || s.CondemnedBytes != 0 {
		t.Errorf("%d transfers, %d bytes staged, %d in quarantine", s.Transfers, s.StagedBytes, s.CondemnedBytes)
	}
}
