// SPDX-License-Identifier: Apache-2.0

package shm

import "unsafe"

// Aligned reports whether b begins at a multiple of align bytes, as direct I/O wants it.
func Aligned(b []byte, align int) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%uintptr(align) == 0
}

// MakeAligned returns n bytes of Go memory, all zero, that begin at a multiple of align.
func MakeAligned(n, align int) []byte {
	b := make([]byte, n+align) // the garbage collector does not move them
	if over := int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) % uintptr(align)); over > 0 {
		b = b[align-over:]
	}
	return b[:n:n]
}
