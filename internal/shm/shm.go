// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package shm creates and attaches POSIX shared-memory segments: named files in /dev/shm, mapped for reading and writing. Only this
// package and internal/rawio import unsafe.
//
// A slice from Bytes, or a word from Word, is valid until the segment's Close. A mapping keeps its inode alive, so a process that
// removes the name does no harm. But after a process has truncated the file, every access to the cut pages faults (SIGBUS). So segments
// have mode 0600: only processes of the same user can truncate them.
package shm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Dir is the folder of POSIX shared memory on Linux.
const Dir = "/dev/shm"

var (
	// ErrLocked means that another process holds the segment's advisory lock.
	ErrLocked = errors.New("shm: segment is locked by another process")
	// ErrName means that a name is empty, too long, or would lead out of the folder.
	ErrName = errors.New("shm: bad segment name")
	// ErrFolder means that this process cannot create a segment in a folder. The folder is unchanged.
	ErrFolder = errors.New("shm: the folder cannot be used")
)

// Segment is one mapped file. Its methods are safe for concurrent use, except Close, which must be the last call.
type Segment struct {
	path  string
	file  *os.File
	mem   []byte
	inode uint64
	huge  huge
}

// Path returns the path of the segment `name` in dir; an empty dir means Dir. It drops a leading slash, which shm_open requires.
func Path(dir, name string) (string, error) {
	name = strings.TrimPrefix(name, "/")
	if name == "" || len(name) > 200 || strings.ContainsAny(name, "/\x00") || name == "." || name == ".." {
		return "", fmt.Errorf("%w: %q", ErrName, name)
	}
	if dir == "" {
		dir = Dir
	}
	return filepath.Join(dir, name), nil
}

// Create makes a new segment of size bytes, all zero, mode 0600. The name must
// not exist (fs.ErrExist).
func Create(path string, size int64) (*Segment, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, explain(path, err)
	}
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(fmt.Errorf("size segment %s: %w", path, err), f.Close(), os.Remove(path))
	}
	s, err := mapFile(path, f, nil)
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	return s, nil
}

// Attach maps an existing segment completely. It does not follow a symbolic link.
func Attach(path string) (*Segment, error) { return AttachIf(path, nil) }

// AttachIf attaches a segment if a condition holds: after it has opened the file and before it maps it, it calls ok, unless ok is nil,
// and returns ok's error.
func AttachIf(path string, ok func(File) error) (*Segment, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) && hidden(path) {
		err = explain(path, err)
	}
	if err != nil {
		return nil, err
	}
	return mapFile(path, f, ok)
}

// hidden reports whether this process may not search the folder of the file at path.
func hidden(path string) bool {
	var st unix.Stat_t
	return errors.Is(unix.Lstat(path, &st), unix.EACCES)
}

// explain adds to an error the reason why the folder of a file cannot be used, and advice. If it knows the reason, the returned error
// wraps ErrFolder.
func explain(path string, err error) error {
	dir := filepath.Dir(path)
	switch {
	case errors.Is(err, unix.EACCES):
		mode := "unknown"
		if st, err := os.Stat(dir); err == nil {
			mode = st.Mode().String()
		}
		return fmt.Errorf("%w: %w: uid %d may not make files in %s, whose mode is %s: chmod 1777 %[4]s, or run as a user who may; under systemd look for InaccessiblePaths=", ErrFolder, err, os.Geteuid(), dir, mode)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: %w: %s is read-only for this process: mount a writable tmpfs there; under systemd look for ReadOnlyPaths=", ErrFolder, err, dir)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w: there is no folder %s: mount a tmpfs there", ErrFolder, err, dir)
	}
	return err
}

// AttachFile maps a segment whose file descriptor a peer has sent. The Segment owns f.
func AttachFile(f *os.File) (*Segment, error) { return mapFile(f.Name(), f, nil) }

func mapFile(path string, f *os.File, ok func(File) error) (*Segment, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size <= 0 || int64(int(st.Size)) != st.Size) {
		err = fmt.Errorf("not a regular file with a size (mode %o, %d bytes)", st.Mode, st.Size)
	}
	if err == nil && ok != nil {
		err = ok(fileOf(&st))
	}
	var mem []byte
	if err == nil {
		mem, err = mapAligned(int(f.Fd()), int(st.Size))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map segment %s: %w", path, err), f.Close())
	}
	mapped.Add(1)
	return &Segment{path: path, file: f, mem: mem, inode: st.Ino}, nil
}

var mapped atomic.Int64

// Mapped returns how many segments this process has mapped. Tests check that it is zero at the end.
func Mapped() int64 { return mapped.Load() }

// Path returns the segment's file name.
func (s *Segment) Path() string { return s.path }

// Inode returns the inode of the segment's file. A file that is created again under the same name has another inode.
func (s *Segment) Inode() uint64 { return s.inode }

// Len returns the segment's size in bytes.
func (s *Segment) Len() int64 { return int64(len(s.mem)) }

// Bytes returns the n bytes at off. It panics if they are not all inside the segment: offsets must be checked where they enter the
// process.
func (s *Segment) Bytes(off, n int64) []byte { return s.mem[off : off+n : off+n] }

// Word returns the 8 bytes at off, a multiple of 8, as an atomic word.
func (s *Segment) Word(off int64) *atomic.Uint64 {
	if off%8 != 0 {
		panic("BUG: shm: word that is not aligned")
	}
	return (*atomic.Uint64)(unsafe.Pointer(&s.mem[off : off+8][0]))
}

// CloseFile closes the file descriptor; the mapping stays until Close. Afterwards ReadAt and Lock fail, and a lock that was held is
// released.
func (s *Segment) CloseFile() error { return s.file.Close() }

// ReadAt copies bytes at off into b without touching the mapping: no page becomes resident in this process, and a truncated file gives
// an error instead of a signal.
func (s *Segment) ReadAt(b []byte, off int64) (int, error) { return s.file.ReadAt(b, off) }

// Lock takes the segment's advisory lock, until Close or the end of the process. The error is ErrLocked if another process holds it.
func (s *Segment) Lock() error {
	err := unix.Flock(int(s.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrLocked
	}
	return err
}

// ErrNoPopulate means that this kernel and file system cannot allocate memory before it is used.
var ErrNoPopulate = errors.New("shm: memory cannot be provided ahead of use here")

// Populate makes the kernel allocate and zero the untouched pages among the n bytes at off; touched pages keep their content. If all
// are untouched, they become huge pages if the kernel has free ones. If keep is false, the pages are then dropped from this process's
// own page table, so that they do not count as its resident memory; if keep is true, touching them here causes no fault. When the file
// system is full, Populate returns an error instead of a signal. It returns ErrNoPopulate if the system cannot do it: before Linux
// 5.14, on a file system without fallocate.
func (s *Segment) Populate(off, n int64, keep bool) error {
	if n == 0 {
		return nil
	}
	n += off % int64(os.Getpagesize()) // whole pages
	off -= off % int64(os.Getpagesize())
	b := s.Bytes(off, n)
	s.populateHuge(off, n)
	err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EINVAL) { // before 5.14
		if err = unix.Fallocate(int(s.file.Fd()), 0, off, n); errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
			err = ErrNoPopulate
		}
	}
	if err != nil {
		return fmt.Errorf("populate %s: %w", s.path, err)
	}
	if keep {
		return nil
	}
	return unix.Madvise(b, unix.MADV_DONTNEED)
}

// Provided returns how many bytes, from the segment's start, have memory already. The caller claims that the first `known` bytes have
// it; Provided ignores that claim if the file has less memory in all. To search the rest takes 12 ms per GiB.
func (s *Segment) Provided(known int64) int64 {
	var st unix.Stat_t
	if err := unix.Fstat(int(s.file.Fd()), &st); err != nil || known < 0 || st.Blocks*512 < known {
		known = 0
	}
	if known >= s.Len() {
		return s.Len()
	}
	hole, err := unix.Seek(int(s.file.Fd()), known, unix.SEEK_HOLE)
	if err != nil {
		return 0 // this file system cannot search for holes
	}
	return min(hole, s.Len())
}

// Extend makes the file longer, with zeros, and maps it anew. Slices and words from before must not be used any more. Peers that have
// mapped the file see only the old length. If the file has that length already, Extend only maps it anew; if the mapping has it, Extend
// does nothing.
func (s *Segment) Extend(size int64) error {
	if size <= s.Len() {
		return nil
	}
	if err := s.file.Truncate(size); err != nil {
		return fmt.Errorf("extend segment %s: %w", s.path, err)
	}
	mem, err := mapAligned(int(s.file.Fd()), int(size))
	if err != nil {
		return fmt.Errorf("map segment %s: %w", s.path, err)
	}
	old := s.mem
	s.mem = mem
	return unmap(old)
}

// Punch gives the whole pages among the n bytes at off back to the system. Afterwards they read as zeros, in this process and in
// others.
func (s *Segment) Punch(off, n int64) error {
	page := int64(os.Getpagesize())
	from, to := (off+page-1)/page*page, (off+n)/page*page
	if from >= to {
		return nil
	}
	err := unix.Fallocate(int(s.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, to-from)
	if err != nil {
		return fmt.Errorf("free memory of segment %s: %w", s.path, err)
	}
	return nil
}

// Taken returns how many bytes of memory the file takes.
func (s *Segment) Taken() int64 {
	var st unix.Stat_t
	if err := unix.Fstat(int(s.file.Fd()), &st); err != nil {
		return 0
	}
	return st.Blocks * 512
}

// Exists reports whether the segment's name still leads to the segment's file.
func (s *Segment) Exists() bool {
	inode, err := InodeOf(s.path)
	return err == nil && inode == s.inode
}

// InodeOf returns the inode that a path has now. For a symbolic link that is the link's own inode.
func InodeOf(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, fmt.Errorf("stat %s: %w", path, err)
	}
	return st.Ino, nil
}

// Unlink removes the name. Mappings, here and in other processes, stay valid.
func (s *Segment) Unlink() error {
	if !s.Exists() {
		return nil
	}
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Close unmaps the segment and releases its lock. Its slices and words must not be used afterwards. To close a segment twice is a bug
// and panics.
func (s *Segment) Close() error {
	if s.mem == nil {
		panic("BUG: shm: segment closed twice")
	}
	err := errors.Join(unmap(s.mem), ignoreClosed(s.file.Close()))
	s.mem = nil
	mapped.Add(-1)
	return err
}

func ignoreClosed(err error) error {
	if errors.Is(err, fs.ErrClosed) {
		return nil
	}
	return err
}

// Free returns how many bytes are free in the file system of dir.
func Free(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("statfs %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}
