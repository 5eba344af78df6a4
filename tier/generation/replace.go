// SPDX-License-Identifier: Apache-2.0

package generation

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// rooms are files that reserve bytes, because a directory of a tier may be full of objects. The next file of generations is written over one
// of them, which is then renamed. So a clear needs no free bytes, and a crash leaves the earlier file or the later one. There are two rooms:
// the bytes of the replaced file become the next room, but the first clear replaces no file.
var rooms = []string{".room", ".room2"} // suffixes of the file's name

const roomUnit = 4096 // the bytes of a room are a multiple of this

// replace puts text in place of the file. If there is no space, it takes a room that an earlier replace has left for that.
func replace(path string, text []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	err := writeNew(path, text)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		if useRoom(path, text) == nil {
			err = nil
		}
	}
	if err != nil {
		return err
	}
	makeRoom(path, int64(len(text)))
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func writeNew(path string, text []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// useRoom writes text over a room's bytes and renames it.
func useRoom(path string, text []byte) error {
	err := error(unix.ENOSPC)
	for _, room := range rooms {
		if err = useOne(path+room, path, text); err == nil {
			return nil
		}
	}
	return err
}

func useOne(room, path string, text []byte) error {
	f, size, err := openRoom(room, 0)
	if err != nil {
		return err
	}
	if size < int64(len(text)) {
		return errors.Join(unix.ENOSPC, f.Close())
	}
	_, err = f.WriteAt(text, 0)
	if err == nil {
		err = f.Truncate(int64(len(text)))
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(room, path)
}

// makeRoom makes the rooms, each for a file of 2n bytes. If the directory is missing or full, it does nothing; each write of a
// file tries again.
func makeRoom(path string, n int64) {
	n = (2*n + roomUnit - 1) / roomUnit * roomUnit
	for _, room := range rooms {
		makeOne(path+room, n)
	}
}

// makeOne makes one room of at least n bytes, if the directory has room for it.
func makeOne(room string, n int64) {
	f, size, err := openRoom(room, os.O_CREATE)
	if err != nil {
		return // the next write reports it, if it needs the room
	}
	defer f.Close()
	if size >= n {
		return
	}
	_, err = f.WriteAt(make([]byte, n-size), size) // written bytes, because a hole reserves no space
	if errors.Join(err, f.Sync()) != nil && size == 0 {
		_ = os.Remove(room) // an empty file is no room
	}
}

// openRoom opens a room. It must be a regular file of this user with one link, since others may write into a tier's directory.
func openRoom(path string, flags int) (f *os.File, size int64, err error) {
	f, err = os.OpenFile(path, os.O_WRONLY|flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, 0, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(f.Fd()), &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 || int(st.Uid) != os.Geteuid()) {
		err = &fs.PathError{Op: "open", Path: path, Err: errors.New("not a regular file that this user alone owns, with one name")}
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, st.Size, nil
}
