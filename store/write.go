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
	Cached  int // chunks already resident
	Staged  int // chunks being stored by somebody else
	NoRoom  int // chunks at the range's end that did not fit
	Skipped int // chunks of which the caller wanted no object
}

// ErrBusy means that too many transfers are in progress.
var ErrBusy = errors.New("store: too many transfers in progress")

// object is one object of a transfer.
type object struct {
	slot         pool.Slot
	chunk, group int // the chunk counts from the range's start
}

// Reserve takes places of chunkBytes each for the chunks hashes[name.From:name.To]
// of one shard that are not yet kept, evicting the least recently used where
// needed. What does not fit is left out from the end, so that the longest prefix
// is kept. With any place taken, the worker name.Instance holds them until
// CommitStore.
func (s *Store) Reserve(name Transfer, requestID []byte, hashes []kv.Hash, chunkBytes int64, p *Place) (Reserved, error) {
	p.Offsets, p.Indices = p.Offsets[:0], p.Indices[:0]
	s.lock()
	defer s.unlock()
	if s.mu.closed || s.mu.holds.len >= s.opts.MaxHolds {
		return Reserved{NoRoom: name.To - name.From}, ErrBusy
	}
	by := pool.Writer{Name: nameHash(name, requestID), Number: uint32(s.mu.holds.last + 1)}
	objects, out := s.stageLocked(name, by, hashes, func(int) int64 { return chunkBytes }, nil)
	var taken []pool.Slot
	for _, o := range objects {
		taken = append(taken, o.slot)
		p.Offsets = append(p.Offsets, s.mu.pool.Offset(o.slot))
		p.Indices = append(p.Indices, o.chunk)
	}
	if len(taken) > 0 {
		s.holdLocked(name, requestID, taken)
	}
	return out, nil
}

// stageLocked stages what is missing of a range, chunk by chunk in all groups.
// by names the transfer for a later server.
func (s *Store) stageLocked(name Transfer, by pool.Writer, hashes []kv.Hash, bytes func(group int) int64, skip func(group, chunk int) bool) (taken []object, out Reserved) {
	guard := prefixGuard{store: s, shard: name.Shard, hashes: hashes[:name.To]}
	defer guard.release()
	var k pool.Key
	for i, h := range hashes[name.From:name.To] {
		before, staged, skipped := len(taken), false, 0
		for g := range name.Shard.Groups.Len() {
			if skip != nil && skip(g, i) {
				skipped++
				continue
			}
			name.Shard.key(&k, name.Shard.Index, g, h)
			slot, err := s.reserveLocked(&k, bytes(g), by, &guard)
			if errors.Is(err, pool.ErrExists) {
				_, st := s.mu.pool.Find(&k)
				staged = staged || st != pool.Resident
				continue
			}
			if err != nil {
				s.unstageLocked(taken[before:])
				out.NoRoom = name.To - name.From - i
				s.mu.n.AllocationFailures++
				return taken[:before], out
			}
			taken = append(taken, object{slot, i, g})
		}
		switch {
		case len(taken) > before:
		case staged:
			out.Staged++
		case skipped == name.Shard.Groups.Len():
			out.Skipped++
		default:
			out.Cached++
		}
	}
	return taken, out
}

// unstageLocked gives back places that nobody was told about.
func (s *Store) unstageLocked(objects []object) {
	for _, o := range objects {
		s.mu.pool.Drop(o.slot)
		s.mu.pool.Unhold(o.slot)
	}
}

// reserveLocked stages one chunk, evicting as long as that helps.
func (s *Store) reserveLocked(k *pool.Key, n int64, by pool.Writer, guard *prefixGuard) (pool.Slot, error) {
	for freed := int64(0); ; {
		slot, err := s.mu.pool.Reserve(k, n, by)
		if !errors.Is(err, pool.ErrFull) {
			return slot, err
		}
		if guard.protect() {
			continue
		}
		if freed >= 2*n && s.evictNearLocked(n) {
			continue
		}
		victim, ok := s.mu.lru.Oldest()
		if !ok {
			return 0, err
		}
		freed += s.mu.pool.Round(s.mu.pool.Length(pool.Slot(victim)))
		s.evictLocked(pool.Slot(victim))
	}
}

// prefixGuard keeps a request from evicting its own leading chunks to make room
// for later ones, which would be of no use without them. Of its window groups
// what no hit needs any more goes first. It works only once something must be
// evicted.
type prefixGuard struct {
	store  *Store
	shard  Shard
	hashes []kv.Hash
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
	s.lock()
	defer s.unlock()
	ended, out := s.mu.holds.commit(name, requestID)
	for _, h := range ended {
		out.Chunks += s.storedLocked(h, hashes, ok).Chunks
	}
	out.Late = out.Late && out.Chunks == 0
	return out
}

func (s *Store) storedLocked(h *hold, hashes []kv.Hash, ok bool) Committed {
	late := h.late()
	n := s.endHoldLocked(h, ok && !late)
	s.mu.n.StoredChunks += uint64(n)
	if n > 0 {
		s.touchHeadsLocked(h.transfer, hashes)
	}
	if late {
		s.mu.n.LateCommits++
	}
	return Committed{Found: true, Chunks: n, Late: late}
}

// touchHeadsLocked makes what the chunks before name's range need of a shard the
// most recently used, the first one last.
func (s *Store) touchHeadsLocked(name Transfer, hashes []kv.Hash) {
	var k pool.Key
	for i := name.From - 1; i >= 0; i-- {
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
