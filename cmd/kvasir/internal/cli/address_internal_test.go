// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"
)

// Two addresses are in conflict where a kernel would refuse the second.
func TestConflicts(t *testing.T) {
	f := func(aHost string, aPort int, bHost string, bPort int, want bool) {
		t.Helper()
		got := addressConflicts([]address{{"a", "--port", aHost, aPort}, {"b", "--http-port", bHost, bPort}})
		if (len(got) == 1) != want || want && got[0] != "a --port and b --http-port are both 1" {
			t.Errorf("%s:%d and %s:%d: %q", aHost, aPort, bHost, bPort, got)
		}
	}
	f("127.0.0.1", 1, "127.0.0.1", 1, true)
	f("localhost", 1, "127.0.0.1", 1, true)
	f("0.0.0.0", 1, "10.0.0.1", 1, true)
	f("10.0.0.1", 1, "::", 1, true)
	f("", 1, "10.0.0.1", 1, true)
	f("10.0.0.1", 1, "10.0.0.2", 1, false)
	f("127.0.0.1", 1, "127.0.0.2", 1, false)
	f("127.0.0.1", 0, "127.0.0.1", 0, false)
	f("127.0.0.1", 1, "127.0.0.1", 2, false)
}

func TestURL(t *testing.T) {
	f := func(host, want string) {
		t.Helper()
		if got := (address{Host: host, Port: 8998}).URL(); got != want {
			t.Errorf("%s: %s", host, got)
		}
	}
	f("10.0.0.1", "http://10.0.0.1:8998")
	f("", "http://127.0.0.1:8998")
	f("0.0.0.0", "http://127.0.0.1:8998")
	f("::", "http://127.0.0.1:8998")
	f("::1", "http://[::1]:8998")
}
