// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// Commands that need shared memory are refused outside Linux with an error that says so. Each command in linuxOnly exists.
func TestCommandsThatNeedLinuxAreRefusedElsewhere(t *testing.T) {
	f := func(goos, command string, refused bool) {
		t.Helper()
		err := refuseElsewhere(goos, command)
		if (err != nil) != refused || refused && !strings.Contains(err.Error(), "needs Linux") {
			t.Errorf("%s on %s: %v", command, goos, err)
		}
	}
	f("darwin", "server", true)
	f("darwin", "keeper keep", true)
	f("darwin", "sim evict", false)
	f("darwin", "bench", false)
	f("darwin", "status", false)
	f("linux", "server", false)
	for _, name := range linuxOnly {
		if refusal(t, []string{name, "--help"}) != "" {
			t.Errorf("there is no command %s", name)
		}
	}
}
