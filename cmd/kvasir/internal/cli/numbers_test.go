// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// A number with a leading zero is refused, whichever way it comes: Go reads 010 as 8.
func TestLeadingZerosAreRefused(t *testing.T) {
	testkit.LongAlone(t)
	f := func(args ...string) {
		t.Helper()
		code, _, stderr := run(t, append([]string{"server"}, args...)...)
		if code != 2 || !strings.Contains(stderr, "has a leading zero") {
			t.Errorf("%v: exit %d: %s", args, code, stderr)
		}
	}
	f("--l1-size-gb", "1", "--chunk-size", "0256")
	f("--l1-size-gb", "1", "--port", "05555")
	f("--l1-size-gb", "010")
	f("--l1-size-gb", "1", "--ttl-seconds", "0600")
	f("--l1-size-gb", "1", "--kv-events-memory", "0256MiB")
	path := filepath.Join(t.TempDir(), "f.yaml")
	if err := os.WriteFile(path, []byte("l1-size-gb: 1\nhttp-port: 010\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f("--config", path)
	t.Setenv("KVASIR_SERVER_PORT", "05555")
	f("--l1-size-gb", "1")
}
