//go:build !linux

package origin

import (
	"net"
	"net/netip"
)

// Of returns who is behind an accepted connection.
func Of(c net.Conn) Origin {
	from, _ := netip.ParseAddrPort(c.RemoteAddr().String()) // an invalid address is an origin too
	return OfAddr(from.Addr())
}
