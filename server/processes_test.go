// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

const (
	stayURL = "KVASIR_TEST_STAY"
	stayMap = "KVASIR_TEST_STAY_MAP" // maps this file, as a worker maps the pool
)

// stay is the process of a worker that copies itself: it registers over the socket,
// maps the pool and is told of places in it, says so, and lives until it is killed.
// Without a URL it only maps.
func stay(url string) {
	err := stayAs(url, os.Getenv(stayMap))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

func stayAs(url, pool string) error {
	if pool != "" {
		if _, err := shm.Attach(pool); err != nil {
			return err
		}
	}
	if url == "none" {
		return nil
	}
	c, err := lmcache.NewClient(url)
	if err != nil {
		return err
	}
	id := int64(os.Getpid())
	_, err = c.RegisterEngineDriven(context.Background(), &lmcache.EngineDriven{
		InstanceID: id, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: smallLayout.Hidden,
		DType: smallLayout.DType, SinglePlane: true, PhysicalSlots: 16,
	})
	if err != nil || pool == "" {
		return err
	}
	got, err := c.PrepareStore(context.Background(), promptKey(os.Getpid(), 2), id, nil)
	if err == nil && len(got.Slots) != 2 {
		err = fmt.Errorf("%+v", got)
	}
	return err
}

// A worker whose process was killed is dropped at once, not after its silence: one
// that lends memory, which goes with it, and one that copies itself, over TCP and
// over the UNIX socket. Those that live stay, also over a restart of the server.
func TestKilledEngineIsDroppedAtOnce(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 64, server.Options{ShmDir: dir})
	ipc := "ipc://" + filepath.Join(dir, "socket")
	if _, err := n.Listen(t.Context(), ipc); err != nil {
		t.Fatal(err)
	}
	type process struct {
		id  int64
		end func()
	}
	var killed, living []process
	for i, url := range []string{n.url, ipc, n.url, ipc} {
		pid, end := start(t, stayURL+"="+url)
		if i < 2 {
			killed = append(killed, process{int64(pid), end})
		} else {
			living = append(living, process{int64(pid), end})
		}
	}
	var segments []string
	for i := range 2 {
		name, end := lender(t, dir)
		reg := lmcache.KVCache{
			InstanceID: int64(i) + 1, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{descriptor("/" + name)},
		}
		n.Answer(append([][]byte{{7}, lmcache.AppendOp(nil, lmcache.OpRegisterKVCache)}, reg.Frames()...))
		segments = append(segments, filepath.Join(dir, name))
		if i == 0 {
			killed = append(killed, process{1, end})
		} else {
			living = append(living, process{2, end})
		}
	}
	n.Tick(time.Now())
	if got := len(workersOf(n)); got != 6 {
		t.Fatalf("%d workers\n%s", got, n.log)
	}
	n.Tick(time.Now().Add(time.Second))
	stop()
	n, stop = startNode(t, dir, 64, server.Options{ShmDir: dir})
	defer stop()
	n.Tick(time.Now())
	if got := len(workersOf(n)); got != 6 {
		t.Fatalf("%d workers after the restart\n%s", got, n.log)
	}
	for _, p := range killed {
		p.end()
	}
	n.Tick(time.Now().Add(time.Second))
	left := workersOf(n)
	for _, p := range killed {
		if left[p.id] {
			t.Errorf("worker %d, whose process was killed, is still registered", p.id)
		}
	}
	for _, p := range living {
		if !left[p.id] {
			t.Errorf("worker %d, whose process lives, was dropped\n%s", p.id, n.log)
		}
	}
	if _, err := os.Stat(segments[0]); err == nil {
		t.Error("the memory of the killed engine stays")
	}
	if _, err := os.Stat(segments[1]); err != nil {
		t.Error("the memory of the living engine was removed")
	}
}

// The slots of a killed worker are free at once where its process was seen to map the pool, and only known processes map it now. They stay
// in quarantine where another process, which may have inherited the mapping, maps the pool, or where the worker was never seen to map it. A
// living worker keeps its slots.
func TestMemoryOfAKilledWorker(t *testing.T) {
	f := func(name string, free bool, before func(n *node, pool string) (worker func())) {
		t.Helper()
		dir := t.TempDir()
		n, stop := startNode(t, dir, 64, server.Options{ShmDir: dir})
		defer stop()
		pool := filepath.Join(dir, "pool")
		_, endLiving := start(t, stayURL+"="+n.url, stayMap+"="+pool)
		defer endLiving()
		kill := before(n, pool)
		n.Tick(time.Now())
		if got := n.store.Stats(); got.Transfers != 2 || got.StagedBytes != 4*4096 {
			t.Fatalf("%s: %+v", name, got)
		}
		kill()
		n.Tick(time.Now().Add(time.Second))
		got := n.store.Stats()
		if want := map[bool]int64{false: 2 * 4096}[free]; got.CondemnedBytes != want || got.StagedBytes != 2*4096 {
			t.Errorf("%s: %d bytes in quarantine, want %d; %d of the living one\n%s", name, got.CondemnedBytes, want, got.StagedBytes, n.log)
		}
	}
	f("mapped", true, func(n *node, pool string) func() {
		_, end := start(t, stayURL+"="+n.url, stayMap+"="+pool)
		return end
	})
	f("mapped by another, too", false, func(n *node, pool string) func() {
		_, end := start(t, stayURL+"="+n.url, stayMap+"="+pool)
		start(t, stayURL+"=none", stayMap+"="+pool)
		return end
	})
	f("never seen to map", false, func(n *node, pool string) func() {
		other := filepath.Join(filepath.Dir(pool), "other")
		if err := os.WriteFile(other, make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
		_, end := start(t, stayURL+"="+n.url, stayMap+"="+other)
		return end
	})
}

// workersOf returns the instances that are registered.
func workersOf(n *node) map[int64]bool {
	out := map[int64]bool{}
	for _, w := range n.Status().Workers {
		out[w.Instance] = true
	}
	return out
}
