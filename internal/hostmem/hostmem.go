// SPDX-License-Identifier: Apache-2.0

// Package hostmem says how much memory this process can still get, and by what it is limited.
package hostmem

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Available returns how many bytes Linux estimates that programs can get without swapping, or how many bytes the cgroups of this
// process leave, if that is less. ok is false if the kernel does not tell.
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
	for _, g := range groups(filepath.Join(root, "proc"), filepath.Join(root, "sys")) {
		if left, limited := g.left(); limited {
			n = min(n, left)
		}
	}
	return n, true
}

// Limit returns the smallest memory limit, in bytes, of the cgroups of this process, and the file that contains it. limited is false if
// there is no limit. proc and sys are /proc and /sys, except in tests. Memory in /dev/shm counts against the limit of the process that
// touched it first.
func Limit(proc, sys string) (n int64, file string, limited bool) {
	for _, g := range groups(proc, sys) {
		if limit, ok := number(g.limit); ok && limit < unlimited && (!limited || limit < n) {
			n, file, limited = limit, g.limit, true
		}
	}
	return n, file, limited
}

// unlimited is a number above all real limits: without a limit, cgroups of version 1 show a larger number.
const unlimited = 1 << 62

// group is a cgroup: the paths of its files, and the name of the field in stat with the page cache that can be reclaimed.
type group struct{ limit, used, stat, cache string }

// groups returns the cgroups, of versions 1 and 2, that can limit this process's memory: its own and all above, up to the root.
func groups(proc, sys string) (out []group) {
	add := func(base, path string, v2 bool) {
		for path = filepath.Clean("/" + path); ; path = filepath.Dir(path) {
			dir := filepath.Join(sys, "fs/cgroup", base, path)
			g := group{filepath.Join(dir, "memory.limit_in_bytes"), filepath.Join(dir, "memory.usage_in_bytes"), filepath.Join(dir, "memory.stat"), "total_inactive_file"}
			if v2 {
				g = group{filepath.Join(dir, "memory.max"), filepath.Join(dir, "memory.current"), filepath.Join(dir, "memory.stat"), "inactive_file"}
			}
			if out = append(out, g); path == "/" {
				return
			}
		}
	}
	b, err := os.ReadFile(filepath.Join(proc, "self/cgroup"))
	if err != nil {
		add("", "/", true)
		return out
	}
	for line := range strings.Lines(string(b)) { // 4:memory:/docker/1234 of version 1, 0::/kubepods/pod1 of version 2
		of := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(of) < 3:
		case of[1] == "":
			add("", of[2], true)
			add("unified", of[2], true)
		case slices.Contains(strings.Split(of[1], ","), "memory"):
			add("memory", of[2], false)
		}
	}
	return out
}

// left returns how many bytes a cgroup's limit leaves. limited is false if it has no limit.
func (g group) left() (left int64, limited bool) {
	limit, ok := number(g.limit) // "max" is not a number
	used, known := number(g.used)
	if !ok || !known || limit >= unlimited {
		return 0, false
	}
	if b, err := os.ReadFile(g.stat); err == nil {
		cache, _ := field(string(b), g.cache) // 0 if it is missing
		used -= cache
	}
	return max(0, limit-used), true
}

// field returns the number after that name at the start of a line.
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
