// SPDX-License-Identifier: Apache-2.0

package store

import (
	"slices"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// batch is how many objects are searched, pinned, released or dropped under the lock at a time: this takes well below a millisecond.
const batch = 2048

// dropBatch is as batch, for objects that may be dropped, which takes longer.
const dropBatch = 128

// maxLookup bounds the objects of one lookup: the chunks beyond them are not looked up. It also bounds the objects of all pending lookups.
const maxLookup = 1 << 21

// Prompt is what a lookup asks for.
type Prompt struct {
	Chunks int
	Tokens int         // tokens of a chunk, for the result
	From   int         // leading chunks that the engine has itself: they are only marked as used, and count as part of the hit
	Owner  lease.Owner // who asks: when pins reach their limit, the owner with the most pins loses some
	Note   any         // a value of the caller, which LookupResult.Note returns

	// Hashes returns the chunk hashes of the prompt, at least the first n. The store calls it without a lock, and asks for more chunks only
	// while all chunks so far are found. Most misses end early, and chunks that are not searched need no hash.
	Hashes func(n int) []kv.Hash
}

// Hashed returns the Prompt of chunks whose hashes are known.
func Hashed(hashes []kv.Hash) Prompt {
	return Prompt{Chunks: len(hashes), Hashes: func(int) []kv.Hash { return hashes }}
}

// found is the result of a search for the objects of a prompt: a slot for each row of each chunk. There is one row for each group and
// shard.
type found struct {
	slots []uint32 // [chunk*rows + row]; absent where there is none
	rows  int
	from  int    // chunks before it are not searched, and count as found
	limit int    // number of chunks: groups of full attention have all chunks before it
	drops uint64 // Store.mu.drops when the search began

	readyOnly bool // search only for objects that may be served now
	unready   bool // the search found an object that may not be served yet
}

const absent = ^uint32(0)

func (f *found) at(chunk, row int) uint32 { return f.slots[chunk*f.rows+row] }

// find searches the objects of a prompt. It ends at the first chunk that a group of full attention lacks in some shard. It returns the
// hashes of at least the chunks that it searched.
func (s *Store) find(sh object.Shard, p Prompt, f *found) []kv.Hash {
	f.drops = s.dropsSoFar()
	columns := max(1, batch/f.rows)
	p.Chunks = min(p.Chunks, maxLookup/f.rows)
	f.from = min(p.From, p.Chunks)
	f.limit, f.slots = f.from, slices.Repeat([]uint32{absent}, f.from*f.rows)
	var hashes []kv.Hash
	for step := 1; f.limit < p.Chunks; step *= 2 {
		hashes = p.Hashes(min(f.limit+step, p.Chunks))
		hashes = hashes[:min(len(hashes), p.Chunks)]
		if step == 2 { // the first chunk was found: as most lookups then find much, the memory for many chunks is taken at once
			f.slots = slices.Grow(f.slots, min((p.Chunks-f.limit)*f.rows, batch))
		}
		for f.limit < len(hashes) {
			to := min(f.limit+columns, len(hashes))
			if !s.findColumns(sh, hashes[:to], f) {
				s.findWindows(sh, hashes, f)
				return hashes
			}
		}
	}
	s.findWindows(sh, hashes, f)
	return hashes
}

func (s *Store) dropsSoFar() uint64 {
	s.lock()
	defer s.unlock()
	return s.mu.drops
}

// findColumns searches the chunks from f.limit on in the groups of full attention. It reports whether all of them were found.
func (s *Store) findColumns(sh object.Shard, hashes []kv.Hash, f *found) bool {
	s.lock()
	defer s.unlock()
	var k kv.Key
	f.slots = slices.Grow(f.slots, (len(hashes)-f.limit)*f.rows)
	for ; f.limit < len(hashes); f.limit++ {
		for row := range f.rows {
			group := row / sh.World
			if !sh.Groups.Full(group) {
				f.slots = append(f.slots, absent)
				continue
			}
			sh.Key(&k, row%sh.World, group, hashes[f.limit])
			slot, ok := s.seekLocked(&k, sh.Groups.Bytes(group), f)
			if !ok {
				f.slots = f.slots[:f.limit*f.rows]
				return false
			}
			f.slots = append(f.slots, uint32(slot))
		}
	}
	return true
}

// findWindows searches the chunks before f.limit in the groups that do not have full attention.
func (s *Store) findWindows(sh object.Shard, hashes []kv.Hash, f *found) {
	if !sh.Groups.Windows() {
		return
	}
	columns := max(1, dropBatch/f.rows) // an object that has expired is dropped here
	for from := f.from; from < f.limit; from += columns {
		s.findWindowColumns(sh, hashes, f, from, min(from+columns, f.limit))
	}
}

func (s *Store) findWindowColumns(sh object.Shard, hashes []kv.Hash, f *found, from, to int) {
	s.lock()
	defer s.unlock()
	var k kv.Key
	for c := from; c < to; c++ {
		for row := range f.rows {
			if group := row / sh.World; !sh.Groups.Full(group) {
				sh.Key(&k, row%sh.World, group, hashes[c])
				if slot, ok := s.seekLocked(&k, sh.Groups.Bytes(group), f); ok {
					f.slots[c*f.rows+row] = uint32(slot)
				}
			}
		}
	}
}

// seekLocked returns the slot with the resident object of k, and sets f.unready if the object may not be served yet. A warmed object whose
// length is not n is not served, because Warm could not know the right length. It is dropped unless it is pinned or held.
func (s *Store) seekLocked(k *kv.Key, n int64, f *found) (pool.Slot, bool) {
	slot, ready, ok := s.servableLocked(k)
	misfit := ok && s.misfitLocked(slot, n)
	if misfit && s.evictableLocked(slot) {
		s.dropLocked(slot, miss.BelowCorrupt)
	}
	ok = ok && (!misfit || !ready) // an object in flight is searched again later
	if ok && !ready {
		f.unready = true
	}
	return slot, ok && (ready || !f.readyOnly)
}

// misfitLocked reports whether Warm read the object of a slot and its length is not n.
func (s *Store) misfitLocked(slot pool.Slot, n int64) bool {
	return s.mu.warmed.Has(uint32(slot)) && s.mu.pool.Length(slot) != n
}

// promisedLocked is residentLocked for a load. It also returns an outdated object, which a lookup may have pinned before the clear.
func (s *Store) promisedLocked(k *kv.Key) (pool.Slot, bool) {
	slot, st := s.findLocked(k)
	return slot, st == pool.Resident && !s.suspectedLocked(slot)
}

// residentLocked returns the slot with the resident object of k. It reports false if the object may not be served.
func (s *Store) residentLocked(k *kv.Key) (pool.Slot, bool) {
	slot, st := s.findLocked(k)
	return slot, st == pool.Resident && !s.suspectedLocked(slot) && !s.outdatedLocked(slot) && !s.mu.lives.ended(slot)
}

// hit returns the longest prefix that every row can serve, as a number of chunks.
func (f *found) hit(sh object.Shard) int {
	if !sh.Groups.Windows() {
		return f.limit
	}
	return sh.Groups.Hit(f.limit, func(group, chunk int) bool { return f.has(group, sh.World, chunk) })
}

// has reports whether chunk c of group g was found in every shard.
func (f *found) has(g, world, c int) bool {
	if c < f.from {
		return true
	}
	for shard := range world {
		if f.at(c, g*world+shard) == absent {
			return false
		}
	}
	return true
}

// pin pins the objects that a load of `hit` chunks needs. The lease takes over f's memory. If an object of the hit was dropped since the
// search, pin removes it from f, pins nothing and reports false.
func (s *Store) pin(sh object.Shard, hashes []kv.Hash, f *found, hit, readers int) (lease.Lease, bool) {
	l := lease.Lease{From: f.from, Chunks: hit, Rows: f.rows}
	if hit <= f.from {
		l.Chunks = 0 // it has no slots
		return l, true
	}
	l.Slots, l.Left = f.slots[:hit*f.rows], make([]uint8, hit*f.rows)
	columns := max(1, batch/f.rows)
	for from := f.from; from < hit; from += columns {
		if !s.pinColumns(sh, hashes, f, &l, from, min(from+columns, hit), readers) {
			s.giveBack([]lease.Lease{l})
			return lease.Lease{}, false
		}
	}
	return l, true
}

func (s *Store) pinColumns(sh object.Shard, hashes []kv.Hash, f *found, l *lease.Lease, from, to, readers int) bool {
	s.lock()
	defer s.unlock()
	changed := s.mu.drops != f.drops
	var k kv.Key
	for group := range sh.Groups.Len() {
		need := sh.Groups.Need(group, f.from, l.Chunks)
		for shard := range sh.World {
			row := group*sh.World + shard
			for c := max(need.Start, from); c < min(need.End, to); c++ {
				slot := pool.Slot(f.at(c, row))
				if changed {
					sh.Key(&k, shard, group, hashes[c])
					var ok bool
					if slot, ok = s.residentLocked(&k); !ok || s.misfitLocked(slot, sh.Groups.Bytes(group)) {
						s.missing(sh, f, group, row, c)
						return false
					}
					l.Slots[c*f.rows+row] = uint32(slot)
				}
				l.Left[c*f.rows+row] = uint8(readers)
				s.pinLocked(slot)
				s.hitLocked(slot)
			}
		}
	}
	return true
}

// missing removes an object from f, because it was dropped after the search found it.
func (s *Store) missing(sh object.Shard, f *found, group, row, chunk int) {
	if sh.Groups.Full(group) {
		f.limit = min(f.limit, chunk)
	} else {
		f.slots[chunk*f.rows+row] = absent
	}
}

// giveBack releases the pins of leases, the last chunks first.
func (s *Store) giveBack(leases []lease.Lease) {
	for i := range leases {
		l := &leases[i]
		columns := max(1, batch/max(1, l.Rows))
		for to := l.Chunks; to > 0; to -= columns {
			s.giveBackColumns(l, max(0, to-columns), to)
		}
	}
}

func (s *Store) giveBackColumns(l *lease.Lease, from, to int) {
	s.lock()
	defer s.unlock()
	for row := range l.Rows {
		l.Take(row, from, to, 255, s.unpinLocked)
	}
}
