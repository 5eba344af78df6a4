// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// listening starts a server and waits until it serves.
func listening(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := command(append([]string{"server", "--host", "127.0.0.1", "--l1-size-gb", "16MiB", "--chunk-size", "64"}, args...)...)
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(60*time.Second, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	log := bufio.NewReader(out)
	for text := ""; !strings.Contains(text, "serving HTTP"); {
		line, err := log.ReadString('\n')
		if text += line; err != nil {
			t.Fatalf("it ended:\n%s", text)
		}
	}
	go func() { _, _ = io.Copy(io.Discard, log) }() // until it ends
	return cmd
}

// Each --listen has clients of its own chunk size, beside those of --chunk-size.
func TestListenChunks(t *testing.T) {
	ports := []int{testkit.FreePort(t), testkit.FreePort(t), testkit.FreePort(t)}
	cmd := listening(t, "--port", fmt.Sprint(ports[0]), "--http-port", fmt.Sprint(ports[2]), "--listen", fmt.Sprintf("%d:144", ports[1]))
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		run(t, "server", "--port", fmt.Sprint(ports[0]), "--drop")
	}()
	for i, want := range []int{64, 144} {
		c, err := lmcache.NewClient(fmt.Sprintf("127.0.0.1:%d", ports[i]))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := c.ChunkTokens(t.Context()); err != nil || got != want {
			t.Errorf("port %d: chunks of %d tokens, want %d, %v", i, got, want, err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// An engine negotiated a chunk size. The server is killed and started again at once, and the engine does not negotiate with the new one. Its
// worker and its scheduler continue with chunks of that size, over TCP and over IPC.
func TestNegotiatedChunksOverAKill(t *testing.T) {
	port, web := testkit.FreePort(t), testkit.FreePort(t)
	ipc := filepath.Join(t.TempDir(), "s")
	flags := []string{"--port", fmt.Sprint(port), "--http-port", fmt.Sprint(web), "--trust-unsummed", "--ipc", ipc}
	cmd := listening(t, flags...)
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		run(t, "server", "--port", fmt.Sprint(port), "--drop")
	}()
	dial := func(url string) *lmcache.Client {
		c, err := lmcache.NewClient(url)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	c := dial(fmt.Sprintf("127.0.0.1:%d", port))
	if n, err := c.Negotiate(t.Context(), 48); n != 96 || err != nil {
		t.Fatal(n, err)
	}
	if _, err := c.RegisterEngineDriven(t.Context(), &lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 48, Layers: 1, Hidden: 8, DType: "float16"}); err != nil {
		t.Fatal(err)
	}
	k := &lmcache.Key{Model: "m", WorldSize: 1, Tokens: make([]uint32, 192), End: 192, RequestID: "r", Packed: true, Readers: 1}
	if p, err := c.PrepareStore(t.Context(), k, 7, nil); err != nil || len(p.Slots) != 2 {
		t.Fatal(p, err)
	}
	if ok, err := c.CommitStore(t.Context(), k, 7); err != nil || !ok {
		t.Fatal(ok, err)
	}
	testkit.Eventually(t, "the worker is noted", func() bool {
		notes, err := filepath.Glob(fmt.Sprintf("/dev/shm/lmcache_l1_pool_kvasir_%d_*", port))
		for _, n := range notes {
			text, _ := os.ReadFile(n)
			if len(text) < 1<<20 && strings.Contains(string(text), "96") && strings.Contains(string(text), `"m"`) {
				return true
			}
		}
		return err != nil
	})
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	cmd = listening(t, flags...)
	for i, url := range []string{fmt.Sprintf("127.0.0.1:%d", port), "ipc://" + ipc} {
		scheduler, worker := dial(url), dial(url)
		look := *k
		look.RequestID, look.Worker = fmt.Sprint("again", i), lmcache.AllWorkers
		if hit, err := scheduler.Lookup(t.Context(), &look); hit != 2 || err != nil {
			t.Errorf("%s: hit %d chunks of 96 tokens, want 2, %v", url, hit, err)
		}
		look.Worker = 0
		if p, err := worker.PrepareRetrieve(t.Context(), &look, 7); err != nil || len(p.Slots) != 2 {
			t.Errorf("%s: %+v, %v", url, p, err)
		}
		if _, err := worker.CommitRetrieve(t.Context(), &look, 7); err != nil {
			t.Error(err)
		}
	}
}

func TestWrongListen(t *testing.T) {
	testkit.LongAlone(t)
	for _, bad := range []string{"5556", "5556:0", "0:16", "x:16", "5556:16x", "65536:16", "5556:65537", "5555:16"} {
		if code, _, stderr := run(t, "server", "--listen", bad); code == 0 || !strings.Contains(stderr, "--listen") {
			t.Errorf("%s: exit %d\n%s", bad, code, stderr)
		}
	}
}
