// SPDX-License-Identifier: Apache-2.0

package fs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// usage is what a directory contains, according to the last scan and this server's changes since.
type usage struct {
	objects, bytes, free atomic.Int64
	counted              chan struct{} // closed once a scan has ended
	changed              chan struct{} // wakes watch, which evicts

	mu struct { // a leaf; held while several of the figures change
		sync.Mutex
		changes              int64 // of files, by this server
		newObjects, newBytes int64 // totals of what this server wrote
	}
}

// replaced records that a file of `was` bytes became one of `is` bytes; -1 means no file.
func (u *usage) replaced(was, is int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.mu.changes++
	if is >= 0 {
		u.mu.newObjects++
		u.mu.newBytes += is
	}
	count := func(n int64, by int64) {
		if n >= 0 {
			u.objects.Add(by)
			u.bytes.Add(by * n)
		}
	}
	count(was, -1)
	count(is, 1)
	if is > 0 {
		u.free.Add(-is)
	}
}

// scanned sets the figures to the result of a scan that began when the counts were `since`. The scan may have seen files that were written
// meanwhile, or not; scanned adds them all, so that the limit holds. It reports whether this server changed files meanwhile: then the
// figures may be too high until the next scan.
func (u *usage) scanned(objects, bytes int64, since counts) (changed bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.objects.Store(objects + u.mu.newObjects - since.newObjects)
	u.bytes.Store(bytes + u.mu.newBytes - since.newBytes)
	if !u.isCounted() {
		close(u.counted)
	}
	return u.mu.changes != since.changes
}

func (u *usage) isCounted() bool {
	select {
	case <-u.counted:
		return true
	default:
		return false
	}
}

// Ready waits for the first scan of a directory with a limit: before it, no object is written.
func (d *Dir) Ready(ctx context.Context) error {
	if d.o.Limit == 0 {
		return ctx.Err()
	}
	select {
	case <-d.usage.counted:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// counts are the figures of changes at some time.
type counts struct{ changes, newObjects, newBytes int64 }

func (u *usage) counts() counts {
	u.mu.Lock()
	defer u.mu.Unlock()
	return counts{u.mu.changes, u.mu.newObjects, u.mu.newBytes}
}

// checkRoom returns ErrNotKept if n more bytes would pass a limit, and ErrResting before the first scan.
func (d *Dir) checkRoom(n int64) error {
	if d.o.MinFree > 0 && d.usage.free.Load()-n < d.o.MinFree {
		return fmt.Errorf("%w: %w: less than %d bytes would be free in the file system", tier.ErrNotKept, tier.ErrFull, d.o.MinFree)
	}
	if d.o.Limit == 0 {
		return nil
	}
	if !d.usage.isCounted() {
		return fmt.Errorf("%w: %w: the files are still being counted", tier.ErrResting, tier.ErrNotReady)
	}
	if d.o.EvictAt > 0 && float64(d.usage.bytes.Load()+n) > d.o.EvictAt*float64(d.o.Limit) {
		select {
		case d.usage.changed <- struct{}{}:
		default:
		}
	}
	if d.usage.bytes.Load()+n > d.o.Limit {
		err := fmt.Errorf("%w: the limit of %d bytes is reached", tier.ErrNotKept, d.o.Limit)
		if d.o.EvictAt == 0 { // with eviction there is room soon
			err = fmt.Errorf("%w: %w", tier.ErrFull, err)
		}
		return err
	}
	return nil
}

// statfs records how many bytes of the file system are free.
func (d *Dir) statfs() {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(d.o.Path, &st) }); err == nil {
		d.usage.free.Store(int64(st.Bavail) * int64(st.Bsize))
	}
}

// watch scans the directory, removes temporary files that ended servers left, and evicts, until
// ctx ends. Other servers may write to the directory, too.
func (d *Dir) watch(ctx context.Context) {
	free := time.NewTicker(time.Second)
	defer free.Stop()
	scan := time.NewTimer(d.scanFor(ctx, false))
	defer scan.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-free.C:
			d.statfs()
		case <-scan.C:
			scan.Reset(d.scanFor(ctx, false))
		case <-d.usage.changed:
			scan.Reset(d.scanFor(ctx, true))
		}
	}
}

// scanFor scans, with `evict` also to delete files, and returns how long to wait before the next scan.
func (d *Dir) scanFor(ctx context.Context, evict bool) time.Duration {
	began := time.Now()
	next := time.Minute
	if d.scan(ctx, evict) {
		next = time.Second
	}
	return max(next, 100*time.Since(began))
}

// found is a file that a scan has seen.
type found struct {
	name string
	size int64
	used int64 // seconds since 1970
}

// tempAge is the age after the last write at which a temporary file counts as left by a
// server that ended.
const tempAge = time.Hour

// scan counts the files. With evict it deletes the least recently used ones while there are too many bytes. It reports whether
// the next scan should be soon.
func (d *Dir) scan(ctx context.Context, evict bool) (again bool) {
	var all []found
	since := d.usage.counts()
	objects, bytes := int64(0), int64(0)
	err := d.each(ctx, d.o.Path, func(f found) bool {
		objects++
		bytes += f.size
		if evict {
			all = append(all, f)
		}
		return true
	})
	d.sweep()
	if err != nil {
		return false
	}
	again = d.usage.scanned(objects, bytes, since)
	limit := float64(d.o.Limit)
	if !evict || d.readOnly || float64(bytes) <= limit*max(0, d.o.EvictAt-d.o.EvictShare) {
		return again
	}
	slices.SortFunc(all, func(a, b found) int { return cmp.Or(cmp.Compare(a.used, b.used), cmp.Compare(a.name, b.name)) })
	for _, f := range all {
		if float64(bytes) <= limit*max(0, d.o.EvictAt-d.o.EvictShare) || ctx.Err() != nil {
			break
		}
		k, known := d.keyOf(f.name)
		if unix.Unlink(filepath.Join(d.o.Path, f.name)) == nil {
			d.usage.replaced(f.size, -1)
			bytes -= f.size
			if known {
				d.o.Changes.Note(d.o.Number, k, false)
			}
		}
	}
	return again
}

// keyOf returns the key of a file's object. It reports false without Options.Changes, and for a file without a checksum.
func (d *Dir) keyOf(name string) (k kv.Key, ok bool) {
	if d.o.Changes == nil {
		return k, false
	}
	var b [attrBytes + 1]byte
	n, err := d.attrs.at(filepath.Join(d.o.Path, name), b[:])
	a, ok := parseAttr(b[:max(0, n)])
	if _, k, whole := ParseFileName(name); ok && err == nil && whole {
		k.Namespace = a.namespace
		return k, true
	}
	return k, false
}

// each calls f with each object's file until f returns false.
func (d *Dir) each(ctx context.Context, path string, f func(found) bool) error {
	dir, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("fs: %w", err)
	}
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(1024)
		for _, name := range names {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			var st unix.Stat_t
			if !strings.HasSuffix(name, suffix) || unix.Lstat(filepath.Join(path, name), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
				continue
			}
			if !f(found{name, st.Size, max(st.Atim.Sec, st.Mtim.Sec)}) {
				return nil
			}
		}
		if err != nil || len(names) == 0 {
			return nil // the end, or a directory that goes away
		}
	}
}

// sweep removes temporary files older than tempAge.
func (d *Dir) sweep() {
	files, err := filepath.Glob(filepath.Join(d.temp, tempPrefix+"*"+tempSuffix))
	if err != nil || d.readOnly {
		return
	}
	for _, path := range files {
		if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() && time.Since(st.ModTime()) > tempAge {
			_ = os.Remove(path)
		}
	}
}

// File is one file of a directory, as tools see it.
type File struct {
	Name   string
	Size   int64
	Object tier.Name
	Key    kv.Key    // without a namespace if the file has no checksum
	Meta   tier.Meta // zero Len if the file was not written whole
}

// Files calls f with each file that has an object's name until f returns false. It adds the names of files
// with a checksum to Options.Names, since a tool has no other source of names.
func (d *Dir) Files(ctx context.Context, f func(File) bool) error {
	return d.files(ctx, func(file File) bool {
		if file.Key.Namespace != (kv.Namespace{}) {
			d.o.Names.Add(file.Key.Namespace, file.Object.Model, []byte(file.Object.Salt))
		}
		return f(file)
	})
}

// files is Files for a server: it adds no names. The model in a file name may differ from the engines' name of it: it may have a revision,
// or be a digest.
func (d *Dir) files(ctx context.Context, f func(File) bool) error {
	return d.each(ctx, d.o.Path, func(at found) bool {
		n, k, ok := ParseFileName(at.name)
		if !ok {
			return true
		}
		out := File{Name: at.name, Size: at.size, Object: n, Key: k, Meta: tier.Meta{Len: at.size, NoSum: true}}
		var b [attrBytes + 1]byte
		got, err := d.attrs.at(filepath.Join(d.o.Path, at.name), b[:])
		if a, ok := parseAttr(b[:max(0, got)]); ok && err == nil {
			out.Key.Namespace = a.namespace
			out.Meta = tier.Meta{}
			if at.size == a.length || at.size == tier.Padded(a.length) {
				out.Meta = tier.Meta{Len: a.length, Sum: a.sum}
			}
		}
		return f(out)
	})
}

// List implements tier.Lister. It lists the objects with a checksum, since only their files have
// the namespace. See Files.
func (d *Dir) List(ctx context.Context, f func(kv.Key, tier.Meta) bool) error {
	return d.Files(ctx, func(file File) bool {
		if file.Meta.Len == 0 || file.Meta.NoSum {
			return true
		}
		return f(file.Key, file.Meta)
	})
}

// Discard removes a file by its name.
func (d *Dir) Discard(name string) error {
	if _, _, ok := ParseFileName(name); !ok || name != filepath.Base(name) {
		return fmt.Errorf("fs: %q is not the file name of an object", name)
	}
	if err := unix.Unlink(filepath.Join(d.o.Path, name)); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("fs: remove %s: %w", name, err)
	}
	return nil
}
