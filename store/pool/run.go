// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"slices"
)

// maxNear is about how many slots one search for a run looks at. Then it ends with the best run that it has found, if any.
const maxNear = 1 << 14

// Run is a run of neighbouring slots whose eviction makes a free range.
type Run struct {
	Slots []Slot
	Bytes int64 // bytes to evict; -1: there is no run
}

// CheapestRun finds a run of neighbouring slots whose eviction leaves n bytes free in a row. Of the runs around the first `places` slots of
// order it returns the one that evicts the fewest bytes. If there is none, it looks around further slots until it finds one. order calls
// its argument for each slot until that reports false. Slots that are not resident, or for which busy reports true, cannot be evicted. all
// says that it looked at every slot of order.
//
// In a pool of small chunks, eviction in the order of use frees places all over the pool, and rarely two beside each other.
func (p *Pool) CheapestRun(n int64, places int, order func(func(slot uint32) bool), busy func(slot uint32) bool) (best Run, all bool) {
	n = p.Round(n)
	best, all = Run{Bytes: -1}, true
	seen, looked := 0, map[int64]bool{} // places of n bytes
	order(func(slot uint32) bool {
		if seen >= maxNear || places <= 0 && best.Bytes >= 0 {
			all = false
			return false
		}
		at := p.Offset(Slot(slot)) / n
		if looked[at] {
			return true
		}
		looked[at] = true
		near, end := p.slotsNear(nil, (at-1)*n, (at+2)*n) // every run with a slot of this place lies in these regions
		places, seen = places-1, seen+len(near)
		if r := p.cheapestOf(near, end, n, busy); r.Bytes >= 0 && (best.Bytes < 0 || r.Bytes < best.Bytes) {
			best = r
		}
		return true
	})
	return best, all
}

// cheapestOf finds, among slots, the run of evictable neighbours that leaves n bytes free and evicts the fewest bytes. slots has all slots
// between the first of them and end.
func (p *Pool) cheapestOf(slots []Slot, end, n int64, busy func(slot uint32) bool) Run {
	slices.SortFunc(slots, func(a, b Slot) int { return cmp.Compare(p.Offset(a), p.Offset(b)) })
	best := Run{Bytes: -1}
	first, cost := 0, int64(0) // slots[first:i] are evictable neighbours
	left := end
	if len(slots) > 0 {
		left = p.Offset(slots[0]) - p.arena.FreeBefore(p.Offset(slots[0]))
	}
	for i := 0; i <= len(slots); i++ {
		right := end
		if i < len(slots) {
			right = min(p.Offset(slots[i]), end)
		}
		// The range is cheaper without its first slot, if it is still long enough.
		for first < i {
			after := p.Offset(slots[first]) + p.Round(p.Length(slots[first]))
			if right-after < n {
				break
			}
			cost -= p.Round(p.Length(slots[first]))
			left = after
			first++
		}
		if first < i && right-left >= n && (best.Bytes < 0 || cost < best.Bytes) {
			best = Run{Slots: slots[first:i], Bytes: cost}
		}
		if i == len(slots) {
			break
		}
		size := p.Round(p.Length(slots[i]))
		if p.StateOf(slots[i]) == Resident && !busy(uint32(slots[i])) {
			cost += size
			continue
		}
		first, cost, left = i+1, 0, right+size
	}
	return best
}
