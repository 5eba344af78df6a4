// SPDX-License-Identifier: Apache-2.0

package peercred

import (
	"net"
)

// OriginOf returns the Origin of the peer of an accepted connection.
func OriginOf(c net.Conn) Origin {
	p := Of(c)
	o := OriginOfAddr(p.Addr)
	if p.Known() {
		o.User, o.Here = p.String(), true
	}
	return o
}
