// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package peercred

import (
	"net"
	"net/netip"
)

// OriginOf returns the Origin of the peer of an accepted connection.
func OriginOf(c net.Conn) Origin {
	from, _ := netip.ParseAddrPort(c.RemoteAddr().String()) // an invalid address is an origin, too
	return OriginOfAddr(from.Addr())
}
