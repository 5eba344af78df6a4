// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// The request and the answer of NETLINK_SOCK_DIAG for one TCP socket. Numbers are in the machine's byte order, except ports and
// addresses (linux/inet_diag.h):
//
//	nlmsghdr        0  4 length, 4 2 type, 6 2 flags, 8 4 sequence, 12 4 port
//	request        16  1 family, 17 1 protocol, 18 2 zero, 20 4 states
//	               24  socket id
//	answer         16  1 family, 17 1 state, 18 2 timer
//	               20  socket id
//	               68  4 expires, 72 4 rqueue, 76 4 wqueue, 80 4 uid, 84 4 inode
//	socket id       0  2 port, 2 2 peer's port, 4 16 address, 20 16 peer's address
//	               36  4 interface, 40 8 cookie (all ones: any)
const (
	nlHeader     = 16
	diagRequest  = nlHeader + 56
	diagAnswer   = nlHeader + 72
	sockIDBytes  = 48
	sockDiagType = 20 // SOCK_DIAG_BY_FAMILY
)

// diag asks the kernel for the socket whose own address is `from` and whose peer's address is `to`. The error is syscall.ENOENT if
// there is no such socket, or says why this process cannot ask.
func diag(from, to netip.AddrPort) (socket, error) {
	if from.Addr().Is4() != to.Addr().Is4() {
		return socket{}, syscall.ENOENT
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return socket{}, fmt.Errorf("sock_diag: %w", err)
	}
	defer unix.Close(fd)
	// The answer is available as soon as the request is sent. The limit is for kernels that behave differently.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return socket{}, fmt.Errorf("sock_diag: %w", err)
	}
	if err := unix.Sendto(fd, appendDiagRequest(nil, from, to), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return socket{}, fmt.Errorf("sock_diag: %w", err)
	}
	buf := make([]byte, 4096)
	n, src, err := unix.Recvfrom(fd, buf, 0)
	if err != nil {
		return socket{}, fmt.Errorf("sock_diag: %w", err)
	}
	if nl, ok := src.(*unix.SockaddrNetlink); !ok || nl.Pid != 0 {
		return socket{}, fmt.Errorf("sock_diag: the answer is not the kernel's")
	}
	return parseDiag(buf[:n], from, to)
}

func appendDiagRequest(b []byte, from, to netip.AddrPort) []byte {
	ne := binary.NativeEndian
	family := byte(unix.AF_INET6)
	if from.Addr().Is4() {
		family = unix.AF_INET
	}
	b = ne.AppendUint32(b, diagRequest)
	b = ne.AppendUint16(b, sockDiagType)
	b = ne.AppendUint16(b, unix.NLM_F_REQUEST)
	b = append(b, make([]byte, 8)...)
	b = append(b, family, unix.IPPROTO_TCP, 0, 0)
	b = ne.AppendUint32(b, 1<<established)
	b = binary.BigEndian.AppendUint16(b, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = append(b, addressField(from.Addr())...)
	b = append(b, addressField(to.Addr())...)
	b = ne.AppendUint32(b, zoneIndex(from.Addr()))
	return append(b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff)
}

// addressField returns the 16 bytes of an address field. An IPv4 address takes the first 4.
func addressField(a netip.Addr) []byte {
	b := a.AsSlice()
	return append(b, make([]byte, 16-len(b))...)
}

func zoneIndex(a netip.Addr) uint32 {
	if a.Zone() == "" {
		return 0
	}
	i, err := net.InterfaceByName(a.Zone())
	if err != nil {
		return 0
	}
	return uint32(i.Index)
}

// parseDiag parses the answer and checks that it is about the socket that was asked for: the kernel may answer with a listening socket.
func parseDiag(b []byte, from, to netip.AddrPort) (socket, error) {
	ne := binary.NativeEndian
	if len(b) < nlHeader+4 {
		return socket{}, fmt.Errorf("sock_diag: the kernel's answer of %d bytes is too short", len(b))
	}
	if ne.Uint16(b[4:]) == unix.NLMSG_ERROR {
		if errno := -int32(ne.Uint32(b[nlHeader:])); errno > 0 {
			return socket{}, fmt.Errorf("sock_diag: %w", syscall.Errno(errno))
		}
		return socket{}, fmt.Errorf("sock_diag: the kernel's answer is empty")
	}
	if ne.Uint16(b[4:]) != sockDiagType || len(b) < diagAnswer {
		return socket{}, fmt.Errorf("sock_diag: the kernel's answer has the wrong type %d, or its %d bytes are too short", ne.Uint16(b[4:]), len(b))
	}
	id := b[nlHeader+4 : nlHeader+4+sockIDBytes]
	is4 := b[nlHeader] == unix.AF_INET
	gotFrom := netip.AddrPortFrom(narrow(id[4:20], is4), binary.BigEndian.Uint16(id[0:]))
	gotTo := netip.AddrPortFrom(narrow(id[20:36], is4), binary.BigEndian.Uint16(id[2:]))
	if gotFrom != plain(from) || gotTo != plain(to) {
		return socket{}, fmt.Errorf("sock_diag: %w: it answers for another socket", syscall.ENOENT)
	}
	return socket{state: b[nlHeader+1], uid: int(ne.Uint32(b[80:])), inode: uint64(ne.Uint32(b[84:]))}, nil
}

func narrow(b []byte, is4 bool) netip.Addr {
	if is4 {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16([16]byte(b)).Unmap()
}

func plain(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}
