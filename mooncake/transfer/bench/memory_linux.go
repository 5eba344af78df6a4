// SPDX-License-Identifier: Apache-2.0

package bench

import "golang.org/x/sys/unix"

// prepare asks for large pages behind b, as numpy does for large buffers, and for all of
// them now: memory that holds KV has been touched. Both are hints.
func prepare(b []byte) {
	if len(b) > 0 {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
		_ = unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	}
}
