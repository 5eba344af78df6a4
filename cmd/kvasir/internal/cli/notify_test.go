// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// Each command that serves notifies systemd once when it is ready and once when it stops.
func TestServiceManagerIsNotified(t *testing.T) {
	pool := fmt.Sprint("kvasir_notify_", os.Getpid())
	t.Cleanup(func() {
		left, _ := filepath.Glob("/dev/shm/*" + pool + "*")
		for _, f := range left {
			_ = os.Remove(f)
		}
	})
	port := testkit.FreePort(t)
	all := write(t, fmt.Sprintf("bootstrap: {port: %d}\nrelay: {port: 0, memory-gb: 8MiB}\nproxy: {port: 0, prefill: ['http://127.0.0.1:1'], decode: ['http://127.0.0.1:1']}\n", port))
	for name, args := range map[string][]string{
		"server":     {"--port", fmt.Sprint(testkit.FreePort(t)), "--http-port", "0", "--l1-size-gb", "8MiB", "--shm-name", pool},
		"bootstrap":  {"--port", "0"},
		"relay":      {"--port", "0", "--memory-gb", "8MiB", "--upstream", "http://127.0.0.1:1"},
		"proxy":      {"--port", "0", "--worker-urls", "http://127.0.0.1:1"},
		"store-node": {"--host", "127.0.0.1", "--http-port", "0", "--memory-gb", "16MiB", "--master", "127.0.0.1:1"},
		"engine":     {"--port", "0"},
		"keeper":     {t.TempDir(), "--max-gb", "1", "--http-port", "0", "--state-dir", t.TempDir()},
		"all":        {"--config", all},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "notify")
			manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			defer manager.Close()
			if err := manager.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
				t.Fatal(err)
			}
			c := command(append([]string{name}, args...)...)
			c.Env = append(c.Env, "NOTIFY_SOCKET="+socket)
			path := filepath.Join(t.TempDir(), "log")
			stderr, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			defer stderr.Close()
			c.Stderr = stderr
			log := func() string {
				text, _ := os.ReadFile(path)
				return string(text)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Process.Kill() })
			ended := make(chan error, 1)
			go func() {
				ended <- c.Wait()
				_ = manager.SetReadDeadline(time.Now().Add(5 * time.Second)) // the reader below gives up then, but still gets earlier messages
			}()
			for _, want := range []string{"READY=1", "STOPPING=1"} {
				text := make([]byte, 100)
				n, err := manager.Read(text)
				if err != nil || string(text[:n]) != want {
					t.Fatalf("got %q, %v, want %s:\n%s", text[:n], err, want, log())
				}
				if want == "READY=1" {
					if err := c.Process.Signal(syscall.SIGTERM); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := <-ended; err != nil {
				t.Errorf("%v:\n%s", err, log())
			}
		})
	}
}
