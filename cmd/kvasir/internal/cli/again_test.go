// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// A killed server can be started again at once. The new one waits until the kernel has released the old one's ports, disk and
// files. The kernel does not report that moment.
func TestStartedAgainAtOnce(t *testing.T) {
	dir, port := t.TempDir(), testkit.FreePort(t)
	flags := []string{
		"--port", fmt.Sprint(port), "--http-port", fmt.Sprint(testkit.FreePort(t)), "--l1-size-gb", "0.5", "--cold",
		"--disk", filepath.Join(dir, "disk"), "--disk-gb", "0.1", "--disk-min-free-gb", "0.001", "--state", filepath.Join(dir, "state"),
		"--kv-events", fmt.Sprintf("tcp://127.0.0.1:%d", testkit.FreePort(t)), "--kv-events-replay", fmt.Sprintf("tcp://127.0.0.1:%d", testkit.FreePort(t)),
	}
	s := serve(t, flags...)
	s.port = port // its pool is removed at the end
	for range 5 {
		if err := s.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		next := serve(t, flags...)
		next.port = port
		_ = s.cmd.Wait()
		s = next
	}
	stop(t, s)
}

// A killed keeper can be started again at once, too. The new one waits for the socket that makes it the only keeper of a directory, for
// the lock and for the notes.
func TestKeeperStartedAgainAtOnce(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "state")
	for range 10 {
		pid, _ := startAndLog(t, "the keeper knows all files", "keeper", dir, "--max-gb", "1", "--state-dir", state)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}
