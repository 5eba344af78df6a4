// SPDX-License-Identifier: Apache-2.0

//go:build linux && race

package rawio

import "syscall"

// Read reads from the non-blocking socket fd.
func Read(fd uintptr, b []byte) (int, error) { return syscall.Read(int(fd), b) }

// Write writes to the non-blocking socket fd.
func Write(fd uintptr, b []byte) (int, error) { return syscall.Write(int(fd), b) }

// announce tells the race detector that all operations so far happen before those that follow the Read of the bytes that are written next
// to fd. An empty write is enough.
func announce(fd uintptr) { _, _ = syscall.Write(int(fd), nil) }
