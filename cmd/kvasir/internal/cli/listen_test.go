// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// Each --listen has clients of its own chunk size, beside those of --chunk-size.
func TestListenChunks(t *testing.T) {
	ports := []int{testkit.FreePort(t), testkit.FreePort(t), testkit.FreePort(t)}
	cmd := command("server", "--host", "127.0.0.1", "--port", fmt.Sprint(ports[0]), "--http-port", fmt.Sprint(ports[2]), "--l1-size-gb", "16MiB", "--chunk-size", "64",
		"--listen", fmt.Sprintf("%d:144", ports[1]))
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(60*time.Second, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		run(t, "server", "--port", fmt.Sprint(ports[0]), "--drop")
	}()
	log := bufio.NewReader(out)
	for text := ""; !strings.Contains(text, "serving HTTP"); {
		line, err := log.ReadString('\n')
		if text += line; err != nil {
			t.Fatalf("it ended:\n%s", text)
		}
	}
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

func TestWrongListen(t *testing.T) {
	for _, bad := range []string{"5556", "5556:0", "0:16", "x:16", "5556:16x", "65536:16", "5556:65537", "5555:16"} {
		if code, _, stderr := run(t, "server", "--listen", bad); code == 0 || !strings.Contains(stderr, "--listen") {
			t.Errorf("%s: exit %d\n%s", bad, code, stderr)
		}
	}
}
