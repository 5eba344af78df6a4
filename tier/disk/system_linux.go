// SPDX-License-Identifier: Apache-2.0

package disk

import "golang.org/x/sys/unix"

// directIO opens a file past the page cache.
const directIO = unix.O_DIRECT

func fallocate(fd int, mode uint32, bytes int64) error { return unix.Fallocate(fd, mode, 0, bytes) }

// keepSize makes fallocate reserve room without changing the file's size.
const keepSize = unix.FALLOC_FL_KEEP_SIZE

func syncData(fd int) error { return unix.Fdatasync(fd) }
