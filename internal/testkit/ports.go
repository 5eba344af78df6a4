// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"sync/atomic"
	"testing"
)

const (
	firstPort  = 12000
	lastPort   = 31000
	portsApart = 8 // engines with several ranks also use the ports after theirs
)

// nextPort counts the ports that this process has tried. It begins at a random number, because other processes use ports, too.
var nextPort = func() *atomic.Uint32 {
	n := new(atomic.Uint32)
	n.Store(rand.Uint32() >> 1)
	return n
}()

// FreePort returns a TCP port of 127.0.0.1 that stays free until the test listens there: while a server starts, or between its stop and
// its restart. The port is below those that Linux gives to clients (net.ipv4.ip_local_port_range, from 32768 on). A client's connection
// may take one of those at any time, and a client that connects to such a port while nothing listens there may get that port itself and
// connect to itself.
//
// Nothing listens on the port. No other test, in this process or another, gets it before t ends, and no other call gets the seven ports
// after it.
func FreePort(t testing.TB) int {
	t.Helper()
	l := Listen(t)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// Listen listens on a port like those of FreePort. The caller must close the listener, and may listen there again.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	for range (lastPort - firstPort) / portsApart {
		port := firstPort + portsApart*int(nextPort.Add(1)%((lastPort-firstPort)/portsApart))
		if !reserve(t, port) {
			continue
		}
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return l
		}
	}
	t.Fatal("no free port")
	return nil
}

// reserve prevents other calls from returning a port before t ends; it returns false if the port is reserved already. A Linux abstract
// socket whose name contains the port shows other processes that the port is taken; the kernel frees it when the process ends. Other
// systems have no such names, so reserve does nothing there.
func reserve(t testing.TB, port int) bool {
	if runtime.GOOS != "linux" {
		return true
	}
	l, err := net.Listen("unix", fmt.Sprintf("@kvasir test port %d", port))
	if err != nil {
		return false
	}
	t.Cleanup(func() { _ = l.Close() })
	return true
}
