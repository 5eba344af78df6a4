// SPDX-License-Identifier: Apache-2.0

// Package pool is the RAM tier: a shared-memory segment that workers write and read themselves. It knows which bytes of the segment belong
// to which chunk, and which a worker may still touch. It records this in an index file beside the segment; index.go gives the format.
// Memory provides the segment's pages ahead of use.
//
// A slot is the place of one object. It goes: free → staged (Reserve) → resident (Commit) → free (Drop). A hold says that a worker may
// touch the slot's bytes. A slot that is dropped while held is condemned: its key is gone at once, and its memory becomes free when the
// last hold ends.
//
// A Pool decides nothing: its owner decides what to evict and when a hold ends. A Pool is not safe for concurrent use, except Populate,
// BackIndex, BackIndexFor and Hash; its owner locks.
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
	ErrExists = errors.New("pool: an object of the key is staged or resident already")
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
	Align       int64  // alignment of slots, a power of two; default DefaultAlign
	ChunkTokens int    // recorded in the index
	Cold        bool   // discard the chunks of an earlier server
	Dir         string // default shm.Dir; tests use another

	// Clock returns the time since boot; default CLOCK_MONOTONIC. Tests use another.
	Clock func() time.Duration

	// Providing is called before the kernel is asked for memory, which may take long. Default none. Tests use it.
	Providing func()

	former []int // chunk sizes that earlier servers announced
}

// Writer identifies a transfer that writes slots, for the server that takes over the pool. The zero Writer identifies no transfer.
type Writer struct {
	Name   uint64 // hold.Transfer.Name, which its commit has too
	Number uint32 // distinguishes transfers of one name
}

// Slot is the number of an object's place. A number is used again after the slot was freed.
type Slot uint32

// State is the state of a slot.
type State uint8

// The states of a slot, as in the index.
const (
	Free State = iota
	Staged
	Resident
	Condemned
)

// Usage counts the pool's bytes by their use, alignment included.
type Usage struct {
	Bytes          int64 // size of the segment
	FreeBytes      int64
	StagedBytes    int64
	ResidentBytes  int64
	CondemnedBytes int64
	Resident       int   // objects
	HighBytes      int64 // end of the highest byte that was ever given out
}

// Pool is an open pool.
type Pool struct {
	opts    Options
	segment *shm.Segment
	index   *shm.Segment
	arena   *arena.Arena
	table   table
	near    regions
	spare   []Slot // records below used that are free
	used    int    // number of records that were ever used
	records int
	bytes   [4]int64 // bytes that slots take, by State
	count   [4]int
	stamp   uint64 // stamp of the latest use

	backing  sync.Mutex   // held by BackIndex, so that one call runs at a time
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

// FormerBytes returns the size that the pool had under the earlier server. A new pool returns its own size.
func (p *Pool) FormerBytes() int64 { return p.restored.Bytes }

// Find returns the slot that is staged or resident under k, and its state; the state is Free if there is none.
func (p *Pool) Find(k *kv.Key) (Slot, State) {
	if s, ok := p.table.find(p, k); ok {
		return s, p.record(s).state()
	}
	return 0, Free
}

// Reserve stages a slot of n bytes under k, with one hold for the worker that will write it. `by` identifies that worker's transfer; the
// Restored of a later server returns it. Errors: ErrExists, ErrFull, ErrIndexMemory.
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

// takeRecord returns a free record: one that was used before if there is one, otherwise the next.
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

// BackIndex makes the kernel provide the next pages of the index. The index is sparse: a page that a full file system cannot provide would
// kill the process that touches it. BackIndex is safe for concurrent use, so its owner need not lock while the kernel takes long. After an
// error Reserve returns ErrFull once instead of ErrIndexMemory.
func (p *Pool) BackIndex() error {
	return p.backIndexTo(int(p.backed.Load()) + 64<<10/recordBytes)
}

// BackIndexFor is BackIndex for the records of a pool of `bytes` bytes.
func (p *Pool) BackIndexFor(bytes int64) error {
	return p.backIndexTo(p.recordsFor(bytes))
}

// backIndexTo makes the kernel provide the index pages of that many records.
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

// providing calls Options.Providing, if it is set.
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

// Drop removes the key of a staged or resident slot. The memory becomes free at once if nothing holds the slot, otherwise when the last
// hold ends.
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

// Hold adds a hold: a worker may now read or write the slot's bytes.
func (p *Pool) Hold(s Slot) {
	r := p.record(s)
	if r.state() == Free || r.holds() >= 0xffffff {
		panic(fmt.Sprintf("BUG: pool: hold on slot %d in state %d with %d holds", s, r.state(), r.holds()))
	}
	r.resetHeld()
	r.setHolds(r.holds() + 1)
}

// Unhold ends one hold. The last one frees a condemned slot.
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

// account adds the n bytes of a slot at offset off, except those beyond the pool's end, to those of a state; with d -1 it subtracts them.
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

// Length returns the length of the slot's object in bytes.
func (p *Pool) Length(s Slot) int64 { return p.record(s).length() }

// KeyOf returns the key under which a slot was reserved.
func (p *Pool) KeyOf(s Slot) kv.Key { return p.record(s).key() }

// Holds returns how many holds a slot has.
func (p *Pool) Holds(s Slot) int { return p.record(s).holds() }

// StateOf returns a slot's state.
func (p *Pool) StateOf(s Slot) State { return p.record(s).state() }

// Usage returns how the pool's bytes are used.
func (p *Pool) Usage() Usage {
	return Usage{
		Bytes: p.opts.Bytes, FreeBytes: p.arena.Free(), HighBytes: p.arena.High(),
		StagedBytes: p.bytes[Staged], ResidentBytes: p.bytes[Resident], CondemnedBytes: p.bytes[Condemned],
		Resident: p.count[Resident],
	}
}

// Slots returns how many slots were ever used. All slot numbers are smaller.
func (p *Pool) Slots() int { return p.used }

// Generation returns the number of a slot's present content. No earlier or later content of the slot has the same.
func (p *Pool) Generation(s Slot) uint32 { return p.record(s).generation() }

// Sum returns the recorded checksum of a slot's bytes. It reports false if there is none.
func (p *Pool) Sum(s Slot) (uint64, bool) { return p.record(s).sum() }

// SetSum records the checksum of a resident slot's bytes, for the check after a
// restart.
func (p *Pool) SetSum(s Slot, sum uint64) {
	r := p.record(s)
	p.requireState(s, r, Resident)
	off := headerBytes + int64(s)*recordBytes
	p.index.Word(off + 104).Store(sum) // before the mark: after a crash in between there is no checksum
	crashPoint()
	p.index.Word(off + 112).Store(sumMark | uint64(r.generation()))
}

// MarkOf returns the mark of a tier by its name; it is never 0.
func MarkOf(place string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(place))
	return max(1, h.Sum32()>>(belowShift-32))
}

// SetBelow records that the tier with that mark also has the object of a resident slot with a checksum; 0: no tier has it.
func (p *Pool) SetBelow(s Slot, mark uint32) {
	r := p.record(s)
	p.requireState(s, r, Resident)
	crashPoint()
	p.index.Word(headerBytes + int64(s)*recordBytes + 112).Store(uint64(mark)<<belowShift | sumMark | uint64(r.generation()))
}

// Below returns the mark of the tier that also has the slot's object, 0 for none.
func (p *Pool) Below(s Slot) uint32 { return p.record(s).below() }

// Hash returns the xxh3 of the n bytes at offset off, which it reads through buf. It may run at the same time as every other method but
// Close. If the slot is reused meanwhile, the result is the checksum of other bytes, and the slot has another Generation.
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

// View returns the slot's bytes in the segment. A worker may be writing them at the same time.
func (p *Pool) View(s Slot) []byte {
	r := p.record(s)
	return p.segment.Bytes(r.offset(), r.length())
}

// At returns the n bytes of the segment at offset off.
func (p *Pool) At(off, n int64) []byte { return p.segment.Bytes(off, n) }

// Populate makes the kernel provide the n bytes of the segment at offset off, up to the segment's end, without a change of their content.
// With keep they stay mapped into this process. It may run at the same time as every other method.
func (p *Pool) Populate(off, n int64, keep bool) error {
	p.providing()
	return p.segment.Populate(off, min(n, p.opts.Bytes-off), keep)
}

// Provided returns how many bytes from the segment's start have memory already.
func (p *Pool) Provided() int64 {
	return min(p.opts.Bytes, p.segment.Provided(int64(min(p.index.Word(headerProvided).Load(), uint64(p.opts.Bytes)))))
}

// NoteProvided records for a later server that the first `bytes` bytes of the segment have memory. That server need not look for holes in
// them.
func (p *Pool) NoteProvided(bytes int64) { p.index.Word(headerProvided).Store(uint64(bytes)) }

// recordPer is the number of pool bytes for which one record of the index is provided ahead of use. It is less than most chunks take.
const recordPer = 64 << 10

// Limit prevents that Reserve takes anything above that many bytes; at first the limit is Bytes. Slots that are in use stay. The limit
// becomes higher only if BackIndexFor has succeeded for as many bytes.
func (p *Pool) Limit(bytes int64) {
	if bytes < p.arena.End() || p.backed.Load() >= int64(p.recordsFor(bytes)) {
		p.arena.Limit(bytes)
	}
}

// recordsFor returns how many index records need memory for a pool of which that many bytes may be used.
func (p *Pool) recordsFor(bytes int64) int {
	return min(int(min(bytes/recordPer, int64(p.records)))+firstRecords, p.records)
}

// NameLost reports whether the segment's name no longer leads to the segment. No further client can then map the pool.
func (p *Pool) NameLost() bool { return !p.segment.Exists() }

// Close unmaps the pool and releases its lock. Its files stay for a later server.
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

// Stamp records that a slot was used later than all others, for the order after a restart.
func (p *Pool) Stamp(s Slot) {
	p.stamp++
	p.record(s).setStamp(p.stamp)
}

// Expire marks a slot as expired for a later server, unless Stamp is called for it afterwards.
func (p *Pool) Expire(s Slot) {
	crashPoint()
	p.record(s).setStamp(0)
	crashPoint()
}

// Expired reports whether an earlier server left the slot without a stamp.
func (p *Pool) Expired(s Slot) bool { return p.record(s).stamp() == 0 }

// Outdate makes all slots outdated for a later server, unless they are stamped again.
func (p *Pool) Outdate() {
	p.stamp++
	crashPoint()
	p.index.Word(headerCleared).Store(p.stamp)
	crashPoint()
}

// Outdated reports whether this or an earlier server called Outdate after the slot's last stamp.
func (p *Pool) Outdated(s Slot) bool {
	cleared := p.index.Word(headerCleared).Load()
	return cleared > 0 && p.record(s).stamp() <= cleared
}
