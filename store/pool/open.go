// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/arena"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/takeover"
)

// NoteSuffix follows the pool's name in the name of the file with the owner's note.
const NoteSuffix = ".workers"

// Restored has what an earlier server left in the pool.
type Restored struct {
	Resident []Slot // committed chunks, the least recently used first
	Held     []Held // slots that a worker may still touch, with one hold each: some are resident, the others have no key
	Bytes    int64  // the pool's former size: workers of the earlier server map that many bytes
}

// Held is a slot that a worker of an earlier server may still touch.
type Held struct {
	Slot Slot
	For  time.Duration // time since the first start of a server that found the slot held

	// Writer is the one that was given to Reserve, for a slot without a key: that transfer may still be writing. It is zero for a resident
	// slot, which is only read.
	Writer Writer
}

// Open opens the pool of o.Name and locks it: the pool that an earlier server left, with its committed chunks, or a new one. Restored
// returns what it found.
func Open(o Options) (*Pool, error) {
	o.Align = cmp.Or(o.Align, DefaultAlign)
	if o.Clock == nil {
		o.Clock = monotonic
	}
	if o.Align < 8 || o.Align&(o.Align-1) != 0 || o.Bytes < o.Align {
		return nil, fmt.Errorf("pool: %d bytes aligned to %d: the alignment must be a power of two from 8, and the size not below it", o.Bytes, o.Align)
	}
	path, err := shm.Path(o.Dir, o.Name)
	if err != nil {
		return nil, err
	}
	for wait := time.Duration(0); ; wait += startStep {
		p, err := open(path, o, wait < startWait)
		if !errors.Is(err, errStarting) {
			return p, err
		}
		time.Sleep(startStep)
	}
}

// A server that makes a pool gives its index a size microseconds after the file has its name.
const (
	startStep = 10 * time.Millisecond
	startWait = 300 * time.Millisecond
)

// errStarting means that another process may be making the pool at this moment.
var errStarting = errors.New("pool: an index without a size")

// open tries once. With patient, an index without a size is the error errStarting; otherwise open takes its server for killed.
func open(path string, o Options, patient bool) (*Pool, error) {
	index, err := shm.AttachIf(path+IndexSuffix, shm.Ours)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(path); err == nil && !o.Cold {
			return nil, fmt.Errorf("%w: %s", cmp.Or(foreign(path), ErrForeign), path)
		}
	} else if err != nil {
		if err := unusable(path, o, patient, err); err != nil {
			return nil, err
		}
	}
	if err != nil {
		if err := replace(path, nil, o); err != nil {
			return nil, err
		}
		return create(path, o)
	}
	if h, err := readHeader(index); err == nil {
		o.former = announcedSizes(index, h, o.ChunkTokens)
	}
	p, err := reopen(path, index, o)
	if p == nil {
		err = errors.Join(err, index.Close())
	}
	if p == nil && err == nil {
		return create(path, o)
	}
	return p, err
}

// reopen takes over an existing pool. If there was nothing to take over, it has removed the files and returns neither a pool nor an error.
func reopen(path string, index *shm.Segment, o Options) (*Pool, error) {
	h, herr := readHeader(index)
	if errors.Is(herr, ErrIndex) && !o.Cold {
		return nil, fmt.Errorf("%w: %s: %w", ErrForeign, path+IndexSuffix, herr)
	}
	if err := takeover.LockAfter(h.pid, shm.ErrLocked, index.Lock); err != nil || !index.Exists() {
		return nil, fmt.Errorf("%w: process %d serves %s", ErrInUse, h.pid, path)
	}
	if o.Cold || errors.Is(herr, errUnfinished) {
		return nil, replace(path, index, o)
	}
	if herr != nil {
		return nil, fmt.Errorf("%s: %w", path, herr)
	}
	if kept, asked := h.opts.shape(), o.shape(); kept != asked {
		return nil, &ChangedError{path, kept, asked}
	}
	segment, err := shm.AttachIf(path, shm.Ours)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, discard(path, o.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cmp.Or(foreign(path), ErrForeign), err)
	}
	if segment.Inode() != h.inode || segment.Len() < h.opts.Bytes {
		return nil, errors.Join(fmt.Errorf("%w: %s is not the file of its index", ErrForeign, path), segment.Close())
	}
	shm.RemoveUnfinished(path + NoteSuffix)
	before := o
	before.Bytes = h.opts.Bytes
	p := newPool(before, segment, index, int(h.records))
	err = p.restore()
	if err == nil && o.Bytes != before.Bytes {
		p, err = p.resize(o)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), segment.Close())
	}
	p.giveBackBeyond()
	claim(index)
	return p, nil
}

// newPool returns a Pool over a segment and an index of `records` records. It knows no slot yet.
func newPool(o Options, segment, index *shm.Segment, records int) *Pool {
	return &Pool{opts: o, segment: segment, index: index, records: records, arena: arena.New(o.Bytes, o.Align), near: newRegions(max(o.Bytes, segment.Len()))}
}

func create(path string, o Options) (*Pool, error) {
	records := min(o.Bytes/o.Align, maxRecords)
	dir := cmp.Or(o.Dir, shm.Dir)
	if free, err := shm.Free(dir); err == nil && free < filesBytes(o) {
		return nil, &SpaceError{Dir: dir, Need: filesBytes(o), Free: free, Removed: ListRemoved(dir)}
	}
	index, err := shm.Create(path+IndexSuffix, headerBytes+records*recordBytes)
	if errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("%w: another server is starting with %s", ErrInUse, path)
	}
	if err != nil {
		return nil, fmt.Errorf("create pool index: %w", err)
	}
	if err := index.Lock(); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", index.Path(), err), index.Unlink(), index.Close())
	}
	crashPoint()
	segment, err := shm.Create(path, o.Bytes)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create pool: %w", err), index.Unlink(), index.Close())
	}
	first := min(records, firstRecords)
	crashPoint()
	if err := index.Populate(0, headerBytes+first*recordBytes, false); err != nil && !errors.Is(err, shm.ErrNoPopulate) {
		return nil, errors.Join(fmt.Errorf("%w: %w", ErrNoSpace, err), segment.Unlink(), index.Unlink(), segment.Close(), index.Close())
	}
	writeHeader(index, o, records, segment.Inode())
	p := newPool(o, segment, index, int(records))
	p.restored.Bytes = o.Bytes
	p.backed.Store(first)
	return p, nil
}

// monotonic returns CLOCK_MONOTONIC. It does not jump when the wall clock is set, and stands still while the machine is suspended, as
// workers do.
func monotonic() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(fmt.Sprintf("BUG: pool: CLOCK_MONOTONIC: %v", err))
	}
	return time.Duration(ts.Nano())
}

// restore takes over the slots that the index records. Committed chunks are served again. A slot that a worker may still touch stays out of
// use: it gets one hold, which the pool's owner ends.
func (p *Pool) restore() error {
	used := p.index.Word(headerUsed).Load()
	if used > uint64(p.records) {
		return fmt.Errorf("%w: its header counts %d records in use, it has %d", ErrIndex, used, p.records)
	}
	p.restored.Bytes = p.opts.Bytes
	p.used = int(used)
	p.backed.Store(int64(used))
	p.stamp = p.index.Word(headerCleared).Load()
	now := p.opts.Clock()
	for i := range p.used {
		s := Slot(i)
		r := p.record(s)
		state, holds := r.state(), r.holds()
		if state == Free {
			p.spare = append(p.spare, s)
			continue
		}
		if state > Condemned || !r.intact() || !p.takeRange(state, r) {
			return fmt.Errorf("%w: record %d is damaged, or its memory is also another record's", ErrIndex, i)
		}
		p.near.add(s, r.offset())
		p.stamp = max(p.stamp, r.stamp())
		if state == Staged {
			state = Condemned
		}
		if state == Resident {
			k := r.key()
			if _, ok := p.table.find(p, &k); ok {
				return fmt.Errorf("%w: record %d has the key of an earlier record", ErrIndex, i)
			}
			p.table.insert(p, s)
			p.restored.Resident = append(p.restored.Resident, s)
		}
		if state == Condemned || holds > 0 {
			h := Held{Slot: s, For: r.heldFor(now)}
			if state == Condemned {
				h.Writer = r.writer()
			}
			p.restored.Held = append(p.restored.Held, h)
			holds = 1
		}
		r.set(state, holds)
		p.account(state, r.offset(), r.length(), 1)
	}
	slices.Reverse(p.spare) // lowest record first
	slices.SortFunc(p.restored.Resident, func(a, b Slot) int {
		return cmp.Compare(p.record(a).stamp(), p.record(b).stamp())
	})
	return nil
}

// takeRange takes the range of a record out of the free ranges. The slot of a worker that may still touch it can lie above the end of a
// pool that became smaller.
func (p *Pool) takeRange(state State, r record) bool {
	off, n := r.offset(), r.length()
	inside := p.inside(off, n)
	if inside == p.Round(n) {
		return p.arena.Take(off, n)
	}
	if off < 0 || n <= 0 || off%p.opts.Align != 0 || off > p.segment.Len() || n > p.segment.Len()-off || state == Resident {
		return false
	}
	return inside == 0 || p.arena.Take(off, inside)
}

// inside returns how many of the bytes of a slot lie below the pool's end.
func (p *Pool) inside(off, n int64) int64 {
	return max(0, min(off+p.Round(n), p.arena.Size())-off)
}

// Restored returns what Open found in the pool.
func (p *Pool) Restored() Restored { return p.restored }
