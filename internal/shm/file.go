// SPDX-License-Identifier: Apache-2.0

//go:build linux

package shm

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// File describes a segment's file.
type File struct {
	UID   int    // user number of its owner
	Perm  uint32 // permission bits
	Links int    // number of hard links
	Inode uint64
	Bytes int64
	Taken int64 // bytes of memory that the file takes
}

// ErrNotOurs means that a file belongs to another user, or that other users may open it.
var ErrNotOurs = errors.New("shm: the file is not this user's alone")

// Ours is a condition for AttachIf: the file must belong to this user, no other user may be able to open it, and it must have exactly
// one name. In a folder to which all users may write, any user can create a file of any name.
func Ours(f File) error {
	switch {
	case f.UID != os.Geteuid():
		return fmt.Errorf("%w: it belongs to uid %d, this process is uid %d", ErrNotOurs, f.UID, os.Geteuid())
	case f.Perm&0o077 != 0:
		return fmt.Errorf("%w: its mode is %04o, not 0600", ErrNotOurs, f.Perm)
	case f.Links != 1:
		return fmt.Errorf("%w: it has %d names", ErrNotOurs, f.Links)
	}
	return nil
}

// Stat returns the description of the regular file at path. It does not follow a symbolic link.
func Stat(path string) (File, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return File{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return File{}, fmt.Errorf("stat %s: not a regular file (mode %o)", path, st.Mode)
	}
	return fileOf(&st), nil
}

func fileOf(st *unix.Stat_t) File {
	return File{UID: int(st.Uid), Perm: st.Mode & 0o7777, Links: int(st.Nlink), Inode: st.Ino, Bytes: st.Size, Taken: st.Blocks * 512}
}

// LockFile takes the advisory lock of a file without mapping the file. The lock lasts until the caller closes the returned file. The
// error is ErrLocked if another process holds the lock.
func LockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrLocked
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// tempMark is a part of the names of files that Write has not finished yet.
const tempMark = ".new-"

// Write writes b to the file at path, with mode 0600. At any moment, path has either the old content or the new content. Write makes a
// new file under an unpredictable name and renames it, so it never follows or changes a file that already lies in the folder.
func Write(path string, b []byte) (err error) {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	tmp := path + tempMark + hex.EncodeToString(random[:])
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(tmp))
	}
	return err
}

// ErrTooLong means that a file is longer than the reader's limit.
var ErrTooLong = errors.New("shm: file is too long")

// Read returns the content of a file that Write made, of at most max bytes. Errors:
// ErrNotOurs, ErrTooLong, fs.ErrNotExist.
func Read(path string, max int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("stat %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("%s: %w: not a regular file (mode %o)", path, ErrNotOurs, st.Mode)
	}
	if err := Ours(fileOf(&st)); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	b, err := io.ReadAll(io.LimitReader(f, max+1))
	if err == nil && int64(len(b)) > max {
		err = fmt.Errorf("%s: %w: more than %d bytes", path, ErrTooLong, max)
	}
	return b, err
}

// RemoveUnfinished removes the temporary files of Writes to path whose processes were killed.
func RemoveUnfinished(path string) {
	list, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return
	}
	for _, e := range list {
		if !strings.HasPrefix(e.Name(), filepath.Base(path)+tempMark) {
			continue
		}
		name := filepath.Join(filepath.Dir(path), e.Name())
		if f, err := Stat(name); err == nil && Ours(f) == nil {
			_ = os.Remove(name) // the next start tries again
		}
	}
}
