// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Mapped returns the inodes of the files that a process maps and whose names, without
// folders, begin with prefix, by that name. seen is false when this process may not
// know.
func Mapped(pid int, prefix string) (files map[string]uint64, seen bool) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, false
	}
	defer f.Close()
	files = map[string]uint64{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text()) // address, mode, offset, device, inode, path
		if len(fields) < 6 || !strings.HasPrefix(filepath.Base(fields[5]), prefix) {
			continue
		}
		if inode, err := strconv.ParseUint(fields[4], 10, 64); err == nil {
			files[filepath.Base(fields[5])] = inode
		}
	}
	return files, lines.Err() == nil
}

// Mappers returns the processes that map the file of that name and inode. whole is
// false when one that started after p, and so may have inherited a mapping of p, may
// not be looked into.
func Mappers(name string, inode uint64, p Process) (pids []int, whole bool) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, false
	}
	whole = true
	for _, d := range procs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		files, seen := Mapped(pid, name)
		if files[name] == inode {
			pids = append(pids, pid)
		}
		if q, ok := Running(pid); ok && !seen && q.Started >= p.Started {
			whole = false
		}
	}
	return pids, whole
}
