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

// memory is P's KV cache as 0.13 sees it.
type memory struct {
	Bases      []uint64 // regions in order of registration, each base once
	BlockBytes uint64   // per block, the same in every region
}

// plan appends to out the copies that answer pull p from own, P's block ids of each
// request in p's order. A request with fewer ids in p gets the last of P's, since D
// has the first ones itself; one without any gets nothing. Regions pair up in order
// until either side has no more. The order is request, region, span.
//
// An error is an ErrShape, where the pull asks for more than there is, or an
// ErrRange, where an address overflows; out is then nil and nothing may be copied.
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
					return nil, wire.Refusef(wire.CodeRange, "%d blocks from %d to %d, region %d", s.Len(), src[s.From], dst[s.From], r)
				}
				out = append(out, mooncake.Descriptor{Src: from, Dst: to, Len: o.BlockBytes * uint64(s.Len())})
			}
		}
	}
	return out, nil
}

// sessionOf names D's transfer engine, as P's knows it.
func sessionOf(p *wire.Pull013) string { return net.JoinHostPort(p.Host, strconv.Itoa(p.Port)) }

// blockAddress is where block id of a region begins; false if its n blocks do not
// lie in the address space.
func blockAddress(base uint64, id, n int, size uint64) (uint64, bool) {
	if id < 0 || id > math.MaxInt-n {
		return 0, false
	}
	over, end := bits.Mul64(uint64(id+n), size)
	_, carry := bits.Add64(base, end, 0)
	return base + uint64(id)*size, over == 0 && carry == 0
}

// sendTable holds the requests that D may pull: a state machine without a clock or a
// lock. A request is announced, then ready, then held by a pull. A successful pull ends
// it, a failed one makes it ready again. A ready request that no pull holds expires with
// its lease.
//
// The original differs for pulls that fail. It answers "trans_done" to a pull of an
// unknown request, so that D decodes from unwritten memory, and requests of a failed
// pull never expire.
type sendTable struct {
	lease time.Duration
	by    map[string]*send
}

type send struct {
	id      string
	blocks  []int
	ready   bool
	gone    bool // out of the table
	sent    bool // by a pull that has ended
	pulls   int  // that hold it
	expires time.Time
}

// newSendTable returns an empty table; lease is how long a ready request waits for
// its pull, 480 s in vLLM.
func newSendTable(lease time.Duration) *sendTable {
	return &sendTable{lease: lease, by: make(map[string]*send)}
}

// announce makes a request known: a pull of it waits. A known one stays as it is.
func (s *sendTable) announce(id string) {
	if s.by[id] == nil {
		s.by[id] = &send{id: id}
	}
}

// ready records that a request's blocks hold its KV. They stay until the lease, which
// begins now, has passed. It keeps the slice. It also announces an unknown request.
func (s *sendTable) ready(id string, blocks []int, now time.Time) {
	s.announce(id)
	e := s.by[id]
	e.blocks, e.ready, e.expires = blocks, true, now.Add(s.lease)
}

// drop forgets a request that will not be ready; pulls that wait for it fail. A
// ready one stays.
func (s *sendTable) drop(id string) {
	if e := s.by[id]; e != nil && !e.ready {
		s.forget(e)
	}
}

func (s *sendTable) forget(e *send) {
	e.gone = true
	delete(s.by, e.id)
}

// heldPull is a pull in progress: none of its requests expires until end.
type heldPull struct {
	table *sendTable
	sends []*send
}

// hold begins a pull. The error, an ErrUnknown, names the first request that is
// not known; nothing is held then.
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

// waiting reports whether a request of the pull is not ready. The error, an
// ErrUnknown, names one that was dropped or sent meanwhile.
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

// blocks returns P's block ids, for memory.plan; the caller does not change them.
func (h *heldPull) blocks() [][]int {
	out := make([][]int, len(h.sends))
	for i, e := range h.sends {
		out[i] = e.blocks
	}
	return out
}

// end ends the pull, once. It returns the requests that are sent and that no other
// pull holds, each once: their blocks are free. The leases of the other requests begin
// again.
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

// expire forgets ready requests whose lease has passed and that no pull holds, and
// returns them, sorted: their blocks are free.
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
