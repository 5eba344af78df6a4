package store

import (
	"encoding/binary"

	"github.com/kvasir-kv/kvasir/pool"
)

// Reason says why chunks were not served.
type Reason uint8

// The reasons of a miss.
const (
	None        Reason = iota
	NeverStored        // no chunk of that key was seen, or too long ago
	Evicted            // to make room
	Cleared            // by an operator or a client
	Failed             // its writer never committed it
	BeingStored        // reserved, not committed yet
	NotPinned          // no lookup of that session promised it
	Busy               // too many transfers in progress
	Corrupt            // differed from its checksum after a restart

	NumReasons = int(Corrupt) + 1
)

var reasons = [NumReasons]string{
	"", "never stored", "evicted", "cleared", "its store was not completed",
	"being stored right now", "no lookup of this request pinned it", "too many transfers in progress",
	"it differed from its checksum after a restart",
}

func (r Reason) String() string { return reasons[r] }

// whyLocked says why the object under k, found in state st, is not served.
func (s *Store) whyLocked(k *pool.Key, st pool.State) Reason {
	if st == pool.Staged {
		return BeingStored
	}
	return s.mu.ghosts.why(k)
}

// ghosts remembers 64 bits of the keys that were dropped last, and why. Two keys
// that agree in those bits only explain a miss wrongly.
type ghosts struct {
	max     int
	reasons map[uint64]Reason
	ring    []uint64
	next    int
}

func ghostOf(k *pool.Key) uint64 {
	le := binary.LittleEndian
	return le.Uint64(k.Chunk[:]) ^ le.Uint64(k.Namespace[:]) ^ uint64(k.Rank)<<32 ^ uint64(k.Group)
}

func (g *ghosts) add(k *pool.Key, why Reason) {
	if g.reasons == nil {
		g.reasons = make(map[uint64]Reason)
	}
	id := ghostOf(k)
	if _, ok := g.reasons[id]; !ok {
		if len(g.ring) < g.max {
			g.ring = append(g.ring, id)
		} else {
			delete(g.reasons, g.ring[g.next])
			g.ring[g.next] = id
			g.next = (g.next + 1) % g.max
		}
	}
	g.reasons[id] = why
}

func (g *ghosts) why(k *pool.Key) Reason {
	if r := g.reasons[ghostOf(k)]; r != None {
		return r
	}
	return NeverStored
}

// Counters count since the start.
type Counters struct {
	Lookups            uint64
	StoredChunks       uint64
	StoredBytes        uint64
	LoadedChunks       uint64
	LoadedBytes        uint64
	EvictedChunks      uint64
	EvictedBytes       uint64
	DeadChunks         uint64 // of the evicted, those of windows that no hit could load any more
	Cleared            uint64 // chunks
	AllocationFailures uint64 // reserves that did not fit whole
	ReadFailures       uint64 // loads refused
	LateCommits        uint64 // commits of detached workers
	HoldsExpired       uint64 // transfers that no commit ended
	RestoredChunks     uint64 // found in the pool at the start
	SummedChunks       uint64 // whose checksum was computed and recorded
	VerifiedChunks     uint64 // of an earlier server, equal to their checksums
	CorruptChunks      uint64 // of an earlier server, different from them: dropped
	SessionsExpired    uint64
	SessionsPushed     uint64 // ended early to make room
}

// Stats is a snapshot of a Store.
type Stats struct {
	Counters
	pool.Usage
	Sessions      int
	Transfers     int // holds
	Quarantined   int // of those, by detached workers
	EvictableObjs int
}

// Stats returns a snapshot.
func (s *Store) Stats() Stats {
	s.lock()
	defer s.unlock()
	return Stats{
		Counters: s.mu.n, Usage: s.mu.pool.Usage(), Sessions: s.mu.leases.Len(),
		Transfers: s.mu.holds.all.slots, Quarantined: s.mu.holds.orphans, EvictableObjs: s.mu.lru.Len(),
	}
}
