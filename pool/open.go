package pool

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/arena"
	"github.com/kvasir-kv/kvasir/shm"
)

// NoteSuffix is put after the pool's name for its owner's note.
const NoteSuffix = ".workers"

// Restored is what an earlier server left in the pool.
type Restored struct {
	Resident []Slot // committed chunks, the least recently used first
	Held     []Held // slots that a worker may still touch, one hold each: some are resident, the others have no key
}

// Held is a slot that a worker of an earlier server may still touch.
type Held struct {
	Slot Slot
	For  time.Duration // since the first start that found it so

	// Writer is what Reserve was told, of a slot without a key: its writer may not
	// be done. It is zero for a resident slot, which was only read.
	Writer Writer
}

// Open opens the pool of o.Name and locks it: the one an earlier server left,
// with its committed chunks, or a new one. See Restored for what became of the
// old content.
func Open(o Options) (*Pool, error) {
	o.Align = cmp.Or(o.Align, DefaultAlign)
	if o.Clock == nil {
		o.Clock = monotonic
	}
	if o.Align < 8 || o.Align&(o.Align-1) != 0 || o.Bytes < o.Align {
		return nil, fmt.Errorf("pool: size %d with alignment %d", o.Bytes, o.Align)
	}
	path, err := shm.Path(o.Dir, o.Name)
	if err != nil {
		return nil, err
	}
	index, err := shm.Attach(path + IndexSuffix)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Lstat(path); err == nil {
			return nil, fmt.Errorf("%w: %s", ErrForeign, path)
		}
		return create(path, o)
	case err != nil:
		return nil, fmt.Errorf("%w: %s: %w", ErrForeign, path+IndexSuffix, err)
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

// reopen goes on with an existing pool. Without pool and error there was nothing
// to go on with, and what there was is removed.
func reopen(path string, index *shm.Segment, o Options) (*Pool, error) {
	h, herr := readHeader(index)
	if errors.Is(herr, ErrIndex) {
		return nil, fmt.Errorf("%w: %s: %w", ErrForeign, path+IndexSuffix, herr)
	}
	if err := lockAfter(index, h.pid); err != nil || !index.Exists() {
		return nil, fmt.Errorf("%w: process %d serves %s", ErrInUse, h.pid, path)
	}
	if o.Cold || errors.Is(herr, errUnfinished) {
		return nil, discard(path, index)
	}
	if herr != nil {
		return nil, fmt.Errorf("%s: %w", path, herr)
	}
	if h.opts.Bytes != o.Bytes || h.opts.Align != o.Align || h.opts.ChunkTokens != o.ChunkTokens {
		return nil, fmt.Errorf("%s: %w: it has %d bytes, alignment %d, %d tokens per chunk; asked for are %d, %d, %d",
			path, ErrChanged, h.opts.Bytes, h.opts.Align, h.opts.ChunkTokens, o.Bytes, o.Align, o.ChunkTokens)
	}
	segment, err := shm.Attach(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, discard(path, index)
	}
	if err != nil {
		return nil, fmt.Errorf("attach pool: %w", err)
	}
	if segment.Inode() != h.inode || segment.Len() != h.opts.Bytes {
		return nil, errors.Join(fmt.Errorf("%w: %s is not the file of its index", ErrForeign, path), segment.Close())
	}
	p := &Pool{opts: o, segment: segment, index: index, records: int(h.records), arena: arena.New(o.Bytes, o.Align)}
	if err := p.restore(); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), segment.Close())
	}
	claim(index)
	return p, nil
}

// lockAfter takes the lock of an index that process pid served. A killed process
// keeps its locks until the kernel has taken it apart, some milliseconds to
// seconds with a large mapping, and nothing tells when it has.
func lockAfter(index *shm.Segment, pid int) error {
	const step = 10 * time.Millisecond
	for wait := time.Duration(0); ; wait += step {
		err := index.Lock()
		if !errors.Is(err, shm.ErrLocked) || wait >= 5*time.Second || wait >= 100*time.Millisecond && lives(pid) {
			return err
		}
		time.Sleep(step)
	}
}

// lives reports whether a process is there and not about to end.
func lives(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := bytes.Cut(stat, []byte(") ")) // after the command's name
	return len(after) > 0 && after[0] != 'Z' && after[0] != 'X'
}

// discard removes a pool whose lock is held.
func discard(path string, index *shm.Segment) error {
	for _, p := range []string{path, path + NoteSuffix} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the pool of an earlier server: %w", err)
		}
	}
	return index.Unlink()
}

func create(path string, o Options) (*Pool, error) {
	if free, err := shm.Free(cmp.Or(o.Dir, shm.Dir)); err == nil && free < o.Bytes {
		return nil, fmt.Errorf("%w: the pool takes %d bytes, %s has %d free", ErrNoSpace, o.Bytes, cmp.Or(o.Dir, shm.Dir), free)
	}
	records := min(o.Bytes/o.Align, maxRecords)
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
	segment, err := shm.Create(path, o.Bytes)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create pool: %w", err), index.Unlink(), index.Close())
	}
	writeHeader(index, o, records, segment.Inode())
	return &Pool{
		opts: o, segment: segment, index: index, records: int(records), arena: arena.New(o.Bytes, o.Align),
	}, nil
}

// monotonic is CLOCK_MONOTONIC: it does not jump when the wall clock is set, and
// stands still while the machine is suspended, as workers do.
func monotonic() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(fmt.Sprintf("BUG: pool: CLOCK_MONOTONIC: %v", err))
	}
	return time.Duration(ts.Nano())
}

// restore takes over what the index says. Committed chunks are served again.
// Whatever a worker may still touch stays out of use: it gets one hold, which the
// pool's owner ends.
func (p *Pool) restore() error {
	used := p.index.Word(headerUsed).Load()
	if used > uint64(p.records) {
		return fmt.Errorf("%w: %d records used of %d", ErrIndex, used, p.records)
	}
	p.used, p.backed = int(used), int(used)
	now := p.opts.Clock()
	for i := range p.used {
		s := Slot(i)
		r := p.record(s)
		state, holds := r.state(), r.holds()
		if state == Free {
			p.spare = append(p.spare, s)
			continue
		}
		if state > Condemned || !r.intact() || !p.arena.Take(r.offset(), r.length()) {
			return fmt.Errorf("%w: record %d", ErrIndex, i)
		}
		p.stamp = max(p.stamp, r.stamp())
		if state == Staged {
			state = Condemned
		}
		if state == Resident {
			k := r.key()
			if _, ok := p.table.find(p, &k); ok {
				return fmt.Errorf("%w: record %d has another's key", ErrIndex, i)
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
		p.account(state, r.length(), 1)
	}
	slices.Reverse(p.spare) // lowest record first
	slices.SortFunc(p.restored.Resident, func(a, b Slot) int {
		return cmp.Compare(p.record(a).stamp(), p.record(b).stamp())
	})
	return nil
}

// Restored returns what Open found.
func (p *Pool) Restored() Restored { return p.restored }

func (p *Pool) notePath() string {
	path, err := shm.Path(p.opts.Dir, p.opts.Name)
	if err != nil {
		return ""
	}
	return path + NoteSuffix
}

// maxNote bounds a note.
const maxNote = 16 << 20

// SetNote keeps b beside the pool, for its owner after a restart. The old note or
// the new one is there at any moment.
func (p *Pool) SetNote(b []byte) error {
	tmp := p.notePath() + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("keep note: %w", err)
	}
	return os.Rename(tmp, p.notePath())
}

// Note returns what SetNote kept last, nil when there is nothing.
func (p *Pool) Note() ([]byte, error) {
	f, err := os.Open(p.notePath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxNote))
}
