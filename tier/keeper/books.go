// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/zeebo/xxh3"
)

// books is the list of the files of all directories, in the order of their eviction. It takes 80 bytes a file. Callers hold the keeper's
// lock.
//
// A job is the files that one thread of an engine wrote or read in one go. Jobs are ordered from the least to the most recently used.
// Inside a job the last file comes first, because a chunk is of use only with the chunks before it.
type books struct {
	slabs [][]file // file 0 is both ends of the list
	free  uint32   // first of the removed files, which are linked by next
	used  uint32   // files that were ever made, file 0 included
	index []uint32 // open addressing; 0 is empty
	seed  uint64
	count int
	bytes int64
	dirs  []*directory
	jobs  map[worker]*job

	lastJob uint32
	names   map[uint32]string   // names of LMCache files
	stuck   map[uint32]struct{} // files that could not be unlinked; such a file is not in the list until it is used again
	changes *changes            // records which files come and go; nil: not recorded
}

type file struct {
	id         id
	dir        uint32
	prev, next uint32 // from cold to hot
	look       uint32 // number of the last look at the directory that saw the file
	job        uint32 // number of its job; 0: no job that may still grow
	counted    bool   // counted as written before its event came
	size       int64
	usedAt     int64 // microseconds since 1970
}

// directory is a directory with files: that of a rank (vLLM), or a root (LMCache).
type directory struct {
	root   *rootDir
	path   string // below the root; "" for the root itself
	layout layout
	model  string
	count  int
	bytes  int64
	usage
}

// wrote counts files that appeared. Negative numbers take back files that were counted but had not appeared.
func (d *directory) wrote(files, bytes int64) {
	d.writes += files
	d.writtenBytes += bytes
	d.root.written.Add(bytes)
}

// usage counts what engines did with files.
type usage struct {
	reads, readBytes      int64 // files that were opened
	writes, writtenBytes  int64 // files that appeared
	evicted, evictedBytes int64 // files that the keeper unlinked
	expired               int64 // of these, those past their time to live
	removedByOthers       int64
}

// worker is a thread that uses a directory. thread is 0 if events do not name it.
type worker struct {
	dir    uint32
	thread int32
}

type job struct {
	last        uint32 // the file that came last, the coldest one
	number      uint32
	began, seen int64 // microseconds since 1970: of its first and its last use
}

// Files that one thread uses without a pause of jobPause are one job, for at most jobTime. If two jobs are taken for one, their files
// change places, which does no harm, because they are equally old. If one job is taken for two, its beginning is evicted before its end.
const (
	jobPause = int64(200 * time.Millisecond / time.Microsecond)
	jobTime  = int64(2 * time.Second / time.Microsecond)
	maxJobs  = 4096 // jobs that may still grow; beyond them those that paused end, or else all: a thread's next file begins a new job
)

// slabFiles is the number of files for which memory is allocated at a time.
const slabFiles = 1 << 14

func newBooks(seed uint64) *books {
	b := &books{seed: seed, index: make([]uint32, 1<<12), jobs: map[worker]*job{}, names: map[uint32]string{}, stuck: map[uint32]struct{}{}}
	b.grow() // file 0
	return b
}

func (b *books) grow() uint32 {
	if int(b.used) == len(b.slabs)*slabFiles {
		b.slabs = append(b.slabs, make([]file, slabFiles))
	}
	b.used++
	return b.used - 1
}

func (b *books) file(n uint32) *file { return &b.slabs[n/slabFiles][n%slabFiles] }

func (b *books) slot(dir uint32, k *id) uint64 {
	return xxh3.HashSeed(k.hash[:k.bytes], b.seed+uint64(dir)<<16+uint64(k.group)) & uint64(len(b.index)-1)
}

// find returns the file's number, 0 for none, and its slot in the index.
func (b *books) find(dir uint32, k id) (n uint32, at uint64) {
	for at = b.slot(dir, &k); b.index[at] != 0; at = (at + 1) & uint64(len(b.index)-1) {
		if f := b.file(b.index[at]); f.dir == dir && f.id == k {
			return b.index[at], at
		}
	}
	return 0, at
}

// add makes a file that is not in the list yet.
func (b *books) add(dir uint32, k id, name string, size, usedAt int64) uint32 {
	if b.count*2 >= len(b.index) {
		b.rehash()
	}
	n := b.free
	if n != 0 {
		b.free = b.file(n).next
	} else {
		n = b.grow()
	}
	*b.file(n) = file{id: k, dir: dir, usedAt: usedAt, prev: n, next: n}
	_, at := b.find(dir, k)
	b.index[at] = n
	d := b.dirs[dir]
	if d.layout == lmcacheLayout {
		b.names[n] = name
	}
	b.count++
	d.count++
	b.resize(n, size)
	if b.changes != nil {
		b.changes.set(d, k, name, true)
	}
	return n
}

// resize records a file's new length.
func (b *books) resize(n uint32, size int64) {
	f := b.file(n)
	b.bytes += size - f.size
	b.dirs[f.dir].bytes += size - f.size
	f.size = size
}

func (b *books) rehash() {
	old := b.index
	b.index = make([]uint32, 2*len(old))
	for _, n := range old {
		if n != 0 {
			f := b.file(n)
			_, at := b.find(f.dir, f.id)
			b.index[at] = n
		}
	}
}

// remove forgets a file.
func (b *books) remove(n uint32) {
	f := b.file(n)
	b.unlink(n)
	_, at := b.find(f.dir, f.id)
	mask := uint64(len(b.index) - 1)
	b.index[at] = 0
	for next := (at + 1) & mask; b.index[next] != 0; next = (next + 1) & mask { // move up the files in the next slots
		m := b.index[next]
		b.index[next] = 0
		g := b.file(m)
		_, to := b.find(g.dir, g.id)
		b.index[to] = m
	}
	d := b.dirs[f.dir]
	if b.changes != nil {
		b.changes.set(d, f.id, b.names[n], false)
	}
	d.count--
	d.bytes -= f.size
	b.bytes -= f.size
	b.count--
	delete(b.names, n)
	delete(b.stuck, n)
	*f = file{next: b.free}
	b.free = n
}

func (b *books) unlink(n uint32) {
	f := b.file(n)
	if f.next != n {
		b.file(f.prev).next, b.file(f.next).prev = f.next, f.prev
	}
	f.prev, f.next = n, n
}

// before puts a file that is not in the list on the cold side of another one; with hotter 0 at the hot end of the list.
func (b *books) before(n, hotter uint32) {
	f, h := b.file(n), b.file(hotter)
	f.prev, f.next = h.prev, hotter
	b.file(h.prev).next = n
	h.prev = n
}

// coldest is the next file to evict, 0 for none.
func (b *books) coldest() uint32 { return b.file(0).next }

// recordUse records that a thread wrote or read a file at the time `now`.
func (b *books) recordUse(n uint32, thread int32, now int64) {
	f := b.file(n)
	f.usedAt = now
	w := worker{f.dir, thread}
	j := b.jobs[w]
	if j != nil && now-j.seen <= jobPause && j.seen-now <= jobPause && now-j.began <= jobTime && b.file(j.last).job == j.number { // a clock may step back
		j.seen = now
		if j.last != n {
			b.unlink(n)
			b.before(n, j.last)
			f.job, j.last = j.number, n
		}
		return
	}
	b.unlink(n)
	b.before(n, 0)
	if j == nil {
		if len(b.jobs) >= maxJobs {
			maps.DeleteFunc(b.jobs, func(_ worker, j *job) bool { return now-j.seen > jobPause })
		}
		if len(b.jobs) >= maxJobs {
			clear(b.jobs)
		}
		j = &job{}
		b.jobs[w] = j
	}
	b.lastJob++
	if b.lastJob == 0 {
		b.lastJob = 1 // 0 is no job
	}
	f.job = b.lastJob
	*j = job{last: n, number: b.lastJob, began: now, seen: now}
}

// arrange sorts all files by the times of their last use. Files of one directory without a pause of jobPause between them
// count as one job.
func (b *books) arrange() {
	clear(b.jobs)
	all := make([]uint32, 0, b.count)
	for _, n := range b.index {
		if n != 0 {
			all = append(all, n)
		}
	}
	slices.SortFunc(all, func(x, y uint32) int {
		f, g := b.file(x), b.file(y)
		return cmp.Or(cmp.Compare(f.dir, g.dir), cmp.Compare(f.usedAt, g.usedAt), cmp.Compare(x, y))
	})
	type span struct {
		first, end int
		usedAt     int64
	}
	var jobs []span
	for i := 0; i < len(all); {
		began := b.file(all[i])
		end, last := i+1, began.usedAt
		for ; end < len(all); end++ {
			f := b.file(all[end])
			if f.dir != began.dir || f.usedAt-last > jobPause || f.usedAt-began.usedAt > jobTime {
				break
			}
			last = f.usedAt
		}
		jobs = append(jobs, span{i, end, last})
		i = end
	}
	slices.SortFunc(jobs, func(x, y span) int { return cmp.Compare(x.usedAt, y.usedAt) })
	*b.file(0) = file{}
	for _, n := range all {
		f := b.file(n)
		f.prev, f.next, f.job = n, n, 0
	}
	for _, j := range jobs {
		for i := j.end - 1; i >= j.first; i-- {
			b.before(all[i], 0)
		}
	}
}
