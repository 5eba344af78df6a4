// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package peercred

import (
	"errors"
	"net"
	"net/netip"
	"strconv"
)

// The errors are those of Linux. On this system no peer can be identified.
var (
	ErrNotHere  = errors.New("peercred: the peer's socket is not in this network namespace")
	ErrUnmapped = errors.New("peercred: the peer's user is of another user namespace")
	ErrNoSource = errors.New("peercred: the system cannot identify peers")
)

// Peer is what is known about the peer of a connection.
type Peer struct {
	Addr   netip.Addr
	UID    int
	PID    int
	Socket uint64
	Err    error
}

// Known reports whether UID is set.
func (p *Peer) Known() bool { return p.Err == nil }

// String returns a name of the user, or the address.
func (p *Peer) String() string {
	if p.Known() {
		return "uid " + strconv.Itoa(p.UID)
	}
	return p.Addr.String()
}

// Of returns a Peer whose user is unknown.
func Of(c net.Conn) Peer {
	from, _ := netip.ParseAddrPort(c.RemoteAddr().String())
	return Peer{Addr: from.Addr().Unmap(), Err: ErrNoSource}
}

// Process identifies a process.
type Process struct {
	PID     int
	Started uint64
}

// RemovedFile is a file whose name was removed, but that processes still map.
type RemovedFile struct {
	Path  string
	Bytes int64
	Taken int64
	PIDs  []int
}

// The functions below find nothing: this system does not show other processes.

func Namespace() string                              { return "unknown" }
func Ticks() uint64                                  { return 0 }
func Running(int) (Process, bool)                    { return Process{}, false }
func (Process) Ancestors() []Process                 { return nil }
func UsesDevice(int) (uses, seen bool)               { return false, false }
func (Process) Gone() bool                           { return false }
func HasSocket(int, uint64) (has, seen bool)         { return false, false }
func Owners(int, map[uint64]bool) map[uint64]Process { return nil }
func Mapped(int, string) (map[string]uint64, bool)   { return nil, false }
func Mappers(string, uint64, Process) ([]int, bool)  { return nil, false }
func MapperStopped(string, uint64) bool              { return false }
func MappedRemoved(string) []RemovedFile             { return nil }
func Command(int) string                             { return "" }
