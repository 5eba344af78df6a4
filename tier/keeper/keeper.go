// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// Watch is how the keeper learns of reads and writes.
type Watch string

// Watches, the best first.
const (
	WatchAuto     Watch = "auto"     // the best one that is allowed
	WatchFanotify Watch = "fanotify" // events of whole file systems
	WatchInotify  Watch = "inotify"  // events of each directory, up to the user's limit of watches
	WatchLook     Watch = "look"     // no events: the directories are read again and again, and access times tell the uses
)

// Options configures a Keeper. A zero field means its default.
type Options struct {
	Roots    []string      // directories of vLLM's fs tier or of LMCache's fs adapters; required
	Limit    int64         // bytes of all files together; 0: none
	MinFree  int64         // bytes that are left free in each root's file system
	TTL      time.Duration // a file that was not used for longer is unlinked; 0: never
	StateDir string        // where times of use are saved; "": after a restart only access times count
	Watch    Watch         // default WatchAuto
	Changes  int           // number of changes of chunks to keep for Keeper.Changes, 64 bytes each; 0: Keeper.Changes is not used
	Log      *slog.Logger

	now           func() time.Time
	free          func(*rootDir) (int64, error) // bytes that its file system has available
	notesEvery    time.Duration
	pathsEvery    time.Duration // between two looks at which directories the paths of the roots lead to
	countOwnReads bool          // reads of this process count: for tests, which are engine and keeper in one
}

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	c.That(len(o.Roots) > 0, "Roots", "names no directory")
	c.That(o.Limit > 0 || o.MinFree > 0 || o.TTL > 0, "Limit", "is 0, and so are MinFree and TTL: set at least one")
	options.Within(&c, "Limit", o.Limit, 0, 1<<60)
	options.Within(&c, "MinFree", o.MinFree, 0, 1<<60)
	options.Within(&c, "TTL", o.TTL, 0, 100*365*24*time.Hour)
	options.Within(&c, "Changes", o.Changes, 0, 1<<24)
	c.That(slices.Contains([]Watch{"", WatchAuto, WatchFanotify, WatchInotify, WatchLook}, o.Watch), "Watch", "%q is none of auto, fanotify, inotify, look", o.Watch)
	return c.Err()
}

// Keeper keeps directories below their limit, from Open to Close.
type Keeper struct {
	o     Options
	log   *slog.Logger
	now   func() time.Time
	roots []*rootDir
	lock  *control
	notes *notes

	fan         *fanotify
	ino         *inotify
	eventsEnded atomic.Bool // events no longer come

	collecting sync.Mutex // held while collect reads all chunks; before mu

	freeing  sync.Mutex             // before mu
	rooms    map[uint64]*systemRoom // by device of the file system; under freeing
	mu       sync.Mutex
	books    *books
	changes  *changes // nil without readers
	reserve  reserve
	pending  int64 // bytes of files that are being unlinked
	arranged bool  // the first look is over
	looks    uint32
	looking  time.Duration // duration of the last look
	lost     int64         // times that the kernel dropped events
	refused  error         // why files cannot be unlinked

	full  chan struct{} // there is something to unlink
	again chan struct{} // events were lost: look again
	end   context.CancelFunc
	done  sync.WaitGroup
}

// Open starts a keeper of directories. It fails if a directory is not an engine's, or if another keeper of this host has it.
func Open(o Options) (_ *Keeper, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	k := &Keeper{o: o, log: o.Log, now: o.now, rooms: map[uint64]*systemRoom{}, full: make(chan struct{}, 1), again: make(chan struct{}, 1)}
	if k.log == nil {
		k.log = slog.New(slog.DiscardHandler)
	}
	if k.now == nil {
		k.now = time.Now
	}
	if k.o.free == nil {
		k.o.free = freeBytes
	}
	k.o.notesEvery, k.o.pathsEvery = cmp.Or(k.o.notesEvery, notesEvery), cmp.Or(k.o.pathsEvery, pathsEvery)
	defer func() {
		if err != nil {
			err = errors.Join(err, k.release())
		}
	}()
	for _, path := range o.Roots {
		r, err := openRoot(path)
		if err != nil {
			return nil, err
		}
		for _, other := range k.roots {
			if within(r.place(), other.place()) || within(other.place(), r.place()) {
				return nil, errors.Join(fmt.Errorf("%s and %s are one directory, or one lies in the other", path, other.path), r.dir.Close())
			}
		}
		r.number = uint16(len(k.roots))
		k.roots = append(k.roots, r)
	}
	if k.lock, err = openControl(k.roots, k.Stats); err != nil {
		return nil, err
	}
	k.books = newBooks(rand.Uint64())
	if o.Changes > 0 {
		k.changes = newChanges(o.Changes, rand.Uint64())
		k.books.changes = k.changes
	}
	k.reserve = newReserve(o.Limit, k.now())
	if k.notes, err = openNotes(o.StateDir, k.roots); err != nil {
		return nil, err
	}
	if err := k.openWatch(); err != nil {
		return nil, err
	}
	var ctx context.Context
	ctx, k.end = context.WithCancel(context.Background())
	k.done.Go(k.readEvents)
	k.done.Go(func() { k.evict(ctx) })
	k.done.Go(func() { k.lookAgain(ctx) })
	k.done.Go(func() { k.noteAgain(ctx) })
	return k, nil
}

func openRoot(path string) (*rootDir, error) {
	if err := checkRoot(path); err != nil {
		return nil, err
	}
	real, err := realPath(path)
	if err != nil {
		return nil, err
	}
	d, err := os.Open(real)
	if err != nil {
		return nil, err
	}
	r := &rootDir{path: path, dir: d, dirs: map[string]uint32{}}
	r.real.Store(&real)
	var st unix.Stat_t
	if unix.Fstat(int(d.Fd()), &st) == nil { // before the first look
		r.changed = st.Mtim
	}
	return r, nil
}

func realPath(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	return filepath.Abs(real)
}

func within(path, parent string) bool { return path == parent || strings.HasPrefix(path, parent+"/") }

// openWatch opens the source of events that Options.Watch names, or for WatchAuto the best one that is allowed.
func (k *Keeper) openWatch() error {
	want := k.o.Watch
	if want == "" {
		want = WatchAuto
	}
	var why error
	if want == WatchAuto || want == WatchFanotify {
		k.fan, why = openFanotify(k.roots, func(thread int32) bool { return !k.o.countOwnReads && k.lock.own(thread) })
		if why == nil {
			return nil
		}
		if want == WatchFanotify {
			return why
		}
		k.log.Info("the kernel refuses events of whole file systems: directories are watched one by one", "reason", why)
	}
	if want == WatchLook {
		return nil
	}
	k.ino, why = openInotify(k.madeDirectory)
	if why != nil && want == WatchInotify {
		return why
	}
	if why != nil {
		k.log.Warn("the kernel gives no events: the directories are read again and again", "reason", why)
	}
	for _, r := range k.roots {
		k.watch(r, "")
	}
	return nil
}

// watch adds a directory to inotify, if inotify is used.
func (k *Keeper) watch(r *rootDir, dir string) {
	if k.ino != nil {
		k.ino.watch(r, dir)
	}
}

// madeDirectory watches a directory that an engine just made, and looks for files that came before the watch.
func (k *Keeper) madeDirectory(r *rootDir, dir string) {
	rank, leaf, _ := strings.Cut(dir, "/")
	if _, ok := rankDirectory(rank); !ok {
		return
	}
	if _, ok := leafGroup(leaf); leaf != "" && !ok && !isHex(leaf, 3) {
		return
	}
	k.watch(r, dir)
	fd, err := openDirectory(int(r.dir.Fd()), dir)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if strings.Contains(leaf, "/") {
		k.mu.Lock()
		number := k.looks
		k.mu.Unlock()
		_ = k.lookAt(r, rank, leaf, fd, number) // the next look finds what this one misses
		return
	}
	names, _ := subdirectories(fd, func(string) bool { return true })
	for _, n := range names {
		k.madeDirectory(r, dir+"/"+n)
	}
}

// directory returns the number of a rank's directory, or with rank "" of an LMCache root. Callers hold k.mu.
func (k *Keeper) directory(r *rootDir, rank string) (uint32, bool) {
	if n, ok := r.dirs[rank]; ok {
		return n, true
	}
	d := &directory{root: r, path: rank, layout: lmcacheLayout}
	if rank != "" {
		d.layout = vllmLayout
		base, ok := rankDirectory(rank)
		if !ok || len(r.dirs) >= maxRanks {
			return 0, false
		}
		model, err := modelOf(r.path, base)
		if err != nil {
			k.log.Warn("the model of a directory is not known", "directory", r.join(rank), "reason", err)
			model = base
		}
		d.model = model
	}
	n := uint32(len(k.books.dirs))
	k.books.dirs = append(k.books.dirs, d)
	r.dirs[rank] = n
	return n, true
}

// maxRanks bounds the directories of ranks below one root. The keeper does not know the files of further ones, and never unlinks them.
const maxRanks = 1 << 14

// path is the path of a file below its root. Callers hold k.mu.
func (k *Keeper) path(n uint32) string {
	f := k.books.file(n)
	if d := k.books.dirs[f.dir]; d.layout == vllmLayout {
		return d.path + "/" + f.id.leaf() + "/" + f.id.name()
	}
	return k.books.names[n]
}

// readEvents reads and applies events until the source is closed.
func (k *Keeper) readEvents() {
	read := func(out []event) ([]event, error) { return out, os.ErrClosed }
	switch {
	case k.fan != nil:
		read = k.fan.read
	case k.ino != nil:
		read = k.ino.read
	}
	var batch []event
	for {
		var err error
		if batch, err = read(batch[:0]); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				k.log.Error("events of the kernel cannot be read: the directories are read again and again", "err", err)
				k.eventsEnded.Store(true)
				signal(k.again)
			}
			return
		}
		k.applyEvents(batch)
	}
}

// applyEvents applies events to the books.
func (k *Keeper) applyEvents(batch []event) {
	sizes := make([]int64, len(batch))
	for i, e := range batch {
		sizes[i] = -1
		if e.act == appeared {
			sizes[i] = sizeOf(e.root, e.dir+"/"+e.name)
		}
	}
	now := k.now().UnixMicro()
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, e := range batch {
		if e.act == lost {
			k.lost++
			signal(k.again)
			continue
		}
		k.applyEvent(e, sizes[i], now)
	}
	k.wakeIfFull()
}

func sizeOf(r *rootDir, name string) int64 {
	var s unix.Stat_t
	if unix.Fstatat(int(r.dir.Fd()), strings.TrimPrefix(name, "/"), &s, unix.AT_SYMLINK_NOFOLLOW) != nil || s.Mode&unix.S_IFMT != unix.S_IFREG {
		return -1
	}
	return s.Size
}

// applyEvent applies an event. Callers hold k.mu.
func (k *Keeper) applyEvent(e event, size, now int64) {
	rank, leaf, _ := strings.Cut(e.dir, "/")
	key, ok := idIn(rank, leaf, e.name)
	if !ok || e.act == opened && (e.own || e.thread == 0 && k.lock.helping()) {
		return
	}
	dir, ok := k.directory(e.root, rank)
	if !ok {
		return
	}
	d := k.books.dirs[dir]
	n, _ := k.books.find(dir, key)
	switch e.act {
	case gone:
		if n != 0 {
			k.books.remove(n)
			d.removedByOthers++
		}
		return
	case opened:
		if n == 0 {
			return // the file is gone again, or a look will find it
		}
		d.reads++
		d.readBytes += k.books.file(n).size
	case appeared:
		if size < 0 {
			return // the file is gone again
		}
		if n == 0 {
			n = k.books.add(dir, key, e.name, size, now)
			k.books.file(n).look = k.looks
		} else {
			k.books.resize(n, size)
		}
		if f := k.books.file(n); f.counted {
			f.counted = false // a look was faster than the event
		} else {
			d.wrote(1, size)
		}
		k.reserve.file = max(k.reserve.file, size)
	}
	if k.arranged {
		k.books.recordUse(n, e.thread, now)
	} else {
		k.books.file(n).usedAt = now
	}
}

// wakeIfFull wakes the goroutine that unlinks, if the files take more than they may. Callers hold k.mu.
func (k *Keeper) wakeIfFull() {
	if k.o.Limit > 0 && k.arranged && k.books.bytes > k.reserve.aim() {
		signal(k.full)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// lookAgain looks at the directories at the start, when events were lost, and from time to time: often if no events come.
func (k *Keeper) lookAgain(ctx context.Context) {
	for {
		began := k.now()
		if k.ino != nil {
			k.ino.recount()
		}
		for _, r := range k.roots {
			if err := k.look(ctx, r); err != nil && ctx.Err() == nil {
				k.log.Warn("a directory cannot be read", "directory", r.path, "err", err)
			}
		}
		if ctx.Err() != nil {
			return
		}
		k.mu.Lock()
		k.looking = k.now().Sub(began)
		first := !k.arranged
		if first {
			k.books.arrange()
			k.arranged = true
			k.notes.drop()
			if k.changes != nil {
				k.changes.begin()
			}
		}
		files, bytes, pause := k.books.count, k.books.bytes, k.pause()
		k.wakeIfFull()
		k.mu.Unlock()
		if first {
			k.log.Info("the keeper knows all files", "files", files, "bytes", bytes, "limit", k.o.Limit, "watch", k.watching(), "seconds", k.looking.Seconds())
			runtime.GC() // frees the lists that only the first look needed
		}
		if !k.wait(ctx, pause) {
			return
		}
	}
}

// wait waits until it is time to look again: after a pause, when events were lost, when the directory of a file was not found, or when a
// directory was replaced. It reports false when the keeper ends.
func (k *Keeper) wait(ctx context.Context, pause time.Duration) bool {
	next := time.NewTimer(pause)
	defer next.Stop()
	soon := false
	tick := time.NewTicker(k.o.pathsEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-k.again:
			return true
		case <-next.C:
			return true
		case <-tick.C:
			if k.followAll() {
				return true
			}
			if !soon && (k.anyMoved() || k.anyMissed()) {
				soon = true
				next.Reset(min(pause, k.restOfLooks()))
			}
		}
	}
}

// pause is the time to the next look. Callers hold k.mu.
func (k *Keeper) pause() time.Duration {
	switch {
	case k.eventsEnded.Load():
	case k.fan != nil && !k.shared():
		return 10 * time.Minute
	case k.fan != nil:
		return max(30*time.Second, 4*k.looking)
	case k.ino != nil:
		if _, more := k.ino.watched(); more == 0 && !k.shared() {
			return time.Minute
		}
	}
	return max(time.Second, 4*k.looking)
}

// shared reports whether other hosts may write to a root.
func (k *Keeper) shared() bool { return slices.ContainsFunc(k.roots, (*rootDir).shared) }

// watching says how the keeper learns of reads and writes now.
func (k *Keeper) watching() Watch {
	switch {
	case k.eventsEnded.Load():
		return WatchLook
	case k.fan != nil:
		return WatchFanotify
	case k.ino != nil:
		return WatchInotify
	}
	return WatchLook
}

// Close ends the keeper. It saves the times of use.
func (k *Keeper) Close() error {
	k.end()
	var err error
	if k.fan != nil {
		err = k.fan.close()
	}
	if k.ino != nil {
		err = k.ino.close()
	}
	k.done.Wait()
	return errors.Join(err, k.saveNotes(), k.release())
}

func (k *Keeper) release() error {
	var errs []error
	if k.lock != nil {
		errs = append(errs, k.lock.close())
	}
	if k.notes != nil {
		errs = append(errs, k.notes.close())
	}
	for _, r := range k.roots {
		errs = append(errs, r.dir.Close())
	}
	return errors.Join(errs...)
}
