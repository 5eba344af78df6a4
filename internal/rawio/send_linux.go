// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rawio

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const sendFlags = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL

// Writev writes the buffers bufs, at most the first maxVec, to the socket fd without waiting. Errors are those of sendmsg(2). vec is
// scratch space of the caller.
func Writev(fd uintptr, bufs [][]byte, vec *Vec) (int, error) {
	vec.iov = vec.iov[:0]
	for _, b := range bufs[:min(len(bufs), maxVec)] {
		if len(b) > 0 {
			v := unix.Iovec{Base: &b[0]}
			v.SetLen(len(b))
			vec.iov = append(vec.iov, v)
		}
	}
	if len(vec.iov) == 0 {
		return 0, nil
	}
	vec.msg.Iov = &vec.iov[0]
	vec.msg.SetIovlen(len(vec.iov))
	announce(fd)
	n, _, errno := syscall.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&vec.msg)), sendFlags)
	clear(vec.iov) // so that vec does not keep the caller's memory alive
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// Vec is scratch space for Writev.
type Vec struct {
	iov []unix.Iovec
	msg unix.Msghdr
}
