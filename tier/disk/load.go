// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

const (
	insertBatch = 1024 // objects that are put into the index at once
	openers     = 4    // segments that are read at once
)

// found is a segment in the directory that is not loaded yet.
type found struct {
	seq  uint32
	id   uint64
	size int64
}

func (f found) name() string { return segmentName(f.seq, f.id) }

// load reads the indexes of all segments: from the checkpoint, then the own indexes of newer
// segments, then record by record the segments without an index.
func (v *volume) load(names map[string]int64, todo map[uint64]found) {
	defer close(v.opened)
	began := v.now()
	v.whole.Store(len(todo) == countSegments(names))
	if err := v.loadCheckpoint(names, todo); err != nil {
		v.log.Warn("the checkpoint of a disk cannot be read: the indexes of its segments are read instead", "path", v.dir.Path, "err", err)
	}
	unfinished := v.loadIndexes(todo)
	for _, s := range unfinished {
		if v.life.Err() == nil {
			v.recover(s)
		}
	}
	if v.life.Err() != nil {
		v.whole.Store(false)
		return
	}
	v.mu.Lock()
	v.mu.dropped = nil
	objects, segments, bytes := v.mu.index.len(), len(v.mu.segs), v.mu.used
	v.mu.Unlock()
	v.n.openTook.Store(int64(v.now().Sub(began)))
	v.log.Info("disk is open", "path", v.dir.Path, "objects", objects, "segments", segments, "bytes", bytes, "unfinished", len(unfinished), "took", v.now().Sub(began))
}

// openSegment opens a segment and adds it to the volume's segments.
func (v *volume) openSegment(f found) (*segment, error) {
	file, err := v.files.open(f.name())
	if err != nil {
		return nil, err
	}
	s := &segment{seq: f.seq, id: f.id, file: file, size: f.size, end: f.size, refs: 1, done: make(chan struct{})}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.segs[f.seq] = s
	return s, nil
}

// insert puts the records of a segment into the index, except deleted keys and older versions of an object. With `sealed` the segment then
// counts as sealed.
func (v *volume) insert(s *segment, records []record, sealed bool) {
	for part := range slices.Chunk(records, insertBatch) {
		v.insertSome(s, part)
	}
	if sealed {
		v.mu.Lock()
		s.sealed = true
		v.mu.Unlock()
		close(s.done)
	}
}

func (v *volume) insertSome(s *segment, records []record) {
	v.mu.Lock()
	defer v.mu.Unlock()
	gone := v.mu.gone[s.id]
	for i := range records {
		r := &records[i]
		_, was := gone[r.block]
		if _, is := v.mu.dropped[r.key]; was || is {
			v.goneLocked(s, r.block)
			continue
		}
		e := entry{r.sum, s.seq, r.block, r.len, r.hot, r.over, r.seal}
		it, had := v.mu.index.item(&r.key)
		if old := v.mu.index.entry(it); had && !e.newer(&old) {
			v.goneLocked(s, r.block) // else it would come back when the newer one is deleted
			continue
		} else if had {
			v.goneLocked(v.mu.segs[old.seg], old.block)
		}
		v.mu.index.put(it, e)
		if r.hot {
			s.heat += float64(r.len)
		}
	}
}

// indexReader reads indexes one after the other, each into the memory of the one before.
type indexReader struct {
	bytes   []byte
	records []record
}

// readIndex reads the index at the end of a segment. Errors: errDamaged, ErrNewer.
func readIndex(f file, id uint64, size int64) (trailer, []record, error) {
	var r indexReader
	return r.read(f, id, size)
}

// read is readIndex. It invalidates the result of the call before.
func (r *indexReader) read(f file, id uint64, size int64) (trailer, []record, error) {
	if size < 2*block || size%block != 0 || size > maxSegment {
		return trailer{}, nil, errDamaged
	}
	b := r.memory(block)
	if err := f.readv([][]byte{b}, size-block); err != nil {
		return trailer{}, nil, err
	}
	t, err := getTrailer(b)
	if err != nil {
		return trailer{}, nil, err
	}
	if t.id != id || t.bytes != size || t.end+indexBytes(t.entries) != size {
		return trailer{}, nil, errDamaged
	}
	if b = r.memory(int(indexBytes(t.entries) - block)); len(b) > 0 {
		if err := f.readv([][]byte{b}, t.end); err != nil {
			return trailer{}, nil, err
		}
	}
	r.records, err = getIndex(r.records[:0], b, t)
	return t, r.records, err
}

// memory returns n bytes at a multiple of a block.
func (r *indexReader) memory(n int) []byte {
	if n > len(r.bytes) {
		r.bytes = shm.MakeAligned(n, block)
	}
	return r.bytes[:n]
}

// loadIndexes reads the indexes of segments, newest first. It returns the segments that
// have none.
func (v *volume) loadIndexes(todo map[uint64]found) (unfinished []*segment) {
	order := make([]found, 0, len(todo))
	for _, f := range todo {
		order = append(order, f)
	}
	slices.SortFunc(order, func(a, b found) int { return cmp.Compare(b.seq, a.seq) })
	var wg sync.WaitGroup
	var mu sync.Mutex
	next := make(chan found)
	for range min(openers, len(order)) {
		wg.Go(func() {
			var r indexReader
			for f := range next {
				if s := v.loadIndex(&r, f); s != nil {
					mu.Lock()
					unfinished = append(unfinished, s)
					mu.Unlock()
				}
			}
		})
	}
	for _, f := range order {
		if v.life.Err() == nil {
			next <- f
		}
	}
	close(next)
	wg.Wait()
	return unfinished
}

// loadIndex reads the index of one segment, and returns the segment if it has none.
func (v *volume) loadIndex(r *indexReader, f found) *segment {
	s, err := v.openSegment(f)
	if err != nil {
		v.whole.Store(false)
		v.log.Error("a segment cannot be opened: its objects are misses", "path", v.dir.Path, "segment", f.name(), "err", err)
		return nil
	}
	t, records, err := r.read(s.file, s.id, s.size)
	if errors.Is(err, errDamaged) { // an unfinished segment, or one of a version with another end
		err = s.checkHead()
		if !errors.Is(err, ErrNewer) {
			return s
		}
	}
	switch {
	case errors.Is(err, ErrNewer):
		v.mu.Lock()
		s.newerFormat = true
		v.mu.Unlock()
		v.log.Error("a later release wrote a segment: it is ignored", "path", v.dir.Path, "segment", f.name(), "err", err)
	case err != nil:
		v.log.Warn("the index of a segment cannot be read: the segment is read record by record", "path", v.dir.Path, "segment", f.name(), "err", err)
		return s
	default:
		s.end = t.end
		v.insert(s, records, true)
	}
	return nil
}

func (s *segment) checkHead() error {
	b := shm.MakeAligned(block, block)
	if err := s.file.readv([][]byte{b}, 0); err != nil {
		return err
	}
	_, err := getHead(b)
	return err
}

// recover finds the records of a segment that has no index, as far as they are whole, and
// seals it.
func (v *volume) recover(s *segment) {
	records := v.scan(s)
	s.end = block
	if n := len(records); n > 0 {
		s.end = records[n-1].end()
	}
	v.insert(s, records, false)
	v.mu.Lock()
	s.entries = records
	v.mu.Unlock()
	v.seal(s)
}

// scan returns the records of a segment whose bytes are what their checksums say.
func (v *volume) scan(s *segment) (records []record) {
	window := v.bounces.get()
	defer v.bounces.put(window)
	size := s.size / block * block
	from, to := int64(0), int64(0) // what the window has
	for pos := int64(block); pos+block <= size && v.life.Err() == nil; {
		if pos < from || pos+block > to {
			from, to = pos, min(pos+int64(len(window)), size)
			err := s.file.readv([][]byte{window[:to-from]}, from)
			if err != nil { // perhaps only one block cannot be read
				to = from + block
				err = s.file.readv([][]byte{window[:block]}, from)
			}
			if err != nil {
				from, to = 0, 0
				pos += block
				continue
			}
		}
		r, err := getRecord(window[pos-from:], s.id, pos)
		if err != nil || r.end() > size {
			pos += block
			continue
		}
		if err := v.verify(v.life, s, &r, func(int) error { return nil }); err == nil {
			records = append(records, r)
		}
		pos = r.end()
	}
	return records
}

// open lists the files of a directory and starts the goroutines, one of which reads the index. Errors: ErrNewer.
func (v *volume) open() error {
	names, err := v.files.list()
	if err != nil {
		return err
	}
	if err := v.mark(names); err != nil {
		return err
	}
	if _, err := v.shortfall(0); err != nil {
		return err
	}
	for _, name := range []string{checkName, goneName, markName} {
		if err := v.files.remove(name + newSuffix); err != nil {
			return err
		}
	}
	v.mu.checkpoint = names[checkName]
	todo, seqs := map[uint64]found{}, map[uint32]bool{}
	for name, size := range names {
		seq, id, ok := parseSegment(name)
		if !ok {
			continue
		}
		v.mu.used += size
		v.mu.nextSeq = max(v.mu.nextSeq, seq)
		if seqs[seq] {
			v.log.Error("two segments have the same number; one is ignored", "path", v.dir.Path, "segment", name)
			continue
		}
		todo[id], seqs[seq] = found{seq, id, size}, true
	}
	v.loadWear(names, todo)
	if err := v.loadJournal(names); err != nil { // without the journal deleted objects would be served again
		return err
	}
	v.running.Go(func() {
		v.load(names, todo)
		if v.life.Err() == nil {
			v.scrub()
		}
	})
	v.running.Go(v.provideSegments)
	v.running.Go(v.runTending)
	return nil
}

// mark reads the marker of the directory, and makes the marker of an empty directory. Before the first encrypted object is written, it
// raises the marker's version to sealedVersion.
func (v *volume) mark(names map[string]int64) error {
	at := uint32(version)
	if v.opts.Sealed {
		at = sealedVersion
	}
	write := func() error {
		return replace(v.files, markName, func(put func([]byte) error) error {
			b := shm.MakeAligned(block, block)
			putMarkAs(b, dirMagic, at, v.id, wear{})
			return put(b)
		})
	}
	if _, ok := names[markName]; !ok {
		v.id = randomID()
		return write()
	}
	b, err := contents(v.files, names, markName)
	if err != nil {
		return fmt.Errorf("read %s: %w", markName, err)
	}
	v.id, err = getMark(b, dirMagic)
	if errors.Is(err, errDamaged) {
		err = fmt.Errorf("%w: its file %s is damaged, or another program wrote it", ErrNotOurs, markName)
	}
	if err == nil && v.opts.Sealed && !v.opts.Inspect && le.Uint32(b[8:]) < at {
		return write()
	}
	return err
}

func countSegments(names map[string]int64) (n int) {
	for name := range names {
		if _, _, ok := parseSegment(name); ok {
			n++
		}
	}
	return n
}

// loadWear finds out how much has been written, today and ever, from the checkpoint or the
// newest segment. After a kill the result may be too low by one segment.
func (v *volume) loadWear(names map[string]int64, todo map[uint64]found) {
	var newest found
	for _, f := range todo {
		if f.seq >= newest.seq {
			newest = f
		}
	}
	b := shm.MakeAligned(block, block)
	first := func(name string) bool {
		if names[name] < block {
			return false
		}
		f, err := v.files.open(name)
		if err != nil {
			return false
		}
		defer f.close()
		return f.readv([][]byte{b}, 0) == nil
	}
	if first(newest.name()) {
		if h, err := getHead(b); err == nil {
			v.mu.wear = wear{h.day, h.today + newest.size, h.all + newest.size}
		}
	}
	if first(checkName) {
		if _, err := getMark(b, checkMagic); err != nil {
			return
		}
		if w, err := getWear(b); err == nil && w.all > v.mu.all {
			v.mu.wear = w
		}
	}
}
