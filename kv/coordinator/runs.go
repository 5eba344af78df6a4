// SPDX-License-Identifier: Apache-2.0

package coordinator

import (
	"slices"
	"sort"
)

// Runs is a set of present blocks, stored as runs per group. For each run that it meets, a
// lookup takes time that grows with the logarithm of the number of runs.
type Runs struct {
	units  []int   // hash units per block, by group
	blocks [][]Run // by group: in rising order, not touching each other
	inside [][]Run // by group: hash units inside blocks, for partial hits; in rising order
}

// NewRuns returns an empty set for c's groups.
func NewRuns(c *Coordinator) *Runs {
	r := &Runs{
		units:  make([]int, c.Groups()),
		blocks: make([][]Run, c.Groups()),
		inside: make([][]Run, c.Groups()),
	}
	for g := range r.units {
		r.units[g] = max(c.BlockUnits(g), 1)
	}
	return r
}

// Reset empties the set and keeps its memory.
func (r *Runs) Reset() {
	for g := range r.blocks {
		r.blocks[g] = r.blocks[g][:0]
		r.inside[g] = r.inside[g][:0]
	}
}

// Add marks the blocks [lo, hi) of a group as present.
func (r *Runs) Add(g, lo, hi int) { r.blocks[g] = insert(r.blocks[g], Run{max(lo, 0), hi}) }

// AddUnits marks hash units [lo, hi) of a group as present. A block is present if its last unit is. A partial hit can also end at each
// other unit.
func (r *Runs) AddUnits(g, lo, hi int) {
	lo, k := max(lo, 0), r.units[g]
	r.Add(g, ceilDiv(lo+1, k)-1, hi/k)
	if k > 1 {
		r.inside[g] = insert(r.inside[g], Run{lo, hi})
	}
}

// Blocks returns the runs of present blocks of a group. The caller must not change them.
func (r *Runs) Blocks(g int) []Run { return r.blocks[g] }

// insert adds a run to runs in rising order, and joins it with those that it touches.
func insert(runs []Run, add Run) []Run {
	if add.Start >= add.End {
		return runs
	}
	if n := len(runs); n == 0 || runs[n-1].End < add.Start { // the usual order
		return append(runs, add)
	}
	i := sort.Search(len(runs), func(i int) bool { return runs[i].End >= add.Start })
	j := i
	for j < len(runs) && runs[j].Start <= add.End {
		add.Start, add.End = min(add.Start, runs[j].Start), max(add.End, runs[j].End)
		j++
	}
	if i == j {
		return slices.Insert(runs, i, add)
	}
	runs[i] = add
	return slices.Delete(runs, i+1, j)
}

// before returns the index of the last run that starts before hi, or -1.
func before(runs []Run, hi int) int {
	lo, n := 0, len(runs)
	for lo < n {
		if mid := int(uint(lo+n) >> 1); runs[mid].Start < hi {
			lo = mid + 1
		} else {
			n = mid
		}
	}
	return lo - 1
}

func (r *Runs) firstAbsent(g, lo, hi int) int {
	runs := r.blocks[g]
	i := before(runs, lo+1)
	if i < 0 || runs[i].End <= lo {
		return lo
	}
	return min(runs[i].End, hi)
}

func (r *Runs) lastPresent(g, lo, hi int, fine bool) int {
	best := lo - 1
	runs := r.blocks[g]
	if fine {
		// A whole block stands for its last unit.
		k := r.units[g]
		if i := before(runs, hi/k); i >= 0 {
			best = max(best, min(runs[i].End, hi/k)*k-1)
		}
		runs = r.inside[g]
	}
	if i := before(runs, hi); i >= 0 {
		best = max(best, min(runs[i].End, hi)-1)
	}
	return best
}

func (r *Runs) lastAbsent(g, lo, hi int) int {
	runs := r.blocks[g]
	i := before(runs, hi)
	if i < 0 || runs[i].End < hi {
		return max(hi, lo) - 1
	}
	return max(runs[i].Start, lo) - 1
}

// Prefix implements Presence.
func (r *Runs) Prefix(s Series, lo, hi int) int { return prefixOf(r, &s, lo, hi) }

// Window implements Presence.
func (r *Runs) Window(s Series, hi int, w Window) int { return windowOf(r, &s, hi, w) }

// Last implements Presence.
func (r *Runs) Last(s Series, lo, hi, align int) int { return alignedLastOf(r, &s, lo, hi, align) }
