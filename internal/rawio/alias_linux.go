//go:build linux

package rawio

import (
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The distance from source to destination, modulo aliasPage, at which copies
// may be slow: 1 to aliasSpan-1.
const (
	aliasPage = 4 << 10
	aliasSpan = 32
)

// SlowCopy says whether the kernel would copy b several times slower than it
// could, when b follows n other bytes on a connection whose earlier bytes have all
// been read. The kernel's buffer begins at a page then, and processors exist (AMD's
// Zen 3, for one) whose block copy falls to a few bytes at a time when the
// destination is 1 to 31 bytes above the source, modulo 4 KiB: for a block at a
// page, that is after every short header. Whether this processor does so is
// measured at the first call that depends on it.
func SlowCopy(n int, b []byte) bool {
	if len(b) == 0 {
		return false
	}
	d := (uintptr(n) - uintptr(unsafe.Pointer(&b[0]))) % aliasPage
	return d > 0 && d < aliasSpan && copiesAlias()
}

// copiesAlias lets the kernel copy the same bytes into a file in memory from
// two places, and compares the times: they differ by a factor of five or by
// nothing.
var copiesAlias = sync.OnceValue(func() bool {
	fd, err := unix.MemfdCreate("kvasir-alias", unix.MFD_CLOEXEC)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	const n = 64 << 10
	b := make([]byte, n+2*aliasPage)
	b = b[-uintptr(unsafe.Pointer(&b[0]))%aliasPage:] // starts at a page
	took := func(distance int) time.Duration {
		best := time.Hour
		for range 6 { // the first provides the pages
			start := time.Now()
			if _, err := unix.Pwrite(fd, b[(aliasPage-distance)%aliasPage:][:n], 0); err != nil {
				return 0
			}
			best = min(best, time.Since(start))
		}
		return best
	}
	return took(8) > 2*took(0)
})
