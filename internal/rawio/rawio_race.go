// SPDX-License-Identifier: Apache-2.0

//go:build linux && race

package rawio

import (
	"net"
	"syscall"
)

// Read reads from the non-blocking socket fd.
func Read(fd uintptr, b []byte) (int, error) { return syscall.Read(int(fd), b) }

// Write writes to the non-blocking socket fd.
func Write(fd uintptr, b []byte) (int, error) { return syscall.Write(int(fd), b) }

// announce tells the race detector that all operations so far happen before those that follow the Read of the bytes that are written next
// to fd. An empty write is enough.
func announce(fd uintptr) { _, _ = syscall.Write(int(fd), nil) }

// announceConn is announce for a connection of package net. Connections of other kinds, as TLS, write each buffer with Write.
func announceConn(c net.Conn) {
	if _, plain := c.(syscall.Conn); plain {
		_, _ = c.Write(nil)
	}
}
