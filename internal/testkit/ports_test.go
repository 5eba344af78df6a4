// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
)

// Ports differ, are not those of clients, and can be listened on again at once.
func TestFree(t *testing.T) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Skip(err)
	}
	if low := strings.Fields(string(b))[0]; len(low) < 5 || low < "31008" {
		t.Skipf("this machine gives clients ports from %s on", low)
	}
	var given []int
	for range 300 {
		given = append(given, FreePort(t))
	}
	seen := map[int]bool{}
	for _, p := range given {
		if seen[p] || p < firstPort || p+portsApart > lastPort+portsApart {
			t.Fatalf("port %d of %v", p, given)
		}
		seen[p] = true
	}
	l := Listen(t)
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if from := c.LocalAddr().(*net.TCPAddr).Port; from < lastPort {
		t.Errorf("a client has port %d", from)
	}
}

// Two processes that try the same ports at the same time get different ones, and a port is free again after its test.
func TestPortsOfTwoProcesses(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("ports are reserved on Linux alone")
	}
	next := nextPort.Load()
	first := FreePort(t)
	nextPort.Store(next) // as another process that begins at the same port
	if port := FreePort(t); port == first {
		t.Errorf("port %d twice", port)
	}
	mine := 1<<20 + os.Getpid() // no process tries it
	t.Run("a test", func(t *testing.T) {
		if !reserve(t, mine) || reserve(t, mine) {
			t.Error("a port is reserved twice, or not at all")
		}
	})
	if !reserve(t, mine) {
		t.Error("a port stays reserved after its test")
	}
}
