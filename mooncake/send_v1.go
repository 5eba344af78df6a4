package mooncake

import (
	"fmt"
	"math"
	"math/bits"
	"net"
	"slices"
	"strconv"
	"time"
)

// OwnV1 is P's KV cache as V1 sees it.
type OwnV1 struct {
	Bases      []uint64 // regions in order of registration, each base once
	BlockBytes uint64   // per block, the same in every region
}

// Plan appends to out the copies that answer pull p from own, P's block ids of each
// request in p's order. A request with fewer ids in p gets the last of P's, since D
// has the first ones itself; one without any gets nothing. Regions pair up in order
// until either side has no more. The order is request, region, span.
//
// An error is an ErrShape, where the pull asks for more than there is, or an
// ErrRange, where an address overflows; out is then nil and nothing may be copied.
//
// vLLM: _send_blocks, 0.13.0; vectors in
// internal/vectors/testdata/mooncake-connector/send-blocks-v0130.json.
func (o *OwnV1) Plan(out []Descriptor, p *PullV1, own [][]int) ([]Descriptor, error) {
	if len(own) != len(p.Blocks) {
		return nil, asserted(CodeShape, "%d requests, %d lists of block ids from %s", len(own), len(p.Blocks), p.session())
	}
	var spans []Span
	for i, dst := range p.Blocks {
		if len(dst) == 0 {
			continue
		}
		if len(own[i]) < len(dst) {
			return nil, asserted(CodeShape, "request %d of the pull from %s: P has %d blocks, D wants %d", i, p.session(), len(own[i]), len(dst))
		}
		src := own[i][len(own[i])-len(dst):]
		var err error
		if spans, err = GroupConcurrentContiguous(spans[:0], src, dst); err != nil {
			return nil, err
		}
		for r := range min(len(o.Bases), len(p.Bases)) {
			for _, s := range spans {
				from, ok := blockAddress(o.Bases[r], src[s.From], s.Len(), o.BlockBytes)
				to, okD := blockAddress(p.Bases[r], dst[s.From], s.Len(), o.BlockBytes)
				if !ok || !okD {
					return nil, refusef(CodeRange, "%d blocks from %d to %d, region %d", s.Len(), src[s.From], dst[s.From], r)
				}
				out = append(out, Descriptor{from, to, o.BlockBytes * uint64(s.Len())})
			}
		}
	}
	return out, nil
}

// session names D's transfer engine, as P's knows it.
func (p *PullV1) session() string { return net.JoinHostPort(p.Host, strconv.Itoa(p.Port)) }

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

// Send plans a pull and hands all its copies to write, the transfer engine's batch
// write, in one call: an empty one too, none if the plan fails. write returns the
// engine's code, 0 for success.
func (o *OwnV1) Send(p *PullV1, own [][]int, write func(session string, batch []Descriptor) int) error {
	batch, err := o.Plan(nil, p, own)
	if err != nil {
		return err
	}
	if rc := write(p.session(), batch); rc != 0 {
		return &Error{CodeEngine, runtimeError, fmt.Sprintf("Error in batch_transfer_sync_write: %d", rc), fmt.Sprintf("%d copies to %s", len(batch), p.session())}
	}
	return nil
}

// SendsV1 is P's table of requests that D may pull, a state machine without a
// clock or a lock. A request is announced, then ready, then held by a pull, which
// ends it or gives it back; a ready one that no pull holds expires with its lease.
//
// It departs from the original in what happens to a pull that fails. There, P
// answers "trans_done" to a pull of an unknown request, so that D decodes from
// memory that nobody wrote, and what a failed pull held never expires.
type SendsV1 struct {
	lease time.Duration
	by    map[string]*sendV1
}

type sendV1 struct {
	id      string
	blocks  []int
	ready   bool
	gone    bool // out of the table
	sent    bool // by a pull that has ended
	pulls   int  // that hold it
	expires time.Time
}

// NewSendsV1 returns an empty table; lease is how long a ready request waits for
// its pull, 480 s in vLLM.
func NewSendsV1(lease time.Duration) *SendsV1 {
	return &SendsV1{lease: lease, by: make(map[string]*sendV1)}
}

// Announce makes a request known: a pull of it waits. A known one stays as it is.
func (s *SendsV1) Announce(id string) {
	if s.by[id] == nil {
		s.by[id] = &sendV1{id: id}
	}
}

// Ready says that a request's blocks hold its KV, from now for the lease. It keeps
// blocks. An unknown request is announced by it.
func (s *SendsV1) Ready(id string, blocks []int, now time.Time) {
	s.Announce(id)
	e := s.by[id]
	e.blocks, e.ready, e.expires = blocks, true, now.Add(s.lease)
}

// Drop forgets a request that will not be ready; pulls that wait for it fail. A
// ready one stays.
func (s *SendsV1) Drop(id string) {
	if e := s.by[id]; e != nil && !e.ready {
		s.forget(e)
	}
}

func (s *SendsV1) forget(e *sendV1) {
	e.gone = true
	delete(s.by, e.id)
}

// HeldV1 is a pull in progress: none of its requests expires until End.
type HeldV1 struct {
	table *SendsV1
	sends []*sendV1
}

// Hold begins a pull. The error, an ErrUnknown, names the first request that is
// not known; nothing is held then.
func (s *SendsV1) Hold(ids []string) (*HeldV1, error) {
	h := &HeldV1{table: s, sends: make([]*sendV1, len(ids))}
	for i, id := range ids {
		if h.sends[i] = s.by[id]; h.sends[i] == nil {
			return nil, refusef(CodeUnknown, "request %q was not announced, was sent, or has expired", id)
		}
	}
	for _, e := range h.sends {
		e.pulls++
	}
	return h, nil
}

// Waiting reports whether a request of the pull is not ready. The error, an
// ErrUnknown, names one that was dropped or sent meanwhile.
func (h *HeldV1) Waiting() (bool, error) {
	waiting := false
	for _, e := range h.sends {
		if e.gone {
			return false, refusef(CodeUnknown, "request %q was given up", e.id)
		}
		waiting = waiting || !e.ready
	}
	return waiting, nil
}

// Blocks returns P's block ids, for OwnV1.Plan; the caller does not change them.
func (h *HeldV1) Blocks() [][]int {
	out := make([][]int, len(h.sends))
	for i, e := range h.sends {
		out[i] = e.blocks
	}
	return out
}

// End ends the pull, once. It returns the requests that are sent and that no other
// pull holds, each once: their blocks are free. Those of a pull that failed have
// their lease anew.
func (h *HeldV1) End(sent bool, now time.Time) (free []string) {
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

// Expire forgets ready requests whose lease has passed and that no pull holds, and
// returns them, sorted: their blocks are free.
func (s *SendsV1) Expire(now time.Time) (free []string) {
	for _, e := range s.by {
		if e.ready && e.pulls == 0 && now.After(e.expires) {
			s.forget(e)
			free = append(free, e.id)
		}
	}
	slices.Sort(free)
	return free
}

// Len returns the number of known requests.
func (s *SendsV1) Len() int { return len(s.by) }
