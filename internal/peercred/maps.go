// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// Mapped returns the files that the process pid maps and whose names, without folders, begin with prefix: their inodes by name. seen is
// false if this process may not read the mappings.
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

// Mappers returns the processes that map the file with that name and inode. whole is false if this process may not read the mappings of
// some process that did not start before p: such a process may have inherited a mapping from p.
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

// MapperStopped reports whether a process that maps the file of that name and inode is stopped (SIGSTOP, a debugger).
func MapperStopped(name string, inode uint64) bool {
	pids, _ := Mappers(name, inode, Process{})
	return slices.ContainsFunc(pids, func(pid int) bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, after, ok := strings.Cut(string(stat[max(0, bytes.LastIndexByte(stat, ')')):]), ") ")
		return err == nil && ok && (strings.HasPrefix(after, "T") || strings.HasPrefix(after, "t"))
	})
}

// RemovedFile is a file whose name was removed, but that processes still map.
type RemovedFile struct {
	Path  string // the path that it had
	Bytes int64  // bytes mapped by the process that maps most of it
	Taken int64  // bytes of memory that the file takes; equal to Bytes if this process may not look
	PIDs  []int
}

// MappedRemoved returns the files whose names were removed from the folder dir, and that processes still map. It finds only processes
// whose mappings this process may read.
func MappedRemoved(dir string) []RemovedFile {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	found := map[uint64]*RemovedFile{}
	for _, d := range procs {
		if pid, err := strconv.Atoi(d.Name()); err == nil {
			findRemoved(pid, dir, found)
		}
	}
	var out []RemovedFile
	for _, f := range found {
		out = append(out, *f)
	}
	slices.SortFunc(out, func(a, b RemovedFile) int { return strings.Compare(a.Path, b.Path) })
	return out
}

func findRemoved(pid int, dir string, found map[uint64]*RemovedFile) {
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return
	}
	defer maps.Close()
	mapped := map[uint64]int64{}
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		fields := strings.Fields(lines.Text()) // address, mode, offset, device, inode, path, (deleted)
		if len(fields) != 7 || fields[6] != "(deleted)" || filepath.Dir(fields[5]) != dir {
			continue
		}
		inode, err := strconv.ParseUint(fields[4], 10, 64)
		low, high, _ := strings.Cut(fields[0], "-")
		from, err1 := strconv.ParseUint(low, 16, 64)
		to, err2 := strconv.ParseUint(high, 16, 64)
		if err != nil || err1 != nil || err2 != nil {
			continue
		}
		f := found[inode]
		if f == nil {
			f = &RemovedFile{Path: fields[5]}
			found[inode] = f
			var st unix.Stat_t
			if unix.Stat(fmt.Sprintf("/proc/%d/map_files/%s", pid, fields[0]), &st) == nil {
				f.Taken = st.Blocks * 512
			}
		}
		if !slices.Contains(f.PIDs, pid) {
			f.PIDs = append(f.PIDs, pid)
		}
		mapped[inode] += int64(to - from)
	}
	for inode, n := range mapped {
		f := found[inode]
		f.Bytes = max(f.Bytes, n)
		f.Taken = cmp.Or(f.Taken, f.Bytes)
	}
}

// Command returns the name of the command that a process runs; "": unknown.
func Command(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return ""
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, string(b))
}
