// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
)

// A pool is resized in place while no server runs. Its segment keeps its inode, so that engines that map it can continue. The header's word
// at 136 has the new size.
//
// To become smaller: chunks above the new end move into free ranges below it, the most recently used first. The memory above the end is
// given back, except where a worker may still touch it. The file keeps its length, so that mappings stay whole. To become larger: the
// segment and the index get longer files. A kill at any moment leaves the old size or the new one, and loses at most the chunk that was
// being moved.

// resize makes the pool o.Bytes long and returns it. p must not be used afterwards.
func (p *Pool) resize(o Options) (_ *Pool, err error) {
	if o.Bytes < p.opts.Bytes {
		p.shrink(o.Bytes)
	} else if err := p.extend(o); err != nil {
		return nil, err
	}
	kept := p.opts.Bytes
	records := (p.index.Len() - headerBytes) / recordBytes
	p = newPool(o, p.segment, p.index, int(min(records, maxRecords)))
	if err := p.restore(); err != nil {
		return nil, err
	}
	p.restored.Bytes = kept
	return p, nil
}

// shrink keeps the chunks for which there is room below the new size `to`, and drops the others.
func (p *Pool) shrink(to int64) {
	p.arena.Limit(to)
	var moving []Slot // the most recently used first
	left := to - p.heldBelow(to)
	for _, s := range slices.Backward(p.restored.Resident) {
		n, beyond := p.Round(p.Length(s)), p.reaches(s, to)
		switch {
		case p.Holds(s) > 0 && !beyond && !p.Outdated(s): // counted in heldBelow
		case p.Outdated(s) || n > left:
			p.Drop(s)
		default:
			left -= n
			if beyond {
				moving = append(moving, s)
			}
		}
	}
	for _, s := range moving {
		for compacted := false; !p.move(s, to); compacted = true {
			if !compacted && p.compact(to) {
				continue
			}
			if !p.makeRoom(s, to) {
				p.Drop(s)
				break
			}
		}
	}
	p.index.Word(headerResized).Store(uint64(to))
	crashPoint()
}

// reaches reports whether a slot has bytes above the new size `to`.
func (p *Pool) reaches(s Slot, to int64) bool { return p.Offset(s)+p.Round(p.Length(s)) > to }

// heldBelow returns how many bytes below `to` a worker may still touch.
func (p *Pool) heldBelow(to int64) (n int64) {
	for _, h := range p.restored.Held {
		off := p.Offset(h.Slot)
		n += max(0, min(off+p.Round(p.Length(h.Slot)), to)-off)
	}
	return n
}

// compact moves slots that are not held to lower places, so that free ranges join. It reports whether it moved any.
func (p *Pool) compact(to int64) (moved bool) {
	var all []Slot
	for s := range Slot(p.used) {
		if p.StateOf(s) == Resident && p.Holds(s) == 0 && !p.reaches(s, to) {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b Slot) int { return cmp.Compare(p.Offset(a), p.Offset(b)) })
	for _, s := range all {
		moved = p.move(s, p.Offset(s)) || moved
	}
	return moved
}

// placesForMove is how many slots makeRoom looks at for a run of neighbours to drop.
const placesForMove = 256

// makeRoom drops neighbouring slots below `to` that were used before s and are not held, so that there is a free range for s. It reports
// false if there are none.
func (p *Pool) makeRoom(s Slot, to int64) bool {
	mine := p.record(s).stamp()
	stays := func(o uint32) bool {
		return p.StateOf(Slot(o)) != Resident || p.Holds(Slot(o)) > 0 || p.record(Slot(o)).stamp() >= mine || p.reaches(Slot(o), to)
	}
	run, _ := p.CheapestRun(p.Length(s), placesForMove, func(yield func(uint32) bool) {
		for o := range uint32(p.used) { // in no order of use: slots that were used after s stay
			if !stays(o) && !yield(o) {
				return
			}
		}
	}, stays)
	for _, o := range run.Slots {
		p.Drop(o)
	}
	return len(run.Slots) > 0
}

// move moves a resident slot's object to another place, below `to`. It reports false if there is none.
func (p *Pool) move(s Slot, to int64) bool {
	from := p.record(s)
	n := from.length()
	off, ok := p.arena.Alloc(n)
	if !ok {
		return false
	}
	if off+p.Round(n) > to {
		p.arena.Release(off, n)
		return false
	}
	if err := p.segment.Populate(off, n, false); err != nil && !errors.Is(err, shm.ErrNoPopulate) {
		p.arena.Release(off, n)
		return false
	}
	if len(p.spare) == 0 && (p.used == p.records || p.used >= int(p.backed.Load()) && p.BackIndex() != nil) {
		p.arena.Release(off, n)
		return false
	}
	key, stamp := from.key(), from.stamp()
	sum, summed := from.sum()
	below := from.below()
	moved := p.takeRecord()
	r := p.record(moved)
	r.write(&key, off, n, from.writer())
	r.begin(Staged, 1) // a server that finds the slot in this state drops it
	p.account(Staged, off, n, 1)
	p.near.add(moved, off)
	copied := shm.Guard(func() { copy(p.segment.Bytes(off, n), p.segment.Bytes(from.offset(), n)) }) == nil
	p.Drop(s) // before the new slot is resident: a key must have only one slot
	p.table.insert(p, moved)
	if !copied {
		p.Drop(moved)
		p.Unhold(moved)
		return true
	}
	r.setStamp(stamp)
	p.Commit(moved)
	if summed {
		p.SetSum(moved, sum)
		p.SetBelow(moved, below)
	}
	return true
}

// extend makes the files as long as a pool of o.Bytes needs. Error: *SpaceError; then nothing has changed.
func (p *Pool) extend(o Options) error {
	need := filesBytes(o) - p.segment.Taken() - p.index.Taken()
	dir := cmp.Or(o.Dir, shm.Dir)
	if free, err := shm.Free(dir); err == nil && free < need {
		return &SpaceError{Dir: dir, Need: need, Free: free, More: true, Removed: ListRemoved(dir)}
	}
	if err := errors.Join(p.index.Extend(filesBytes(o)-o.Bytes), p.segment.Extend(o.Bytes)); err != nil {
		return fmt.Errorf("pool: make it larger: %w", err)
	}
	crashPoint()
	p.index.Word(headerResized).Store(uint64(o.Bytes))
	crashPoint()
	return nil
}

// filesBytes returns the length of a pool's segment and index together.
func filesBytes(o Options) int64 {
	return o.Bytes + headerBytes + min(o.Bytes/o.Align, maxRecords)*recordBytes
}

// giveBackBeyond gives back the memory above the pool's end, which the file of a pool that became smaller may have. It leaves out slots
// that a worker may still touch.
func (p *Pool) giveBackBeyond() {
	end := p.opts.Bytes
	if p.segment.Len() <= end {
		return
	}
	if w := p.index.Word(headerProvided); w.Load() > uint64(end) {
		w.Store(uint64(end)) // done first: a server that makes the pool larger must not find more than there is
	}
	var kept []span
	for _, h := range p.restored.Held {
		kept = append(kept, span{p.Offset(h.Slot), p.Offset(h.Slot) + p.Round(p.Length(h.Slot))})
	}
	_ = punchExcept(p.segment, end, kept) // on a file system that cannot do this, the memory stays until the pool is removed
}

// span is a range of bytes.
type span struct{ from, to int64 }

// punchExcept gives back the memory of a segment from offset off on, except that of the spans in kept.
func punchExcept(s *shm.Segment, off int64, kept []span) error {
	slices.SortFunc(kept, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	for _, k := range kept {
		if k.from > off {
			if err := s.Punch(off, k.from-off); err != nil {
				return err
			}
		}
		off = max(off, k.to)
	}
	if off >= s.Len() {
		return nil
	}
	return s.Punch(off, s.Len()-off)
}

// replace removes a pool that no process serves, to make room for a new pool of o, if there is room enough. Engines that map the old pool
// keep their mapping and its memory, so replace first gives back the memory that no worker may touch. index is the old pool's, or nil if it
// cannot be read. Error: *SpaceError; then nothing has changed.
func replace(path string, index *shm.Segment, o Options) error {
	dir := cmp.Or(o.Dir, shm.Dir)
	file, err := shm.Stat(path)
	if err != nil || foreign(path) != nil {
		return discard(path, o.Name)
	}
	kept, readable := touchable(index, file)
	pids, whole := peercred.Mappers(o.Name, file.Inode, peercred.Process{})
	held := int64(0) // bytes that stay in use after the pool is removed
	switch {
	case !readable && len(pids) > 0:
		held = file.Taken
	case len(pids) > 0 || !whole:
		for _, k := range kept {
			held += k.to - k.from
		}
	}
	freed := file.Taken - min(held, file.Taken)
	if f, err := shm.Stat(path + IndexSuffix); err == nil {
		freed += f.Taken
	}
	if free, err := shm.Free(dir); err == nil && free+freed < filesBytes(o) {
		return &SpaceError{Dir: dir, Need: filesBytes(o), Free: free + freed, Held: held, Holders: pids, Removed: ListRemoved(dir)}
	}
	if readable {
		if s, err := shm.AttachIf(path, shm.Ours); err == nil {
			_ = punchExcept(s, 0, kept) // if the file system cannot, the memory comes back with the last mapping
			if err := s.Close(); err != nil {
				return err
			}
		}
	}
	return discard(path, o.Name)
}

// touchable returns the ranges of a pool's file that a worker may still touch. It reports false if the index does not tell.
func touchable(index *shm.Segment, file shm.File) (kept []span, ok bool) {
	if index == nil {
		return nil, false
	}
	h, err := readHeader(index)
	if err != nil {
		return nil, false
	}
	used := index.Word(headerUsed).Load()
	if h.inode != file.Inode || used > uint64(h.records) {
		return nil, false
	}
	p := &Pool{index: index}
	for i := range int(used) {
		r := p.record(Slot(i))
		if r.state() == Free || r.state() == Resident && r.holds() == 0 {
			continue
		}
		if !r.intact() || r.state() > Condemned {
			return nil, false
		}
		kept = append(kept, span{r.offset(), r.offset() + r.length()})
	}
	return kept, true
}
