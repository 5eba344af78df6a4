// SPDX-License-Identifier: Apache-2.0

//go:build linux && race

package rawio

import "syscall"

// Read reads from the non-blocking socket fd.
func Read(fd uintptr, b []byte) (int, error) { return syscall.Read(int(fd), b) }

// Write writes to the non-blocking socket fd.
func Write(fd uintptr, b []byte) (int, error) { return syscall.Write(int(fd), b) }

// announce makes the race detector order all operations so far before the operations that follow a Read of the bytes written next. An
// empty write is enough.
func announce(fd uintptr) { _, _ = syscall.Write(int(fd), nil) }
