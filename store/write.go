// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// Reserved is the outcome of BeginStore, apart from the places.
type Reserved struct {
	Cached  int  // chunks already resident
	Staged  int  // chunks that another transfer is storing
	NoRoom  int  // chunks at the range's end that did not fit
	Share   bool // NoRoom is due to the share of the worker or of its user
	Skipped int  // chunks of which the caller wanted no object (Transfer.Skip)
}

// ErrBusy means that too many transfers are in progress.
var ErrBusy = errors.New("store: too many transfers in progress")

// heldObject is one object of a transfer.
type heldObject struct {
	slot         pool.Slot
	chunk, group int   // the chunk's number counts from the range's start
	offset       int64 // in the pool
	bytes        int64
}

// stage takes places for the missing objects of a range, chunk by chunk in all groups, a batch at a time.
type stage struct {
	store   *Store
	name    hold.Transfer
	by      pool.Writer // the writer that the pool's index names for a later server
	hashes  []kv.Hash
	skip    func(group, chunk int) bool // may be nil
	prompt  int                         // chunks from this one on have tokens of the answer
	limited bool                        // some slot of the pool has an end
	ends    time.Duration               // end of the stored objects, since Store.began; 0: none

	guard prefixGuard
	limit int64 // bytes that may be staged by evicting; an own transfer has no limit, because it ends soon
	first int64 // the same limit for the first chunk
	most  int64 // bytes that may be staged while memory is free
	used  int64
	taken []heldObject
	out   Reserved

	counted int64 // part of used that hold.Table counts already
}

// maxTransfer bounds the objects of one transfer. A store leaves out the chunks beyond them, a lookup lends no more, and a larger load is
// refused.
const maxTransfer = 1 << 16

// stageBatch is how many chunks get their places under the lock at a time. It is small because each chunk may need evictions.
const stageBatch = 256

// run takes the places. It reports false when too many transfers are in progress.
func (st *stage) run() bool {
	st.store.provide(st.name.To-st.name.From, st.name.Shard.Groups)
	st.guard = prefixGuard{store: st.store, shard: st.name.Shard, hashes: st.hashes[:st.name.To], by: st.name.By}
	if !st.begin() {
		st.out.NoRoom = st.name.To - st.name.From
		return false
	}
	defer st.end()
	if st.limited {
		st.prolongHeads()
	}
	for from, more := st.name.From, true; more && from < st.name.To; {
		from, more = st.stageBatch(from, min(from+stageBatch, st.name.To))
	}
	return true
}

func (st *stage) begin() bool {
	s := st.store
	s.lock()
	defer s.unlock()
	if s.busyLocked(st.name.By) {
		return false
	}
	st.limited = s.mu.lives.any()
	if st.by.Name != 0 { // the number distinguishes two transfers of one name that are staged at the same time
		st.by.Number = uint32(s.mu.holds.Number())
	}
	return true
}

// sharesLocked sets how much may be staged. The bytes of the worker and its user may change from batch to batch, because several of their
// transfers may be staged at once.
func (st *stage) sharesLocked() {
	s := st.store
	bytes := s.mu.pool.Bytes()
	if st.by.Name == 0 {
		st.limit, st.first = bytes, bytes
		return
	}
	may := hold.Share{Worker: s.opts.WorkerShare, By: s.opts.PeerShare}
	st.limit, st.first, st.most = s.mu.holds.MayStage(&st.name, st.counted, bytes, st.name.Shard.Groups.Bytes(0), may)
}

// countLocked adds the bytes that are staged so far to those of the worker.
func (st *stage) countLocked() {
	if st.by.Name != 0 {
		st.store.mu.holds.Count(&st.name, st.used-st.counted)
		st.counted = st.used
	}
}

func (st *stage) end() {
	st.store.lock()
	defer st.store.unlock()
	if !st.store.mu.closed {
		st.guard.release()
	}
}

// stageBatch stages the chunks [from, to). next is the first chunk that it did not stage; more is false once there is no room for a chunk.
func (st *stage) stageBatch(from, to int) (next int, more bool) {
	s := st.store
	s.lock()
	defer s.unlock()
	st.sharesLocked()
	defer st.countLocked()
	for c := from; c < to; c++ {
		err := pool.ErrFull
		if !s.mu.closed && len(st.taken) < maxTransfer {
			err = st.chunkLocked(c)
		}
		switch {
		case errors.Is(err, errAgain):
			return c, true
		case err != nil:
			st.out.NoRoom = st.name.To - c
			s.mu.n.AllocationFailures++
			return c, false
		}
	}
	return to, true
}

// chunkLocked stages chunk c in all groups, or in none. Errors: pool.ErrFull, errAgain.
func (st *stage) chunkLocked(c int) error {
	s, groups := st.store, st.name.Shard.Groups
	var k kv.Key
	before, used, staged, skipped := len(st.taken), st.used, false, 0
	for g := range groups.Len() {
		if st.skip != nil && st.skip(g, c-st.name.From) {
			skipped++
			continue
		}
		st.name.Shard.Key(&k, st.name.Shard.Index, g, st.hashes[c])
		if slot, kept := s.findLocked(&k); kept != pool.Free {
			s.prolongLocked(slot, st.ends)
			staged = staged || kept != pool.Resident
			continue
		}
		n := groups.Bytes(g)
		st.used += s.mu.pool.Round(n)
		var err error
		var slot pool.Slot
		limit := st.limit
		if before == 0 {
			limit = st.first
		}
		switch {
		case st.used <= limit:
			slot, err = s.reserveLocked(&k, n, st.by, &st.guard)
		case st.used <= st.most:
			if slot, err = s.placeLocked(&k, n, st.by); errors.Is(err, pool.ErrIndexMemory) {
				s.mu.indexShort, err = true, errAgain
			}
		default:
			err = pool.ErrFull
		}
		st.out.Share = st.out.Share || errors.Is(err, pool.ErrFull) && st.used > limit
		if err != nil {
			s.unstageLocked(st.taken[before:])
			st.taken, st.used = st.taken[:before], used
			return err
		}
		s.continuesLocked(slot, &k, st.hashes, c)
		s.markAnswerLocked(slot, c >= st.prompt)
		s.limitLocked(slot, st.ends)
		st.taken = append(st.taken, heldObject{slot, c - st.name.From, g, s.mu.pool.Offset(slot), n})
	}
	switch {
	case len(st.taken) > before:
	case staged:
		st.out.Staged++
	case skipped == groups.Len():
		st.out.Skipped++
	default:
		st.out.Cached++
	}
	return nil
}

// busyLocked reports whether a transfer of the user or address `by` must be refused, because too many are in progress or the store is
// closed.
func (s *Store) busyLocked(by string) bool { return s.mu.closed || !s.mu.holds.MayBegin(by) }

// unstageLocked frees places that were not given to a worker.
func (s *Store) unstageLocked(objects []heldObject) {
	for _, o := range objects {
		*s.mu.parents.At(int(o.slot)) = 0
		s.markAnswerLocked(o.slot, false)
		s.mu.lives.remove(o.slot)
		s.mu.policy.Remove(uint32(o.slot), tenant.Other)
		s.mu.pool.Drop(o.slot)
		s.mu.pool.Unhold(o.slot)
	}
}

// endsForRoom is how many objects whose end has come are dropped for one chunk before the store tries again to place it.
const endsForRoom = 16

// mostFreed bounds the bytes that may be evicted for one chunk that finds no place, as a multiple of the chunk's length. Beyond it the chunk
// is not stored.
const mostFreed = 16

// reserveLocked stages one object of n bytes for the transfer `by`, and evicts others as long as that helps, but none that guard keeps.
// Errors: pool.ErrFull, errAgain.
func (s *Store) reserveLocked(k *kv.Key, n int64, by pool.Writer, guard *prefixGuard) (pool.Slot, error) {
	freed, search, asked := int64(0), 2*n, false
	s.mu.needs = needs{guard.by, k.Namespace}
	s.makeRoomForLocked(k, n)
	for {
		slot, err := s.placeLocked(k, n, by)
		if errors.Is(err, pool.ErrIndexMemory) {
			s.mu.indexShort = true // unlock provides it
			return 0, errAgain
		}
		if !errors.Is(err, pool.ErrFull) {
			return slot, err
		}
		if s.mu.lives.any() {
			if dropped, more := s.endLivesLocked(endsForRoom); dropped > 0 || more {
				continue
			}
		}
		if guard.protect() {
			continue
		}
		if freed >= search {
			if s.evictNearLocked(n) {
				continue
			}
			search *= 2
		}
		victim, ok, more := s.victimLocked()
		if !ok && !more && !asked {
			asked = true
			s.giveUpLocked(guard.by)
			victim, ok, more = s.victimLocked()
		}
		if more {
			return 0, errAgain
		}
		if !ok || search > mostFreed*n || freed == 0 && s.cannotMakeRoomLocked(victim, n) {
			return 0, err
		}
		freed += s.mu.pool.Round(s.mu.pool.Length(victim))
		s.evictLocked(victim, miss.Evicted)
	}
}

// giveUpLocked makes some chunks evictable for a transfer of the user or address `by`, if all chunks are pinned and another user has pinned
// more than one user's share: it releases the oldest pins of that user.
func (s *Store) giveUpLocked(by string) {
	limit := int(float64(s.mu.pool.Usage().Resident) * s.opts.PeerShare)
	if sess := s.mu.leases.Over(by, limit); sess != nil {
		sess.GiveUp(batch, s.unpinLocked)
	}
}

// cannotMakeRoomLocked reports whether no eviction makes room for n bytes, because the space between pinned or held slots is too small. It
// is called with the first victim.
func (s *Store) cannotMakeRoomLocked(victim pool.Slot, n int64) bool {
	if s.mu.pool.Length(victim) >= n {
		return false
	}
	run, all := s.mu.pool.CheapestRun(n, 1, s.mu.policy.Ascend, s.untouchable)
	return all && run.Bytes < 0
}

// prefixGuard keeps a request from evicting its own leading chunks to make room for later ones, which would be of no use without them.
// Chunks of the request's window groups that no hit needs any more are evicted first. The guard works only once something must be evicted.
type prefixGuard struct {
	store  *Store
	shard  object.Shard
	hashes []kv.Hash
	by     string // Transfer.By
	on     bool
	kept   []pool.Slot
}

// protect keeps the request's chunks from eviction, at the first call. It reports whether it evicted any of the request's window chunks: the
// caller then tries again to place its chunk.
func (g *prefixGuard) protect() bool {
	if g.on {
		return false
	}
	g.on = true
	evicted := g.store.mu.n.EvictedChunks
	g.store.dropDeadLocked(g.shard, g.hashes)
	var k kv.Key
	for _, h := range g.hashes {
		for group := range g.shard.Groups.Len() {
			g.shard.Key(&k, g.shard.Index, group, h)
			slot, st := g.store.mu.pool.Find(&k)
			if st == pool.Resident && !g.store.keptLocked(slot) && !g.store.mu.policy.Expired(uint32(slot)) && !g.store.mu.lives.ended(slot) { // release uses what it kept
				g.store.keepLocked(slot)
				g.kept = append(g.kept, slot)
			}
		}
	}
	return g.store.mu.n.EvictedChunks != evicted
}

func (g *prefixGuard) release() {
	for i := len(g.kept) - 1; i >= 0; i-- {
		g.store.letGoLocked(g.kept[i])
	}
}

// Committed is the outcome of CommitStore or CommitLoad.
type Committed struct {
	Found  bool // a transfer of that name was in progress
	Chunks int  // objects made visible, or read
	Late   bool // the worker had been detached, or was too slow: nothing is made visible

	// Unwritten means that marks are still in the places (Transfer.Marked): the worker copied elsewhere, or not at all. No object of the
	// transfer is made visible.
	Unwritten bool
}

// CommitStore ends the transfer that BeginStore began. With ok its chunks become visible, unless the worker was detached in between. hashes
// are those of the prompt, at least the first name.To. The chunks before the range become more recently used than those in it, so that
// tails are evicted before heads.
//
// While the same worker has several transfers of one name and request in progress, no commit ends one of them before the commit of the
// last.
func (s *Store) CommitStore(name hold.Transfer, requestID []byte, hashes []kv.Hash, ok bool) Committed {
	out := s.committed(name, requestID, ok)
	if out.Chunks > 0 {
		s.touchHeads(name, hashes)
	}
	return out
}

// committed ends the transfers that one commit ends. With ok, their chunks become resident, unless the worker has left places unwritten or
// the transfer is late; otherwise they are dropped.
func (s *Store) committed(name hold.Transfer, requestID []byte, ok bool) Committed {
	ended, marked, out := s.commit(name, requestID)
	out.Unwritten = ok && s.unwritten(marked)
	for _, h := range ended {
		n := s.end(h, ok && !out.Unwritten && !h.Late())
		out.Chunks += n
		s.computed(h, n)
	}
	out.Late = out.Late && out.Chunks == 0
	return out
}

// computed reports the bytes that a request has computed and stored to the rates.
func (s *Store) computed(h *hold.Hold, objects int) {
	if s.below != nil && objects > 0 {
		s.rates.Stored([]byte(h.RequestID), h.Bytes*int64(objects)/int64(len(h.Slots)))
	}
}

// commit removes the transfers that a commit ends from the table, and returns their objects that have marks.
func (s *Store) commit(name hold.Transfer, requestID []byte) ([]*hold.Hold, []markedObject, Committed) {
	s.lock()
	defer s.unlock()
	ended, found, late := s.mu.holds.Commit(name, requestID)
	var marked []markedObject
	for _, h := range ended {
		s.countEndLocked(h)
		if !h.Late() && !s.mu.closed {
			marked = append(marked, s.markedLocked(h)...)
		}
	}
	return ended, marked, Committed{Found: found, Late: late}
}

// countEndLocked adds the end of a transfer to the counters.
func (s *Store) countEndLocked(h *hold.Hold) {
	switch {
	case h.Transfer.Load && !h.Orphan():
		s.mu.n.LoadedChunks += uint64(len(h.Slots))
		s.mu.n.LoadedBytes += uint64(h.Bytes)
	case !h.Transfer.Load && h.Late():
		s.mu.n.LateCommits++
	}
}

// touchHeads marks the objects of the chunks before name's range as the most recently used ones of a shard, the first chunk last.
func (s *Store) touchHeads(name hold.Transfer, hashes []kv.Hash) {
	columns := max(1, dropBatch/name.Shard.Groups.Len()) // each may have expired, and goes
	for to := name.From; to > 0; to -= columns {
		s.touchSome(name, hashes, max(0, to-columns), to)
	}
}

func (s *Store) touchSome(name hold.Transfer, hashes []kv.Hash, from, to int) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return
	}
	var k kv.Key
	for i := to - 1; i >= from; i-- {
		for g := range name.Shard.Groups.Len() {
			if i < name.Shard.Groups.Need(g, 0, name.From).Start {
				continue
			}
			name.Shard.Key(&k, name.Shard.Index, g, hashes[i])
			if slot, ok := s.residentLocked(&k); ok {
				s.useLocked(slot)
			}
		}
	}
}
