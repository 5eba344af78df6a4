// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// A command that is stopped before it listens returns no error.
func TestStopBeforeListeningSucceeds(t *testing.T) {
	name := fmt.Sprintf("kvasir_test_stopped_%d", os.Getpid())
	t.Cleanup(func() {
		left, _ := filepath.Glob("/dev/shm/lmcache_l1_pool_" + name + "*")
		for _, f := range left {
			_ = os.Remove(f)
		}
	})
	for _, args := range [][]string{
		{"server", "--l1-size-gb", "8MiB", "--shm-name", name, "--port", fmt.Sprint(testkit.FreePort(t)), "--http-port", "0"},
		{"server", "--l1-size-gb", "8MiB", "--shm-name", name, "--port", fmt.Sprint(testkit.FreePort(t)), "--http-port", "0", "--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://127.0.0.1:*"},
		{"bootstrap", "--host", "localhost", "--port", "0"},
	} {
		line, err := readLine(args, io.Discard, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		e := &env{ctx: ctx, stdout: io.Discard, stderr: io.Discard, model: line.parser.Model, given: line.given, log: slog.New(slog.DiscardHandler)}
		if err := runOrCheck(e, line.ctx, line.given); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
}
