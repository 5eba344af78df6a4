// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// act is what happened to a file.
type act uint8

const (
	opened   act = iota // for reading, or for writing anew
	appeared            // under its name, whole
	gone
	lost // events were lost: look at the directories again
)

// event is what the kernel reports of one file.
type event struct {
	act    act
	root   *rootDir
	dir    string // below the root, with slashes
	name   string
	thread int32 // 0: not known
	own    bool  // the keeper or a connected process opened it, not an engine
}

// fanotify reports what happens in whole file systems. It needs CAP_SYS_ADMIN, and CAP_DAC_READ_SEARCH for the names of directories.
type fanotify struct {
	f      *os.File
	buffer []byte
	own    func(thread int32) bool

	missed atomic.Bool // a file appeared or was removed in a directory whose path was not found

	mu      sync.Mutex
	systems map[unix.Fsid][]*rootDir // under mu
}

// fanotifyMask has the events that are reported. Engines rename whole files onto their names. A file that is copied in by hand, or written
// in place, ends with FAN_CLOSE_WRITE.
const fanotifyMask = unix.FAN_OPEN | unix.FAN_MOVED_TO | unix.FAN_MOVED_FROM | unix.FAN_DELETE | unix.FAN_CLOSE_WRITE

func openFanotify(roots []*rootDir, own func(thread int32) bool) (*fanotify, error) {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_REPORT_DFID_NAME|unix.FAN_REPORT_TID|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("fanotify_init: %w", err)
	}
	w := &fanotify{f: os.NewFile(uintptr(fd), "fanotify"), systems: map[unix.Fsid][]*rootDir{}, buffer: make([]byte, 256<<10), own: own}
	for _, r := range roots {
		if err := w.add(r); err != nil {
			return nil, errors.Join(err, w.f.Close())
		}
	}
	return w, nil
}

// add adds the file system of a root to those that report.
func (w *fanotify) add(r *rootDir) error {
	raw, err := w.f.SyscallConn()
	if err != nil {
		return err
	}
	if failed := raw.Control(func(fd uintptr) {
		err = unix.FanotifyMark(int(fd), unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, fanotifyMask, int(r.dir.Fd()), ".")
	}); failed != nil {
		return failed
	}
	if err != nil {
		return fmt.Errorf("fanotify_mark of %s: %w", r.path, err)
	}
	var s unix.Statfs_t
	if err := unix.Fstatfs(int(r.dir.Fd()), &s); err != nil {
		return err
	}
	if _, err := w.path(r, handleOf(r)); err != nil {
		return fmt.Errorf("open_by_handle_at in %s: %w", r.path, err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for system, roots := range w.systems { // the root may have been in another file system before
		w.systems[system] = slices.DeleteFunc(slices.Clone(roots), func(x *rootDir) bool { return x == r })
	}
	w.systems[s.Fsid] = append(w.systems[s.Fsid], r)
	return nil
}

// rootsOf returns the roots in a file system.
func (w *fanotify) rootsOf(system unix.Fsid) []*rootDir {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.systems[system]
}

// handleOf returns the root's own file handle, the zero value if its file system has none.
func handleOf(r *rootDir) unix.FileHandle {
	h, _, err := unix.NameToHandleAt(int(r.dir.Fd()), "", unix.AT_EMPTY_PATH)
	if err != nil {
		return unix.NewFileHandle(0, nil)
	}
	return h
}

func (w *fanotify) close() error { return w.f.Close() }

// read waits for events and adds them to out.
func (w *fanotify) read(out []event) ([]event, error) {
	n, err := w.f.Read(w.buffer)
	if err != nil {
		return out, err
	}
	return w.parse(w.buffer[:n], out), nil
}

// Lengths of the kernel's records: fanotify(7).
const (
	metadataBytes = 24 // event_len u32, vers u8, reserved u8, metadata_len u16, mask u64, fd i32, pid i32
	infoBytes     = 4  // info_type u8, pad u8, len u16
	fsidBytes     = 8
	handleBytes   = 8 // handle_bytes u32, handle_type i32
)

// parse reads the kernel's records. It drops those of files that are no engine's before it makes any system call.
func (w *fanotify) parse(b []byte, out []event) []event {
	for len(b) >= metadataBytes {
		length := int(binary.NativeEndian.Uint32(b))
		head := int(binary.NativeEndian.Uint16(b[6:]))
		if length < metadataBytes || length > len(b) || head < metadataBytes || head > length {
			return append(out, event{act: lost})
		}
		mask := binary.NativeEndian.Uint64(b[8:])
		thread := int32(binary.NativeEndian.Uint32(b[20:]))
		if mask&unix.FAN_Q_OVERFLOW != 0 {
			out = append(out, event{act: lost})
		} else {
			out = w.info(b[head:length], mask, thread, out)
		}
		b = b[length:]
	}
	return out
}

// info reads the directory and the name that follow an event's head.
func (w *fanotify) info(b []byte, mask uint64, thread int32, out []event) []event {
	if len(b) < infoBytes+fsidBytes+handleBytes || b[0] != unix.FAN_EVENT_INFO_TYPE_DFID_NAME {
		return out
	}
	var system unix.Fsid
	system.Val[0] = int32(binary.NativeEndian.Uint32(b[infoBytes:]))
	system.Val[1] = int32(binary.NativeEndian.Uint32(b[infoBytes+4:]))
	size := int(binary.NativeEndian.Uint32(b[infoBytes+fsidBytes:]))
	kind := int32(binary.NativeEndian.Uint32(b[infoBytes+fsidBytes+4:]))
	b = b[infoBytes+fsidBytes+handleBytes:]
	if size > len(b) {
		return out
	}
	text, _, _ := bytes.Cut(b[size:], []byte{0})
	if mask&unix.FAN_ONDIR != 0 || !bytes.HasSuffix(text, []byte(vllmEnd)) && !bytes.HasSuffix(text, []byte(lmcEnd)) {
		return out
	}
	for _, r := range w.rootsOf(system) {
		dir, err := w.path(r, unix.NewFileHandle(kind, b[:size]))
		if err != nil {
			if !errors.Is(err, errElsewhere) && mask&^unix.FAN_OPEN != 0 && named(string(text)) {
				w.missed.Store(true)
			}
			continue
		}
		e := event{root: r, dir: dir, name: string(text), thread: thread}
		if mask&(unix.FAN_DELETE|unix.FAN_MOVED_FROM) != 0 { // the kernel may merge events of one file: its state now decides
			e.act = gone
			out = append(out, e)
		}
		if mask&(unix.FAN_MOVED_TO|unix.FAN_CLOSE_WRITE) != 0 {
			e.act = appeared
			out = append(out, e)
		}
		if mask&unix.FAN_OPEN != 0 {
			e.act, e.own = opened, w.own(thread)
			out = append(out, e)
		}
	}
	return out
}

var errElsewhere = errors.New("not below the root")

// path returns where a directory is below the root. It fails for a directory that was removed after the event.
func (w *fanotify) path(r *rootDir, h unix.FileHandle) (string, error) {
	fd, err := unix.OpenByHandleAt(int(r.dir.Fd()), h, unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	path, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return "", err
	}
	if strings.HasSuffix(path, " (deleted)") { // removed, and still open in some process: proc(5)
		return "", unix.ENOENT
	}
	below, found := strings.CutPrefix(path, r.place())
	if !found || below != "" && below[0] != '/' {
		return "", errElsewhere
	}
	return strings.TrimPrefix(below, "/"), nil
}
