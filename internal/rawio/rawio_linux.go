//go:build linux && !race

// Package rawio reads and writes non-blocking sockets without telling the Go
// scheduler. It is one of the packages that import unsafe.
//
// The ordinary calls announce themselves to the scheduler in case they block,
// and on an otherwise idle process that wakes its monitor thread: 18 of the 48 µs
// of CPU that one small request cost a server here. A non-blocking call cannot
// block, so there is nothing to announce.
package rawio

import (
	"syscall"
	"unsafe"
)

// Read reads from the non-blocking descriptor fd; errors as of read(2),
// EAGAIN and EINTR among them. b must not be empty.
func Read(fd uintptr, b []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// Write writes to the non-blocking descriptor fd; errors as of write(2).
// b must not be empty.
func Write(fd uintptr, b []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// Writev writes bufs, at most MaxVec of which count, to the non-blocking
// descriptor fd; errors as of writev(2). vec is scratch space of the caller's.
func Writev(fd uintptr, bufs [][]byte, vec *Vec) (int, error) {
	vec.iov = vec.iov[:0]
	for _, b := range bufs[:min(len(bufs), MaxVec)] {
		if len(b) > 0 {
			vec.iov = append(vec.iov, syscall.Iovec{Base: &b[0], Len: uint64(len(b))})
		}
	}
	if len(vec.iov) == 0 {
		return 0, nil
	}
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&vec.iov[0])), uintptr(len(vec.iov)))
	clear(vec.iov) // keeps no caller's memory alive
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// Vec is scratch space for Writev.
type Vec struct{ iov []syscall.Iovec }
