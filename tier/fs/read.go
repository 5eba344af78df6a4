// SPDX-License-Identifier: Apache-2.0

package fs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/rawio"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// attrName is the extended attribute beside a file:
//
//	0   1  version, 2; 1 in files without the last field
//	1  16  namespace of the object
//	17  8  its length, bytes, little-endian
//	25  8  its xxh3, little-endian
//	33  8  kv.Key.Digest of its key, little-endian
const (
	attrName     = "user.kvasir.x3"
	attrVersion  = 2
	attrBytes    = 41
	unboundBytes = 33 // of version 1
)

// attrs sets and reads the attribute of a file.
type attrs struct {
	set func(fd int, b []byte) error
	of  func(fd int, b []byte) (int, error)
	at  func(path string, b []byte) (int, error)
}

// kernel sets and reads the attributes of real files.
var kernel = attrs{
	set: func(fd int, b []byte) error { return unix.Fsetxattr(fd, attrName, b, 0) },
	of:  func(fd int, b []byte) (int, error) { return unix.Fgetxattr(fd, attrName, b) },
	at:  func(path string, b []byte) (int, error) { return unix.Lgetxattr(path, attrName, b) },
}

// attr is the content of the attribute.
type attr struct {
	namespace kv.Namespace
	length    int64
	sum       uint64
	key       uint64 // digest of the key, where bound
	bound     bool
}

// attrOf returns the attribute for a file with an object.
func attrOf(k kv.Key, m tier.Meta) attr { return attr{k.Namespace, m.Len, m.Sum, k.Digest(), true} }

// of reports whether the file can be the file of k's object.
func (a attr) of(k kv.Key) bool {
	return a.namespace == k.Namespace && (!a.bound || a.key == k.Digest())
}

func (a attr) bytes() []byte {
	b := make([]byte, attrBytes)
	b[0] = attrVersion
	copy(b[1:], a.namespace[:])
	binary.LittleEndian.PutUint64(b[17:], uint64(a.length))
	binary.LittleEndian.PutUint64(b[25:], a.sum)
	binary.LittleEndian.PutUint64(b[33:], a.key)
	return b
}

func parseAttr(b []byte) (a attr, ok bool) {
	switch {
	case len(b) == attrBytes && b[0] == attrVersion:
		a.key, a.bound = binary.LittleEndian.Uint64(b[33:]), true
	case len(b) != unboundBytes || b[0] != 1:
		return a, false
	}
	a.namespace = kv.Namespace(b[1:17])
	a.length = int64(binary.LittleEndian.Uint64(b[17:]))
	a.sum = binary.LittleEndian.Uint64(b[25:])
	return a, true
}

// isLater reports whether a later release wrote the attribute: it has a higher version, or is longer than any
// that this release knows. get reads it.
func isLater(get func(b []byte) (int, error)) bool {
	var b [attrBytes + 1]byte
	n, err := get(b[:])
	return errors.Is(err, unix.ERANGE) || err == nil && n > 0 && b[0] > attrVersion
}

// metaOf returns the Meta of a regular file of size bytes for a caller that asks for k; zero
// if the file cannot serve k. get reads the attribute.
func (d *Dir) metaOf(k kv.Key, size int64, get func(b []byte) (int, error)) tier.Meta {
	var b [attrBytes + 1]byte
	n, err := get(b[:])
	a, ok := parseAttr(b[:max(0, n)])
	switch {
	case size <= 0:
		return tier.Meta{}
	case errors.Is(err, unix.ERANGE), err == nil && !ok: // a later release wrote it: the meaning of its bytes is not known
		return tier.Meta{}
	case err != nil: // no attribute: an LMCache server wrote it
		if name, _ := d.o.Names.Of(k.Namespace); d.o.Trust == TrustChecksum || name.Mixed {
			return tier.Meta{}
		}
		return tier.Meta{Len: size, NoSum: true}
	case !a.of(k): // an object of another layout of the model, or a file under a wrong name
		return tier.Meta{}
	case size != a.length && size != tier.Padded(a.length): // not written whole
		return tier.Meta{Len: size, Sum: a.sum}
	}
	return tier.Meta{Len: a.length, Sum: a.sum}
}

// look returns the Meta of an object without opening its file. size is the file's size,
// -1 if there is none.
func (d *Dir) look(k kv.Key, path string) (m tier.Meta, size int64, err error) {
	var st unix.Stat_t
	if err := retry(func() error { return unix.Lstat(path, &st) }); err != nil {
		if errors.Is(err, unix.ENOENT) {
			err = nil
		}
		return m, -1, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return m, st.Size, nil
	}
	return d.metaOf(k, st.Size, func(b []byte) (int, error) { return d.attrs.at(path, b) }), st.Size, nil
}

// retry calls f again while a signal interrupts it.
func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// statsAtOnce is how many files Stat looks at at once, for file systems on which each look takes long.
const statsAtOnce = 8

// Stat implements tier.Tier.
func (d *Dir) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	n := min(statsAtOnce, 1+len(keys)/32)
	errs := make([]error, n)
	part := func(i int) {
		for j := i * len(keys) / n; j < (i+1)*len(keys)/n && errs[i] == nil; j++ {
			metas[j] = tier.Meta{}
			if errs[i] = ctx.Err(); errs[i] != nil {
				break
			}
			if path, ok := d.path(keys[j]); ok {
				metas[j], _, errs[i] = d.look(keys[j], path)
			}
		}
	}
	var wg sync.WaitGroup
	for i := 1; i < n; i++ {
		wg.Go(func() { part(i) })
	}
	part(0)
	wg.Wait()
	return errors.Join(errs...)
}

const (
	// piece is how many bytes are read or written between two looks at the context.
	piece = 8 << 20

	// hotPiece is how many bytes are copied from the page cache before their checksum is computed: they are still in the
	// processor's cache then.
	hotPiece = 128 << 10
)

// Read implements tier.Tier.
func (d *Dir) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	return d.read(ctx, k, dst, nil)
}

// ReadSummed implements tier.Summing.
func (d *Dir) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (m tier.Meta, sum uint64, err error) {
	if d.o.Direct && !d.noDirect.Load() { // direct I/O leaves nothing in the processor's cache: one checksum at the end costs no more
		if m, err = d.read(ctx, k, dst, nil); err == nil {
			sum = xxh3.Hash(dst)
		}
		return m, sum, err
	}
	h := hashers.Get().(*xxh3.Hasher)
	defer hashers.Put(h)
	h.Reset()
	if m, err = d.read(ctx, k, dst, h); err == nil {
		sum = h.Sum64()
	}
	return m, sum, err
}

var hashers = sync.Pool{New: func() any { return xxh3.New() }}

// read fills dst, and writes the bytes to h if h is not nil.
func (d *Dir) read(ctx context.Context, k kv.Key, dst []byte, h *xxh3.Hasher) (tier.Meta, error) {
	path, ok := d.path(k)
	if !ok {
		return tier.Meta{}, tier.ErrMissing
	}
	if err := ctx.Err(); err != nil {
		return tier.Meta{}, err
	}
	fd, direct, err := d.open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return tier.Meta{}, missing(err, path)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return tier.Meta{}, fmt.Errorf("fs: stat %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return tier.Meta{}, tier.ErrMissing
	}
	m := d.metaOf(k, st.Size, func(b []byte) (int, error) { return d.attrs.of(fd, b) })
	want := int64(len(dst))
	switch {
	case m.Len == 0:
		return tier.Meta{}, tier.ErrMissing
	case !m.Fits(want):
		return tier.Meta{}, &tier.CorruptError{Key: k, Want: tier.Meta{Len: want}, Got: m}
	}
	got, err := d.readAll(ctx, fd, direct, dst, h)
	switch {
	case err != nil:
		return tier.Meta{}, fmt.Errorf("fs: read %s: %w", path, err)
	case got < want: // another program truncated it
		return tier.Meta{}, &tier.CorruptError{Key: k, Want: tier.Meta{Len: want}, Got: tier.Meta{Len: got}}
	}
	if d.o.EvictAt > 0 && st.Atim.Sec < time.Now().Unix() {
		used(path)
	}
	return tier.Meta{Len: want, Sum: m.Sum, NoSum: m.NoSum}, nil
}

// used sets the access time of a file to now: most file systems do so once a day, or not at all. It fails silently for files of other users.
func used(path string) {
	touch(path)
}

// missing returns ErrMissing if err says that no regular file is at path.
func missing(err error, path string) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		return tier.ErrMissing
	}
	return fmt.Errorf("fs: open %s: %w", path, err)
}

// open opens a file, but never follows a symbolic link. It uses direct I/O if Options.Direct
// asks for it and the file system can do it.
func (d *Dir) open(path string, flags int, mode uint32) (fd int, direct bool, err error) {
	flags |= unix.O_CLOEXEC | unix.O_NOFOLLOW
	direct = d.o.Direct && !d.noDirect.Load()
	if direct {
		err = retry(func() error { fd, err = unix.Open(path, flags|directIO, mode); return err })
		if !errors.Is(err, unix.EINVAL) {
			return fd, true, err
		}
		if !d.noDirect.Swap(true) {
			d.log.Warn("the file system has no direct I/O: files pass through the page cache", "path", d.o.Path)
		}
		if flags&unix.O_CREAT != 0 {
			_ = unix.Unlink(path) // Linux makes the file before it refuses O_DIRECT
		}
	}
	err = retry(func() error { fd, err = unix.Open(path, flags, mode); return err })
	return fd, false, err
}

// readAll fills dst and returns how many bytes it got: less where the file ends.
func (d *Dir) readAll(ctx context.Context, fd int, direct bool, dst []byte, h *xxh3.Hasher) (int64, error) {
	return d.inPieces(ctx, fd, direct, dst, func(b []byte, off int64, direct bool) (int, error) {
		if h != nil {
			b = b[:min(len(b), hotPiece)]
		}
		n, err := d.pread(fd, b, off, direct)
		if h != nil && n > 0 {
			_, _ = h.Write(b[:n]) // never fails
		}
		return n, err
	})
}

// pread reads from a file. With direct I/O it uses the queue, so that no thread waits.
func (d *Dir) pread(fd int, b []byte, off int64, direct bool) (int, error) {
	if direct && d.queue != nil {
		n, err := d.queue.Preadv(fd, [][]byte{b}, off)
		if !errors.Is(err, rawio.ErrQueue) {
			return n, err
		}
	}
	return unix.Pread(fd, b, off)
}

// inPieces calls f until all of b is moved, whole pages first. The rest that fills no page, and
// memory that the kernel refuses as not aligned, go through the page cache. It returns how many
// bytes were moved: fewer if f moves none.
func (d *Dir) inPieces(ctx context.Context, fd int, direct bool, b []byte, f func(b []byte, off int64, direct bool) (int, error)) (int64, error) {
	off := int64(0)
	for off < int64(len(b)) {
		if err := ctx.Err(); err != nil {
			return off, err
		}
		part := b[off:min(int64(len(b)), off+piece)]
		if direct {
			whole := len(part) &^ (tier.Page - 1)
			if whole == 0 || off%tier.Page != 0 {
				if err := indirect(fd); err != nil {
					return off, err
				}
				direct = false
				continue
			}
			part = part[:whole]
		}
		n, err := f(part, off, direct)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EINVAL) && direct:
			if err := indirect(fd); err != nil {
				return off, err
			}
			direct = false
		case err != nil:
			return off, err
		case n == 0:
			return off, nil
		default:
			off += int64(n)
		}
	}
	return off, nil
}

// indirect switches an open file from direct I/O to the page cache.
func indirect(fd int) error {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags&^directIO)
	return err
}
