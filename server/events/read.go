// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"slices"
	"strings"
)

// Changed returns a channel that is closed when there are records after the newest one.
func (b *Book) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.changed
}

// Last returns the number of the newest record.
func (b *Book) Last() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.last
}

// Read appends to dst the records after number `after` for which want reports true, oldest first, limit at most; a nil want accepts all. It
// returns the number of the last record that it looked at. lost means that some of these records were dropped, or that `after` was never a
// record's number: Read then returns no records, and the caller must read a Snapshot.
func (b *Book) Read(after uint64, limit int, dst []Record, want func(*Record) bool) (_ []Record, next uint64, lost bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	kept := uint64(len(b.mu.records))
	if after > b.mu.last || b.mu.last > kept && after < b.mu.last-kept {
		return dst, after, true
	}
	for n := 0; after < b.mu.last && n < limit; {
		after++
		if r := &b.mu.records[after%kept]; want == nil || want(r) {
			dst = append(dst, *r)
			n++
		}
	}
	return dst, after, false
}

// Snapshot returns the chunks in the pool whose tokens are known, each after those before it in a prompt, and the number of the newest
// record that they include. An empty model means all models. With onePerModel a chunk that several salts have is returned once.
func (b *Book) Snapshot(model string, onePerModel bool) (chunks []*Chunk, last uint64) {
	placed, last := b.snapshot(model, true)
	for _, p := range placed {
		chunks = append(chunks, p.Chunk)
	}
	if onePerModel {
		chunks = slices.CompactFunc(chunks, func(a, c *Chunk) bool { return a.Model == c.Model && a.Hash == c.Hash })
	}
	return chunks, last
}

// Everything is Snapshot for all media. The chunks of one model are together, those in the pool first.
func (b *Book) Everything() (placed []Placed, last uint64) { return b.snapshot("", false) }

func (b *Book) snapshot(model string, poolOnly bool) (placed []Placed, last uint64) {
	b.mu.Lock()
	for _, bound := range b.mu.bindings {
		for i := range bound.whole {
			w := &bound.whole[i]
			if model != "" && w.chunk.Model != model || poolOnly && w.chunk.Group >= 0 {
				continue
			}
			for m := range Medium(media) {
				if w.in[m] && !(poolOnly && m != InPool) && bound.firstOf(i, m) {
					placed = append(placed, Placed{w.chunk, m})
				}
			}
		}
	}
	last = b.mu.last
	b.mu.Unlock()
	slices.SortFunc(placed, func(a, c Placed) int {
		return cmp.Or(strings.Compare(a.Model, c.Model), cmp.Compare(a.Medium, c.Medium), cmp.Compare(a.Index, c.Index), slices.Compare(a.Hash[:], c.Hash[:]))
	})
	return placed, last
}

// firstOf reports whether no family before number i has the chunk in the medium for the same tenant.
func (bound *binding) firstOf(i int, m Medium) bool {
	for _, w := range bound.whole[:i] {
		if w.in[m] && w.family.tenant == bound.whole[i].family.tenant {
			return false
		}
	}
	return true
}

// Capacity returns how many records are kept for readers.
func (b *Book) Capacity() int { return b.o.Records }

// Stats is a snapshot of a Book.
type Stats struct {
	Counters
	Active bool
	Chunks int    // chunks of which an object is in the pool, or which have tokens and an object in a tier
	Bytes  int64  // memory of the tokens
	Kept   int    // number of records that readers can still read
	Last   uint64 // number of the newest record
}

// Stats returns a snapshot.
func (b *Book) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.mu.n
	n.Unbound += b.queue.lost()
	return Stats{
		Counters: n, Active: b.Active(), Chunks: len(b.mu.bindings), Bytes: b.mu.bytes,
		Kept: int(min(b.mu.last, uint64(len(b.mu.records)))), Last: b.mu.last,
	}
}
