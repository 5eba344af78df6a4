// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// inotify reports events in the directories that it watches. The kernel limits the number of watches of a user.
type inotify struct {
	f      *os.File
	fd     int // descriptor of f, which stays non-blocking
	buffer []byte
	found  func(r *rootDir, dir string) // is called with a directory that was just made, and is now watched

	mu struct {
		sync.Mutex
		dirs    map[int32]place
		refused int // directories that are not watched because of the limit
	}
}

type place struct {
	root *rootDir
	dir  string
}

const inotifyMask = unix.IN_OPEN | unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE | unix.IN_CREATE | unix.IN_CLOSE_WRITE | unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW

func openInotify(found func(r *rootDir, dir string)) (*inotify, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify_init: %w", err)
	}
	w := &inotify{fd: fd, f: os.NewFile(uintptr(fd), "inotify"), buffer: make([]byte, 256<<10), found: found}
	w.mu.dirs = map[int32]place{}
	return w, nil
}

func (w *inotify) close() error { return w.f.Close() }

// watch adds a directory. If the user's limit is reached, it only counts the directory.
func (w *inotify) watch(r *rootDir, dir string) {
	n, err := unix.InotifyAddWatch(w.fd, fmt.Sprintf("/proc/self/fd/%d/%s", r.dir.Fd(), dir), inotifyMask) // r.path may be another directory now
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case err == nil:
		w.mu.dirs[int32(n)] = place{r, dir}
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM):
		w.mu.refused++
	}
}

// forget ends all watches of a root.
func (w *inotify) forget(r *rootDir) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n, p := range w.mu.dirs {
		if p.root == r {
			_, _ = unix.InotifyRmWatch(w.fd, uint32(n)) // the directory may be gone
			delete(w.mu.dirs, n)
		}
	}
}

// recount resets the count of refused directories, before a look adds all directories again.
func (w *inotify) recount() {
	w.mu.Lock()
	w.mu.refused = 0
	w.mu.Unlock()
}

// watched returns how many directories are watched, and how many are not because of the limit.
func (w *inotify) watched() (n, more int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.mu.dirs), w.mu.refused
}

// read waits for events and adds them to out.
func (w *inotify) read(out []event) ([]event, error) {
	n, err := w.f.Read(w.buffer)
	if err != nil {
		return out, err
	}
	for b := w.buffer[:n]; len(b) >= unix.SizeofInotifyEvent; {
		watch := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		length := int(binary.NativeEndian.Uint32(b[12:]))
		if length > len(b)-unix.SizeofInotifyEvent {
			return append(out, event{act: lost}), nil
		}
		name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+length], []byte{0})
		b = b[unix.SizeofInotifyEvent+length:]
		out = w.decodeEvent(watch, mask, string(name), out)
	}
	return out, nil
}

func (w *inotify) decodeEvent(watch int32, mask uint32, name string, out []event) []event {
	w.mu.Lock()
	p, known := w.mu.dirs[watch]
	if mask&unix.IN_IGNORED != 0 {
		delete(w.mu.dirs, watch)
	}
	w.mu.Unlock()
	switch {
	case mask&unix.IN_Q_OVERFLOW != 0:
		return append(out, event{act: lost})
	case !known || mask&unix.IN_IGNORED != 0 || name == "":
		return out
	case mask&unix.IN_ISDIR != 0:
		if mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0 {
			w.found(p.root, strings.TrimPrefix(p.dir+"/"+name, "/"))
		}
		return out
	}
	e := event{root: p.root, dir: p.dir, name: name}
	switch {
	case mask&(unix.IN_MOVED_TO|unix.IN_CLOSE_WRITE) != 0:
		e.act = appeared
	case mask&(unix.IN_DELETE|unix.IN_MOVED_FROM) != 0:
		e.act = gone
	case mask&unix.IN_OPEN != 0:
		e.act = opened
	default:
		return out
	}
	return append(out, e)
}
