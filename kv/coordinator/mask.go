// SPDX-License-Identifier: Apache-2.0

package coordinator

import "iter"

// Run is a range of indices, [Start, End).
type Run struct{ Start, End int }

// Mask says for each block of a group, from a first block on, whether to load or store
// it. It is a small value, whatever its length: periodic tails plus two runs.
// The zero Mask is empty.
type Mask struct {
	length int
	all    bool // vLLM returns None here, which means all blocks

	// Tails: relative block i is set when i+phase >= 0 and
	// (i+phase) % period >= period-tail. Period 0 means none.
	phase, period, tail int

	runs [2]Run // more blocks that are set, within [0, length)
}

// Len returns the number of blocks the mask describes.
func (m *Mask) Len() int { return m.length }

// All reports whether vLLM returns None, which means all blocks, instead of a list of booleans.
func (m *Mask) All() bool { return m.all }

// At reports whether block i, counted from the mask's first, is set.
func (m *Mask) At(i int) bool {
	if i < 0 || i >= m.length {
		return false
	}
	for _, r := range m.runs {
		if i >= r.Start && i < r.End {
			return true
		}
	}
	return m.period > 0 && i+m.phase >= 0 && (i+m.phase)%m.period >= m.period-m.tail
}

// Next returns the first run of set blocks at or after `from`. If `from` lies inside a run, the
// result begins at `from`. The block after the result is unset.
func (m *Mask) Next(from int) (Run, bool) {
	from = max(from, 0)
	best := Run{m.length, m.length}
	for _, r := range m.runs {
		if r.End > from && max(r.Start, from) < best.Start {
			best = Run{max(r.Start, from), r.End}
		}
	}
	if r, ok := m.nextTail(from); ok && r.Start < best.Start {
		best = r
	}
	if best.Start >= m.length {
		return Run{}, false
	}
	for best.End < m.length && m.At(best.End) { // runs and tails may touch or overlap
		end := best.End
		for _, r := range m.runs {
			if r.Start <= end && r.End > end {
				best.End = max(best.End, r.End)
			}
		}
		if r, ok := m.nextTail(end); ok && r.Start == end {
			best.End = max(best.End, r.End)
		}
	}
	best.End = min(best.End, m.length)
	return best, true
}

// nextTail returns the first periodic tail with a block at or after `from`.
func (m *Mask) nextTail(from int) (Run, bool) {
	if m.period == 0 || m.tail <= 0 {
		return Run{}, false
	}
	at := max(from+m.phase, 0)
	segment := at - at%m.period
	start := max(segment+m.period-m.tail, at)
	r := Run{start - m.phase, segment + m.period - m.phase}
	return r, r.Start < m.length
}

// Runs yields the runs of set blocks, rising and apart.
func (m *Mask) Runs() iter.Seq[Run] {
	return func(yield func(Run) bool) {
		for r, ok := m.Next(0); ok && yield(r); r, ok = m.Next(r.End) {
		}
	}
}

// Count returns the number of set blocks.
func (m *Mask) Count() int {
	n := 0
	for r, ok := m.Next(0); ok; r, ok = m.Next(r.End) {
		n += r.End - r.Start
	}
	return n
}

// AppendBools appends one bool per block to dst.
func (m *Mask) AppendBools(dst []bool) []bool {
	at := 0
	for r, ok := m.Next(0); ok; r, ok = m.Next(r.End) {
		for ; at < r.Start; at++ {
			dst = append(dst, false)
		}
		for ; at < r.End; at++ {
			dst = append(dst, true)
		}
	}
	for ; at < m.length; at++ {
		dst = append(dst, false)
	}
	return dst
}

// AppendRunLengths appends the mask as lengths of alternating runs, beginning
// with unset blocks: 0 0 1 is 2 1, 1 1 is 0 2.
func (m *Mask) AppendRunLengths(dst []int) []int {
	at := 0
	for r, ok := m.Next(0); ok; r, ok = m.Next(r.End) {
		dst = append(dst, r.Start-at, r.End-r.Start)
		at = r.End
	}
	if at < m.length {
		dst = append(dst, m.length-at)
	}
	return dst
}

// suffixMask is a mask of n blocks, set from block `from` on.
func suffixMask(n, from int) Mask {
	return Mask{length: n, runs: [2]Run{{min(from, n), n}}}
}
