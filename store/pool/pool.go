// SPDX-License-Identifier: Apache-2.0

// Package pool is the RAM tier and the truth about it: a shared-memory segment
// that workers write and read themselves, which of its bytes belong to which
// chunk, and which may still be touched by a worker. It keeps that truth in an
// index file beside the segment; index.go gives the format. Memory provides its
// pages ahead of use.
//
// A slot is one object's place. It goes free → staged (Reserve) → resident
// (Commit) → free (Drop). A hold says that a worker may touch the slot's bytes; a
// slot dropped while held is condemned: its key is gone at once, its memory comes
// back when the last hold ends.
//
// A Pool decides nothing: what to evict and when a hold ends is its owner's
// business. It is not safe for concurrent use, except Populate, BackIndex, BackIndexFor and
// Hash; its owner locks.
package pool

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/arena"
	"github.com/kvasir-kv/kvasir/internal/invariant"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
)

var (
	// ErrFull means that no free range is long enough.
	ErrFull = errors.New("pool: no room")
	// ErrIndexMemory means that the index has no memory for another slot yet. BackIndex provides it.
	ErrIndexMemory = errors.New("pool: no memory for the index")
	// ErrExists means that a key is staged or resident already.
	ErrExists = errors.New("pool: key exists")
	// ErrInUse means that another server has the pool of that name.
	ErrInUse = errors.New("pool: in use")
	// ErrForeign means that a file of the pool's name is no pool of Kvasir.
	ErrForeign = errors.New("pool: file exists and is not a Kvasir pool")
	// ErrNoSpace means that the shared-memory file system is too small.
	ErrNoSpace = errors.New("pool: shared memory too small")
)

// DefaultAlign is the alignment of slots: one page, as LMCache's.
const DefaultAlign = 4096

// Options configures a Pool.
type Options struct {
	Name        string // segment name, without a slash
	Bytes       int64  // size of the segment
	Align       int64  // of slots, a power of two; default DefaultAlign
	ChunkTokens int    // recorded in the index
	Cold        bool   // discard what an earlier server left
	Dir         string // default shm.Dir; tests use another

	// Clock is the time since boot; default CLOCK_MONOTONIC. Tests use another.
	Clock func() time.Duration

	// Providing is called before the kernel is asked for memory, which may take long; default
	// none. Tests use it.
	Providing func()

	former []int // chunk sizes that earlier servers announced
}

// Writer names a transfer that writes slots, for the server that takes the pool
// over. The zero Writer names no transfer.
type Writer struct {
	Name   uint64 // which its commit repeats
	Number uint32 // distinguishes transfers of one name
}

// Slot numbers an object's place; the number is reused.
type Slot uint32

// State is what a slot is.
type State uint8

// The states of a slot, as in the index.
const (
	Free State = iota
	Staged
	Resident
	Condemned
)

// Usage counts bytes, alignment included.
type Usage struct {
	Bytes          int64 // the segment
	FreeBytes      int64
	StagedBytes    int64
	ResidentBytes  int64
	CondemnedBytes int64
	Resident       int   // objects
	HighBytes      int64 // end of the highest byte ever handed out
}

// Pool is an open pool.
type Pool struct {
	opts    Options
	segment *shm.Segment
	index   *shm.Segment
	arena   *arena.Arena
	table   table
	near    regions
	spare   []Slot // free records below used
	used    int    // records ever used
	records int
	bytes   [4]int64 // rounded bytes by State
	count   [4]int
	stamp   uint64 // of the latest use

	backing  sync.Mutex   // orders BackIndex
	backed   atomic.Int64 // records whose index pages the kernel has provided; grows under backing
	unbacked atomic.Bool  // the kernel had no memory for more

	restored Restored
}

// Name returns the segment's name as a client opens it.
func (p *Pool) Name() string { return p.opts.Name }

// Path is the segment's file.
func (p *Pool) Path() string { return p.segment.Path() }

// Inode identifies the segment's file.
func (p *Pool) Inode() uint64 { return p.segment.Inode() }

// Bytes returns the segment's size.
func (p *Pool) Bytes() int64 { return p.opts.Bytes }

// FormerBytes returns the size that the pool had when the earlier server served it, its own without one.
func (p *Pool) FormerBytes() int64 { return p.restored.Bytes }

// Find returns the slot that is staged or resident under k.
func (p *Pool) Find(k *kv.Key) (Slot, State) {
	if s, ok := p.table.find(p, k); ok {
		return s, p.record(s).state()
	}
	return 0, Free
}

// Reserve stages n bytes under k, with one hold for the worker that will write
// them. by names that worker's transfer for Restored. Errors: ErrExists, ErrFull, ErrIndexMemory.
func (p *Pool) Reserve(k *kv.Key, n int64, by Writer) (Slot, error) {
	if _, ok := p.table.find(p, k); ok {
		return 0, ErrExists
	}
	if len(p.spare) == 0 && p.used == p.records {
		return 0, ErrFull
	}
	if len(p.spare) == 0 && p.used >= int(p.backed.Load()) {
		if p.unbacked.CompareAndSwap(true, false) {
			return 0, ErrFull
		}
		return 0, ErrIndexMemory
	}
	off, ok := p.arena.Alloc(n)
	if !ok {
		return 0, ErrFull
	}
	s := p.takeRecord()
	r := p.record(s)
	r.write(k, off, n, by)
	r.begin(Staged, 1)
	p.account(Staged, off, n, 1)
	p.table.insert(p, s)
	p.near.add(s, off)
	return s, nil
}

// takeRecord returns a free record: one that was used before, else the next.
func (p *Pool) takeRecord() (s Slot) {
	if last := len(p.spare) - 1; last >= 0 {
		s, p.spare = p.spare[last], p.spare[:last]
		return s
	}
	s = Slot(p.used)
	p.used++
	p.index.Word(headerUsed).Store(uint64(p.used))
	crashPoint()
	return s
}

// BackIndex makes the kernel provide the next pages of the index, which is sparse: touching a page
// that a full file system cannot provide would kill the process. It is safe for concurrent use, so
// that its owner need not lock: the kernel may take long. After an error Reserve answers ErrFull
// once instead of ErrIndexMemory.
func (p *Pool) BackIndex() error {
	return p.backIndexTo(int(p.backed.Load()) + 64<<10/recordBytes)
}

// BackIndexFor is BackIndex for the slots of a pool of that many bytes.
func (p *Pool) BackIndexFor(bytes int64) error {
	return p.backIndexTo(p.recordsFor(bytes))
}

// backIndexTo makes the kernel provide the pages of the index for that many records.
func (p *Pool) backIndexTo(records int) error {
	p.backing.Lock()
	defer p.backing.Unlock()
	records = min(records, p.records)
	backed := int(p.backed.Load())
	if records <= backed {
		return nil
	}
	p.providing()
	err := p.index.Populate(headerBytes+int64(backed)*recordBytes, int64(records-backed)*recordBytes, false)
	if err != nil && !errors.Is(err, shm.ErrNoPopulate) {
		p.unbacked.Store(true)
		return err
	}
	p.backed.Store(int64(records))
	p.unbacked.Store(false)
	return nil
}

// providing calls Options.Providing.
func (p *Pool) providing() {
	if p.opts.Providing != nil {
		p.opts.Providing()
	}
}

// Commit makes a staged slot resident and ends its writer's hold.
func (p *Pool) Commit(s Slot) {
	r := p.record(s)
	p.requireState(s, r, Staged)
	p.account(Staged, r.offset(), r.length(), -1)
	p.account(Resident, r.offset(), r.length(), 1)
	r.set(Resident, 0)
}

// Drop removes a staged or resident slot's key. The memory is free at once when
// nothing holds the slot, else when the last hold ends.
func (p *Pool) Drop(s Slot) {
	r := p.record(s)
	state := r.state()
	if state != Staged && state != Resident {
		panic(fmt.Sprintf("BUG: pool: drop of slot %d in state %d", s, state))
	}
	p.table.remove(p, s)
	p.account(state, r.offset(), r.length(), -1)
	if r.holds() == 0 {
		p.free(s, r)
		return
	}
	r.setState(Condemned)
	p.account(Condemned, r.offset(), r.length(), 1)
}

// Hold says that a worker may now read or write the slot's bytes.
func (p *Pool) Hold(s Slot) {
	r := p.record(s)
	if r.state() == Free || r.holds() >= 0xffffff {
		panic(fmt.Sprintf("BUG: pool: hold on slot %d in state %d with %d holds", s, r.state(), r.holds()))
	}
	r.resetHeld()
	r.setHolds(r.holds() + 1)
}

// Unhold ends one hold and frees a condemned slot with its last.
func (p *Pool) Unhold(s Slot) {
	r := p.record(s)
	if r.holds() == 0 {
		panic(fmt.Sprintf("BUG: pool: slot %d is not held", s))
	}
	if r.holds() == 1 && r.state() == Condemned {
		p.account(Condemned, r.offset(), r.length(), -1)
		p.free(s, r)
		return
	}
	r.setHolds(r.holds() - 1)
}

func (p *Pool) free(s Slot, r record) {
	off, n := r.offset(), r.length()
	r.set(Free, 0)
	if invariant.Enabled {
		_ = shm.Guard(func() { invariant.Poison(p.segment.Bytes(off, n)) }) // memory that is gone needs no poison
	}
	p.near.remove(s, off)
	inside := p.inside(off, n)
	if inside > 0 {
		p.arena.Release(off, inside)
	}
	if inside < p.Round(n) { // of a pool that became smaller
		_ = p.segment.Punch(off+inside, p.Round(n)-inside)
	}
	p.spare = append(p.spare, s)
}

// account notes that the bytes of a slot at off, those below the pool's end, are of a state, or with d -1 no more.
func (p *Pool) account(state State, off, n int64, d int) {
	p.bytes[state] += int64(d) * p.inside(off, n)
	p.count[state] += d
}

func (p *Pool) requireState(s Slot, r record, want State) {
	if got := r.state(); got != want {
		panic(fmt.Sprintf("BUG: pool: slot %d is in state %d, not %d", s, got, want))
	}
}

// Offset returns where the slot's bytes begin in the segment.
func (p *Pool) Offset(s Slot) int64 { return p.record(s).offset() }

// Length returns the slot's bytes.
func (p *Pool) Length(s Slot) int64 { return p.record(s).length() }

// KeyOf returns the key a slot was reserved under.
func (p *Pool) KeyOf(s Slot) kv.Key { return p.record(s).key() }

// Holds returns how many holds a slot has.
func (p *Pool) Holds(s Slot) int { return p.record(s).holds() }

// StateOf returns a slot's state.
func (p *Pool) StateOf(s Slot) State { return p.record(s).state() }

// Usage returns what the pool's bytes are.
func (p *Pool) Usage() Usage {
	return Usage{
		Bytes: p.opts.Bytes, FreeBytes: p.arena.Free(), HighBytes: p.arena.High(),
		StagedBytes: p.bytes[Staged], ResidentBytes: p.bytes[Resident], CondemnedBytes: p.bytes[Condemned],
		Resident: p.count[Resident],
	}
}

// Slots is how many slots were ever used: their numbers are smaller.
func (p *Pool) Slots() int { return p.used }

// Generation returns the number of a slot's content, which earlier and later contents do not share.
func (p *Pool) Generation(s Slot) uint32 { return p.record(s).generation() }

// Sum returns the recorded checksum of a slot's bytes; false when there is none.
func (p *Pool) Sum(s Slot) (uint64, bool) { return p.record(s).sum() }

// SetSum records the checksum of a resident slot's bytes, for the check after a
// restart.
func (p *Pool) SetSum(s Slot, sum uint64) {
	r := p.record(s)
	p.requireState(s, r, Resident)
	off := headerBytes + int64(s)*recordBytes
	p.index.Word(off + 104).Store(sum) // before the mark: a crash between leaves none
	crashPoint()
	p.index.Word(off + 112).Store(sumMark | uint64(r.generation()))
}

// MarkOf returns the mark of a place below the pool by its name: never 0.
func MarkOf(place string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(place))
	return max(1, h.Sum32()>>(belowShift-32))
}

// SetBelow notes that a resident slot with a checksum is kept below the pool, too: in the
// place of that mark, or nowhere with 0.
func (p *Pool) SetBelow(s Slot, mark uint32) {
	r := p.record(s)
	p.requireState(s, r, Resident)
	crashPoint()
	p.index.Word(headerBytes + int64(s)*recordBytes + 112).Store(uint64(mark)<<belowShift | sumMark | uint64(r.generation()))
}

// Below returns the mark of the place below the pool where the slot's object is kept, 0
// for none.
func (p *Pool) Below(s Slot) uint32 { return p.record(s).below() }

// Hash returns the xxh3 of n bytes at off, read through buf. Safe beside every
// other method but Close: a slot that is reused meanwhile gives some other sum,
// and another Generation.
func (p *Pool) Hash(off, n int64, buf []byte) (uint64, error) {
	h := xxh3.New()
	for n > 0 {
		b := buf[:min(int64(len(buf)), n)]
		if _, err := p.segment.ReadAt(b, off); err != nil {
			return 0, fmt.Errorf("read pool: %w", err)
		}
		_, _ = h.Write(b)
		off, n = off+int64(len(b)), n-int64(len(b))
	}
	return h.Sum64(), nil
}

// View returns the slot's bytes in the segment. A worker may be writing them.
func (p *Pool) View(s Slot) []byte {
	r := p.record(s)
	return p.segment.Bytes(r.offset(), r.length())
}

// At returns the n bytes at off.
func (p *Pool) At(off, n int64) []byte { return p.segment.Bytes(off, n) }

// Populate makes the kernel provide n bytes of the segment at off, clipped to its
// end, without changing their content; with keep they stay mapped here. Safe beside
// every other method.
func (p *Pool) Populate(off, n int64, keep bool) error {
	p.providing()
	return p.segment.Populate(off, min(n, p.opts.Bytes-off), keep)
}

// Provided returns how many bytes from the segment's start have memory already.
func (p *Pool) Provided() int64 {
	return min(p.opts.Bytes, p.segment.Provided(int64(min(p.index.Word(headerProvided).Load(), uint64(p.opts.Bytes)))))
}

// NoteProvided records for a later server that the first bytes bytes of the segment
// have memory: it need not look for holes in them.
func (p *Pool) NoteProvided(bytes int64) { p.index.Word(headerProvided).Store(uint64(bytes)) }

// recordPer is how much of the segment a record of the index is provided for ahead
// of use: less than most chunks take.
const recordPer = 64 << 10

// Limit lets Reserve take nothing above that many bytes; it begins as Bytes. What
// was taken stays. It rises only if BackIndexFor has succeeded for as many.
func (p *Pool) Limit(bytes int64) {
	if bytes < p.arena.End() || p.backed.Load() >= int64(p.recordsFor(bytes)) {
		p.arena.Limit(bytes)
	}
}

// recordsFor returns how many records have memory where that many bytes may be used.
func (p *Pool) recordsFor(bytes int64) int {
	return min(int(min(bytes/recordPer, int64(p.records)))+firstRecords, p.records)
}

// NameLost reports whether the segment's name no longer leads to it, so that no
// further client can map the pool.
func (p *Pool) NameLost() bool { return !p.segment.Exists() }

// Close unmaps the pool and gives up its lock. Its files stay, for a later server
// to go on with.
func (p *Pool) Close() error {
	return errors.Join(p.segment.Close(), p.index.Close())
}

// Remove removes the pool's files. Clients that map it keep their mapping.
func (p *Pool) Remove() error {
	err := p.segment.Unlink()
	if rerr := os.Remove(p.notePath()); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	shm.RemoveUnfinished(p.notePath())
	return errors.Join(err, p.index.Unlink())
}

// Stamp notes that a slot was used later than all others, for the order after a
// restart.
func (p *Pool) Stamp(s Slot) {
	p.stamp++
	p.record(s).setStamp(p.stamp)
}

// Expire makes a slot expired for a later server, unless it is stamped afterwards.
func (p *Pool) Expire(s Slot) {
	crashPoint()
	p.record(s).setStamp(0)
	crashPoint()
}

// Expired reports whether an earlier server left a slot that it had not stamped.
func (p *Pool) Expired(s Slot) bool { return p.record(s).stamp() == 0 }

// Outdate makes all slots outdated for a later server, unless they are stamped again.
func (p *Pool) Outdate() {
	p.stamp++
	crashPoint()
	p.index.Word(headerCleared).Store(p.stamp)
	crashPoint()
}

// Outdated reports whether Outdate was called since a slot was stamped, by this server
// or by an earlier one.
func (p *Pool) Outdated(s Slot) bool {
	cleared := p.index.Word(headerCleared).Load()
	return cleared > 0 && p.record(s).stamp() <= cleared
}
