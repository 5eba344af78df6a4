// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"cmp"
	"slices"
)

// maxRun bounds the bytes of a merged request, so that acknowledgements come often enough to show progress. A longer run of neighbouring
// entries becomes several requests.
const maxRun = 16 << 20

// Entry is one copy of a batch.
type Entry struct {
	Local  []byte // source of a write, destination of a read
	Remote uint64 // published address at the peer
}

// request is what one header on the wire asks for: several neighbouring entries, one entry, or a part of one.
type request struct {
	addr, size  uint64
	first, last int // the entries plan.order[first:last]
	off         int // offset in the first entry at which the request begins
	single      bool
}

type orderKey struct {
	addr  uint64
	index int32
}

// plan turns a batch into requests. Entries that adjoin each other at the peer become one request, wherever their local bytes lie,
// because only the remote address is on the wire. A plan may be reused.
type plan struct {
	order []orderKey // entries with bytes, by remote address
	reqs  []request
	bytes uint64
}

// build plans the requests for entries. If one range is impossible, it returns ErrRange, and nothing is sent.
func (p *plan) build(entries []Entry) error {
	p.order, p.reqs, p.bytes = p.order[:0], p.reqs[:0], 0
	sorted := true
	for i := range entries {
		e := &entries[i]
		if len(e.Local) == 0 {
			continue // nothing goes on the wire, as with engines since 0.3.12
		}
		if !(Range{e.Remote, uint64(len(e.Local))}).valid() {
			return ErrRange
		}
		if n := len(p.order); n > 0 && e.Remote < p.order[n-1].addr {
			sorted = false
		}
		p.order = append(p.order, orderKey{e.Remote, int32(i)})
		p.bytes += uint64(len(e.Local))
	}
	if !sorted {
		slices.SortStableFunc(p.order, func(a, b orderKey) int { return cmp.Compare(a.addr, b.addr) })
	}
	return nil
}

// cut cuts the planned entries into requests of at most limit bytes each.
func (p *plan) cut(entries []Entry, limit uint64) {
	p.reqs = p.reqs[:0]
	limit = min(limit, maxRun)
	for i, k := range p.order {
		size := uint64(len(entries[k.index].Local))
		if n := len(p.reqs); n > 0 {
			r := &p.reqs[n-1]
			if r.addr+r.size == k.addr && r.size+size <= limit {
				r.size += size
				r.last = i + 1
				continue
			}
		}
		for off := uint64(0); off < size; off += limit {
			p.reqs = append(p.reqs, request{
				addr: k.addr + off, size: min(limit, size-off),
				first: i, last: i + 1, off: int(off), single: true,
			})
		}
	}
	for i := range p.reqs {
		p.reqs[i].single = p.reqs[i].last == p.reqs[i].first+1
	}
}

// singles splits the merged request r into one request per entry. The peer may have refused r because of one entry, or because r spans
// two of its regions.
func (p *plan) singles(r request, entries []Entry) []request {
	out := make([]request, 0, r.last-r.first)
	for i := r.first; i < r.last; i++ {
		k := p.order[i]
		out = append(out, request{addr: k.addr, size: uint64(len(entries[k.index].Local)), first: i, last: i + 1, single: true})
	}
	return out
}

// share cuts reqs, of `bytes` bytes in all, into n runs of about equal size.
func share(reqs []request, n int, bytes uint64) [][]request {
	out := make([][]request, 0, n)
	var sum uint64
	start := 0
	for i := range reqs {
		sum += reqs[i].size
		if len(out) < n-1 && sum >= bytes*uint64(len(out)+1)/uint64(n) {
			out = append(out, reqs[start:i+1])
			start = i + 1
		}
	}
	if start < len(reqs) {
		out = append(out, reqs[start:])
	}
	return out
}

// cursor walks through the local bytes of a run of requests.
type cursor struct {
	req   int // the next request, or the current one
	entry int // index into plan.order; meaningful while left > 0
	off   int
	left  uint64 // bytes of the current request that are left
}

func (c *cursor) start(r *request) {
	c.entry, c.off, c.left = r.first, r.off, r.size
}

// next returns the next piece of the current request, at most limit bytes. Entries that adjoin each other in local memory, too, make
// one piece.
func (c *cursor) next(p *plan, entries []Entry, limit int) []byte {
	limit = int(min(uint64(limit), c.left))
	b := entries[p.order[c.entry].index].Local[c.off:]
	n := 0 // bytes of the entries that b contains completely
	for len(b) < limit {
		following := entries[p.order[c.entry+1].index].Local
		if !adjoin(b, following) {
			break
		}
		n = len(b)
		b = b[:n+len(following)]
		c.entry, c.off = c.entry+1, 0
	}
	if len(b) <= limit {
		c.entry, c.off = c.entry+1, 0
	} else {
		c.off += limit - n
		b = b[:limit]
	}
	c.left -= uint64(len(b))
	if c.left == 0 {
		c.req++
	}
	return b
}

// adjoin reports whether b begins in memory where a ends, within a's array. b must have bytes.
func adjoin(a, b []byte) bool {
	return cap(a)-len(a) >= len(b) && &a[:len(a)+1][len(a)] == &b[0]
}
