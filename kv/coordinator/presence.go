// SPDX-License-Identifier: Apache-2.0

package coordinator

// Series is a sequence of positions in a prompt that a lookup asks about. Index
// i stands for the hash unit (i+1)*Units - 1: the last unit of block i, or
// unit i when Units is 1. A position is present when it is stored for every group of
// Groups.
type Series struct {
	Groups []int // the groups of one spec, rising; belongs to the Coordinator
	Set    int   // which spec of the Coordinator this is
	Units  int   // hash units per index

	// Fine asks for single hash units inside blocks (partial hits); Units is
	// then 1. Such a series is asked with Last only.
	Fine bool
}

// Window is the condition that a sliding window puts on a prefix of e blocks: the
// last Need blocks must be present, or all e blocks if e is smaller, and
// (e - Shift) must be a multiple of Align.
type Window struct{ Need, Align, Shift int }

// down returns the largest aligned length of at most e blocks, 0 if there is none.
func (w Window) down(e int) int {
	if e < w.Shift {
		return 0
	}
	return e - (e-w.Shift)%w.Align
}

// Presence knows which blocks of one prompt are in a store. Lookups ask only these
// three questions. A set of runs can answer them in time that grows with the number of
// runs, and a remote store in few batches.
//
// Indices are bounded by the prompt's hash units. A block that was not added
// is absent.
type Presence interface {
	// Prefix returns the first absent index of [lo, hi), hi if none is.
	Prefix(s Series, lo, hi int) int

	// Window returns the largest e in [1, hi] that satisfies w, 0 if none does.
	Window(s Series, hi int, w Window) int

	// Last returns the largest present i of [lo, hi) for which i+1 is a
	// multiple of align, lo-1 if there is none.
	Last(s Series, lo, hi, align int) int
}

// everything is a Presence in which every block is present. The masks of a hit in it are load masks.
type everything struct{}

func (everything) Prefix(_ Series, _, hi int) int        { return hi }
func (everything) Window(_ Series, hi int, w Window) int { return w.down(hi) }
func (everything) Last(_ Series, lo, hi, align int) int  { return max(hi/align*align-1, lo-1) }

// spans is what Presences over local sets have in common: questions about the runs of one group. No method takes a *Series, because that
// would move every Series to the heap.
type spans interface {
	firstAbsent(g, lo, hi int) int            // hi if none
	lastPresent(g, lo, hi int, fine bool) int // lo-1 if none
	lastAbsent(g, lo, hi int) int             // lo-1 if none
}

func prefixOf(p spans, s *Series, lo, hi int) int {
	for _, g := range s.Groups {
		if hi <= lo {
			return lo
		}
		hi = p.firstAbsent(g, lo, hi)
	}
	return hi
}

// lastOf returns the largest index of [lo, hi) that is present for all groups: each group
// lowers the candidate to an index of its own, until a round changes nothing.
func lastOf(p spans, s *Series, lo, hi int) int {
	at := hi - 1
	for agreed := 0; agreed < len(s.Groups); {
		for _, g := range s.Groups {
			if at < lo {
				return lo - 1
			}
			if i := p.lastPresent(g, lo, at+1, s.Fine); i < at {
				at, agreed = i, 0
			}
			if agreed++; agreed == len(s.Groups) {
				break
			}
		}
	}
	return max(at, lo-1)
}

// startOf returns the first index, from lo on, of the run that ends with the present
// index at.
func startOf(p spans, s *Series, lo, at int) int {
	start := lo
	for _, g := range s.Groups {
		start = p.lastAbsent(g, start, at) + 1
	}
	return start
}

func windowOf(p spans, s *Series, hi int, w Window) int {
	for hi > 0 {
		at := lastOf(p, s, 0, hi)
		if at < 0 {
			return 0
		}
		start := startOf(p, s, 0, at)
		if e := w.down(at + 1); e > start && (start == 0 || e-start >= w.Need) {
			return e
		}
		hi = start
	}
	return 0
}

func alignedLastOf(p spans, s *Series, lo, hi, align int) int {
	for hi > lo {
		at := lastOf(p, s, lo, hi)
		if at < lo || align == 1 {
			return at
		}
		start := startOf(p, s, lo, at)
		if i := (at+1)/align*align - 1; i >= start {
			return i
		}
		hi = start
	}
	return lo - 1
}
