// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"path"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// victim is a file that left the books and is to be unlinked.
type victim struct {
	id      id
	root    *rootDir
	dir     uint32
	name    string // below the root
	size    int64
	usedAt  int64
	expired bool
}

// unlinkBatch is how many files leave the books at once. When that is not enough, so many goroutines unlink: as many as vLLM
// has threads that write.
const (
	unlinkBatch = 16
	unlinkers   = 16
)

// evict unlinks files while there are too many bytes, and those whose time to live is over.
func (k *Keeper) evict(ctx context.Context) {
	every := time.Second
	if k.o.MinFree > 0 {
		every = 100 * time.Millisecond
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	notes := time.NewTicker(notesEvery)
	defer notes.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-notes.C:
			if err := k.saveNotes(); err != nil {
				k.log.Warn("times of use cannot be noted", "err", err)
			}
		case <-k.full:
		case <-tick.C:
		}
		if k.evictSome() { // more than a batch: engines write fast
			var crew sync.WaitGroup
			for range unlinkers {
				crew.Go(func() {
					for ctx.Err() == nil && k.evictSome() {
					}
				})
			}
			crew.Wait()
		}
	}
}

// evictSome unlinks a few files. It reports whether there is more to do now.
func (k *Keeper) evictSome() bool {
	short := k.shortOfFree()
	k.mu.Lock()
	if !k.arranged {
		k.mu.Unlock()
		return false
	}
	now := k.now()
	if k.o.Limit > 0 {
		k.reserve.note(k.books.bytes+k.pending-k.reserve.aim(), now)
	}
	victims := k.pick(now, short)
	k.mu.Unlock()
	var failed error
	for i, v := range victims {
		err := k.unlink(v.root, v.name)
		k.unlinked(v, err)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			failed = err
			for _, rest := range victims[i+1:] {
				k.unlinked(rest, err)
			}
			break
		}
	}
	k.say(failed, len(victims))
	return len(victims) == unlinkBatch && failed == nil
}

// pick takes the next victims out of the books. Callers hold k.mu.
func (k *Keeper) pick(now time.Time, short map[*rootDir]int64) (out []victim) {
	oldest := int64(0)
	if k.o.TTL > 0 {
		oldest = now.Add(-k.o.TTL).UnixMicro()
	}
	for n := k.books.coldest(); n != 0 && len(out) < unlinkBatch; {
		f := k.books.file(n)
		d := k.books.dirs[f.dir]
		over := k.o.Limit > 0 && k.books.bytes > k.reserve.aim()
		v := victim{id: f.id, root: d.root, dir: f.dir, size: f.size, usedAt: f.usedAt, expired: f.usedAt < oldest}
		if !over && !v.expired && len(short) == 0 {
			break
		}
		next := f.next
		if over || v.expired || short[d.root] > 0 {
			v.name = k.path(n)
			k.books.remove(n)
			k.pending += v.size
			if short[d.root] -= v.size; short[d.root] <= 0 {
				delete(short, d.root)
			}
			out = append(out, v)
		}
		n = next
	}
	return out
}

// shortOfFree returns the bytes by which the file systems of roots have less than MinFree available.
func (k *Keeper) shortOfFree() map[*rootDir]int64 {
	short := map[*rootDir]int64{}
	if k.o.MinFree == 0 {
		return short
	}
	for _, r := range k.roots {
		var s unix.Statfs_t
		if unix.Fstatfs(int(r.dir.Fd()), &s) == nil {
			if free := int64(s.Bavail) * s.Bsize; free < k.o.MinFree {
				short[r] = k.o.MinFree - free
			}
		}
	}
	return short
}

// unlink removes a file below a root. It follows no symbolic link.
func (k *Keeper) unlink(r *rootDir, name string) error {
	at := int(r.dir.Fd())
	dir, file := path.Split(name)
	for _, part := range strings.Split(strings.TrimSuffix(dir, "/"), "/") {
		if part == "" {
			continue
		}
		fd, err := unix.Openat(at, part, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if at != int(r.dir.Fd()) {
			unix.Close(at)
		}
		if err != nil {
			return err
		}
		at = fd
	}
	err := unix.Unlinkat(at, file, 0)
	if at != int(r.dir.Fd()) {
		unix.Close(at)
	}
	return err
}

// unlinked enters what became of a victim. A file that cannot be unlinked is back in the books.
func (k *Keeper) unlinked(v victim, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pending -= v.size
	d := k.books.dirs[v.dir]
	switch {
	case err == nil:
		d.evicted++
		d.evictedBytes += v.size
		if v.expired {
			d.expired++
		}
	case errors.Is(err, unix.ENOENT):
		d.removedByOthers++
	default:
		if n, _ := k.books.find(v.dir, v.id); n == 0 {
			n = k.books.add(v.dir, v.id, path.Base(v.name), v.size, v.usedAt)
			k.books.before(n, k.books.file(0).next) // at the cold end
			k.books.file(n).look = k.looks
		}
	}
}

// say warns when files cannot be unlinked, and when they can again.
func (k *Keeper) say(err error, tried int) {
	k.mu.Lock()
	before := k.refused
	if err != nil || tried > 0 {
		k.refused = err
	}
	k.mu.Unlock()
	switch {
	case err != nil && before == nil:
		k.log.Warn("files cannot be unlinked: the limit does not hold", "err", err)
	case err == nil && tried > 0 && before != nil:
		k.log.Info("files can be unlinked again")
	}
}
