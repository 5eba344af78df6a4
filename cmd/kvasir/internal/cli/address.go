// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"net"
	"strconv"
)

// address is an address on which a part of kvasir all listens. Port 0 means a port that the kernel chooses; it never conflicts with
// another.
type address struct {
	Part string
	Flag string // flag that sets the port
	Host string
	Port int
}

// URL returns the URL by which other processes on this machine reach the address.
func (a address) URL() string {
	host := a.Host
	if isEvery(host) {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, strconv.Itoa(a.Port))
}

// addressConflicts returns a line for each pair of parts that would listen on the same address.
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

// meet reports whether two hosts may mean the same address. Different host names count as different addresses, except localhost and
// 127.0.0.1.
func meet(a, b string) bool {
	return a == b || isEvery(a) || isEvery(b) || isLocal(a) && isLocal(b)
}

// isEvery reports whether a host stands for all addresses of this machine.
func isEvery(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

// isLocal reports whether a host is 127.0.0.1 or localhost.
func isLocal(host string) bool { return host == "localhost" || host == "127.0.0.1" }
