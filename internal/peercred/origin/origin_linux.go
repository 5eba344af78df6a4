package origin

import (
	"net"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// Of returns who is behind an accepted connection.
func Of(c net.Conn) Origin {
	p := peercred.Of(c)
	o := OfAddr(p.Addr)
	if p.Known() {
		o.User, o.Here = p.String(), true
	}
	return o
}
