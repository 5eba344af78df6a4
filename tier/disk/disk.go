// SPDX-License-Identifier: Apache-2.0

// Package disk is a tier on local disks: a log of segments in each of some directories.
//
// Objects are appended to a segment with direct I/O, straight from and to the caller's
// memory where that begins at a multiple of 4,096 bytes. A full segment is sealed with an
// index, synced, and never changed again; the oldest are removed as a whole. The index of
// all objects is in memory: about 75 bytes each. Open reads it from a checkpoint and from
// the segments' indexes, in the background.
//
// Objects in sealed segments survive a power cut; all written objects survive the process. Every record
// names its object and has a checksum, which each Read compares.
package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

var (
	// ErrInUse means that another process, or another Disk, has the directory.
	ErrInUse = errors.New("disk: directory is in use")
	// ErrNotOurs means that a directory has files of another program.
	ErrNotOurs = errors.New("disk: not a directory of kvasir")
	// ErrNewer means that a newer build wrote the directory.
	ErrNewer = errors.New("disk: written by a newer build")
)

// Dir is one directory. It should have a file system, and so a disk, of its own.
type Dir struct {
	Path  string
	Bytes int64 // most bytes that its files may take
}

// Options configures a Disk. A zero field means its default.
type Options struct {
	Dirs         []Dir
	SegmentBytes int64 // size of one segment; default 16 MiB to 4 GiB, by the size of Dirs. The largest object is a little smaller
	MinFree      int64 // bytes of each file system that are left to other programs; default 1/20 of it, at most 4 GiB
	WriteBudget  int64 // bytes that may be written to each Dir in a day (UTC); default no limit
	ScrubRate    int64 // bytes per second that are compared with their checksums in the background; default 8 MiB
	FirstTouch   bool  // always keep an object at its first offer; default: while the disk has room, or if that gives more hits
	SecondTouch  bool  // always keep an object only at its second offer
	Inspect      bool  // for tools: make no directory, evict nothing to keep MinFree, and write no checkpoint
	Log          *slog.Logger

	// Sealed says that encrypted objects are written; older builds then do not open the directories. VerifySealed returns an error for an
	// encrypted object whose bytes are not those that were written. Without VerifySealed encrypted objects are not compared.
	Sealed       bool
	VerifySealed func(k kv.Key, m tier.Meta, stored []byte) error

	// Changes gets the objects that are found, added and removed: those of the first Dir as objects of tier Number, and those of the other
	// Dirs under the next numbers.
	Changes *tier.Changes
	Number  uint8
}

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	c.That(len(o.Dirs) > 0, "Dirs", "names no directory")
	seen := map[string]bool{}
	for _, d := range o.Dirs {
		path, err := filepath.Abs(d.Path)
		c.That(err == nil && d.Path != "" && !seen[path], "Dirs", "has %q twice, or it is not a path", d.Path)
		seen[path] = true
		c.That(d.Bytes >= 4*cmp.Or(o.SegmentBytes, smallest), "Dirs", "gives %s %d bytes, which is less than four segments, %d bytes", d.Path, d.Bytes, 4*cmp.Or(o.SegmentBytes, smallest))
	}
	c.That(o.SegmentBytes == 0 || o.SegmentBytes >= minSegment && o.SegmentBytes <= maxSegment && o.SegmentBytes%block == 0,
		"SegmentBytes", "%d is not a multiple of %d from %d to %d", o.SegmentBytes, block, minSegment, int64(maxSegment))
	c.That(!o.FirstTouch || !o.SecondTouch, "SecondTouch", "is asked for together with FirstTouch")
	options.Within(&c, "MinFree", o.MinFree, 0, math.MaxInt64)
	options.Within(&c, "WriteBudget", o.WriteBudget, 0, math.MaxInt64)
	options.Within(&c, "ScrubRate", o.ScrubRate, 0, 1<<40)
	return c.Err()
}

// minFree returns how many of the `all` bytes of a file system are left to other programs.
func (o *Options) minFree(all int64) int64 { return cmp.Or(o.MinFree, min(all/20, 4<<30)) }

// smallest is the default size of the segments of a small directory.
const smallest = 16 << 20

// segmentBytes returns the default size of the segments of a directory: at most 1,024 of
// them, since each is an open file, up to 4 TiB.
func segmentBytes(bytes int64) int64 {
	n := max(smallest, min(bytes/64, 256<<20), min(bytes/1024, maxSegment))
	return n / block * block
}

// Disk is a tier.Tier, tier.Lister and tier.Sized. Its methods are safe for concurrent
// use.
type Disk struct {
	opts    Options
	volumes []*volume
	opened  chan struct{}
	waiting sync.WaitGroup

	admission           admission
	readTime, writeTime *histogram.Histogram
}

// Open opens the directories and makes missing ones. It reads their index in
// the background: until Opened is closed, some objects are missing. Errors:
// ErrInUse, ErrNotOurs, ErrNewer, those of the file system; then nothing was changed.
func Open(o Options) (*Disk, error) {
	return openWith(o, func(path string) (files, error) { return openFiles(path, o.Inspect) }, time.Now)
}

// openWith is Open with the files and the clock of a test.
func openWith(o Options, open func(path string) (files, error), now func() time.Time) (*Disk, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	d := &Disk{opts: o, opened: make(chan struct{}), readTime: histogram.Times(), writeTime: histogram.Times()}
	d.admission.seed, d.admission.touched.Most = maphash.MakeSeed(), mostTouched
	for i, dir := range o.Dirs {
		f, err := open(dir.Path)
		var v *volume
		if err == nil {
			v, err = openVolume(&d.opts, dir, o.Number+uint8(i), f, now)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open %s: %w", dir.Path, err), d.Close())
		}
		d.volumes = append(d.volumes, v)
	}
	d.waiting.Go(func() {
		for _, v := range d.volumes {
			<-v.opened
		}
		close(d.opened)
	})
	return d, nil
}

// openVolume opens a directory. If that fails, it closes f.
func openVolume(o *Options, dir Dir, number uint8, f files, now func() time.Time) (*volume, error) {
	v := &volume{dir: dir, number: number, opts: o, segment: cmp.Or(o.SegmentBytes, segmentBytes(dir.Bytes)), log: o.Log, files: f, now: now}
	v.life, v.stop = context.WithCancel(context.Background())
	v.opened, v.wake, v.full = make(chan struct{}), make(chan struct{}, 1), make(chan struct{}, 1)
	v.journal.turn = make(chan struct{}, 1)
	v.heads.bytes, v.bounces.bytes = 2*block, bouncePiece
	v.mu.index, v.mu.segs, v.mu.gone = newIndex(), map[uint32]*segment{}, map[uint64]map[uint32]struct{}{}
	v.mu.writing, v.mu.dropped = map[kv.Key]int{}, map[kv.Key]struct{}{}
	v.mu.changed = make(chan struct{})
	if err := v.open(); err != nil {
		v.stop()
		return nil, errors.Join(err, v.journal.close(), f.close())
	}
	return v, nil
}

// Flows implements tier.Flowing.
func (d *Disk) Flows() {}

// Opened is closed when the whole index has been read.
func (d *Disk) Opened() <-chan struct{} { return d.opened }

// wait waits for the index.
func (d *Disk) wait(ctx context.Context) error {
	select {
	case <-d.opened:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Stat implements tier.Tier. It reads nothing from the disks.
func (d *Disk) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	clear(metas)
	for _, v := range d.volumes {
		v.stat(keys, metas)
	}
	return ctx.Err()
}

// ReadSummed implements tier.Summing: Read has compared the checksum.
func (d *Disk) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, uint64, error) {
	m, err := d.Read(ctx, k, dst)
	return m, m.Sum, err
}

// Read implements tier.Tier. It drops an object from the index if its bytes are damaged.
func (d *Disk) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	if err := ctx.Err(); err != nil {
		return tier.Meta{}, err
	}
	began := time.Now()
	for _, v := range d.volumes {
		m, err := v.read(ctx, k, dst)
		if err == nil {
			d.readTime.Took(time.Since(began))
			if tier.IsUse(ctx) {
				d.wasRead(&k, m.Len)
			}
		}
		if !errors.Is(err, tier.ErrMissing) {
			return m, err
		}
	}
	return tier.Meta{}, tier.ErrMissing
}

// Write implements tier.Tier. It appends to the first disk in the order of the key, or, if that takes nothing now, to the next one. It
// returns tier.ErrNotKept for an object at its first offer, for lack of room, and beyond the write budget.
func (d *Disk) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if m.Len != int64(len(src)) || m.Len < 1 {
		return fmt.Errorf("disk: write of %d bytes for an object of %d: the lengths must be equal and above 0", len(src), m.Len)
	}
	if m.NoSum {
		m = tier.Meta{Len: m.Len, Sum: xxh3.Hash(src), End: m.End}
	}
	var has [1]tier.Meta
	if err := d.Stat(ctx, []kv.Key{k}, has[:]); err != nil || m.Lasts(has[0]) {
		return err
	}
	if m.Unseals(has[0]) {
		return fmt.Errorf("%w: %w", tier.ErrNotKept, tier.ErrSealed)
	}
	replaced := has[0].Len > 0 && has[0].Seal != m.Seal // m was encrypted with a newer key
	if !(replaced && !tier.IsUse(ctx)) && !d.admits(&k, m.Len) && !replaced {
		d.admission.refused.Add(1)
		return fmt.Errorf("%w: the disk stores an object at its second write, and this is the first", tier.ErrNotKept)
	}
	began := time.Now()
	var err error
	for i, v := range d.order(&k) {
		if e := v.write(ctx, k, m, src); i == 0 || !errors.Is(e, tier.ErrNotKept) {
			err = e
		}
		if err == nil {
			d.writeTime.Took(time.Since(began))
			d.dropElsewhere(k, v)
		}
		if err == nil || ctx.Err() != nil || isFault(err) {
			return err
		}
	}
	return err
}

// order returns the volumes in the order of a key. If a volume is added or removed, the first
// volume changes only for the keys whose first volume it is.
func (d *Disk) order(k *kv.Key) []*volume {
	if len(d.volumes) == 1 {
		return d.volumes
	}
	key := keyHash(k)
	weigh := func(v *volume) float64 { // rendezvous hashing, by size
		at := (float64(mix(key^v.id)>>11) + 0.5) / (1 << 53)
		return -float64(v.dir.Bytes) / math.Log(at)
	}
	all := slices.Clone(d.volumes)
	slices.SortFunc(all, func(a, b *volume) int { return cmp.Compare(weigh(b), weigh(a)) })
	return all
}

// keyHash folds a key to 64 bits. Chunk and namespace are digests already.
func keyHash(k *kv.Key) uint64 {
	return le.Uint64(k.Chunk[:]) ^ mix(le.Uint64(k.Namespace[:])^uint64(k.Rank)<<32^uint64(k.Group))
}

// mix is the finalizer of MurmurHash3.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// dropElsewhere drops a key from all volumes except `but`, to which it was just written.
func (d *Disk) dropElsewhere(k kv.Key, but *volume) {
	for _, v := range d.volumes {
		if v != but {
			v.drop([]kv.Key{k})
		}
	}
}

// Delete implements tier.Tier. It waits until the whole index has been read. When it returns without an
// error, the objects are gone, also after a restart or a power cut.
func (d *Disk) Delete(ctx context.Context, keys []kv.Key) error {
	if len(keys) == 0 {
		return nil
	}
	if err := d.wait(ctx); err != nil {
		return err
	}
	var errs []error
	for _, v := range d.volumes {
		if err := v.begin(); err != nil {
			return err
		}
		v.drop(keys)
		errs = append(errs, v.save())
		v.calls.Done()
	}
	return errors.Join(errs...)
}

// List implements tier.Lister. It waits until the whole index has been read.
func (d *Disk) List(ctx context.Context, f func(kv.Key, tier.Meta) bool) error {
	if err := d.wait(ctx); err != nil {
		return err
	}
	for _, v := range d.volumes {
		more := true
		v.list(func(part []listed) bool {
			for i := range part {
				if m := part[i].meta(); !m.Over(v.now()) {
					more = more && ctx.Err() == nil && f(part[i].key, m)
				}
			}
			return more
		})
		if !more {
			break
		}
	}
	return ctx.Err()
}

// Flush seals the segments with written objects: a power cut after it returns loses none of these objects.
func (d *Disk) Flush(ctx context.Context) error {
	var errs []error
	for _, v := range d.volumes {
		errs = append(errs, v.flush(ctx))
	}
	return errors.Join(errs...)
}

// Close seals the active segment, writes a checkpoint, and unlocks the directories.
func (d *Disk) Close() error {
	var errs []error
	for _, v := range d.volumes {
		if err := v.close(); err != nil {
			errs = append(errs, fmt.Errorf("close %s: %w", v.dir.Path, err))
		}
	}
	d.waiting.Wait()
	return errors.Join(errs...)
}

func (v *volume) close() error {
	v.mu.Lock()
	closed := v.mu.closed
	v.mu.closed = true
	v.mu.Unlock()
	if closed {
		return nil
	}
	v.stop()
	v.calls.Wait()
	v.running.Wait()
	v.mu.Lock()
	v.retireLocked()
	spare := v.mu.spare
	v.mu.spare = nil
	v.mu.Unlock()
	v.sealAll()
	errs := []error{v.save()}
	if spare != nil {
		errs = append(errs, v.evict(spare))
	}
	if v.opts.Inspect && v.whole.Load() {
		errs = append(errs, v.evictEmpty())
	}
	if v.checked != v.mu.all && v.whole.Load() && !v.opts.Inspect {
		errs = append(errs, v.checkpoint())
	}
	for _, s := range v.mu.segs {
		errs = append(errs, s.file.close())
	}
	return errors.Join(append(errs, v.journal.close(), v.files.close())...)
}

func (j *journal) close() error {
	if j.file == nil {
		return nil
	}
	return j.file.close()
}

// isFault reports whether the caller's memory could not be accessed (EFAULT).
func isFault(err error) bool { return errors.Is(err, syscall.EFAULT) }

// isBroken reports whether the disk caused an error.
func isBroken(err error) bool {
	return !isFault(err) && !errors.Is(err, tier.ErrNotKept) && !errors.Is(err, errClosed) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
}

// counters are what a volume has done.
type counters struct {
	reads, readBytes, writes, writeBytes, diskBytes atomic.Int64
	noRoom, overBudget, tooLarge                    atomic.Int64
	corrupt, evicted, evictedObjects, readmitted    atomic.Int64
	scrubbed, openTook, free                        atomic.Int64
}
