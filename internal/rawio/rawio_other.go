//go:build unix && (!linux || race)

// Package rawio reads and writes non-blocking sockets; see rawio_linux.go.
package rawio

import "syscall"

// Read reads from the non-blocking descriptor fd.
func Read(fd uintptr, b []byte) (int, error) { return syscall.Read(int(fd), b) }

// Write writes to the non-blocking descriptor fd.
func Write(fd uintptr, b []byte) (int, error) { return syscall.Write(int(fd), b) }
