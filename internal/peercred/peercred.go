// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package peercred finds out which user of this host is behind an accepted
// connection. Origin is that user, or the peer's address; OriginShares gives each
// origin its share of a limit.
//
// Over a UNIX socket the kernel names the user (SO_PEERCRED). Over TCP the package looks up the peer's own socket, if that is on this
// host and in this network namespace: its two addresses are those of the accepted connection, swapped. The user is the one that created
// that socket. A local forwarder (ssh, socat, a container's port proxy) therefore counts as its own user, not as the user of its
// clients.
//
// The user is unknown for peers on other hosts or in other network namespaces, for users that this user namespace does not map, and for
// sockets that are closed already. An answer holds as long as the connection lives: two sockets cannot have the same addresses.
package peercred

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotHere means that this host and network namespace has no socket of the
	// peer: it is on another host, in another network namespace, or closed.
	ErrNotHere = errors.New("peercred: the peer's socket is not in this network namespace")
	// ErrUnmapped means that the peer's user has no number in this user namespace.
	ErrUnmapped = errors.New("peercred: the peer's user is of another user namespace")
	// ErrNoSource means that the system cannot identify peers.
	ErrNoSource = errors.New("peercred: the system cannot identify peers")
)

// Peer is what is known about the peer of a connection.
type Peer struct {
	Addr   netip.Addr // of the peer, IPv4 in its short form; not valid for a UNIX socket
	UID    int        // user who created the peer's socket; valid only if Err is nil
	PID    int        // process that connected over a UNIX socket; else 0
	Socket uint64     // inode of the peer's TCP socket; else 0
	Err    error      // why UID is unknown
}

// Known reports whether UID is set. A known peer is on this host.
func (p *Peer) Known() bool { return p.Err == nil }

// String returns a name of the user, or the address if the user is unknown.
func (p *Peer) String() string {
	switch {
	case p.Known():
		return "uid " + strconv.Itoa(p.UID)
	case p.Addr.IsValid():
		return p.Addr.String()
	}
	return "a local socket"
}

// Of returns the peer of c, an accepted connection. It does not read from c.
func Of(c net.Conn) Peer {
	switch c := c.(type) {
	case *net.UnixConn:
		return ofUnix(c)
	case *net.TCPConn:
		local, remote := addrPort(c.LocalAddr()), addrPort(c.RemoteAddr())
		p := Peer{Addr: remote.Addr().WithZone("")}
		if !remote.IsValid() || !local.IsValid() {
			p.Err = ErrNotHere
			return p
		}
		s, err := find(remote, local)
		p.UID, p.Socket, p.Err = s.uid, s.inode, err
		if err == nil && unmapped(s.uid) {
			p.Err = ErrUnmapped
		}
		return p
	}
	return Peer{Err: fmt.Errorf("%w: a connection of type %T", ErrNoSource, c)}
}

func addrPort(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := t.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

func ofUnix(c *net.UnixConn) Peer {
	var cred *unix.Ucred
	raw, err := c.SyscallConn()
	if err == nil {
		if cerr := raw.Control(func(fd uintptr) {
			cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		}); cerr != nil {
			err = cerr
		}
	}
	if err != nil {
		return Peer{Err: fmt.Errorf("%w: %w", ErrNoSource, err)}
	}
	p := Peer{UID: int(cred.Uid), PID: int(cred.Pid)}
	if unmapped(p.UID) {
		p.Err = ErrUnmapped
	}
	return p
}

// socket is what the kernel reports about a TCP socket.
type socket struct {
	uid   int
	inode uint64
	state uint8
}

// established is the only state in which the reported user counts: for a socket that its process has closed, the kernel reports inode 0
// and uid 0, whoever created it.
const established = 1

func (s socket) check() (socket, error) {
	if s.state != established || s.inode == 0 {
		return socket{}, ErrNotHere
	}
	return s, nil
}

// find returns the socket whose own address is `from` and whose peer's address is `to`.
func find(from, to netip.AddrPort) (socket, error) {
	return findBy(diag, diagWorks, from, to)
}

// findBy finds the socket whose own address is `from` and whose peer's address is `to` by asking the kernel (ask). If ask is not available,
// or does not even find the accepted socket, which works reports, findBy searches the kernel's tables.
func findBy(ask func(from, to netip.AddrPort) (socket, error), works func(from, to netip.AddrPort) bool, from, to netip.AddrPort) (socket, error) {
	s, err := ask(from, to)
	if err == nil {
		return s.check()
	}
	// Without its diagnosis module, the kernel answers as if there were no such socket. A query for the accepted socket, which exists,
	// shows whether the module is there.
	if errors.Is(err, syscall.ENOENT) && works(to, from) {
		return socket{}, ErrNotHere
	}
	s, err = list(from, to)
	if err != nil {
		return socket{}, err
	}
	return s.check()
}

var diagSeen struct {
	sync.Mutex
	works bool
}

// diagWorks reports whether the kernel finds the socket with these addresses, which must exist. After the first success it does not ask
// again.
func diagWorks(from, to netip.AddrPort) bool {
	diagSeen.Lock()
	defer diagSeen.Unlock()
	if !diagSeen.works {
		_, err := diag(from, to)
		diagSeen.works = err == nil
	}
	return diagSeen.works
}

// unmapped reports whether the number uid in the kernel's answer stands for all users without a number here. In a user namespace that
// maps every number there are no such users.
func unmapped(uid int) bool {
	m := mapping()
	return uid == m.overflow && !m.whole
}

type users struct {
	overflow int
	whole    bool // every number is mapped
}

var mapping = sync.OnceValue(func() users {
	u := users{overflow: 65534}
	if b, err := os.ReadFile("/proc/sys/kernel/overflowuid"); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			u.overflow = n
		}
	}
	b, err := os.ReadFile("/proc/self/uid_map")
	u.whole = err == nil && wholeMap(string(b))
	return u
})

// wholeMap reports whether the text of /proc/PID/uid_map maps every number. Its fields are the first number inside, the first number
// outside, and the count.
func wholeMap(s string) bool {
	f := strings.Fields(s)
	return len(f) == 3 && f[0] == "0" && f[2] == "4294967295"
}
