package store

import (
	"errors"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
)

// Place is where chunks are in the pool.
type Place struct {
	Offsets []int64 // bytes from the pool's start
	Indices []int   // Reserve only: position of each chunk in the range
}

// Reserved is the outcome of Reserve besides the places.
type Reserved struct {
	Cached  int  // chunks already resident
	Staged  int  // chunks being stored by somebody else
	NoRoom  int  // chunks at the range's end that did not fit
	Share   bool // because the worker, or its user, has its share of the pool
	Skipped int  // chunks of which the caller wanted no object
}

// ErrBusy means that too many transfers are in progress.
var ErrBusy = errors.New("store: too many transfers in progress")

// object is one object of a transfer.
type object struct {
	slot         pool.Slot
	chunk, group int   // the chunk counts from the range's start
	offset       int64 // in the pool
	bytes        int64
}

// Reserve takes places of chunkBytes each for the chunks hashes[name.From:name.To]
// of one shard that are not yet kept, evicting the least recently used where
// needed. What does not fit, or passes the worker's share, is left out from the
// end, so that the longest prefix is kept. With any place taken, the worker
// name.Instance holds them until CommitStore.
func (s *Store) Reserve(name Transfer, requestID []byte, hashes []kv.Hash, chunkBytes int64, p *Place) (Reserved, error) {
	p.Offsets, p.Indices = p.Offsets[:0], p.Indices[:0]
	st := stage{
		store: s, name: name, by: pool.Writer{Name: nameHash(name, requestID)}, hashes: hashes,
		bytes: func(int) int64 { return chunkBytes },
	}
	if !st.run() {
		return st.out, ErrBusy
	}
	for _, o := range st.taken {
		p.Offsets = append(p.Offsets, o.offset)
		p.Indices = append(p.Indices, o.chunk)
	}
	if len(st.taken) == 0 {
		return st.out, nil
	}
	h := s.newHold(name, requestID, st.taken)
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return st.out, ErrBusy
	}
	s.mu.holds.count(&name, -st.counted) // the hold counts
	s.mu.holds.add(h)
	return st.out, nil
}

// stage takes places for what is missing of a range, chunk by chunk in all groups,
// a batch at a time.
type stage struct {
	store  *Store
	name   Transfer
	by     pool.Writer // for a later server
	hashes []kv.Hash
	bytes  func(group int) int64
	skip   func(group, chunk int) bool // may be nil

	guard prefixGuard
	limit int64 // bytes that may be staged by evicting; a copy of this process, which ends soon, has no limit
	first int64 // the same of the first chunk
	most  int64 // bytes that may be staged where memory is free
	used  int64
	taken []object
	out   Reserved

	counted int64 // of used, in the books already
}

// maxTransfer bounds the objects of one transfer.
const maxTransfer = 1 << 16

// stageBatch is how many chunks get their places before the lock is offered to
// others: each may evict.
const stageBatch = 256

// run reports false when too many transfers are in progress.
func (st *stage) run() bool {
	st.guard = prefixGuard{store: st.store, shard: st.name.Shard, hashes: st.hashes[:st.name.To], by: st.name.By}
	if !st.begin() {
		st.out.NoRoom = st.name.To - st.name.From
		return false
	}
	defer st.end()
	for from := st.name.From; from < st.name.To; from += stageBatch {
		if !st.some(from, min(from+stageBatch, st.name.To)) {
			break
		}
	}
	return true
}

func (st *stage) begin() bool {
	s := st.store
	s.lock()
	defer s.unlock()
	if s.busyLocked(&st.name) {
		return false
	}
	s.mu.holds.last++ // tells two transfers of one name apart that are staged at the same time
	if st.by.Name != 0 {
		st.by.Number = uint32(s.mu.holds.last)
	}
	return true
}

// sharesLocked finds out how much may be staged. What the worker and its user have
// may change from batch to batch: several of their transfers may be staged at once.
func (st *stage) sharesLocked() {
	s := st.store
	bytes := s.mu.pool.Bytes()
	if st.by.Name == 0 {
		st.limit, st.first = bytes, bytes
		return
	}
	worker, peer := s.mu.holds.staged[st.name.Instance]-st.counted, s.mu.holds.stagedBy[st.name.By]-st.counted
	st.most = bytes - peer
	if rest := bytes / 8; rest >= 8*st.bytes(0) {
		st.most -= rest // for others
	}
	st.first = int64(float64(bytes)*s.opts.PeerShare) - peer
	st.limit = min(int64(float64(bytes)*s.opts.WorkerShare)-worker, st.first)
	switch {
	case peer == 0:
		st.first = bytes
	case worker > 0:
		st.first = st.limit
	}
}

// countLocked has what is staged so far count as the worker's.
func (st *stage) countLocked() {
	if st.by.Name != 0 {
		st.store.mu.holds.count(&st.name, st.used-st.counted)
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

// some stages the chunks [from, to). It reports false at the first one for which
// there is no room.
func (st *stage) some(from, to int) bool {
	s := st.store
	s.lock()
	defer s.unlock()
	st.sharesLocked()
	defer st.countLocked()
	for c := from; c < to; c++ {
		if s.mu.closed || len(st.taken) >= maxTransfer || !st.chunkLocked(c) {
			st.out.NoRoom = st.name.To - c
			s.mu.n.AllocationFailures++
			return false
		}
	}
	return true
}

// chunkLocked stages chunk c in all groups, or in none.
func (st *stage) chunkLocked(c int) bool {
	s, groups := st.store, st.name.Shard.Groups
	var k pool.Key
	before, used, staged, skipped := len(st.taken), st.used, false, 0
	for g := range groups.Len() {
		if st.skip != nil && st.skip(g, c-st.name.From) {
			skipped++
			continue
		}
		st.name.Shard.key(&k, st.name.Shard.Index, g, st.hashes[c])
		if _, kept := s.mu.pool.Find(&k); kept != pool.Free {
			staged = staged || kept != pool.Resident
			continue
		}
		n := st.bytes(g)
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
			slot, err = s.mu.pool.Reserve(&k, n, st.by)
		default:
			err = pool.ErrFull
		}
		st.out.Share = st.out.Share || err != nil && st.used > limit
		if err != nil {
			s.unstageLocked(st.taken[before:])
			st.taken, st.used = st.taken[:before], used
			return false
		}
		st.taken = append(st.taken, object{slot, c - st.name.From, g, s.mu.pool.Offset(slot), n})
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
	return true
}

// unstageLocked gives back places that nobody was told about.
func (s *Store) unstageLocked(objects []object) {
	for _, o := range objects {
		s.mu.pool.Drop(o.slot)
		s.mu.pool.Unhold(o.slot)
	}
}

// mostFreed is how many times its length may be evicted for a chunk that finds no place.
const mostFreed = 16

// reserveLocked stages one chunk, evicting as long as that helps.
func (s *Store) reserveLocked(k *pool.Key, n int64, by pool.Writer, guard *prefixGuard) (pool.Slot, error) {
	freed, search, asked := int64(0), 2*n, false
	for {
		slot, err := s.mu.pool.Reserve(k, n, by)
		if !errors.Is(err, pool.ErrFull) {
			return slot, err
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
		victim, ok := s.mu.lru.Oldest()
		if !ok && !asked {
			asked = true
			s.giveUpLocked(guard.by)
			victim, ok = s.mu.lru.Oldest()
		}
		if !ok || search > mostFreed*n || freed == 0 && s.hopelessLocked(victim, n) {
			return 0, err
		}
		freed += s.mu.pool.Round(s.mu.pool.Length(pool.Slot(victim)))
		s.evictLocked(pool.Slot(victim))
	}
}

// giveUpLocked makes some chunks evictable for a transfer of by where all are pinned and
// somebody else has pinned more than the share of one: then the oldest of those pins.
func (s *Store) giveUpLocked(by string) {
	limit := int(float64(s.mu.pool.Usage().Resident) * s.opts.PeerShare)
	if sess := s.mu.leases.Over(by, limit); sess != nil {
		sess.GiveUp(batch, s.unpinLocked)
	}
}

// hopelessLocked reports whether no eviction makes room for n bytes: between what is
// pinned or held there is too little. It is called with the first victim.
func (s *Store) hopelessLocked(victim uint32, n int64) bool {
	if s.mu.pool.Length(pool.Slot(victim)) >= n {
		return false
	}
	run, all := s.runLocked(n, 1)
	return all && run.bytes < 0
}

// prefixGuard keeps a request from evicting its own leading chunks to make room
// for later ones, which would be of no use without them. Of its window groups
// what no hit needs any more goes first. It works only once something must be
// evicted.
type prefixGuard struct {
	store  *Store
	shard  Shard
	hashes []kv.Hash
	by     string // Transfer.By
	on     bool
	pinned []pool.Slot
}

// protect reports whether it may have made room.
func (g *prefixGuard) protect() bool {
	if g.on {
		return false
	}
	g.on = true
	evicted := g.store.mu.n.EvictedChunks
	g.store.dropDeadLocked(g.shard, g.hashes)
	var k pool.Key
	for _, h := range g.hashes {
		for group := range g.shard.Groups.Len() {
			g.shard.key(&k, g.shard.Index, group, h)
			if slot, st := g.store.mu.pool.Find(&k); st == pool.Resident && g.store.mu.lru.Has(uint32(slot)) {
				g.store.mu.lru.Remove(uint32(slot))
				g.pinned = append(g.pinned, slot)
			}
		}
	}
	return g.store.mu.n.EvictedChunks != evicted
}

func (g *prefixGuard) release() {
	for i := len(g.pinned) - 1; i >= 0; i-- {
		g.store.touchLocked(g.pinned[i])
	}
}

// Committed is the outcome of CommitStore or CommitLoad.
type Committed struct {
	Found  bool // a transfer of that name was in progress
	Chunks int  // objects made visible, or read
	Late   bool // the worker had been detached, or was too slow: nothing is made visible
}

// CommitStore ends the transfer that Reserve began. With ok its chunks become
// visible, unless the worker was detached in between. hashes are those of the
// prompt, at least the first name.To: the chunks before the range become more
// recently used than those in it, so that tails are evicted before heads.
//
// While the same worker has several transfers of one name and request in
// progress, commits end none of them before the last one came.
func (s *Store) CommitStore(name Transfer, requestID []byte, hashes []kv.Hash, ok bool) Committed {
	out := s.committed(name, requestID, ok)
	if out.Chunks > 0 {
		s.touchHeads(name, hashes)
	}
	return out
}

// committed ends what a commit ends.
func (s *Store) committed(name Transfer, requestID []byte, ok bool) Committed {
	ended, out := s.commit(name, requestID)
	for _, h := range ended {
		out.Chunks += s.end(h, ok && !h.late())
	}
	out.Late = out.Late && out.Chunks == 0
	return out
}

// commit takes out of the table what a commit ends.
func (s *Store) commit(name Transfer, requestID []byte) ([]*hold, Committed) {
	s.lock()
	defer s.unlock()
	ended, out := s.mu.holds.commit(name, requestID)
	for _, h := range ended {
		s.mu.holds.remove(h)
		s.countEndLocked(h)
	}
	return ended, out
}

// countEndLocked counts the end of a transfer.
func (s *Store) countEndLocked(h *hold) {
	switch {
	case h.transfer.Load && !h.orphan:
		s.mu.n.LoadedChunks += uint64(len(h.slots))
		s.mu.n.LoadedBytes += uint64(h.bytes)
	case !h.transfer.Load && h.late():
		s.mu.n.LateCommits++
	}
}

// touchHeads makes what the chunks before name's range need of a shard the most
// recently used, the first one last.
func (s *Store) touchHeads(name Transfer, hashes []kv.Hash) {
	columns := max(1, batch/name.Shard.Groups.Len())
	for to := name.From; to > 0; to -= columns {
		s.touchSome(name, hashes, max(0, to-columns), to)
	}
}

func (s *Store) touchSome(name Transfer, hashes []kv.Hash, from, to int) {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return
	}
	var k pool.Key
	for i := to - 1; i >= from; i-- {
		for g := range name.Shard.Groups.Len() {
			if i < name.Shard.Groups.Need(g, 0, name.From).Start {
				continue
			}
			name.Shard.key(&k, name.Shard.Index, g, hashes[i])
			if slot, ok := s.residentLocked(&k); ok {
				s.touchLocked(slot)
			}
		}
	}
}
