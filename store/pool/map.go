// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"

	"github.com/kvasir-kv/kvasir/kv"
)

// Map shows where in the pool memory is in use. It divides the pool's bytes into cells of one size, and gives for each cell the bytes that
// are resident, staged, and quarantined because of a detached worker. The rest of a cell is free.
type Map struct {
	CellBytes   int64   `json:"cell_bytes"`
	Resident    []int64 `json:"resident"`
	Staged      []int64 `json:"staged"`
	Quarantined []int64 `json:"quarantined"`
	Sampled     bool    `json:"sampled"` // only one slot in several was looked at, and stands for the others

	Owner  []int   `json:"owner"` // of each cell: the index in Owners of the namespace that has about the most of it; -1 if the cell has no chunk
	Owners []Owner `json:"-"`     // namespaces with resident or staged chunks, at most MaxOwners; further ones share the last entry

	bytes int64 // of the pool
	most  int   // slots to look at
	next  int   // the slot to look at next

	lead  []int64 // of each cell: by how many bytes its owner leads
	place map[kv.Namespace]int
}

// Owner is how much of the pool one namespace has.
type Owner struct {
	Namespace kv.Namespace // zero: all namespaces beyond MaxOwners
	Bytes     int64
	Chunks    int
}

// Limits of a Map.
const (
	maxMapCells = 4096    // cells; if more are asked for, the cells are larger
	maxMapped   = 1 << 17 // slots that are looked at by default

	MaxOwners = 256 // namespaces in Owners; the last entry is shared by all beyond that
)

// NewMap returns an empty Map of a pool of `bytes` bytes, with at most `cells` cells of at least 4,096 bytes. AddSome fills it. `most` is
// how many slots AddSome looks at, 0 for the default.
func NewMap(bytes int64, cells, most int) Map {
	parts := int64(min(max(cells, 1), maxMapCells))
	cell := max((bytes+parts-1)/parts, 4096)
	n := int((bytes + cell - 1) / cell)
	m := Map{
		CellBytes: cell, Resident: make([]int64, n), Staged: make([]int64, n), Quarantined: make([]int64, n),
		Owner: make([]int, n), Owners: []Owner{}, lead: make([]int64, n), place: make(map[kv.Namespace]int),
		bytes: bytes, most: cmp.Or(most, maxMapped),
	}
	for i := range m.Owner {
		m.Owner[i] = -1
	}
	return m
}

// AddSome looks at the next n slots of p, and reports whether there are more.
func (m *Map) AddSome(p *Pool, n int) (more bool) {
	slots := p.Slots()
	step := max(1, (slots+m.most-1)/m.most)
	m.Sampled = m.Sampled || step > 1
	for end := min(slots, m.next+n*step); m.next < end; m.next += step {
		slot, of := Slot(m.next), m.Resident
		switch p.StateOf(slot) {
		case Resident:
		case Staged:
			of = m.Staged
		case Condemned:
			of = m.Quarantined
		default:
			continue
		}
		off, n := p.Offset(slot), p.Round(p.Length(slot))
		m.add(of, off, n, int64(step))
		if p.StateOf(slot) != Condemned {
			m.own(p.KeyOf(slot).Namespace, off, n, step)
		}
	}
	return m.next < slots
}

// own counts a chunk of n bytes at offset off for its namespace `of`, `times` times, and once in the cells that have it. The Owner of a cell
// is the namespace with the majority of its bytes, if there is one; otherwise one of those that were seen there.
func (m *Map) own(of kv.Namespace, off, n int64, times int) {
	at, known := m.place[of]
	if !known {
		if len(m.Owners) >= MaxOwners-1 {
			of = kv.Namespace{}
		}
		if at, known = m.place[of]; !known {
			at = len(m.Owners)
			m.place[of] = at
			m.Owners = append(m.Owners, Owner{Namespace: of})
		}
	}
	m.Owners[at].Bytes += n * int64(times)
	m.Owners[at].Chunks += times
	for n > 0 {
		i := off / m.CellBytes
		part := min(n, (i+1)*m.CellBytes-off)
		switch {
		case m.Owner[i] == at:
			m.lead[i] += part
		case m.lead[i] < part:
			m.Owner[i], m.lead[i] = at, part-m.lead[i]
		default:
			m.lead[i] -= part
		}
		off, n = off+part, n-part
	}
}

// add adds n bytes at offset off, `times` times, to the cells that have them. `of` is one of Resident, Staged and Quarantined. A cell never
// gets more than its own size, even if the samples add up to more.
func (m *Map) add(of []int64, off, n, times int64) {
	for n > 0 {
		i := off / m.CellBytes
		part := min(n, (i+1)*m.CellBytes-off)
		of[i] = min(of[i]+part*times, m.CellBytes, m.bytes-i*m.CellBytes)
		off, n = off+part, n-part
	}
}
