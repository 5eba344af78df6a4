//go:build unix && (!linux || race)

// Package rawio reads and writes non-blocking sockets; see rawio_linux.go.
package rawio

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// Read reads from the non-blocking descriptor fd.
func Read(fd uintptr, b []byte) (int, error) { return syscall.Read(int(fd), b) }

// Write writes to the non-blocking descriptor fd.
func Write(fd uintptr, b []byte) (int, error) { return syscall.Write(int(fd), b) }

// Writev writes bufs, at most MaxVec of which count.
func Writev(fd uintptr, bufs [][]byte, _ *Vec) (int, error) {
	return unix.Writev(int(fd), bufs[:min(len(bufs), MaxVec)])
}

// Vec is scratch space for Writev.
type Vec struct{}
