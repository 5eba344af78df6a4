// SPDX-License-Identifier: Apache-2.0

// Package hostmem says how much memory this process can still get.
package hostmem

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Available returns the bytes that Linux estimates programs can get without swapping, or what
// this process's cgroup (version 2) leaves if that is less. ok is false where the kernel does
// not tell.
func Available() (n int64, ok bool) { return available("/") }

func available(root string) (n int64, ok bool) {
	b, err := os.ReadFile(filepath.Join(root, "proc/meminfo"))
	if err != nil {
		return 0, false
	}
	kib, ok := field(string(b), "MemAvailable:")
	if !ok {
		return 0, false
	}
	n = kib << 10
	if left, limited := cgroup(filepath.Join(root, "sys/fs/cgroup")); limited {
		n = min(n, left)
	}
	return n, true
}

// cgroup returns what the limit of the cgroup at dir leaves: its page cache can be taken back.
func cgroup(dir string) (left int64, limited bool) {
	limit, ok := number(filepath.Join(dir, "memory.max")) // "max" is no number
	used, known := number(filepath.Join(dir, "memory.current"))
	if !ok || !known {
		return 0, false
	}
	if b, err := os.ReadFile(filepath.Join(dir, "memory.stat")); err == nil {
		cache, _ := field(string(b), "inactive_file") // 0 if it is missing
		used -= cache
	}
	return max(0, limit-used), true
}

// field returns the number behind a name at the start of a line.
func field(text, name string) (int64, bool) {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == name {
			n, err := strconv.ParseInt(f[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

func number(path string) (int64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil
}
