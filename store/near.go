package store

import (
	"cmp"
	"slices"

	"github.com/kvasir-kv/kvasir/pool"
)

// neighbourhoods is how many places are looked at for a range that takes little
// eviction, and maxNear how many slots in all.
const (
	neighbourhoods = 16
	maxNear        = 1 << 14
)

// window is a run of neighbours whose eviction makes a free range.
type window struct {
	slots []pool.Slot
	bytes int64 // that go; -1 while there is no window
}

// evictNearLocked evicts one run of neighbours that leaves n bytes free, around one
// of the least recently used: the run that costs the fewest bytes. In a pool of
// small chunks the order of use alone frees places all over, and rarely two beside
// each other. It reports false when it found none.
func (s *Store) evictNearLocked(n int64) bool {
	best, _ := s.runLocked(n, neighbourhoods)
	for _, slot := range best.slots {
		s.evictLocked(slot)
	}
	return best.bytes >= 0
}

// runLocked finds a run of neighbours whose eviction leaves n bytes free: the one that
// costs the fewest bytes of those around the places least recently used chunks, or of
// further ones while there is none. all says that every chunk was looked at.
func (s *Store) runLocked(n int64, places int) (best window, all bool) {
	n = s.mu.pool.Round(n)
	best, all = window{bytes: -1}, true
	seen, looked := 0, map[int64]bool{} // places of n bytes
	s.mu.lru.Ascend(func(slot uint32) bool {
		if seen >= maxNear || places <= 0 && best.bytes >= 0 {
			all = false
			return false
		}
		at := s.mu.pool.Offset(pool.Slot(slot)) / n
		if looked[at] {
			return true
		}
		looked[at] = true
		near, end := s.mu.pool.Near(nil, (at-1)*n, (at+2)*n) // every run that one of the place is in
		places, seen = places-1, seen+len(near)
		if w := s.cheapestLocked(near, end, n); w.bytes >= 0 && (best.bytes < 0 || w.bytes < best.bytes) {
			best = w
		}
		return true
	})
	return best, all
}

// cheapestLocked finds, among slots that are all that begin before end from the first
// of them on, the run of evictable neighbours that leaves n bytes free and costs the
// fewest.
func (s *Store) cheapestLocked(slots []pool.Slot, end, n int64) window {
	p := s.mu.pool
	slices.SortFunc(slots, func(a, b pool.Slot) int { return cmp.Compare(p.Offset(a), p.Offset(b)) })
	best := window{bytes: -1}
	first, cost := 0, int64(0) // slots[first:i] are evictable neighbours
	left := end
	if len(slots) > 0 {
		left = p.Offset(slots[0]) - p.FreeBefore(slots[0])
	}
	for i := 0; i <= len(slots); i++ {
		right := end
		if i < len(slots) {
			right = min(p.Offset(slots[i]), end)
		}
		// While the range without its first slot is long enough still, it is cheaper.
		for first < i {
			after := p.Offset(slots[first]) + p.Round(p.Length(slots[first]))
			if right-after < n {
				break
			}
			cost -= p.Round(p.Length(slots[first]))
			left = after
			first++
		}
		if first < i && right-left >= n && (best.bytes < 0 || cost < best.bytes) {
			best = window{slots: slots[first:i], bytes: cost}
		}
		if i == len(slots) {
			break
		}
		size := p.Round(p.Length(slots[i]))
		if s.mu.lru.Has(uint32(slots[i])) {
			cost += size
			continue
		}
		first, cost, left = i+1, 0, right+size
	}
	return best
}
