// SPDX-License-Identifier: Apache-2.0

package shm

import "unsafe"

// Aligned reports whether b begins at an address that is a multiple of align, as direct I/O requires.
func Aligned(b []byte, align int) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%uintptr(align) == 0
}

// MakeAligned returns n zero bytes of Go memory that begin at an address that is a multiple of align.
func MakeAligned(n, align int) []byte {
	b := make([]byte, n+align) // the garbage collector does not move memory
	if over := int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) % uintptr(align)); over > 0 {
		b = b[align-over:]
	}
	return b[:n:n]
}
