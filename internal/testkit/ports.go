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
	portsApart = 8 // engines of several ranks take the ports that follow
)

// nextPort counts the ports tried by this process; it begins anywhere, since other processes take some, too.
var nextPort = func() *atomic.Uint32 {
	n := new(atomic.Uint32)
	n.Store(rand.Uint32() >> 1)
	return n
}()

// FreePort returns a TCP port of 127.0.0.1 that stays free while nothing listens there: while a server is started, or between
// two lives of one. It lies below the ports that Linux gives to clients (net.ipv4.ip_local_port_range, from 32768 on): one of
// those may be taken at any time by a client's connection, and a client that connects to such a port without a listener may
// be given that port itself and connect to itself.
//
// It is a port on which nothing listens. No other test has it before t ends, in this process or another. The seven that
// follow it are of no other call either.
func FreePort(t testing.TB) int {
	t.Helper()
	l := Listen(t)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// Listen listens on such a port. The caller closes it, and may listen there again.
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

// reserve keeps other calls from returning a port before t ends. A name among the abstract sockets of Linux shows the other
// processes that the port is taken; the kernel frees it when the process ends. Other systems have no such names, and nothing is kept there.
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
