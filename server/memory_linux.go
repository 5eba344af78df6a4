// SPDX-License-Identifier: Apache-2.0

package server

import "golang.org/x/sys/unix"

// systemMemory returns the bytes of the machine's memory; 0: not known.
func systemMemory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}
