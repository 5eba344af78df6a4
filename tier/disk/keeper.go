// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
)

const (
	tendEvery  = time.Second
	syncEvery  = 5 * time.Second
	scrubEvery = 24 * time.Hour // a round begins this often

	candidates    = 16       // most segments among which the next victim is chosen
	minCandidates = 4        // least number of these, if there are as many
	mostReadmit   = 64 << 20 // most bytes of a victim that are readmitted
	readmitShare  = 8        // also at most a segment's size divided by this
	dropBatch     = 1024     // objects that are dropped or listed in one hold of the lock
	checkpointPer = 64       // a checkpoint is written after this multiple of its bytes was written
)

// provideSegments makes segments, and evicts others to make room, until the volume ends.
func (v *volume) provideSegments() {
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		select {
		case <-v.life.Done():
			return
		case <-v.wake:
		case <-tick.C:
			v.guard()
		}
		v.provide()
	}
}

// runTending calls tend once a second and when a segment is full, until the volume ends. It has a
// goroutine of its own, so that writers that wait for the next segment of provideSegments do not wait for a sync.
func (v *volume) runTending() {
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		select {
		case <-v.life.Done():
			return
		case <-v.full:
		case <-tick.C:
		}
		v.tend()
	}
}

// tend seals full segments, syncs every syncEvery, and writes a checkpoint when one is due.
func (v *volume) tend() {
	v.sealAll()
	if now := v.now(); now.Sub(v.synced) >= syncEvery {
		v.synced = now
		v.syncActive()
	}
	if v.isOpen() && !v.opts.Inspect && v.checkpointDue() {
		if err := v.checkpoint(); err != nil {
			v.log.Warn("the checkpoint of a disk cannot be written: the next start takes longer", "path", v.dir.Path, "err", err)
		}
	}
}

func (v *volume) isOpen() bool {
	select {
	case <-v.opened:
		return true
	default:
		return false
	}
}

// provide makes the next segment if a writer wants one, and wakes the writers that wait for it. If that fails, writes are refused for a
// while.
func (v *volume) provide() {
	v.mu.Lock()
	need := v.mu.wanted && v.mu.spare == nil
	sealing := len(v.mu.sealing) > 0
	v.mu.Unlock()
	if !need {
		return
	}
	s, err := v.newSegment()
	v.mu.Lock()
	defer v.mu.Unlock()
	if errors.Is(err, errFull) && sealing { // a sealed segment can be evicted: try again once it is sealed
		if len(v.mu.sealing) == 0 {
			signal(v.wake)
		}
		return
	}
	v.mu.wanted = false
	if err != nil {
		if v.mu.refused == nil && !errors.Is(err, errOpens) {
			v.log.Warn("writes to this disk are paused", "path", v.dir.Path, "err", err)
		}
		v.refusedLocked(err)
		if errors.Is(err, errOpens) {
			v.mu.until = v.now().Add(tendEvery)
		}
		return
	}
	v.mu.spare, v.mu.refused = s, nil
	v.changedLocked()
}

// newSegment makes a segment, and evicts others if there is no room.
func (v *volume) newSegment() (*segment, error) {
	if err := v.makeRoom(v.segment); err != nil {
		return nil, err
	}
	v.mu.Lock()
	if v.mu.nextSeq == math.MaxUint32 {
		v.mu.Unlock()
		return nil, errors.New("disk: the numbers of segments are used up")
	}
	v.mu.nextSeq++
	s := &segment{seq: v.mu.nextSeq, id: randomID(), size: v.segment, end: block, refs: 1, done: make(chan struct{})}
	h := head{s.seq, s.id, v.mu.wear}
	v.mu.Unlock()
	b := shm.MakeAligned(block, block)
	putHead(b, h)
	name := segmentName(s.seq, s.id)
	var err error
	s.file, err = v.files.create(name, v.segment)
	if noRoom(err) && v.isOpen() { // less room than the file system reported
		v.noteFull()
		if old := v.victim(); old != nil && v.evict(old) == nil {
			s.file, err = v.files.create(name, v.segment)
		}
	}
	if err != nil {
		return nil, err
	}
	err = s.file.writev([][]byte{b}, 0)
	if err == nil {
		err = errors.Join(s.file.sync(), v.files.sync())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("begin %s: %w", name, err), s.file.close(), v.files.remove(name))
	}
	v.wrote(block)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.segs[s.seq] = s
	v.mu.used += s.size
	return s, nil
}

// shortfall returns how many bytes must be freed before `need` more bytes may be used.
func (v *volume) shortfall(need int64) (int64, error) {
	v.mu.Lock()
	over := v.mu.used + v.booksLocked() + need - v.dir.Bytes
	v.mu.Unlock()
	all, free, err := v.files.space()
	if err != nil {
		v.n.free.Store(-1)
		return 0, err
	}
	v.n.free.Store(free)
	return max(0, over, v.opts.minFree(all)-(free-need)), nil
}

// booksLocked returns how many bytes checkpoint and journal take at most. It counts each twice, because a new file is written
// beside the old one, and it counts the active segment, the spare one and one that is being made as full of the smallest objects. The
// result is at most a quarter of the limit, which suffices unless segments are tiny.
func (v *volume) booksLocked() int64 {
	objects := int64(v.mu.index.len()) + 3*v.segment/block
	checkpoint := entryBytes*objects + 2*block*int64(len(v.mu.segs)+1)
	return min(2*(max(checkpoint, v.mu.checkpoint)+v.journal.bytes.Load()), v.dir.Bytes/4)
}

// makeRoom evicts until `need` bytes are free, with bounded retries: other writers may take the space, and a removed segment occupies its
// space until its last read ends. Errors: errFull, errOpens.
func (v *volume) makeRoom(need int64) error {
	for range 4 {
		lack, err := v.shortfall(need)
		if err != nil || lack == 0 {
			return err
		}
		if !v.isOpen() {
			return errOpens
		}
		for lack > 0 {
			s := v.victim()
			if s == nil {
				return errFull
			}
			lack -= s.size
			v.noteFull()
			if err := v.evict(s); err != nil {
				return err
			}
		}
	}
	return errFull
}

// noteFull records how many bytes the volume has when a segment must be evicted.
func (v *volume) noteFull() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.full = max(v.mu.used, v.segment)
}

// guard evicts segments while the file system has less room than MinFree, or the volume is above its limit, which an operator may have
// lowered.
func (v *volume) guard() {
	if !v.isOpen() || v.opts.Inspect {
		return
	}
	if err := v.makeRoom(0); err != nil && !errors.Is(err, errFull) {
		v.log.Warn("no segment can be removed to make room on a disk", "path", v.dir.Path, "err", err)
	}
}

// victim returns the coldest of the oldest segments, nil if none can be evicted. Each call
// makes these oldest segments colder.
func (v *volume) victim() *segment {
	v.mu.Lock()
	defer v.mu.Unlock()
	var old []*segment
	for _, s := range v.mu.segs {
		if !s.newerFormat && !s.leaving && (s.sealed || s.err != nil) {
			old = append(old, s)
		}
	}
	if len(old) == 0 || len(old) < minCandidates && len(v.mu.sealing) > 0 { // soon there are more to choose from
		return nil
	}
	slices.SortFunc(old, func(a, b *segment) int { return cmp.Compare(a.seq, b.seq) })
	old = old[:min(len(old), max(minCandidates, min(candidates, len(old)/4)))]
	coldest := slices.MinFunc(old, func(a, b *segment) int { return cmp.Compare(a.heat, b.heat) })
	for _, s := range old {
		s.heat *= 0.75
	}
	coldest.leaving = true
	return coldest
}

// evict removes a segment that is marked as leaving, so that no other goroutine removes it.
func (v *volume) evict(s *segment) error {
	err := v.tryEvict(s)
	if err != nil {
		v.mu.Lock()
		s.leaving = false
		v.mu.Unlock()
	}
	return err
}

// tryEvict removes a segment. It first writes some of the objects again that were read since they were written.
func (v *volume) tryEvict(s *segment) error {
	records, err := v.recordsOf(s)
	if err != nil { // the segment's own index is damaged: use the index in memory
		records = v.walk(s)
	}
	v.readmit(s, records)
	if err := v.save(); err != nil {
		return err
	}
	if err := errors.Join(v.files.remove(segmentName(s.seq, s.id)), v.files.sync()); err != nil {
		return err
	}
	for len(records) > 0 {
		n := min(len(records), dropBatch)
		v.dropFrom(s, records[:n])
		records = records[n:]
	}
	v.mu.Lock()
	delete(v.mu.segs, s.seq)
	delete(v.mu.gone, s.id)
	v.mu.used -= s.size
	sealed := s.count > 0 || s.sealed
	v.mu.Unlock()
	if sealed {
		v.n.evicted.Add(1)
	}
	v.release(s)
	return nil
}

// evictEmpty removes the sealed segments without objects.
func (v *volume) evictEmpty() (err error) {
	live := map[uint32]bool{}
	v.list(func(part []listed) bool {
		for i := range part {
			live[part[i].seg] = true
		}
		return true
	})
	for _, s := range v.sealedSegments() {
		if !live[s.seq] && !s.leaving {
			s.leaving = true
			err = errors.Join(err, v.evict(s))
		}
	}
	return err
}

func (v *volume) dropFrom(s *segment, records []record) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i := range records {
		if e, ok := v.mu.index.get(&records[i].key); ok && e.seg == s.seq {
			v.mu.index.remove(&records[i].key)
			v.noteLocked(records[i].key, false)
			v.n.evictedObjects.Add(1)
		}
	}
}

// recordsOf returns the records of a segment, deleted ones included.
func (v *volume) recordsOf(s *segment) ([]record, error) {
	v.mu.Lock()
	sealed, size, records := s.sealed, s.size, s.entries
	v.mu.Unlock()
	if !sealed {
		return records, nil
	}
	_, records, err := readIndex(s.file, s.id, size)
	return records, err
}

// walk returns the records of a segment, from the index in memory.
func (v *volume) walk(s *segment) (records []record) {
	v.list(func(part []listed) bool {
		for _, o := range part {
			if o.seg == s.seq {
				records = append(records, record{o.key, o.block, o.len, o.sum, o.hot, o.over, o.seal})
			}
		}
		return true
	})
	return records
}

// listed is an object in the index.
type listed struct {
	key kv.Key
	entry
}

// list calls f with the objects in the index, some at a time, until f returns false.
func (v *volume) list(f func([]listed) bool) {
	part := make([]listed, 0, dropBatch)
	for at, done := 0, false; !done; part = part[:0] {
		v.mu.Lock()
		at, done = v.mu.index.walk(at, dropBatch, func(k kv.Key, e entry) { part = append(part, listed{k, e}) })
		v.mu.Unlock()
		if !f(part) {
			return
		}
	}
}

// live returns the records that are still in the index at their place.
func (v *volume) live(s *segment, records []record) []record {
	var out []record
	for part := range slices.Chunk(records, dropBatch) {
		v.mu.Lock()
		for _, r := range part {
			if e, ok := v.mu.index.get(&r.key); ok && e.seg == s.seq && e.block == r.block {
				r.hot = e.hot
				out = append(out, r)
			}
		}
		v.mu.Unlock()
	}
	return out
}

// writes adds `by` to the number of running writes of an object.
func (v *volume) writes(k kv.Key, by int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.writing[k] += by; v.mu.writing[k] == 0 {
		delete(v.mu.writing, k)
	}
}

// readmit writes some objects that were read to the active segment, if that has room.
func (v *volume) readmit(s *segment, records []record) {
	budget := min(v.segment/readmitShare, mostReadmit)
	for _, r := range v.live(s, records) {
		need := recordBytes(int64(r.len))
		if !r.hot || need > budget || r.ended(v.now()) {
			continue
		}
		b := shm.MakeAligned(int(r.len), block)
		if err := v.readInto(v.life, s, &r, b); err != nil {
			continue
		}
		t, at, _, err := v.tryReserve(need, &r.key)
		if errors.Is(err, errBusy) {
			continue
		}
		if t == nil || err != nil {
			return
		}
		copied := record{r.key, uint32(at / block), r.len, r.sum, false, r.over, r.seal}
		err = v.append(v.life, t, &copied, b)
		v.finish(t, &copied, &entry{seg: s.seq, block: r.block}, err)
		if err != nil {
			return
		}
		v.n.readmitted.Add(need)
		budget -= need
	}
}

// sealAll seals the segments that take no more records and have no running write.
func (v *volume) sealAll() {
	for {
		v.mu.Lock()
		i := slices.IndexFunc(v.mu.sealing, func(s *segment) bool { return s.pending == 0 })
		if i < 0 {
			v.mu.Unlock()
			return
		}
		s := v.mu.sealing[i]
		v.mu.Unlock()
		v.seal(s)
		v.mu.Lock()
		v.mu.sealing = slices.DeleteFunc(v.mu.sealing, func(x *segment) bool { return x == s })
		v.mu.Unlock()
		signal(v.wake)
	}
}

// seal writes the index of a segment and syncs the segment. It evicts a segment without live records.
func (v *volume) seal(s *segment) {
	v.mu.Lock()
	entries := s.entries
	v.mu.Unlock()
	records := v.live(s, entries)
	t, err := v.writeIndex(s, records)
	if err != nil {
		v.log.Error("the index of a segment cannot be written", "path", v.dir.Path, "segment", segmentName(s.seq, s.id), "err", err)
	}
	v.mu.Lock()
	s.err = err
	if err == nil {
		v.mu.used += t.bytes - s.size
		s.size, s.sealed, s.entries, s.dirty = t.bytes, true, nil, false
		s.leaving = len(records) == 0
	} else {
		v.refusedLocked(err)
	}
	v.mu.Unlock()
	close(s.done)
	if err == nil && len(records) == 0 {
		if err := v.evict(s); err != nil {
			v.log.Warn("an empty segment cannot be removed", "path", v.dir.Path, "err", err)
		}
	}
}

func (v *volume) writeIndex(s *segment, records []record) (trailer, error) {
	b := shm.MakeAligned(int(indexBytes(len(records))), block)
	t := putIndex(b, trailer{seq: s.seq, id: s.id, end: s.end, bytes: s.end + int64(len(b))}, records)
	putTrailer(b[len(b)-block:], t)
	if err := s.file.sync(); err != nil { // before the journal says that older records were replaced by these
		return t, err
	}
	if err := v.save(); err != nil {
		return t, err
	}
	if err := s.file.writev([][]byte{b}, s.end); err != nil {
		return t, err
	}
	v.wrote(int64(len(b)))
	return t, errors.Join(s.file.truncate(t.bytes), s.file.sync())
}

// syncActive syncs recent writes that are in no sealed segment yet, and the journal.
func (v *volume) syncActive() {
	v.journal.turn <- struct{}{}
	err := v.syncDirty()
	<-v.journal.turn
	if err = errors.Join(err, v.save()); err != nil {
		v.log.Warn("recent writes cannot be synced to a disk: a power cut may lose them", "path", v.dir.Path, "err", err)
	}
}

// syncDirty syncs the segments with unsynced writes. The caller has the journal's turn, so no other sync runs.
func (v *volume) syncDirty() (err error) {
	v.mu.Lock()
	dirty := slices.DeleteFunc(append(slices.Clone(v.mu.sealing), v.mu.active), func(s *segment) bool { return s == nil || !s.dirty })
	for _, s := range dirty {
		s.dirty = false
		s.refs++
	}
	v.mu.Unlock()
	for _, s := range dirty {
		if e := s.file.sync(); e != nil {
			v.mu.Lock()
			s.dirty = true
			v.mu.Unlock()
			err = errors.Join(err, e)
		}
		v.release(s)
	}
	return err
}

// flush seals the segments with objects written so far, and waits until they are sealed.
func (v *volume) flush(ctx context.Context) error {
	v.mu.Lock()
	if v.mu.closed {
		v.mu.Unlock()
		return errClosed
	}
	v.calls.Add(1)
	defer v.calls.Done()
	if v.mu.active != nil && v.mu.active.count > 0 {
		v.retireLocked()
	}
	waiting := slices.Clone(v.mu.sealing)
	v.mu.Unlock()
	var errs []error
	for _, s := range waiting {
		select {
		case <-s.done:
			v.mu.Lock()
			errs = append(errs, s.err)
			v.mu.Unlock()
		case <-ctx.Done():
			return ctx.Err()
		case <-v.life.Done():
			return errClosed
		}
	}
	return errors.Join(append(errs, v.save())...)
}

// sealedSegments returns the sealed segments, newest first.
func (v *volume) sealedSegments() []*segment {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := slices.Collect(maps.Values(v.mu.segs))
	all = slices.DeleteFunc(all, func(s *segment) bool { return !s.sealed || s.newerFormat })
	slices.SortFunc(all, func(a, b *segment) int { return cmp.Compare(b.seq, a.seq) })
	return all
}

// retain keeps a segment open until release. It reports false if the segment was evicted.
func (v *volume) retain(s *segment) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.segs[s.seq] != s {
		return false
	}
	s.refs++
	return true
}
