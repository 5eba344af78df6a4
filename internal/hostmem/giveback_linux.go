// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
)

// GiveBack returns memory to the kernel that only the start of the process needed: free heap memory, and pages of the program's file,
// of which the kernel maps 16 for each page used. The kernel maps a page again when it is needed.
func GiveBack() {
	debug.FreeOSMemory()
	for _, m := range program() {
		_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, m.from, m.to-m.from, syscall.MADV_DONTNEED) // if it fails, the pages stay mapped
	}
}

// mapping is a range of addresses of this process.
type mapping struct{ from, to uintptr }

// program returns those mappings of the program's file that cannot have changed: its code and its constants.
func program() (out []mapping) {
	path, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil
	}
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) { // 00400000-00d9a000 r-xp 00000000 fe:00 9979192    /usr/bin/kvasir
		f := strings.SplitN(strings.Join(strings.Fields(line), " "), " ", 6)
		if len(f) < 6 || f[5] != path || strings.Contains(f[1], "w") || !strings.HasSuffix(f[1], "p") {
			continue
		}
		from, to, _ := strings.Cut(f[0], "-")
		a, err := strconv.ParseUint(from, 16, 64)
		b, err2 := strconv.ParseUint(to, 16, 64)
		if err == nil && err2 == nil && b > a {
			out = append(out, mapping{uintptr(a), uintptr(b)})
		}
	}
	return out
}
