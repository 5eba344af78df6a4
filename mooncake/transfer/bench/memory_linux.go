// SPDX-License-Identifier: Apache-2.0

package bench

import "golang.org/x/sys/unix"

// prepare asks the kernel for large pages behind b, as numpy does for large buffers, and to map all of them now: memory that holds KV
// has been touched before. The kernel may ignore both.
func prepare(b []byte) {
	if len(b) > 0 {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
		_ = unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	}
}
