// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

// journal is the file of deleted records. The index in a segment file is never changed. Whoever reads it
// leaves out the records in the journal.
type journal struct {
	turn     chan struct{} // capacity 1: the goroutine that has put a value in may write
	file     file
	off      int64  // of the tail
	tail     []byte // content of the last, partly filled block
	reserved int64  // bytes that the file system has reserved for the file

	bytes atomic.Int64 // size of the file
}

// journalAhead is how many bytes of the journal are reserved before they are needed. Otherwise, on a full disk, no object could be deleted,
// and no segment evicted, because that writes the journal first.
const journalAhead = 64 << 10

// ensure reserves room for the journal up to end and journalAhead bytes more. It ignores failures: the next write reports them.
func (j *journal) ensure(end int64) {
	if j.file != nil && end+journalAhead/2 > j.reserved && j.file.reserve(end+journalAhead) == nil {
		j.reserved = end + journalAhead
	}
	j.bytes.Store(max(end, j.reserved))
}

// loadJournal reads the journal of a directory.
func (v *volume) loadJournal(names map[string]int64) error {
	b, err := contents(v.files, names, goneName)
	if err != nil {
		return fmt.Errorf("read journal: %w", err)
	}
	v.mu.Lock()
	getGone(b, v.addGoneLocked)
	v.mu.Unlock()
	v.journal.off = blocksOf(names[goneName]) * block
	if _, ok := names[goneName]; ok {
		v.journal.file, err = v.files.open(goneName)
	} else if v.journal.make(v.files) != nil { // there may be room later
		return nil
	}
	v.journal.ensure(v.journal.off)
	return err
}

// make creates the file, or opens an existing one.
func (j *journal) make(d files) error {
	f, err := d.create(goneName, 0)
	if err == nil {
		j.file = f
		return d.sync()
	}
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	if f, err = d.open(goneName); err != nil {
		return err
	}
	size, err := f.size()
	if err != nil {
		return errors.Join(err, f.close())
	}
	j.file, j.off, j.tail, j.reserved = f, blocksOf(size)*block, nil, 0
	j.ensure(j.off)
	return nil
}

// save makes the deletions so far durable: it writes them to the journal and syncs it.
func (v *volume) save() error {
	v.journal.turn <- struct{}{}
	defer func() { <-v.journal.turn }()
	v.mu.Lock()
	fresh := v.mu.fresh
	v.mu.fresh = nil
	v.mu.Unlock()
	if len(fresh) == 0 {
		return nil
	}
	n, err := int64(0), v.syncDirty() // first the records that replaced deleted ones
	if err == nil {
		n, err = v.journal.write(v.files, fresh)
	}
	v.wrote(n)
	if err != nil {
		v.mu.Lock()
		v.mu.fresh = append(fresh, v.mu.fresh...)
		v.mu.Unlock()
		return fmt.Errorf("write journal in %s: %w", v.dir.Path, err)
	}
	return nil
}

func (j *journal) write(d files, fresh []place) (bytes int64, err error) {
	if j.file == nil {
		if err := j.make(d); err != nil {
			return 0, err
		}
	}
	used := len(j.tail) + len(fresh)*goneBytes
	j.ensure(j.off + int64(used))
	b := shm.MakeAligned(int(blocksOf(int64(used))*block), block)
	at := copy(b, j.tail)
	for _, p := range fresh {
		putGone(b[at:], p)
		at += goneBytes
	}
	if err := j.file.writev([][]byte{b}, j.off); err != nil {
		return 0, err
	}
	whole := used / block * block
	j.off += int64(whole)
	j.tail = append(j.tail[:0], b[whole:used]...)
	return int64(len(b)), j.file.sync()
}

// compact writes the journal anew if more than half of it is about removed segments.
func (v *volume) compact() error {
	if !v.whole.Load() {
		return nil
	}
	v.journal.turn <- struct{}{}
	defer func() { <-v.journal.turn }()
	places, saved := v.living()
	if v.journal.off < 2*int64(len(places))*goneBytes+16*block {
		return nil
	}
	b := shm.MakeAligned(int(blocksOf(int64(len(places))*goneBytes)*block), block)
	for i, p := range places {
		putGone(b[i*goneBytes:], p)
	}
	if err := v.syncDirty(); err != nil { // before the journal, as in save
		return err
	}
	err := replace(v.files, goneName, func(put func([]byte) error) error {
		if len(b) == 0 {
			return nil
		}
		return put(b)
	})
	// Open the file anew, whatever err says: it may be the old or the new one, and writes to the other are lost.
	old := v.journal.file
	v.journal.file = nil
	if old != nil {
		err = errors.Join(err, old.close())
	}
	if err = errors.Join(err, v.journal.make(v.files)); err != nil {
		return err
	}
	v.wrote(int64(len(b)))
	v.mu.Lock()
	v.mu.fresh = v.mu.fresh[saved:]
	v.mu.Unlock()
	return nil
}

// living returns the deleted records of existing segments, and how many deletions are
// not in the journal yet. It forgets the deleted records of removed segments.
func (v *volume) living() (places []place, fresh int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	ids := make(map[uint64]bool, len(v.mu.segs))
	for _, s := range v.mu.segs {
		ids[s.id] = true
	}
	for id, of := range v.mu.gone {
		if !ids[id] {
			delete(v.mu.gone, id)
			continue
		}
		for at := range of {
			places = append(places, place{id, at})
		}
	}
	return places, len(v.mu.fresh)
}
