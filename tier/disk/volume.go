// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

const (
	directPiece = 4 << 20 // bytes of one call, for memory that is aligned for direct I/O
	bouncePiece = 1 << 20 // bytes of one call that goes through a buffer

	refusePause = 10 * time.Second // pause of writes after a disk was full or failed
)

var (
	errClosed = errors.New("disk: closed")
	errFull   = errors.New("no room on the disk")
	errOpens  = errors.New("the disk is still being read")
	errBudget = errors.New("the write budget of this day is used up")
	errBusy   = errors.New("the object is being written")
	errLarge  = errors.New("the object is larger than a segment")
)

// volume is one directory: segments, and the index of what is in them.
type volume struct {
	dir     Dir
	number  uint8 // number of the directory in opts.Changes
	opts    *Options
	segment int64 // bytes of one segment
	log     *slog.Logger
	files   files
	id      uint64 // of the directory
	now     func() time.Time

	heads, bounces buffers // buffers of two blocks, and of bouncePiece bytes

	life    context.Context
	stop    context.CancelFunc
	running sync.WaitGroup // goroutines in the background
	calls   sync.WaitGroup // calls in progress
	opened  chan struct{}  // closed when the index has been read
	whole   atomic.Bool    // the indexes of all segments were read
	wake    chan struct{}  // wakes provideSegments
	full    chan struct{}  // wakes runTending
	journal journal        // owned by the goroutine that has its turn
	synced  time.Time      // owned by runTending: time of the last sync
	checked int64          // bytes ever written at the time of the last checkpoint
	n       counters

	mu struct {
		sync.Mutex
		index   index
		segs    map[uint32]*segment
		writing map[kv.Key]int                 // number of running writes of an object
		gone    map[uint64]map[uint32]struct{} // by a segment's id: blocks of deleted records that are still in its file
		fresh   []place                        // the places in gone that are not in the journal yet
		dropped map[kv.Key]struct{}            // while the index is read: keys whose records are skipped; nil afterwards

		active  *segment   // takes records
		spare   *segment   // will be the next active one
		sealing []*segment // take no more records, are not sealed yet
		nextSeq uint32
		used    int64 // bytes of all files of segments
		full    int64 // used when a segment was last evicted for room; 0: none was

		checkpoint int64 // bytes of the checkpoint file

		wanted  bool          // a write waits for a spare
		changed chan struct{} // closed when the next spare is ready, or refused is set
		refused error         // why no spare could be made
		until   time.Time     // when to try again

		wear
		closed bool
	}
}

// entry is where an object is.
type entry struct {
	sum   uint64
	seg   uint32
	block uint32
	len   uint32
	hot   bool
	over  uint32 // end of its life, seconds since 1970; 0: none
	seal  uint16 // key that encrypted it; 0: it is plain
}

func (e *entry) meta() tier.Meta {
	return tier.Meta{Len: int64(e.len), Sum: e.sum, End: e.over, Seal: e.seal}
}

// newer reports whether e's place was reserved after that of `than`; both are records of one key.
func (e *entry) newer(than *entry) bool {
	return e.seg > than.seg || e.seg == than.seg && e.block > than.block
}

// segment is one file. Its fields are guarded by volume.mu but for seq, id and file.
type segment struct {
	seq  uint32
	id   uint64
	file file

	size        int64    // bytes of the file
	end         int64    // where the next record goes
	count       int      // records reserved
	pending     int      // records being written
	refs        int      // readers, and the volume itself
	dirty       bool     // written since the last sync
	heat        float64  // bytes read, recent reads counted more
	entries     []record // records in the file and in the index, until the segment is sealed
	sealed      bool
	newerFormat bool          // a newer version of Kvasir wrote it: must not be removed
	leaving     bool          // a goroutine is removing it
	done        chan struct{} // closed when the segment was sealed, or sealing failed
	err         error         // why sealing failed
}

// begin counts a call, which ends with v.calls.Done. If the volume is closed it returns errClosed and counts nothing.
func (v *volume) begin() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.closed {
		return errClosed
	}
	v.calls.Add(1)
	return nil
}

// use finds an object of n bytes and keeps its segment open until release. counts says that this read counts as a use of the object. Errors:
// errClosed, tier.ErrMissing, *tier.CorruptError for another length.
func (v *volume) use(k *kv.Key, n int, counts bool) (s *segment, e entry, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	e, ok := v.mu.index.get(k)
	switch {
	case v.mu.closed:
		return nil, e, errClosed
	case !ok || e.meta().Over(v.now()):
		return nil, e, tier.ErrMissing
	case int(e.len) != n:
		return nil, e, &tier.CorruptError{Key: *k, Want: tier.Meta{Len: int64(n)}, Got: e.meta()}
	}
	v.noteLocked(*k, true)
	s = v.mu.segs[e.seg]
	s.refs++
	if counts {
		s.heat += float64(n)
	}
	if counts && !e.hot {
		e.hot = true
		v.mu.index.set(k, e)
	}
	v.calls.Add(1)
	return s, e, nil
}

// release ends a use. The last one closes the file.
func (v *volume) release(s *segment) {
	v.mu.Lock()
	s.refs--
	last := s.refs == 0
	v.mu.Unlock()
	if last {
		if err := s.file.close(); err != nil {
			v.log.Warn("a segment cannot be closed", "path", v.dir.Path, "segment", segmentName(s.seq, s.id), "err", err)
		}
	}
}

// read fills dst with an object.
func (v *volume) read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	s, e, err := v.use(&k, len(dst), tier.IsUse(ctx))
	if err != nil {
		return tier.Meta{}, err
	}
	defer v.calls.Done()
	defer v.release(s)
	r := record{k, e.block, e.len, e.sum, false, e.over, e.seal}
	got := tier.Meta{Len: int64(len(dst))}
	err = v.readInto(ctx, s, &r, dst)
	if err == nil && e.seal == 0 { // whoever decrypts an encrypted object checks its tag
		if got.Sum = xxh3.Hash(dst); got.Sum != e.sum {
			err = fmt.Errorf("%w: their checksum is %x, recorded is %x", errDamaged, got.Sum, e.sum)
		}
	}
	switch {
	case err == nil:
		v.n.reads.Add(1)
		v.n.readBytes.Add(int64(len(dst)))
		return e.meta(), nil
	case ctx.Err() != nil:
		return tier.Meta{}, ctx.Err()
	case isFault(err): // dst could not be accessed; the disk is not at fault
		return tier.Meta{}, err
	}
	v.dropDamaged(s, &r, err)
	if errors.Is(err, errDamaged) || errors.Is(err, io.ErrUnexpectedEOF) {
		return tier.Meta{}, &tier.CorruptError{Key: k, Want: e.meta(), Got: got}
	}
	return tier.Meta{}, fmt.Errorf("read from %s: %w", v.dir.Path, err)
}

// dropDamaged forgets an object that cannot be read, counts it as corrupt and logs err.
func (v *volume) dropDamaged(s *segment, r *record, err error) {
	if !v.forget(s, r) {
		return
	}
	v.n.corrupt.Add(1)
	v.log.Warn("an object on disk is damaged; it is forgotten", "path", v.dir.Path, "segment", segmentName(s.seq, s.id), "place", int64(r.block)*block, "err", err)
}

// forget removes an object from the index if it is still at r's place.
func (v *volume) forget(s *segment, r *record) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	e, ok := v.mu.index.get(&r.key)
	if !ok || e.seg != s.seq || e.block != r.block {
		return false
	}
	v.mu.index.remove(&r.key)
	v.noteLocked(r.key, false)
	v.goneLocked(s, r.block)
	return true
}

// goneLocked records that the record at the place `at` of a segment was deleted; journal.save makes that durable.
func (v *volume) goneLocked(s *segment, at uint32) {
	if _, ok := v.mu.gone[s.id][at]; !ok {
		v.addGoneLocked(place{s.id, at})
		v.mu.fresh = append(v.mu.fresh, place{s.id, at})
	}
}

func (v *volume) addGoneLocked(p place) {
	of := v.mu.gone[p.id]
	if of == nil {
		of = make(map[uint32]struct{})
		v.mu.gone[p.id] = of
	}
	of[p.block] = struct{}{}
}

// readInto reads a record's payload into dst, directly if dst is aligned, and
// checks the record's header.
func (v *volume) readInto(ctx context.Context, s *segment, r *record, dst []byte) error {
	if !shm.Aligned(dst, block) {
		at := 0
		return v.stream(ctx, s, r, func(b []byte) error {
			at += copy(dst[at:], b)
			return nil
		})
	}
	if flow := tier.FlowOf(ctx); flow != nil {
		return v.readFlow(ctx, s, r, dst, flow)
	}
	ends := v.heads.get()
	defer v.heads.put(ends)
	body, rest, extra := parts(int64(r.len))
	for at, done := int64(0), false; !done; {
		n := min(body-at, directPiece)
		done = at+n == body
		if err := v.readPiece(s, r, at, dst[at:at+n], ends, done && extra); err != nil {
			return err
		}
		at += n
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	copy(dst[body:], restOf(ends, rest, extra))
	return nil
}

// restOf returns the part of `ends`, two blocks, that has the rest of a payload: the second block with extra, else the first one after the
// header.
func restOf(ends []byte, rest int64, extra bool) []byte {
	if extra {
		return ends[block:][:rest]
	}
	return ends[headBytes:][:rest]
}

// readPiece reads the part of the payload's body at byte `at`. With the first part it reads the header
// and checks it. With extra it reads the block after the body, which has the rest.
func (v *volume) readPiece(s *segment, r *record, at int64, body, ends []byte, extra bool) error {
	var parts [3][]byte
	bufs, off := parts[:0], int64(r.block)*block
	if at == 0 {
		bufs = append(bufs, ends[:block])
	} else {
		off += block + at
	}
	if len(body) > 0 {
		bufs = append(bufs, body)
	}
	if extra {
		bufs = append(bufs, ends[block:])
	}
	if err := s.file.readv(bufs, off); err != nil || at > 0 {
		return err
	}
	switch got, err := getRecord(ends, s.id, int64(r.block)*block); {
	case err != nil:
		return err
	case got.key != r.key || got.len != r.len || got.sum != r.sum || got.seal != r.seal:
		return fmt.Errorf("%w: another object is in the object's place", errDamaged)
	}
	return nil
}

// stream calls f with the payload of a record, piece by piece, in a buffer.
func (v *volume) stream(ctx context.Context, s *segment, r *record, f func([]byte) error) error {
	ends, bounce := v.heads.get(), v.bounces.get()
	defer v.heads.put(ends)
	defer v.bounces.put(bounce)
	body, rest, extra := parts(int64(r.len))
	for at, done := int64(0), false; !done; {
		n := min(body-at, bouncePiece)
		done = at+n == body
		if err := v.readPiece(s, r, at, bounce[:n], ends, done && extra); err != nil {
			return err
		}
		if err := f(bounce[:n]); err != nil {
			return err
		}
		at += n
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return f(restOf(ends, rest, extra))
}

// write appends an object. Errors: tier.ErrNotKept.
func (v *volume) write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if err := v.begin(); err != nil {
		return err
	}
	defer v.calls.Done()
	if m.Len > v.largest() {
		return v.refuse(errLarge)
	}
	v.writes(k, 1)
	defer v.writes(k, -1)
	s, at, err := v.reserve(ctx, recordBytes(m.Len))
	if err != nil {
		return err
	}
	r := record{k, uint32(at / block), uint32(m.Len), m.Sum, !tier.IsUse(ctx), m.End, m.Seal} // hot if the replaced record is
	err = errClosed                                                                           // the result if src faults
	defer func() { v.finish(s, &r, nil, err) }()
	if err = v.append(ctx, s, &r, src); err != nil {
		return err
	}
	v.n.writes.Add(1)
	v.n.writeBytes.Add(m.Len)
	return nil
}

// largest is the longest object that fits a segment.
func (v *volume) largest() int64 { return v.segment - block - indexBytes(1) - 2*block }

// reserve finds a place for a record of `need` bytes. It waits for a segment while one is being made. If there is no place, the error is
// tier.ErrNotKept.
func (v *volume) reserve(ctx context.Context, need int64) (*segment, int64, error) {
	for {
		s, at, wait, err := v.tryReserve(need, nil)
		switch {
		case err != nil:
			return nil, 0, v.refuse(err)
		case s != nil:
			return s, at, nil
		}
		signal(v.wake)
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		case <-v.life.Done():
			return nil, 0, errClosed
		}
	}
}

// signal wakes the goroutine that waits for c, or lets its next wait return at once.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// tryReserve finds a place for a record. If there is none, it returns a channel to wait for.
// For a copy (copyOf) it never asks for a segment, and refuses while the object is being rewritten, because
// the new record would look older than the copy. Errors: errBudget, errBusy, why there is no segment.
func (v *volume) tryReserve(need int64, copyOf *kv.Key) (s *segment, at int64, wait chan struct{}, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	want := copyOf == nil
	if !want && v.mu.writing[*copyOf] > 0 {
		return nil, 0, nil, errBusy
	}
	if v.overBudgetLocked(need) {
		return nil, 0, nil, errBudget
	}
	for {
		if s = v.mu.active; s != nil && s.end+need+indexBytes(s.count+1) <= s.size {
			break
		}
		if v.mu.spare == nil {
			if want && v.mu.refused != nil && v.now().Before(v.mu.until) {
				return nil, 0, nil, v.mu.refused
			}
			v.mu.wanted = v.mu.wanted || want
			return nil, 0, v.mu.changed, nil
		}
		v.retireLocked()
		v.mu.active, v.mu.spare = v.mu.spare, nil
	}
	at = s.end
	s.end += need
	s.count++
	s.pending++
	s.dirty = true
	v.wroteLocked(need)
	if s.end > s.size/8 && v.mu.spare == nil && !v.mu.wanted { // so that the next segment is ready when this one is full
		v.mu.wanted = true
		signal(v.wake)
	}
	return s, at, nil, nil
}

// retireLocked ends the active segment. Then tend seals it.
func (v *volume) retireLocked() {
	if v.mu.active != nil {
		v.mu.sealing = append(v.mu.sealing, v.mu.active)
		v.mu.active = nil
		signal(v.full)
	}
}

// overBudgetLocked reports whether n more bytes would pass today's write budget.
func (v *volume) overBudgetLocked(n int64) bool {
	if day := v.now().Unix() / 86400; day != v.mu.day {
		v.mu.day, v.mu.today = day, 0
	}
	return v.opts.WriteBudget > 0 && v.mu.today+n > v.opts.WriteBudget
}

// wroteLocked counts bytes that go to the disk.
func (v *volume) wroteLocked(n int64) {
	v.mu.today += n
	v.mu.all += n
	v.n.diskBytes.Add(n)
}

func (v *volume) wrote(n int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.wroteLocked(n)
}

// append writes a record to the place that was reserved for it.
func (v *volume) append(ctx context.Context, s *segment, r *record, src []byte) error {
	flow := tier.FlowOf(ctx)
	if flow != nil && shm.Aligned(src, block) {
		return v.appendFlow(ctx, s, r, src, flow)
	}
	if err := flow.Wants(0, int64(len(src))); err != nil {
		return err
	}
	ends := v.heads.get()
	defer v.heads.put(ends)
	clear(ends)
	body, rest, extra := parts(int64(r.len))
	putRecord(ends, s.id, r)
	copy(restOf(ends, rest, extra), src[body:])
	piece := int64(directPiece)
	var bounce []byte
	if !shm.Aligned(src, block) {
		bounce, piece = v.bounces.get(), bouncePiece
		defer v.bounces.put(bounce)
	}
	for at, done := int64(0), false; !done; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(body-at, piece)
		done = at+n == body
		from := src[at : at+n]
		if bounce != nil {
			from = bounce[:copy(bounce, from)]
		}
		if err := writePiece(s, r, at, from, ends, done && extra); err != nil {
			return err
		}
		at += n
	}
	return nil
}

func writePiece(s *segment, r *record, at int64, body, ends []byte, extra bool) error {
	var parts [3][]byte
	bufs, off := parts[:0], int64(r.block)*block
	if at == 0 {
		bufs = append(bufs, ends[:block])
	} else {
		off += block + at
	}
	if len(body) > 0 {
		bufs = append(bufs, body)
	}
	if extra {
		bufs = append(bufs, ends[block:])
	}
	return s.file.writev(bufs, off)
}

// finish ends a reservation. The written record replaces the record that the key had. A copy does so only if the key's record is still at
// `from`. A record with hot set stays hot if the replaced record is hot.
func (v *volume) finish(s *segment, r *record, from *entry, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	s.pending--
	if s.pending == 0 && s != v.mu.active {
		signal(v.full)
	}
	e := entry{sum: r.sum, seg: s.seq, block: r.block, len: r.len, over: r.over, seal: r.seal}
	old, had := v.mu.index.get(&r.key)
	s.dirty = true // it may have been synced since the reservation
	switch {
	case err != nil && s == v.mu.active && isBroken(err):
		v.retireLocked()
		v.refusedLocked(err)
	case err != nil:
	case from != nil && (!had || old.seg != from.seg || old.block != from.block):
		v.goneLocked(s, r.block) // it was deleted or written again meanwhile
	case from == nil && had && old.meta() == e.meta():
		v.goneLocked(s, r.block) // another write of the same object was faster
		v.noteLocked(r.key, true)
	default:
		if r.hot = r.hot && had && old.hot; r.hot {
			e.hot = true
			s.heat += float64(r.len)
		}
		if had && from == nil {
			v.goneLocked(v.mu.segs[old.seg], old.block)
		}
		v.mu.index.set(&r.key, e)
		v.noteLocked(r.key, true)
		s.entries = append(s.entries, *r)
	}
}

// refusedLocked refuses writes to this disk with err for refusePause, also those that wait for a segment now.
func (v *volume) refusedLocked(err error) {
	v.mu.refused, v.mu.until, v.mu.wanted = err, v.now().Add(refusePause), false
	v.changedLocked()
}

func (v *volume) changedLocked() {
	close(v.mu.changed)
	v.mu.changed = make(chan struct{})
}

// drop removes objects from the index; journal.save makes that durable.
func (v *volume) drop(keys []kv.Key) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, k := range keys {
		if v.mu.dropped != nil {
			v.mu.dropped[k] = struct{}{}
		}
		if e, ok := v.mu.index.get(&k); ok {
			v.mu.index.remove(&k)
			v.noteLocked(k, false)
			v.goneLocked(v.mu.segs[e.seg], e.block)
		}
	}
}
