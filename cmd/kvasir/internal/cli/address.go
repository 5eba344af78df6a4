// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"net"
	"strconv"
)

// address is what a part listens on. Port 0 is one that the kernel chooses; it is in
// conflict with none.
type address struct {
	Part string
	Flag string // that gives the port
	Host string
	Port int
}

// URL returns where others of this machine reach it.
func (a address) URL() string {
	host := a.Host
	if isEvery(host) {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, strconv.Itoa(a.Port))
}

// addressConflicts names the addresses on which two would listen, a line for each two.
func addressConflicts(all []address) (out []string) {
	for i, b := range all {
		for _, a := range all[:i] {
			if a.Port == b.Port && a.Port != 0 && meet(a.Host, b.Host) {
				out = append(out, fmt.Sprintf("%s %s and %s %s are both %d", a.Part, a.Flag, b.Part, b.Flag, b.Port))
			}
		}
	}
	return out
}

// meet reports whether two hosts may be one address. Names are taken for different ones,
// but for localhost.
func meet(a, b string) bool {
	return a == b || isEvery(a) || isEvery(b) || isLocal(a) && isLocal(b)
}

// isEvery reports whether a host is all addresses of this machine.
func isEvery(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

// isLocal reports whether a host is 127.0.0.1 or a name of it.
func isLocal(host string) bool { return host == "localhost" || host == "127.0.0.1" }
