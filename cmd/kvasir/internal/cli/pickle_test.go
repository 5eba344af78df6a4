// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	"github.com/kvasir-kv/kvasir/server"
)

// Pickled tensors are taken by default only where no other host can connect.
func TestPickleMode(t *testing.T) {
	f := func(flag, host string, want server.PickleMode) {
		t.Helper()
		if got := (&serverCmd{Pickle: flag, Host: host}).pickleMode(); got != want {
			t.Errorf("--pickle %s --host %s: %v, want %v", flag, host, got, want)
		}
	}
	for _, host := range []string{"localhost", "127.0.0.1", "127.8.9.1", "::1"} {
		f("auto", host, server.PickleOn)
		f("off", host, server.PickleOff)
	}
	for _, host := range []string{"0.0.0.0", "::", "*", "", "10.0.0.5", "node7", "localhost.example"} {
		f("auto", host, server.PickleOff)
		f("on", host, server.PickleOn)
		f("only", host, server.PickleOnly)
	}
}
