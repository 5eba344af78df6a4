// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// rootDir is one directory that engines fill.
type rootDir struct {
	path   string                 // as the operator wrote it
	number uint16                 // position in Options.Roots
	real   atomic.Pointer[string] // without symbolic links, according to the kernel
	dir    *os.File               // when the directory is replaced, this descriptor leads to the new one

	// Owned by the goroutine that looks at the directories:
	warned  bool          // a warning was logged that the keeper cannot follow the path to its new directory
	changed unix.Timespec // time of the last change of its entries that was seen

	pending atomic.Int64      // bytes of files that are being unlinked
	written atomic.Int64      // bytes of files that appeared
	dirs    map[string]uint32 // numbers of the ranks' directories, by name, "" for LMCache's files; under the keeper's lock
}

// place is the path of the directory, without symbolic links.
func (r *rootDir) place() string { return *r.real.Load() }

func (r *rootDir) join(dir string) string { return path.Join(r.path, dir) }

// found is a file that a look found.
type found struct {
	id     id
	name   string // of an LMCache file
	size   int64
	usedAt int64
}

// oldTemp is the age above which a temporary file counts as left by a writer that was killed.
const oldTemp = time.Hour

// look reads a whole root and corrects the books: new, longer and missing files, and the times of reads that no event
// reported. After the first look the files are sorted.
func (k *Keeper) look(ctx context.Context, r *rootDir) error {
	k.mu.Lock()
	k.looks++
	number := k.looks
	k.mu.Unlock()
	var made func(dir string)
	if k.ino != nil {
		made = func(dir string) { k.watch(r, dir) }
	}
	err := r.walk(ctx, made, func(rank, leaf string, fd int) error {
		return k.lookAt(r, rank, leaf, fd, number)
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	k.dropUnseen(r, number)
	return err
}

// walk calls leaf with each directory of files below a root, several at a time, and made, if it is not nil, with each directory before
// reading it. If it cannot read a directory, it goes on with the others, and returns one of the errors.
func (r *rootDir) walk(ctx context.Context, made func(dir string), leaf func(rank, leaf string, fd int) error) error {
	root, err := openDirectory(int(r.dir.Fd()), ".")
	if err != nil {
		return err
	}
	defer unix.Close(root)
	w := &walker{ctx, r, made, leaf}
	return cmp.Or(leaf("", "", root), w.in(root, "", func(name string) bool { _, ok := rankDirectory(name); return ok }, w.rank))
}

type walker struct {
	ctx  context.Context
	r    *rootDir
	made func(dir string)
	leaf func(rank, leaf string, fd int) error
}

// in calls f with each subdirectory for which ok returns true. It leaves out one that is removed meanwhile. It returns one of the errors.
func (w *walker) in(parent int, dir string, ok func(name string) bool, f func(name string, fd int) error) error {
	names, err := subdirectories(parent, ok)
	if err != nil {
		return fmt.Errorf("%s: %w", w.r.join(dir), err)
	}
	for _, name := range names {
		if w.ctx.Err() != nil {
			return w.ctx.Err()
		}
		err = cmp.Or(err, w.readDirectory(parent, dir, name, f))
	}
	return err
}

func (w *walker) readDirectory(parent int, dir, name string, f func(name string, fd int) error) error {
	if w.made != nil {
		w.made(path.Join(dir, name))
	}
	fd, err := openDirectory(parent, name)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", w.r.join(path.Join(dir, name)), err)
	}
	defer unix.Close(fd)
	return f(name, fd)
}

// rank reads the folders of one rank with several goroutines.
func (w *walker) rank(rank string, fd int) error {
	tops, err := subdirectories(fd, func(name string) bool { return isHex(name, 3) })
	if err != nil {
		return fmt.Errorf("%s: %w", w.r.join(rank), err)
	}
	next := make(chan string)
	errs := make(chan error, len(tops))
	var wg sync.WaitGroup
	for range min(4, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for top := range next {
				if err := w.readDirectory(fd, rank, top, func(_ string, at int) error { return w.top(rank, top, at) }); err != nil {
					errs <- err
				}
			}
		})
	}
	for _, top := range tops {
		if w.ctx.Err() != nil {
			break
		}
		next <- top
	}
	close(next)
	wg.Wait()
	close(errs)
	return cmp.Or(w.ctx.Err(), <-errs)
}

func (w *walker) top(rank, top string, fd int) error {
	isLeaf := func(name string) bool { _, ok := leafGroup(top + "/" + name); return ok }
	return w.in(fd, rank+"/"+top, isLeaf, func(name string, at int) error { return w.leaf(rank, top+"/"+name, at) })
}

// lookAt reads the files of one directory, whose descriptor is fd.
func (k *Keeper) lookAt(r *rootDir, rank, leaf string, fd int, number uint32) error {
	var files []found
	err := readDirectory(fd, func(name []byte, kind byte) error {
		text := string(name)
		e, ok := found{name: text}, false
		e.id, ok = idIn(rank, leaf, text)
		temporary := !ok && rank != "" && isTemporary(text)
		if !ok && !temporary {
			return nil
		}
		var s unix.Stat_t
		if err := unix.Fstatat(fd, text, &s, unix.AT_SYMLINK_NOFOLLOW); err != nil || s.Mode&unix.S_IFMT != unix.S_IFREG {
			return nil // removed meanwhile, or no regular file
		}
		if temporary {
			if k.now().Sub(time.Unix(s.Mtim.Unix())) > oldTemp && unix.Unlinkat(fd, text, 0) == nil {
				k.log.Info("removed a temporary file of a writer that ended", "file", r.join(path.Join(rank, leaf, text)))
			}
			return nil
		}
		e.size, e.usedAt = s.Size, max(micros(s.Atim), micros(s.Mtim))
		files = append(files, e)
		return nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w", r.join(path.Join(rank, leaf)), err)
	}
	slices.SortFunc(files, func(x, y found) int { return cmp.Compare(x.usedAt, y.usedAt) })
	for some := range slices.Chunk(files, lookBatch) { // in parts, to hold the lock only shortly
		for _, e := range k.enterFiles(r, rank, some, number) {
			k.recheck(r, rank, fd, e)
		}
	}
	return nil
}

// lookBatch is how many files of a directory are put into the books in one hold of the lock.
const lookBatch = 4096

// recheck removes a file from the books again if it does not exist: it may have been unlinked, and that event
// may have been handled, after the look saw the file and before it was put into the books.
func (k *Keeper) recheck(r *rootDir, rank string, fd int, e found) {
	var s unix.Stat_t
	if !isGone(unix.Fstatat(fd, e.name, &s, unix.AT_SYMLINK_NOFOLLOW)) {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	dir, ok := k.directory(r, rank)
	n, _ := k.books.find(dir, e.id)
	if !ok || n == 0 || k.books.file(n).usedAt != e.usedAt { // or the file was made or used again meanwhile
		return
	}
	k.books.remove(n)
	k.books.dirs[dir].wrote(-1, -e.size)
}

// isGone reports whether the error of a call says that a file is not there.
func isGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) }

func micros(t unix.Timespec) int64 { return t.Nano() / 1000 }

// isTemporary reports whether name is a temporary name of vLLM: HASH.bin_NUMBER.tmp.
func isTemporary(name string) bool {
	text, found := strings.CutSuffix(name, tempEnd)
	i := strings.LastIndexByte(text, '_')
	if !found || i < 0 || strings.Trim(text[i+1:], "0123456789") != "" {
		return false
	}
	_, ok := vllmID(text[:i])
	return ok
}

// enterFiles puts the files of one directory into the books. It returns the files that are new since the first look. It ignores times in
// the future.
func (k *Keeper) enterFiles(r *rootDir, rank string, files []found, number uint32) (came []found) {
	k.mu.Lock()
	defer k.mu.Unlock()
	dir, ok := k.directory(r, rank)
	if !ok {
		return nil
	}
	now := k.now().UnixMicro()
	for i := range files {
		e := &files[i]
		n, _ := k.books.find(dir, e.id)
		future := e.usedAt > now
		if n == 0 {
			switch at, ok := k.noted(dir, e.id); {
			case ok && future:
				e.usedAt = at
			case future:
				e.usedAt = now
			case ok:
				e.usedAt = max(e.usedAt, at)
			}
			n = k.books.add(dir, e.id, e.name, e.size, e.usedAt)
			if k.arranged { // the file was written since the last look
				k.books.recordUse(n, 0, e.usedAt)
				k.books.file(n).counted = true
				k.books.dirs[dir].wrote(1, e.size)
				came = append(came, *e)
			}
		} else {
			f := k.books.file(n)
			if f.size != e.size {
				k.books.resize(n, e.size)
			}
			if !future && e.usedAt > f.usedAt+int64(time.Second/time.Microsecond) { // a read that no event reported
				k.books.dirs[dir].reads++
				k.books.dirs[dir].readBytes += e.size
				k.books.recordUse(n, 0, e.usedAt)
			}
		}
		k.books.file(n).look = number
	}
	k.wakeIfFull()
	return came
}

// dropUnseen drops the files of a root that a look did not see and that do not exist.
func (k *Keeper) dropUnseen(r *rootDir, number uint32) {
	type missing struct {
		dir  uint32
		id   id
		path string
	}
	var all []missing
	k.mu.Lock()
	unseen := func(n uint32) {
		if f := k.books.file(n); f.look < number && k.books.dirs[f.dir].root == r {
			all = append(all, missing{f.dir, f.id, k.path(n)})
		}
	}
	for n := k.books.coldest(); n != 0; n = k.books.file(n).next {
		unseen(n)
	}
	for n := range k.books.stuck {
		unseen(n)
	}
	k.mu.Unlock()
	for _, m := range all {
		var s unix.Stat_t
		if !isGone(unix.Fstatat(int(r.dir.Fd()), m.path, &s, unix.AT_SYMLINK_NOFOLLOW)) {
			continue // it was made after the look passed its directory, or the directory cannot be read
		}
		k.mu.Lock()
		if n, _ := k.books.find(m.dir, m.id); n != 0 {
			k.books.remove(n)
			k.books.dirs[m.dir].removedByOthers++
		}
		k.mu.Unlock()
	}
}

// openDirectory opens a directory to read it, without changing its access time if this user may do that.
func openDirectory(parent int, name string) (int, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(parent, name, flags|unix.O_NOATIME, 0)
	if errors.Is(err, unix.EPERM) { // another user's directory
		fd, err = unix.Openat(parent, name, flags, 0)
	}
	return fd, err
}

func subdirectories(fd int, ok func(name string) bool) (names []string, err error) {
	err = readDirectory(fd, func(name []byte, kind byte) error {
		if kind == unix.DT_DIR || kind == unix.DT_UNKNOWN {
			if text := string(name); ok(text) {
				names = append(names, text)
			}
		}
		return nil
	})
	return names, err
}

// directoryBuffers are for getdents.
var directoryBuffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

// readDirectory calls f with each entry of a directory. It allocates nothing for them.
func readDirectory(fd int, f func(name []byte, kind byte) error) error {
	if _, err := unix.Seek(fd, 0, 0); err != nil {
		return err
	}
	buffer := directoryBuffers.Get().(*[]byte)
	defer directoryBuffers.Put(buffer)
	for {
		n, err := unix.ReadDirent(fd, *buffer)
		if err == unix.EINTR {
			continue
		}
		if n <= 0 || err != nil {
			return err
		}
		const head = 19 // d_ino u64, d_off i64, d_reclen u16, d_type u8
		for b := (*buffer)[:n]; len(b) > head; {
			length := int(binary.NativeEndian.Uint16(b[16:]))
			if length <= head || length > len(b) {
				return fmt.Errorf("the kernel returned a directory entry of %d bytes, which is impossible", length)
			}
			name, _, _ := bytes.Cut(b[head:length], []byte{0})
			kind := b[18]
			b = b[length:]
			if text := string(name); text == "" || text == "." || text == ".." { // not others with a dot: the model ./m makes a hidden directory
				continue
			}
			if err := f(name, kind); err != nil {
				return err
			}
		}
	}
}
