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

// victim is a file that was taken out of the books to be unlinked.
type victim struct {
	id      id
	root    *rootDir
	dir     uint32
	name    string // below the root
	size    int64
	usedAt  int64
	expired bool
}

// unlinkBatch is how many files are taken out of the books at once. If one batch is not enough, unlinkers goroutines unlink: as many as vLLM
// has writing threads.
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
	for {
		select {
		case <-ctx.Done():
			return
		case <-k.full:
		case <-tick.C:
			for ctx.Err() == nil && k.retry() {
			}
		}
		if k.evictSome() { // more than one batch was due: engines write fast
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
	victims := k.choose()
	var failed error
	gone := 0
	for _, v := range victims {
		err := k.unlink(v.root, v.name)
		k.unlinked(v, err)
		if err == nil || isGone(err) {
			gone++
		} else {
			failed = err
		}
	}
	k.logUnlinkState(failed)
	return len(victims) == unlinkBatch && gone > 0
}

// choose takes the next victims out of the books.
func (k *Keeper) choose() []victim {
	var short shortage
	if k.o.MinFree > 0 { // one goroutine at a time computes the shortage and takes its victims' bytes off it
		k.freeing.Lock()
		defer k.freeing.Unlock()
		short = k.shortOfFree()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.arranged {
		return nil
	}
	now := k.now()
	if k.o.Limit > 0 {
		k.reserve.note(k.books.bytes+k.pending-k.reserve.aim(), now)
	}
	return k.pick(now, short)
}

// due reports whether a file must be unlinked, and whether its time to live is over. It must be unlinked if that time is over, if all files
// exceed the limit, or if its root is in `short`, which lacks free space. Callers hold k.mu.
func (k *Keeper) due(f *file, now time.Time, short shortage) (due, expired bool) {
	over := k.o.Limit > 0 && k.books.bytes > k.reserve.aim()
	expired = k.o.TTL > 0 && f.usedAt < now.Add(-k.o.TTL).UnixMicro()
	return over || expired || short.of(k.books.dirs[f.dir].root), expired
}

// pick takes the next victims out of the books, unlinkBatch at most, and subtracts their bytes from what `short` lacks. Callers hold k.mu.
func (k *Keeper) pick(now time.Time, short shortage) (out []victim) {
	for n := k.books.coldest(); n != 0 && len(out) < unlinkBatch; {
		f := k.books.file(n)
		next := f.next
		due, expired := k.due(f, now, short)
		if !due && !short.any() {
			break
		}
		if due {
			v := k.victim(n)
			v.expired = expired
			k.books.remove(n)
			k.pending += v.size
			k.reserve.took(v.size)
			v.root.pending.Add(v.size)
			short.take(v.root, v.size)
			out = append(out, v)
		}
		n = next
	}
	return out
}

// victim returns file n as a victim. Callers hold k.mu.
func (k *Keeper) victim(n uint32) victim {
	f := k.books.file(n)
	return victim{id: f.id, root: k.books.dirs[f.dir].root, dir: f.dir, name: k.path(n), size: f.size, usedAt: f.usedAt}
}

// shortage says how many bytes the file system of each root lacks of MinFree. Roots of one file system share a systemRoom.
type shortage map[*rootDir]*systemRoom

// systemRoom is the room of a file system. Some file systems (XFS, btrfs) show unlinked bytes as free only later. So until half of
// them show, or freeLag is over, the keeper unlinks only the bytes that were missing at the beginning and those written since.
type systemRoom struct {
	free    int64 // bytes
	pending int64 // bytes of files that are being unlinked
	written int64 // bytes that were written to its roots
	lacks   int64 // bytes missing to MinFree; pending ones count as free

	before        int64 // bytes that were free at beganAt
	writtenBefore int64
	missing       int64 // bytes that were missing at beganAt
	taken         int64 // bytes of files unlinked since beganAt
	beganAt       time.Time
}

// freeLag is how long the keeper waits for unlinked bytes to show as free: see systemRoom.
const freeLag = 5 * time.Second

func (s shortage) of(r *rootDir) bool { return s[r] != nil && s[r].lacks > 0 }

func (s shortage) any() bool {
	for _, room := range s {
		if room.lacks > 0 {
			return true
		}
	}
	return false
}

func (s shortage) take(r *rootDir, n int64) {
	if room := s[r]; room != nil {
		room.lacks -= n
		room.taken += n
	}
}

// look sets s.lacks to the bytes that must be unlinked until `least` bytes are free. While the file system does not show yet what was
// unlinked before, it counts that as free.
func (s *systemRoom) look(least int64, now time.Time) {
	s.lacks = least - s.free - s.pending
	came := max(s.written-s.writtenBefore, s.before-s.free) // other programs write to it, too: at least this many bytes
	if s.taken > 0 && s.free < s.before-came+s.taken/2 && now.Sub(s.beganAt) < freeLag {
		s.lacks = min(s.lacks, s.missing+came-s.taken)
		return
	}
	s.before, s.writtenBefore, s.missing, s.taken, s.beganAt = s.free, s.written, s.lacks, 0, now
}

// shortOfFree returns the shortage of all roots. Callers hold k.freeing.
func (k *Keeper) shortOfFree() shortage {
	short, now := shortage{}, k.now()
	seen := map[*systemRoom]bool{}
	for _, r := range k.roots {
		pending, written := r.pending.Load(), r.written.Load() // before the free bytes: bytes unlinked in between count twice until the next look
		var st unix.Stat_t
		free, err := k.o.free(r)
		if err = errors.Join(err, unix.Fstat(int(r.dir.Fd()), &st)); err != nil {
			continue
		}
		room := k.rooms[st.Dev]
		if room == nil {
			room = &systemRoom{}
			k.rooms[st.Dev] = room
		}
		if !seen[room] {
			room.free, room.pending, room.written = free, 0, 0
		}
		room.pending += pending
		room.written += written
		seen[room], short[r] = true, room
	}
	for room := range seen {
		room.look(k.o.MinFree, now)
	}
	return short
}

// freeBytes returns what a root's file system has available.
func freeBytes(r *rootDir) (int64, error) {
	var s unix.Statfs_t
	err := unix.Fstatfs(int(r.dir.Fd()), &s)
	return int64(s.Bavail) * s.Bsize, err
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

// unlinked records the result for a victim. A file that could not be unlinked goes back into the books.
func (k *Keeper) unlinked(v victim, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pending -= v.size
	k.books.dirs[v.dir].root.pending.Add(-v.size)
	if err == nil || isGone(err) {
		k.enterEnd(&v, err)
		return
	}
	n, _ := k.books.find(v.dir, v.id)
	if n == 0 {
		n = k.books.add(v.dir, v.id, path.Base(v.name), v.size, v.usedAt)
		k.books.file(n).look = k.looks
	}
	k.books.unlink(n) // out of the list, so that the files after it can be evicted
	k.books.stuck[n] = struct{}{}
}

// enterEnd counts a file that is gone: as evicted by this keeper, or with an err as removed by others. Callers hold k.mu.
func (k *Keeper) enterEnd(v *victim, err error) {
	d := k.books.dirs[v.dir]
	if err != nil {
		d.removedByOthers++
		return
	}
	d.evicted++
	d.evictedBytes += v.size
	if v.expired {
		d.expired++
	}
}

// retry tries again to unlink up to unlinkBatch files that could not be unlinked. It reports whether a whole batch was removed.
func (k *Keeper) retry() bool {
	stuck := k.stuck()
	gone := 0
	for _, v := range stuck {
		err := k.unlink(v.root, v.name)
		if err != nil && !isGone(err) {
			continue
		}
		gone++
		k.mu.Lock()
		if n, _ := k.books.find(v.dir, v.id); n != 0 {
			k.books.remove(n)
			k.enterEnd(&v, err)
		}
		k.mu.Unlock()
	}
	k.logUnlinkState(nil)
	return gone == unlinkBatch
}

// stuck returns up to unlinkBatch files that could not be unlinked and are still due.
func (k *Keeper) stuck() (out []victim) {
	var short shortage
	if k.o.MinFree > 0 {
		k.freeing.Lock()
		defer k.freeing.Unlock()
		short = k.shortOfFree()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.now()
	for n := range k.books.stuck {
		if due, expired := k.due(k.books.file(n), now, short); due {
			v := k.victim(n)
			v.expired = expired
			out = append(out, v)
		}
		if len(out) == unlinkBatch {
			break
		}
	}
	return out
}

// logUnlinkState logs when files cannot be unlinked, and when all can be unlinked again.
func (k *Keeper) logUnlinkState(err error) {
	k.mu.Lock()
	before := k.refused
	if err != nil || len(k.books.stuck) == 0 {
		k.refused = err
	}
	after := k.refused
	k.mu.Unlock()
	switch {
	case err != nil && before == nil:
		k.log.Warn("files cannot be unlinked: the limit may not hold", "err", err)
	case before != nil && after == nil:
		k.log.Info("files can be unlinked again")
	}
}
