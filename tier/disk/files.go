// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/rawio"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/takeover"
)

// files are the files of one directory. Tests use an implementation in memory that loses unsynced writes.
type files interface {
	// list returns names and sizes.
	list() (map[string]int64, error)
	// open opens a file to read and write it.
	open(name string) (file, error)
	// create makes a file and reserves `bytes` bytes for it. Errors: fs.ErrExist, ENOSPC.
	create(name string, bytes int64) (file, error)
	rename(from, to string) error
	// remove removes a name. A missing name is no error.
	remove(name string) error
	// sync makes names durable.
	sync() error
	// space returns the bytes of the file system, and those that are free.
	space() (all, free int64, err error)
	close() error
}

// file is read and written in blocks at multiples of a block, from and to memory that
// begins at a multiple of a block.
type file interface {
	// readv fills bufs. Error: io.ErrUnexpectedEOF.
	readv(bufs [][]byte, off int64) error
	writev(bufs [][]byte, off int64) error
	size() (int64, error)
	truncate(bytes int64) error
	// reserve reserves space for `bytes` bytes of the file, whose size stays.
	reserve(bytes int64) error
	sync() error
	close() error
}

const (
	markName  = "kvasir-disk"
	lockName  = "lock"
	checkName = "checkpoint"
	goneName  = "deleted"
	newSuffix = ".new"
)

// osFiles are a directory's files in a file system.
type osFiles struct {
	path   string
	dir    int
	lock   *os.File
	direct int          // O_DIRECT, or 0 where the file system has none
	queue  *rawio.Queue // of reads; nil where the kernel has none, or they are not direct
}

// readsAtOnce is how many reads of one directory the kernel has at once; others wait.
const readsAtOnce = 64

// ours are the names that a directory of this package has before it has its marker.
var ours = map[string]bool{lockName: true, markName + newSuffix: true, "lost+found": true, "probe": true}

// openFiles opens and locks a directory. It makes a missing directory unless look is set. It changes nothing in a directory of another
// program. Errors: ErrInUse, ErrNotOurs.
func openFiles(path string, look bool) (_ *osFiles, err error) {
	if !look {
		if err := os.MkdirAll(path, 0o700); err != nil {
			return nil, err
		}
	}
	o := &osFiles{path: path, dir: -1, direct: directIO}
	defer func() {
		if err != nil {
			_ = o.close()
		}
	}()
	if o.dir, err = unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return nil, err
	}
	// Lock the directory, too: a cleaning program may remove the lock file.
	if err := o.take(o.dir); errors.Is(err, ErrInUse) {
		return nil, err
	}
	names, err := o.list()
	if err != nil {
		return nil, err
	}
	if _, ok := names[markName]; !ok {
		for name := range names {
			if !ours[name] {
				return nil, fmt.Errorf("%w: it has a file %q and none named %s", ErrNotOurs, name, markName)
			}
		}
		if look {
			return nil, fmt.Errorf("%w: it has no file %s", ErrNotOurs, markName)
		}
	}
	lock, err := o.openat(lockName, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", lockName, err)
	}
	o.lock = os.NewFile(uintptr(lock), lockName)
	if err := o.take(lock); err != nil {
		return nil, err
	}
	takeover.SetLockOwner(o.lock)
	if err := o.probe(); err != nil {
		return nil, err
	}
	if o.direct != 0 {
		o.queue, _ = rawio.NewQueue(readsAtOnce) // without a queue each read blocks a thread
	}
	return o, nil
}

// take locks the directory or its lock file. The lock file names the process that locked them last. Error: ErrInUse.
func (o *osFiles) take(fd int) error {
	pid := 0
	if lock, err := o.openat(lockName, unix.O_RDONLY|unix.O_NONBLOCK); err == nil {
		f := os.NewFile(uintptr(lock), lockName)
		pid = takeover.LockOwner(f)
		_ = f.Close()
	}
	err := takeover.LockAfter(pid, unix.EWOULDBLOCK, func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		if pid == 0 {
			return fmt.Errorf("%w by another process", ErrInUse)
		}
		return fmt.Errorf("%w by process %d", ErrInUse, pid)
	}
	return err
}

// probe finds out whether direct I/O is possible. A full file system is no error if the directory has its marker: its objects
// can be served, and eviction can free room.
func (o *osFiles) probe() error {
	if err := o.remove("probe"); err != nil {
		return err
	}
	for {
		f, err := o.create("probe", 0)
		b := [][]byte{shm.MakeAligned(block, block)}
		if err == nil {
			if err = f.writev(b, 0); err == nil {
				err = f.readv(b, 0)
			}
			err = errors.Join(err, f.close())
		}
		err = errors.Join(err, o.remove("probe"))
		if noRoom(err) {
			if f, e := o.open(markName); e == nil {
				return f.close()
			} else if errors.Is(e, unix.EINVAL) {
				err = e
			}
		}
		if errors.Is(err, unix.EINVAL) && o.direct != 0 {
			o.direct = 0
			continue
		} else if err != nil {
			return fmt.Errorf("try to write: %w", err)
		}
		return nil
	}
}

// noRoom reports whether an error means that the file system, or a user's quota on it, is full.
func noRoom(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

func (o *osFiles) openat(name string, flags int) (int, error) {
	return unix.Openat(o.dir, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
}

func (o *osFiles) list() (map[string]int64, error) {
	entries, err := os.ReadDir(o.path)
	if err != nil {
		return nil, err
	}
	names := make(map[string]int64, len(entries))
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		names[e.Name()] = info.Size()
	}
	return names, nil
}

func (o *osFiles) open(name string) (file, error) {
	fd, err := o.openat(name, unix.O_RDWR|o.direct)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	return osFile{fd, o.queue}, nil
}

func (o *osFiles) create(name string, bytes int64) (file, error) {
	fd, err := o.openat(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|o.direct)
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", name, err)
	}
	if bytes > 0 {
		err = fallocate(fd, 0, bytes)
		if errors.Is(err, unix.EOPNOTSUPP) {
			err = unix.Ftruncate(fd, bytes)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("reserve %d bytes for %s: %w", bytes, name, err), unix.Close(fd), o.remove(name))
	}
	return osFile{fd, o.queue}, nil
}

func (o *osFiles) rename(from, to string) error { return unix.Renameat(o.dir, from, o.dir, to) }

func (o *osFiles) remove(name string) error {
	if err := unix.Unlinkat(o.dir, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return nil
}

func (o *osFiles) sync() error {
	if err := unix.Fsync(o.dir); err != nil && !errors.Is(err, unix.EINVAL) { // some file systems cannot sync a directory
		return err
	}
	return nil
}

func (o *osFiles) space() (all, free int64, err error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(o.dir, &st); err != nil {
		return 0, 0, err
	}
	return int64(st.Blocks) * int64(st.Bsize), int64(st.Bavail) * int64(st.Bsize), nil
}

func (o *osFiles) close() error {
	var errs []error
	if o.queue != nil {
		errs = append(errs, o.queue.Close())
	}
	if o.lock != nil {
		errs = append(errs, o.lock.Close())
	}
	if o.dir >= 0 {
		errs = append(errs, unix.Close(o.dir))
	}
	return errors.Join(errs...)
}

// osFile is a file's descriptor.
type osFile struct {
	fd    int
	queue *rawio.Queue // of its directory
}

func (f osFile) readv(bufs [][]byte, off int64) error {
	return each(bufs, off, func(bufs [][]byte, off int64) (int, error) {
		if f.queue != nil {
			n, err := f.queue.Preadv(f.fd, bufs, off)
			if !errors.Is(err, rawio.ErrQueue) {
				return n, err
			}
		}
		return unix.Preadv(f.fd, bufs, off)
	}, io.ErrUnexpectedEOF)
}

func (f osFile) writev(bufs [][]byte, off int64) error {
	return each(bufs, off, func(bufs [][]byte, off int64) (int, error) { return unix.Pwritev(f.fd, bufs, off) }, io.ErrShortWrite)
}

// each repeats call until all of bufs are moved, to or from offset off on. If a call moves nothing, each returns the error `none`.
func each(bufs [][]byte, off int64, call func([][]byte, int64) (int, error), none error) error {
	for len(bufs) > 0 {
		n, err := call(bufs, off)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil && n == 0 {
			err = none
		}
		if err != nil {
			return err
		}
		off += int64(n)
		bufs = after(bufs, n)
	}
	return nil
}

// after returns those parts of bufs that follow the first n bytes. It does not change bufs.
func after(bufs [][]byte, n int) [][]byte {
	for i := range bufs {
		if n < len(bufs[i]) {
			return append([][]byte{bufs[i][n:]}, bufs[i+1:]...)
		}
		n -= len(bufs[i])
	}
	return nil
}

func (f osFile) size() (int64, error) {
	var st unix.Stat_t
	err := unix.Fstat(f.fd, &st)
	return st.Size, err
}

func (f osFile) truncate(bytes int64) error { return unix.Ftruncate(f.fd, bytes) }
func (f osFile) reserve(bytes int64) error {
	return fallocate(f.fd, keepSize, bytes)
}
func (f osFile) sync() error  { return syncData(f.fd) }
func (f osFile) close() error { return unix.Close(f.fd) }

// replace writes a file as a whole: at any moment the name has the old or the new content.
// write must call put with blocks, in order.
func replace(d files, name string, write func(put func(b []byte) error) error) error {
	if err := d.remove(name + newSuffix); err != nil {
		return err
	}
	f, err := d.create(name+newSuffix, 0)
	if err != nil {
		return err
	}
	off := int64(0)
	err = write(func(b []byte) error {
		off += int64(len(b))
		return f.writev([][]byte{b}, off-int64(len(b)))
	})
	if err == nil {
		err = f.sync()
	}
	if err = errors.Join(err, f.close()); err == nil {
		err = d.rename(name+newSuffix, name)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", name, err), d.remove(name+newSuffix))
	}
	return d.sync()
}

// contents reads the whole blocks of a file, whose size is not bounded. It returns nil
// if the file is missing or smaller than a block.
func contents(d files, names map[string]int64, name string) ([]byte, error) {
	if names[name] < block {
		return nil, nil
	}
	f, err := d.open(name)
	if err != nil {
		return nil, err
	}
	b := shm.MakeAligned(int(names[name]/block*block), block)
	return b, errors.Join(f.readv([][]byte{b}, 0), f.close())
}

// buffers is a pool of aligned buffers of one size.
type buffers struct {
	bytes int
	pool  sync.Pool
}

func (b *buffers) get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return shm.MakeAligned(b.bytes, block)
}

func (b *buffers) put(buf []byte) { b.pool.Put(&buf) }
