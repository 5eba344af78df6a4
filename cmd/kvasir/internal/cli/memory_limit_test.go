// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// server, relay and store-node refuse a pool above the memory limit of their cgroup with both figures, before they touch an earlier
// pool. They start with a pool within the limit. The commands see a cgroup file system that the test made, in a mount namespace.
func TestPoolAboveTheMemoryLimitIsRefused(t *testing.T) {
	if out, err := exec.Command("unshare", "-m", "true").CombinedOutput(); err != nil {
		t.Skipf("no mount namespace: %v, %s", err, out)
	}
	groups := t.TempDir()
	for _, file := range []string{"memory.max", "memory/memory.limit_in_bytes"} { // version 2, version 1
		if err := os.MkdirAll(filepath.Dir(filepath.Join(groups, file)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(groups, file), []byte("67108864\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	limited := func(args ...string) (string, error) {
		c := command(args...)
		c.Args = append([]string{"unshare", "-m", "sh", "-c", `mount --bind "$0" /sys/fs/cgroup && exec "$@"`, groups, c.Path}, c.Args[1:]...)
		path, err := exec.LookPath("unshare")
		if err != nil {
			t.Fatal(err)
		}
		c.Path = path
		var out bytes.Buffer
		c.Stdout, c.Stderr = &out, &out
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		kill := time.AfterFunc(time.Minute, func() { _ = c.Process.Signal(syscall.SIGTERM) }) // one that serves
		defer kill.Stop()
		err = c.Wait()
		return out.String(), err
	}
	name := fmt.Sprintf("kvasir_limit_%d", os.Getpid())
	file := "/dev/shm/lmcache_l1_pool_" + name
	port := fmt.Sprint(testkit.FreePort(t))
	t.Cleanup(func() { _, _, _ = run(t, "pool", "rm", name) })
	s := serve(t, "--shm-name", name)
	s.stop(t)
	before, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	f := func(flag string, args ...string) {
		t.Helper()
		out, err := limited(args...)
		want := flag + " 65MiB is more than the memory limit of this process, 64 MiB (/sys/fs/cgroup/"
		if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 1 || !strings.Contains(out, want) || !strings.Contains(out, "raise the limit to 1.1 GiB") {
			t.Errorf("%v: %v, %s", args, err, out)
		}
	}
	f("--l1-size-gb", "server", "--port", port, "--http-port", port, "--shm-name", name, "--l1-size-gb", "65MiB")
	f("--l1-size-gb", "server", "--port", port, "--http-port", port, "--shm-name", name, "--l1-size-gb", "65MiB", "--cold")
	f("--memory-gb", "relay", "--port", port, "--memory-gb", "65MiB", "--upstream", "http://127.0.0.1:1")
	f("--memory-gb", "store-node", "--master", "127.0.0.1:1", "--memory-gb", "65MiB")
	if after, err := os.Stat(file); err != nil || !os.SameFile(before, after) || after.Size() != before.Size() {
		t.Errorf("the earlier pool was touched: %v", err)
	}
	if out, err := limited("server", "--port", port, "--http-port", port, "--shm-name", name, "--l1-size-gb", "0.01", "--drop"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
