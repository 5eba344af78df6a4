// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
)

const pagesURL = "KVASIR_TEST_PAGES"

// pagesWorker is the process of a worker with a device: it registers and pings as it is told.
func pagesWorker(url string) {
	c, err := lmcache.NewClient(url)
	if err != nil {
		panic(err)
	}
	reg := &lmcache.EngineDriven{
		InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16,
		Layers: smallLayout.Layers, Hidden: smallLayout.Hidden, DType: smallLayout.DType, SinglePlane: smallLayout.SinglePlane, PhysicalSlots: smallLayout.Slots,
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var got bool
		switch lines.Text() {
		case "register":
			var pool lmcache.Pool
			pool, err = c.RegisterEngineDriven(context.Background(), reg)
			got = pool.ShmName != ""
		case "ping":
			got, err = c.Ping(context.Background(), 7)
		}
		fmt.Println(got, err)
	}
}

// An engine maps the pool of one server, and comes back to another one at the same address. It is not offered that one's pool either where
// the pool is older than the engine.
func TestWorkerOfAnotherServerIsNotOfferedAnOlderPool(t *testing.T) {
	old := pinning(t, 64) // whose pool is older than the engine
	old.stop()
	running := false
	defer func() {
		if !running {
			old.start(64)
		}
	}()
	made := time.Now()
	testkit.Eventually(t, "a process that begins now is younger than the pool", func() bool { return time.Since(made) > 1200*time.Millisecond })
	first := pinning(t, 64)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), pagesURL+"="+first.url)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); _ = cmd.Wait() }()
	lines := bufio.NewScanner(out)
	tell := func(what string) string {
		if _, err := io.WriteString(in, what+"\n"); err != nil {
			t.Fatal(err)
		}
		lines.Scan()
		return lines.Text()
	}
	if got := tell("register"); got != "true <nil>" {
		t.Fatal(got)
	}
	if got := tell("ping"); got != "true <nil>" {
		t.Fatal(got)
	}
	first.stop()
	was := old.url
	old.url = first.url // the second server takes over
	old.start(64)
	running = true
	defer func() { first.url = was; first.start(64) }() // both are stopped at the end
	testkit.Eventually(t, "the worker is asked to register again", func() bool { return tell("ping") == "false <nil>" })
	if got := tell("register"); got != "false <nil>" {
		t.Errorf("a worker that has the pages of another server's pool is offered this one: %s", got)
	}
}
