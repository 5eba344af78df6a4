// SPDX-License-Identifier: Apache-2.0

package fs

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Write implements tier.Tier. It keeps a good file, and replaces a file that was not written whole or that
// its readers could not use. It keeps a file of a later release and returns ErrNewer.
func (d *Dir) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if m.Len != int64(len(src)) || m.Len < 1 {
		return fmt.Errorf("fs: write of %d bytes for an object of %d: the lengths must be equal and above 0", len(src), m.Len)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if d.readOnly {
		return fmt.Errorf("%w: %w: the directory cannot be written", tier.ErrNotKept, tier.ErrReadOnly)
	}
	path, ok := d.path(k)
	if !ok {
		return d.o.Names.Unnamed(k)
	}
	was, size, err := d.look(k, path)
	if err != nil {
		return fmt.Errorf("fs: %w", err)
	}
	if d.servesAll(was, size, m.Len) {
		return nil
	}
	if was.Len == 0 && size > 0 && isLater(func(b []byte) (int, error) { return d.attrs.at(path, b) }) {
		if _, said := d.warned.LoadOrStore(tier.ErrNewer, true); !said {
			d.log.Warn("files of a later release are misses and stay as they are: start the release that wrote them, or name another directory", "path", path)
		}
		return fmt.Errorf("%w: %w", tier.ErrNotKept, tier.ErrNewer)
	}
	if err := d.checkRoom(d.fileBytes(m.Len)); err != nil {
		return err
	}
	err = d.put(ctx, path, attrOf(k, m), src)
	d.noteGone(isGone(err), err)
	if err != nil {
		return refused(err, path)
	}
	d.usage.replaced(size, d.fileBytes(m.Len))
	return nil
}

// fileBytes is how long the file of an object of n bytes is.
func (d *Dir) fileBytes(n int64) int64 {
	if d.o.Pad {
		return tier.Padded(n)
	}
	return n
}

// servesAll reports whether a file of size bytes serves all readers: it has an object of n bytes, and is padded
// if Options.Pad asks for it.
func (d *Dir) servesAll(m tier.Meta, size, n int64) bool {
	return m.Fits(n) && (size == n && !d.o.Pad || size == tier.Padded(n))
}

// refused turns the error of a failed write into an error for the caller. ErrNotKept: no room, not writable, or no checksum
// possible. ErrResting: the directory is not there now, so the caller should try again. Others: the write failed.
func refused(err error, path string) error {
	switch {
	case noRoom(err):
		return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, tier.ErrFull, err)
	case unwritable(err):
		return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, tier.ErrReadOnly, err)
	case errors.Is(err, unix.EFBIG), errors.Is(err, ErrNoChecksums):
		return fmt.Errorf("%w: %w", tier.ErrNotKept, err)
	case isGone(err):
		return fmt.Errorf("%w: write %s: %w", tier.ErrResting, path, err)
	}
	return fmt.Errorf("fs: write %s: %w", path, err)
}

// noRoom reports whether an error means that the file system, or a user's quota on it, is full.
func noRoom(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// isGone reports whether a file cannot be made because its directory is not there: moved away, or no longer mounted.
func isGone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESTALE) }

// noteGone logs once that the directory is gone, and once that it is back.
func (d *Dir) noteGone(gone bool, err error) {
	switch was := d.gone.Swap(gone); {
	case gone && !was:
		d.log.Warn("the directory is gone: writes wait until it is back", "path", d.o.Path, "err", err)
	case was && err == nil:
		d.log.Info("the directory is back", "path", d.o.Path)
	}
}

// put writes a file under a temporary name and renames it to path. On an error it removes the
// temporary file.
func (d *Dir) put(ctx context.Context, path string, a attr, src []byte) (err error) {
	temp := d.tempName()
	fd, direct, err := d.open(temp, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = unix.Unlink(temp)
		}
	}()
	if err := d.fill(ctx, fd, direct, a, src); err != nil {
		_ = unix.Close(fd)
		return err
	}
	if err := unix.Close(fd); err != nil {
		return err
	}
	if err := unix.Rename(temp, path); err != nil {
		return err
	}
	d.written.Add(d.fileBytes(a.length))
	return nil
}

func (d *Dir) fill(ctx context.Context, fd int, direct bool, a attr, src []byte) error {
	move := func(b []byte, off int64, _ bool) (int, error) { return unix.Pwrite(fd, b, off) }
	rest := src
	if d.o.Pad { // the last page is copied to a padded page, so that it can be written whole
		rest = src[:len(src)&^(tier.Page-1)]
	}
	n, err := d.inPieces(ctx, fd, direct, rest, move)
	if err == nil && n < int64(len(rest)) {
		err = unix.EIO
	}
	if err == nil && len(rest) < len(src) {
		last := make([]byte, tier.Page)
		copy(last, src[len(rest):])
		err = d.lastPage(fd, last, n)
	}
	if err == nil {
		err = d.setSum(fd, a)
	}
	return err
}

// lastPage writes a page through the page cache.
func (d *Dir) lastPage(fd int, page []byte, off int64) error {
	if err := indirect(fd); err != nil {
		return err
	}
	for len(page) > 0 {
		n, err := unix.Pwrite(fd, page, off)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return unix.EIO
		default:
			page, off = page[n:], off+int64(n)
		}
	}
	return nil
}

// Delete implements tier.Tier.
func (d *Dir) Delete(ctx context.Context, keys []kv.Key) error {
	var errs []error
	for _, k := range keys {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		path, ok := d.path(k)
		if !ok {
			continue
		}
		m, size, err := d.look(k, path)
		if err == nil && size >= 0 && (m.Len > 0 || size == 0) { // not an object of another layout
			err = unix.Unlink(path)
		}
		switch {
		case errors.Is(err, unix.ENOENT):
		case err != nil:
			errs = append(errs, fmt.Errorf("fs: delete %s: %w", filepath.Base(path), err))
		case size >= 0 && m.Len > 0:
			d.usage.replaced(size, -1)
		}
	}
	return errors.Join(errs...)
}
