// Package loopback knows TCP connections whose two ends are on one host.
package loopback

import "net"

// Prepare says whether both ends of c are on this host. Such a connection loses
// nothing on its way, so it need not be paced: where BBR is the system's choice,
// that costs large messages up to 40 % of their throughput. Reno, which every kernel has,
// does not pace.
func Prepare(c *net.TCPConn) bool {
	if !sameHost(c.LocalAddr(), c.RemoteAddr()) {
		return false
	}
	unpaced(c)
	return true
}

// sameHost relies on the kernel: towards an address of its own host, a
// connection has that address itself.
func sameHost(local, remote net.Addr) bool {
	l, ok1 := local.(*net.TCPAddr)
	r, ok2 := remote.(*net.TCPAddr)
	return ok1 && ok2 && l != nil && r != nil && (r.IP.IsLoopback() || r.IP.Equal(l.IP))
}
