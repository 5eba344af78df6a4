// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"os"
	"testing"
)

// The demo's port is outside the range from which the system gives ports to connections. Else a connection of any process could take it, and
// the server could not start again after it was killed.
func TestPortIsNoneThatTheSystemGivesOut(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Skip(err)
	}
	var first, last int
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if port, err := freePort(); err != nil || first >= 32768 && port >= first && port <= last {
			t.Fatalf("port %d, %v: the system gives out %d to %d", port, err, first, last)
		}
	}
}
