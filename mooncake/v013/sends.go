// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"math"
	"math/bits"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// memory is P's KV cache in the terms of vLLM 0.13.
type memory struct {
	Bases      []uint64 // of regions in the order of registration, each base once
	BlockBytes uint64   // per block, the same in every region
}

// plan appends to out the copies that answer the pull p. own are P's block ids for each request of p, in p's order. If p has fewer ids
// than P for a request, D gets P's last blocks, because D has the first ones itself; a request without ids in p gets nothing. The i-th
// region of P fills the i-th of D, as far as both have one. The copies are sorted by request, region and span.
//
// The error is an ErrShape if the pull asks for more blocks than P has, or an ErrRange if an address overflows. out is then nil, and
// nothing may be copied.
//
// vLLM: _send_blocks, 0.13.0; vectors in
// internal/testkit/testdata/mooncake-connector/send-blocks-v0130.json.
func (o *memory) plan(out []mooncake.Descriptor, p *wire.Pull013, own [][]int) ([]mooncake.Descriptor, error) {
	if len(own) != len(p.Blocks) {
		return nil, wire.Asserted(wire.CodeShape, "%d requests, %d lists of block ids from %s", len(own), len(p.Blocks), sessionOf(p))
	}
	var spans []mooncake.Span
	for i, dst := range p.Blocks {
		if len(dst) == 0 {
			continue
		}
		if len(own[i]) < len(dst) {
			return nil, wire.Asserted(wire.CodeShape, "request %d of the pull from %s: P has %d blocks, D wants %d", i, sessionOf(p), len(own[i]), len(dst))
		}
		src := own[i][len(own[i])-len(dst):]
		var err error
		if spans, err = mooncake.GroupConcurrentContiguous(spans[:0], src, dst); err != nil {
			return nil, err
		}
		for r := range min(len(o.Bases), len(p.Bases)) {
			for _, s := range spans {
				from, ok := blockAddress(o.Bases[r], src[s.From], s.Len(), o.BlockBytes)
				to, okD := blockAddress(p.Bases[r], dst[s.From], s.Len(), o.BlockBytes)
				if !ok || !okD {
					return nil, wire.Refusef(wire.CodeRange, "%d blocks, at P from %d and at D from %d, lie outside the memory of region %d", s.Len(), src[s.From], dst[s.From], r)
				}
				out = append(out, mooncake.Descriptor{Src: from, Dst: to, Len: o.BlockBytes * uint64(s.Len())})
			}
		}
	}
	return out, nil
}

// sessionOf returns the name of D's transfer engine, host:port.
func sessionOf(p *wire.Pull013) string { return net.JoinHostPort(p.Host, strconv.Itoa(p.Port)) }

// blockAddress returns the address of block id of a region at base. It returns false if n blocks from there do not fit into the address
// space.
func blockAddress(base uint64, id, n int, size uint64) (uint64, bool) {
	if id < 0 || id > math.MaxInt-n {
		return 0, false
	}
	over, end := bits.Mul64(uint64(id+n), size)
	_, carry := bits.Add64(base, end, 0)
	return base + uint64(id)*size, over == 0 && carry == 0
}

// sendTable holds the requests that D may pull. It is a state machine without a clock or a lock. A request is first announced, then
// ready, then held by a pull. A successful pull ends it; a failed pull makes it ready again. A ready request that no pull holds expires
// with its lease.
//
// vLLM differs for pulls that fail: it answers "trans_done" to a pull of an unknown request, so that D decodes from memory that was
// never written, and the requests of a failed pull never expire.
type sendTable struct {
	lease time.Duration
	by    map[string]*send
}

type send struct {
	id      string
	blocks  []int
	ready   bool
	gone    bool // removed from the table
	sent    bool // a pull that has ended delivered it
	pulls   int  // number of pulls that hold it
	expires time.Time
}

// newSendTable returns an empty table. lease is how long a ready request waits for its pull; 480 s in vLLM.
func newSendTable(lease time.Duration) *sendTable {
	return &sendTable{lease: lease, by: make(map[string]*send)}
}

// announce enters a request into the table, so that a pull of it waits instead of failing. It does not change a known request.
func (s *sendTable) announce(id string) {
	if s.by[id] == nil {
		s.by[id] = &send{id: id}
	}
}

// ready records that the request's KV is in blocks. P must keep the blocks until the lease, which begins now, has passed. ready keeps
// the slice. It also announces a request that is unknown.
func (s *sendTable) ready(id string, blocks []int, now time.Time) {
	s.announce(id)
	e := s.by[id]
	e.blocks, e.ready, e.expires = blocks, true, now.Add(s.lease)
}

// drop removes a request that will not become ready; pulls that wait for it fail. It does not change a ready request.
func (s *sendTable) drop(id string) {
	if e := s.by[id]; e != nil && !e.ready {
		s.forget(e)
	}
}

func (s *sendTable) forget(e *send) {
	e.gone = true
	delete(s.by, e.id)
}

// heldPull is a pull in progress. None of its requests expires before end.
type heldPull struct {
	table *sendTable
	sends []*send
}

// hold begins a pull of the requests ids. The error is an ErrUnknown that names the first unknown request; then no request is held.
func (s *sendTable) hold(ids []string) (*heldPull, error) {
	h := &heldPull{table: s, sends: make([]*send, len(ids))}
	for i, id := range ids {
		if h.sends[i] = s.by[id]; h.sends[i] == nil {
			return nil, wire.Refusef(wire.CodeUnknown, "request %q was not announced, was sent, or has expired", id)
		}
	}
	for _, e := range h.sends {
		e.pulls++
	}
	return h, nil
}

// waiting reports whether a request of the pull is not ready yet. The error is an ErrUnknown that names a request that was dropped or
// sent meanwhile.
func (h *heldPull) waiting() (bool, error) {
	waiting := false
	for _, e := range h.sends {
		if e.gone {
			return false, wire.Refusef(wire.CodeUnknown, "request %q was given up", e.id)
		}
		waiting = waiting || !e.ready
	}
	return waiting, nil
}

// blocks returns P's block ids of the pull's requests, for memory.plan. The caller must not change them.
func (h *heldPull) blocks() [][]int {
	out := make([][]int, len(h.sends))
	for i, e := range h.sends {
		out[i] = e.blocks
	}
	return out
}

// end ends the pull; it must be called once. If `sent` is true, D got the blocks. end returns the sent requests that no other pull holds,
// each once: their blocks may be reused. The leases of the other requests start anew at the time `now`.
func (h *heldPull) end(sent bool, now time.Time) (free []string) {
	for _, e := range h.sends {
		e.pulls--
		e.sent = e.sent || sent && e.ready
		e.expires = now.Add(h.table.lease)
		if e.sent && e.pulls == 0 && !e.gone {
			h.table.forget(e)
			free = append(free, e.id)
		}
	}
	h.sends = nil
	return free
}

// expire removes the ready requests whose lease has passed and that no pull holds. It returns them sorted: their blocks may be reused.
func (s *sendTable) expire(now time.Time) (free []string) {
	for _, e := range s.by {
		if e.ready && e.pulls == 0 && now.After(e.expires) {
			s.forget(e)
			free = append(free, e.id)
		}
	}
	slices.Sort(free)
	return free
}

// size returns the number of known requests.
func (s *sendTable) size() int { return len(s.by) }
