// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process identifies a process of this PID namespace. Started distinguishes it from a later process with the same number. The zero
// Process stands for none.
type Process struct {
	PID     int
	Started uint64 // clock ticks after boot
}

// Namespace returns the name of the PID namespace to which process numbers here belong.
func Namespace() string {
	name, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return "unknown"
	}
	return name
}

// Running returns the process with the number pid. It returns false if there is none, if this process may not see it, or if it has
// ended and only waits for its parent (a zombie).
func Running(pid int) (Process, bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, false
	}
	started, ok := parseStat(stat)
	return Process{PID: pid, Started: started}, ok
}

// parseStat returns when a process started, from the text of its /proc stat file. It returns false for a process that has ended. A
// process whose first thread has ended while others run has not ended.
func parseStat(stat []byte) (started uint64, ok bool) {
	_, after, ok := bytes.Cut(stat[max(0, bytes.LastIndexByte(stat, ')')):], []byte(") ")) // after the command's name
	f := strings.Fields(string(after))                                                     // from the third field on
	if !ok || len(f) < 20 {
		return 0, false
	}
	threads, err1 := strconv.Atoi(f[17])
	started, err2 := strconv.ParseUint(f[19], 10, 64)
	if err1 != nil || err2 != nil || (f[0] == "Z" || f[0] == "X") && threads < 2 {
		return 0, false
	}
	return started, true
}

// maxAncestors bounds the result of Ancestors; earlier ancestors are left out.
const maxAncestors = 16

// Ancestors returns the processes that started p: its parent, the parent's parent, and so on, without process 1.
func (p Process) Ancestors() (out []Process) {
	if p.Gone() {
		return nil
	}
	for pid := p.PID; len(out) < maxAncestors; {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return out
		}
		_, after, _ := bytes.Cut(stat[max(0, bytes.LastIndexByte(stat, ')')):], []byte(") "))
		f := strings.Fields(string(after)) // state, parent
		if len(f) < 2 {
			return out
		}
		if pid, err = strconv.Atoi(f[1]); err != nil || pid <= 1 {
			return out
		}
		parent, ok := Running(pid)
		if !ok {
			return out
		}
		out = append(out, parent)
	}
	return out
}

// Gone reports whether the process has certainly ended. It returns false for a process that this one can no longer see.
func (p Process) Gone() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID))
	if err != nil {
		return errors.Is(unix.Kill(p.PID, 0), unix.ESRCH)
	}
	started, ok := parseStat(stat)
	return !ok || started != p.Started
}

// HasSocket reports whether the process pid has the socket with that inode open. seen is false if this process may not look.
func HasSocket(pid int, inode uint64) (has, seen bool) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		return false, false
	}
	want := fmt.Sprintf("socket:[%d]", inode)
	for _, f := range files {
		link, err := os.Readlink(filepath.Join(dir, f.Name()))
		if link == want {
			return true, true
		}
		if os.IsPermission(err) {
			return false, false
		}
	}
	return false, true
}

// Owners returns, by inode, the processes of the user uid that have the sockets `inodes` open; nil means any socket. It finds only what
// this process may see. A socket that several processes have open gets no entry, because the end of one of them proves nothing. Owners
// reads all of /proc.
func Owners(uid int, inodes map[uint64]bool) map[uint64]Process {
	out := map[uint64]Process{}
	shared := map[uint64]bool{}
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return out
	}
	for _, d := range procs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(filepath.Join("/proc", d.Name()), &st) != nil || int(st.Uid) != uid {
			continue
		}
		p, ok := Running(pid)
		if !ok {
			continue
		}
		for inode := range socketsOf(pid) {
			if inodes == nil || inodes[inode] {
				if _, twice := out[inode]; twice {
					shared[inode] = true
				}
				out[inode] = p
			}
		}
		if p.Gone() { // another process may have had its number before
			for inode, of := range out {
				if of == p {
					delete(out, inode)
				}
			}
		}
	}
	for inode := range shared {
		delete(out, inode)
	}
	return out
}

func socketsOf(pid int) map[uint64]bool {
	out := map[uint64]bool{}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		return out
	}
	for _, f := range files {
		link, err := os.Readlink(filepath.Join(dir, f.Name()))
		if err != nil {
			continue
		}
		digits, ok := strings.CutPrefix(link, "socket:[")
		if !ok {
			continue
		}
		if inode, err := strconv.ParseUint(strings.TrimSuffix(digits, "]"), 10, 64); err == nil {
			out[inode] = true
		}
	}
	return out
}
