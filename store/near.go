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
// each other. It reports false when there is none.
func (s *Store) evictNearLocked(n int64) bool {
	n = s.mu.pool.Round(n)
	best := window{bytes: -1}
	places, seen := 0, 0
	s.mu.lru.Ascend(func(slot uint32) bool {
		off := s.mu.pool.Offset(pool.Slot(slot))
		near, start, end := s.mu.pool.Near(nil, off-n, off+2*n)
		places, seen = places+1, seen+len(near)
		if w := s.cheapestLocked(near, start, end, n); w.bytes >= 0 && (best.bytes < 0 || w.bytes < best.bytes) {
			best = w
		}
		return places < neighbourhoods && seen < maxNear
	})
	for _, slot := range best.slots {
		s.evictLocked(slot)
	}
	return best.bytes >= 0
}

// cheapestLocked finds, among slots that begin in [start, end), the run of
// evictable neighbours that leaves n bytes free and costs the fewest.
func (s *Store) cheapestLocked(slots []pool.Slot, start, end, n int64) window {
	p := s.mu.pool
	slices.SortFunc(slots, func(a, b pool.Slot) int { return cmp.Compare(p.Offset(a), p.Offset(b)) })
	best := window{bytes: -1}
	first, cost := 0, int64(0) // slots[first:i] are evictable neighbours
	left := start              // what lies before start is not known: taken
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
