//go:build linux

package rawio

import (
	"syscall"
	"unsafe"
)

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
	announce(fd)
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&vec.iov[0])), uintptr(len(vec.iov)))
	clear(vec.iov) // keeps no caller's memory alive
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// Vec is scratch space for Writev.
type Vec struct{ iov []syscall.Iovec }
