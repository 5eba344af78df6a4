package store

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
)

// Checksums guard what survives a restart. They are computed in the background
// after a commit and recorded in the pool's index. An object that an earlier
// server recorded one for is not served before it was compared; one that differs
// is dropped and counted. An object without a checksum is served as it is.
//
// Bytes are read without the lock. That an object was still the same afterwards,
// its slot's generation tells.

// sums is what is to be computed and compared.
type sums struct {
	suspects []bool      // by slot: to be compared before it is served
	order    []pool.Slot // of the suspects, the most recently used last
	queue    []unsummed  // committed, without a checksum; oldest first
}

type unsummed struct {
	slot       pool.Slot
	generation uint32
	due        time.Time
}

// maxUnsummed bounds the queue. Beyond it chunks stay without a checksum.
const maxUnsummed = 1 << 20

// sumTask is an object at one moment.
type sumTask struct {
	slot       pool.Slot
	generation uint32
	offset     int64
	length     int64
	want       uint64
	compare    bool
	got        uint64
	err        error
}

// sumBuffers are what objects are read through.
var sumBuffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

func (s *Store) taskLocked(slot pool.Slot) sumTask {
	p := s.mu.pool
	return sumTask{slot: slot, generation: p.Generation(slot), offset: p.Offset(slot), length: p.Length(slot)}
}

// suspectLocked notes that a restored object is to be compared first.
func (s *Store) suspectLocked(slot pool.Slot) {
	for int(slot) >= len(s.mu.sums.suspects) {
		s.mu.sums.suspects = append(s.mu.sums.suspects, false)
	}
	s.mu.sums.suspects[slot] = true
	s.mu.sums.order = append(s.mu.sums.order, slot)
	s.suspects.Add(1)
}

func (s *Store) suspectedLocked(slot pool.Slot) bool {
	return int(slot) < len(s.mu.sums.suspects) && s.mu.sums.suspects[slot]
}

func (s *Store) trustLocked(slot pool.Slot) {
	if s.suspectedLocked(slot) {
		s.mu.sums.suspects[slot] = false
		s.suspects.Add(-1)
	}
}

// unsummedLocked queues a committed object.
func (s *Store) unsummedLocked(slot pool.Slot) {
	if !s.opts.Checksums || len(s.mu.sums.queue) >= maxUnsummed {
		return
	}
	s.mu.sums.queue = append(s.mu.sums.queue, unsummed{slot, s.mu.pool.Generation(slot), time.Now().Add(s.opts.SumAfter)})
}

// SumNext compares or computes one object's checksum and returns the bytes read,
// 0 when there is nothing to do yet. Its owner calls it in the background.
func (s *Store) SumNext() int64 {
	t, p, ok := s.nextSum()
	if !ok {
		return 0
	}
	t.read(p)
	s.lock()
	defer s.unlock()
	s.summedLocked(&t)
	return max(t.length, 1)
}

func (s *Store) nextSum() (sumTask, *pool.Pool, bool) {
	s.lock()
	defer s.unlock()
	t, ok := s.nextSumLocked()
	return t, s.mu.pool, ok
}

func (s *Store) nextSumLocked() (sumTask, bool) {
	q := &s.mu.sums
	for !s.mu.closed && len(q.order) > 0 {
		slot := q.order[len(q.order)-1]
		q.order = q.order[:len(q.order)-1]
		if s.suspectedLocked(slot) {
			return s.compareLocked(slot), true
		}
	}
	for !s.mu.closed && len(q.queue) > 0 {
		u := q.queue[0]
		if time.Now().Before(u.due) {
			break
		}
		q.queue = q.queue[1:]
		if s.sameLocked(u.slot, u.generation) {
			return s.taskLocked(u.slot), true
		}
	}
	return sumTask{}, false
}

func (s *Store) compareLocked(slot pool.Slot) sumTask {
	t := s.taskLocked(slot)
	t.compare = true
	t.want, _ = s.mu.pool.Sum(slot)
	return t
}

func (t *sumTask) read(p *pool.Pool) {
	buf := sumBuffers.Get().(*[]byte)
	defer sumBuffers.Put(buf)
	t.got, t.err = p.Hash(t.offset, t.length, *buf)
}

// sameLocked reports whether the slot still holds what it held then.
func (s *Store) sameLocked(slot pool.Slot, generation uint32) bool {
	return !s.mu.closed && s.mu.pool.StateOf(slot) == pool.Resident && s.mu.pool.Generation(slot) == generation
}

// summedLocked settles what was read.
func (s *Store) summedLocked(t *sumTask) {
	if !s.sameLocked(t.slot, t.generation) {
		return // evicted meanwhile: what was read means nothing
	}
	switch {
	case !t.compare && t.err == nil:
		s.mu.pool.SetSum(t.slot, t.got)
		s.mu.n.SummedChunks++
	case t.compare && s.suspectedLocked(t.slot):
		if t.err == nil && t.got == t.want {
			s.trustLocked(t.slot)
			s.mu.n.VerifiedChunks++
			return
		}
		s.mu.n.CorruptChunks++
		s.dropLocked(t.slot, Corrupt)
	}
}

// verify compares what a lookup of hashes would otherwise not serve.
func (s *Store) verify(sh Shard, hashes []kv.Hash) {
	if s.suspects.Load() == 0 {
		return
	}
	tasks, p := s.suspectsOf(sh, hashes)
	if len(tasks) == 0 {
		return
	}
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < int64(len(tasks)); i = next.Add(1) - 1 {
			tasks[i].read(p)
		}
	}
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(tasks)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	s.lock()
	defer s.unlock()
	for i := range tasks {
		s.summedLocked(&tasks[i])
	}
}

func (s *Store) suspectsOf(sh Shard, hashes []kv.Hash) ([]sumTask, *pool.Pool) {
	s.lock()
	defer s.unlock()
	return s.suspectsOfLocked(sh, hashes), s.mu.pool
}

// suspectsOfLocked lists the suspects of a prompt up to the first chunk that is
// not kept at all.
func (s *Store) suspectsOfLocked(sh Shard, hashes []kv.Hash) (tasks []sumTask) {
	var k pool.Key
	for _, full := range []bool{true, false} {
		for row := range sh.Groups.Len() * sh.World {
			g := row / sh.World
			if s.mu.closed || sh.Groups.full(g) != full {
				continue
			}
			for c, h := range hashes {
				sh.key(&k, row%sh.World, g, h)
				slot, st := s.mu.pool.Find(&k)
				if st != pool.Resident && full {
					hashes = hashes[:c]
					break
				}
				if st == pool.Resident && s.suspectedLocked(slot) {
					tasks = append(tasks, s.compareLocked(slot))
				}
			}
		}
	}
	return tasks
}
