// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// list searches the kernel's tables /proc/net/tcp and tcp6 for a socket. The socket of an IPv4 client is in tcp, or in tcp6 if its
// process created an IPv6 socket.
func list(from, to netip.AddrPort) (socket, error) {
	from, to = plain(from), plain(to)
	read := 0
	for _, path := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		f, err := os.Open(path)
		if err != nil {
			continue // without IPv6 there is only one table
		}
		read++
		s, ok := scanTable(f, from, to)
		f.Close()
		if ok {
			return s, nil
		}
	}
	if read == 0 {
		return socket{}, fmt.Errorf("%w: neither sock_diag nor /proc/net/tcp can be read", ErrNoSource)
	}
	return socket{}, ErrNotHere
}

// scanTable searches a table for the socket with these addresses. A line is
//
//	0: 0100007F:15B3 0200007F:C001 01 00000000:00000000 00:00000000 00000000  1000  0  12345 ...
//
// number, address, peer's address, state, queues, timer, retransmits, uid,
// timeouts, inode.
func scanTable(r io.Reader, from, to netip.AddrPort) (socket, bool) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 10 {
			continue
		}
		if a, ok := parseTableAddr(f[1]); !ok || a != from {
			continue
		}
		if a, ok := parseTableAddr(f[2]); !ok || a != to {
			continue
		}
		state, err1 := strconv.ParseUint(f[3], 16, 8)
		uid, err2 := strconv.ParseUint(f[7], 10, 32)
		inode, err3 := strconv.ParseUint(f[9], 10, 64)
		if err1 != nil || err2 != nil || err3 != nil {
			continue
		}
		return socket{state: uint8(state), uid: int(uid), inode: inode}, true
	}
	return socket{}, false
}

// parseTableAddr parses an address of the table: 32-bit words in the machine's byte order, each in hexadecimal digits, then the port in
// hexadecimal digits.
func parseTableAddr(s string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	if !ok || err != nil || len(b) != 4 && len(b) != 16 {
		return netip.AddrPort{}, false
	}
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), true
}
