// Package ports gives tests TCP ports of 127.0.0.1 that stay free while nothing listens there: while a server is started,
// or between two lives of one. Only tests import it.
//
// They lie below the ports that Linux gives to clients (net.ipv4.ip_local_port_range, from 32768 on). One of those may be taken at any
// time by a connection that somebody makes, and a client that connects to a port of that range on which nobody listens may
// even be given that port and connect to itself.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
)

const (
	first = 12000
	last  = 31000
	apart = 8 // engines of several ranks take the ports that follow
)

// next counts the ports tried by this process; it begins anywhere, since other processes take some, too.
var next = func() *atomic.Uint32 {
	n := new(atomic.Uint32)
	n.Store(rand.Uint32() >> 1)
	return n
}()

// Free returns a port on which nobody listens, and that no other call in this process returned lately. The seven that follow
// it are of no other call either.
func Free(t testing.TB) int {
	t.Helper()
	l := Listen(t)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// Listen listens on such a port. The caller closes it, and may listen there again.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	for range (last - first) / apart {
		port := first + apart*int(next.Add(1)%((last-first)/apart))
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return l
		}
	}
	t.Fatal("no free port")
	return nil
}
