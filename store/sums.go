// SPDX-License-Identifier: Apache-2.0

package store

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Checksums protect what survives a restart. They are computed in the background after a commit and recorded in the pool's index. An object
// that an earlier server recorded a checksum for is not served before it was compared; if it differs, it is dropped and counted. An object
// of an earlier server without a checksum is dropped too: that server was killed in the seconds after the commit. Close computes the
// checksums that are missing.
//
// Bytes are read without the lock. The slot's generation shows whether the slot still had the same object afterwards.

// sumTask is a checksum to compute or to compare, of the object that a slot has at one moment.
type sumTask struct {
	slot       pool.Slot
	generation uint32
	offset     int64
	length     int64
	want       uint64
	flight     *flight // the flight of an object to compare; nil if the checksum is only computed
	got        uint64
	err        error
}

// sumBuffers has buffers for reading objects.
var sumBuffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

func (s *Store) taskLocked(slot pool.Slot) sumTask {
	p := s.mu.pool
	return sumTask{slot: slot, generation: p.Generation(slot), offset: p.Offset(slot), length: p.Length(slot)}
}

func (s *Store) suspectedLocked(slot pool.Slot) bool { return s.mu.sums.Suspected(uint32(slot)) }

// unsummedLocked queues a committed object for the tier below, and for its checksum.
func (s *Store) unsummedLocked(slot pool.Slot) {
	if s.answerLocked(slot) {
		s.mu.n.AnswerChunks++
	}
	s.offerNewLocked(slot)
	if s.opts.ChecksumRate > 0 {
		s.mu.sums.Sum(uint32(slot), s.mu.pool.Generation(slot), time.Now().Add(s.opts.SumAfter))
	}
}

// sumNext compares or computes one object's checksum. It returns the bytes read, or 0 when there is nothing to do yet.
func (s *Store) sumNext() int64 {
	return s.sum((*Store).nextSumLocked)
}

// sumsIdle returns how long sumNext has nothing to do. An object that is committed meanwhile is due later than that.
func (s *Store) sumsIdle() time.Duration {
	const least, again = 50 * time.Millisecond, 250 * time.Millisecond // to sum several at once; for suspects that others have taken
	s.lock()
	defer s.unlock()
	wait := time.Second
	if s.opts.SumAfter < wait {
		wait = again
	}
	if due, ok := s.mu.sums.Due(); ok {
		wait = min(wait, time.Until(due))
	}
	if s.mu.sums.Suspects() {
		wait = min(wait, again)
	}
	return max(wait, least)
}

func (s *Store) corruptChunks() uint64 {
	s.lock()
	defer s.unlock()
	return s.mu.n.CorruptChunks
}

// flyNext compares one object that a lookup waits for. It reports false when there is none.
func (s *Store) flyNext() bool {
	return s.sum((*Store).nextCompareLocked) > 0
}

// sum does one task that `next` returns. It returns the bytes read, or 0 when there is no task.
func (s *Store) sum(next func(*Store) (sumTask, bool)) int64 {
	s.readers <- struct{}{}
	defer func() { <-s.readers }()
	t, p, ok := s.begun(next)
	if !ok {
		return 0
	}
	t.read(p)
	s.lock()
	defer s.unlock()
	s.summedLocked(&t)
	return max(t.length, 1)
}

func (s *Store) begun(next func(*Store) (sumTask, bool)) (sumTask, *pool.Pool, bool) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return sumTask{}, nil, false
	}
	t, ok := next(s)
	return t, s.mu.pool, ok
}

// nextSumLocked returns the next task: first objects that a lookup waits for, then the most recently used suspects, then objects that need
// a checksum.
func (s *Store) nextSumLocked() (sumTask, bool) {
	if t, ok := s.nextCompareLocked(); ok {
		return t, true
	}
	flies := func(slot uint32) bool { return s.mu.flights.of[pool.Slot(slot)] != nil }
	if slot, ok := s.mu.sums.NextSuspect(flies); ok {
		fl := s.newFlightLocked(pool.Slot(slot))
		fl.begun = true
		return s.compareLocked(fl), true
	}
	for now := time.Now(); ; {
		slot, generation, ok := s.mu.sums.NextDue(now)
		if !ok {
			return sumTask{}, false
		}
		if !s.sameLocked(pool.Slot(slot), generation) {
			continue
		}
		if _, ok := s.mu.pool.Sum(pool.Slot(slot)); !ok { // else the goroutine that wrote it below has computed it
			return s.taskLocked(pool.Slot(slot)), true
		}
	}
}

func (s *Store) nextCompareLocked() (sumTask, bool) {
	fl := s.nextWantedLocked()
	if fl == nil {
		return sumTask{}, false
	}
	return s.compareLocked(fl), true
}

func (s *Store) compareLocked(fl *flight) sumTask {
	t := s.taskLocked(fl.slot)
	t.flight = fl
	t.want, _ = s.mu.pool.Sum(fl.slot)
	return t
}

func (t *sumTask) read(p *pool.Pool) {
	buf := sumBuffers.Get().(*[]byte)
	defer sumBuffers.Put(buf)
	t.got, t.err = p.Hash(t.offset, t.length, *buf)
}

// sameLocked reports whether the slot still has the object that it had in that generation.
func (s *Store) sameLocked(slot pool.Slot, generation uint32) bool {
	return !s.mu.closed && s.mu.pool.StateOf(slot) == pool.Resident && s.mu.pool.Generation(slot) == generation
}

// summedLocked records the result of a task. If the slot was evicted meanwhile, it discards the checksum.
func (s *Store) summedLocked(t *sumTask) {
	same := s.sameLocked(t.slot, t.generation)
	if t.flight != nil {
		s.mu.n.ComparedBytes += uint64(t.length)
	}
	switch {
	case s.mu.closed:
	case t.flight != nil:
		s.endFlightLocked(t.flight, same && s.comparedLocked(t))
	case same && t.err == nil && s.mu.pool.Below(t.slot) == 0:
		s.mu.pool.SetSum(t.slot, t.got)
		if s.answerLocked(t.slot) {
			s.mu.pool.SetBelow(t.slot, answerMark)
		}
		s.mu.n.SummedChunks++
	}
}

// comparedLocked reports whether an object may be served from now on. An object that differs from its checksum is dropped.
func (s *Store) comparedLocked(t *sumTask) bool {
	switch {
	case !s.suspectedLocked(t.slot):
		return true
	case t.err == nil && t.got == t.want:
		s.mu.sums.Trust(uint32(t.slot))
		s.mu.n.VerifiedChunks++
		s.offerNewLocked(t.slot)
		return true
	}
	s.mu.n.CorruptChunks++
	s.dropLocked(t.slot, miss.Corrupt)
	return false
}

// maxCloseSums bounds the time in which Close computes checksums. Objects that have none then are misses after a restart.
const maxCloseSums = 5 * time.Second

// sumRest computes the checksum of every resident object that has none. An object that it does not reach within maxCloseSums is a miss
// after the restart.
func (s *Store) sumRest() {
	if s.opts.ChecksumRate == 0 && s.opts.TrustUnsummed {
		return // checksums are not wanted
	}
	end := time.Now().Add(maxCloseSums)
	var at atomic.Int64 // the next slot to look at
	next := func(s *Store) (sumTask, bool) {
		for range batch {
			slot := pool.Slot(at.Load())
			if int(slot) >= s.mu.pool.Slots() || time.Now().After(end) {
				break
			}
			at.Add(1)
			if s.unsummedResidentLocked(slot) {
				return s.taskLocked(slot), true
			}
		}
		return sumTask{}, false
	}
	var wg sync.WaitGroup
	for range readers() {
		wg.Go(func() {
			for s.sum(next) > 0 || s.slotsAfter(at.Load()) && time.Now().Before(end) {
			}
		})
	}
	wg.Wait()
	if left := s.unsummedFrom(at.Load()); left > 0 {
		s.log.Warn("chunks have no checksum: the time for it at the end is over, and they are misses after the restart", "chunks", left, "time", maxCloseSums)
	}
}

func (s *Store) slotsAfter(slot int64) bool {
	s.lock()
	defer s.unlock()
	return !s.mu.closed && slot < int64(s.mu.pool.Slots())
}

// unsummedResidentLocked reports whether a slot has an object without a checksum.
func (s *Store) unsummedResidentLocked(slot pool.Slot) bool {
	if s.mu.pool.StateOf(slot) != pool.Resident {
		return false
	}
	_, ok := s.mu.pool.Sum(slot)
	return !ok
}

func (s *Store) unsummedFrom(slot int64) (n int) {
	s.lock()
	defer s.unlock()
	for ; !s.mu.closed && slot < int64(s.mu.pool.Slots()); slot++ {
		if s.unsummedResidentLocked(pool.Slot(slot)) {
			n++
		}
	}
	return n
}
