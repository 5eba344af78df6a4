// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package disk

import "golang.org/x/sys/unix"

// Commands that look at a disk tier compile; a server does not run here.
const (
	directIO = 0
	keepSize = 0
)

func fallocate(int, uint32, int64) error { return unix.EOPNOTSUPP }
func syncData(fd int) error              { return unix.Fsync(fd) }
