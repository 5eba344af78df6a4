// SPDX-License-Identifier: Apache-2.0

//go:build unix && !linux

// Package rawio reads and writes non-blocking sockets; see rawio_linux.go.
package rawio

import (
	"net"
	"syscall"
)

// Read reads from the non-blocking socket fd.
func Read(fd uintptr, b []byte) (int, error) { return syscall.Read(int(fd), b) }

// Write writes to the non-blocking socket fd.
func Write(fd uintptr, b []byte) (int, error) { return syscall.Write(int(fd), b) }

// Writev writes only the first of bufs that is not empty.
func Writev(fd uintptr, bufs [][]byte, _ *Vec) (int, error) {
	for _, b := range bufs {
		if len(b) > 0 {
			return syscall.Write(int(fd), b)
		}
	}
	return 0, nil
}

// Vec is scratch space for Writev.
type Vec struct{}

// announceConn does nothing: the race detector is run on Linux.
func announceConn(net.Conn) {}
