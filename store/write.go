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
	Cached int // chunks already resident
	Staged int // chunks being stored by somebody else
	NoRoom int // chunks at the range's end that did not fit
}

// ErrBusy means that too many transfers are in progress.
var ErrBusy = errors.New("store: too many transfers in progress")

// Reserve takes places of chunkBytes each for the chunks hashes[name.From:name.To]
// of one shard that are not yet kept, evicting the least recently used where
// needed. What does not fit is left out from the end, so that the longest prefix
// is kept. With any place taken, the worker name.Instance holds them until
// CommitStore.
func (s *Store) Reserve(name Transfer, requestID []byte, hashes []kv.Hash, chunkBytes int64, p *Place) (Reserved, error) {
	p.Offsets, p.Indices = p.Offsets[:0], p.Indices[:0]
	var out Reserved
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed || s.mu.holds.len >= s.opts.MaxHolds {
		out.NoRoom = name.To - name.From
		return out, ErrBusy
	}
	var taken []pool.Slot
	guard := prefixGuard{store: s, shard: name.Shard, hashes: hashes[:name.To]}
	defer guard.release()
	var k pool.Key
	for i, h := range hashes[name.From:name.To] {
		name.Shard.key(&k, name.Shard.Index, h)
		slot, err := s.reserveLocked(&k, chunkBytes, &guard)
		switch {
		case errors.Is(err, pool.ErrExists):
			if _, st := s.mu.pool.Find(&k); st == pool.Resident {
				out.Cached++
			} else {
				out.Staged++
			}
			continue
		case err != nil:
			out.NoRoom = name.To - name.From - i
			s.mu.n.AllocationFailures++
		default:
			taken = append(taken, slot)
			p.Offsets = append(p.Offsets, s.mu.pool.Offset(slot))
			p.Indices = append(p.Indices, i)
			continue
		}
		break
	}
	if len(taken) > 0 {
		s.holdLocked(name, requestID, taken)
	}
	return out, nil
}

// reserveLocked stages one chunk, evicting as long as that helps.
func (s *Store) reserveLocked(k *pool.Key, n int64, guard *prefixGuard) (pool.Slot, error) {
	for {
		slot, err := s.mu.pool.Reserve(k, n)
		if !errors.Is(err, pool.ErrFull) {
			return slot, err
		}
		guard.protect()
		victim, ok := s.mu.lru.Oldest()
		if !ok {
			return 0, err
		}
		s.mu.n.EvictedChunks++
		s.mu.n.EvictedBytes += uint64(s.mu.pool.Length(pool.Slot(victim)))
		s.dropLocked(pool.Slot(victim), Evicted)
	}
}

// prefixGuard keeps a request from evicting its own leading chunks to make room
// for later ones, which would be of no use without them. It works only once
// something must be evicted.
type prefixGuard struct {
	store  *Store
	shard  Shard
	hashes []kv.Hash
	on     bool
	pinned []pool.Slot
}

func (g *prefixGuard) protect() {
	if g.on {
		return
	}
	g.on = true
	var k pool.Key
	for _, h := range g.hashes {
		g.shard.key(&k, g.shard.Index, h)
		if slot, st := g.store.mu.pool.Find(&k); st == pool.Resident && g.store.mu.lru.Has(uint32(slot)) {
			g.store.mu.lru.Remove(uint32(slot))
			g.pinned = append(g.pinned, slot)
		}
	}
}

func (g *prefixGuard) release() {
	for i := len(g.pinned) - 1; i >= 0; i-- {
		g.store.touchLocked(g.pinned[i])
	}
}

// Committed is the outcome of CommitStore or CommitLoad.
type Committed struct {
	Found  bool // a transfer of that name was in progress
	Chunks int  // made visible, or read
	Late   bool // the worker had been detached: nothing is made visible
}

// CommitStore ends the transfer that Reserve began. With ok its chunks become
// visible, unless the worker was detached in between. hashes are those of the
// prompt, at least the first name.To: the chunks before the range become more
// recently used than those in it, so that tails are evicted before heads.
func (s *Store) CommitStore(name Transfer, requestID []byte, hashes []kv.Hash, ok bool) Committed {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.mu.holds.match(name, requestID)
	if h == nil {
		return Committed{}
	}
	late := h.orphan
	n := s.endHoldLocked(h, ok && !late)
	s.mu.n.StoredChunks += uint64(n)
	if n > 0 {
		s.mu.n.StoredBytes += uint64(n) * uint64(s.mu.pool.Length(h.slots[0]))
		s.touchHeadsLocked(name, hashes)
	}
	if late {
		s.mu.n.LateCommits++
	}
	return Committed{Found: true, Chunks: n, Late: late}
}

// touchHeadsLocked makes the chunks of a shard before name's range the most
// recently used, the first one last.
func (s *Store) touchHeadsLocked(name Transfer, hashes []kv.Hash) {
	var k pool.Key
	for i := name.From - 1; i >= 0; i-- {
		name.Shard.key(&k, name.Shard.Index, hashes[i])
		if slot, st := s.mu.pool.Find(&k); st == pool.Resident {
			s.touchLocked(slot)
		}
	}
}
