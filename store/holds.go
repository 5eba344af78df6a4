package store

import (
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
)

// Transfer names one prepare and its commit. LMCache pairs them by everything in
// the key but the request id; the chunk hash at the end covers all tokens.
type Transfer struct {
	Instance int64
	Shard    Shard
	From, To int     // chunks
	Last     kv.Hash // of chunk To-1
	Load     bool

	own uint64 // numbers the transfers that this process carries out
}

// hold is a transfer in progress: a worker was told where slots are.
type hold struct {
	transfer  Transfer
	requestID string
	slots     []pool.Slot
	deadline  time.Time
	orphan    bool // the worker unregistered, was reaped or registered anew
}

// holds finds transfers by name and by worker.
type holds struct {
	byTransfer map[Transfer][]*hold // oldest first
	byInstance map[int64]map[*hold]struct{}
	len        int
	orphans    int
}

func (t *holds) init() {
	t.byTransfer = make(map[Transfer][]*hold)
	t.byInstance = make(map[int64]map[*hold]struct{})
}

func (t *holds) add(h *hold) {
	t.byTransfer[h.transfer] = append(t.byTransfer[h.transfer], h)
	of := t.byInstance[h.transfer.Instance]
	if of == nil {
		of = make(map[*hold]struct{})
		t.byInstance[h.transfer.Instance] = of
	}
	of[h] = struct{}{}
	t.len++
}

func (t *holds) remove(h *hold) {
	q := t.byTransfer[h.transfer]
	for i := range q {
		if q[i] == h {
			q = append(q[:i], q[i+1:]...)
			break
		}
	}
	if len(q) == 0 {
		delete(t.byTransfer, h.transfer)
	} else {
		t.byTransfer[h.transfer] = q
	}
	of := t.byInstance[h.transfer.Instance]
	delete(of, h)
	if len(of) == 0 {
		delete(t.byInstance, h.transfer.Instance)
	}
	t.len--
	if h.orphan {
		t.orphans--
	}
}

// match returns the hold that a commit of t ends, or nil. A prepare_retrieve
// that was refused left a hold without slots: the worker sends its commit all the
// same, and that commit must not end a hold that names slots. Otherwise the same
// request's oldest comes first, then the oldest, so that a commit never ends a
// later hold than its own.
func (t *holds) match(name Transfer, requestID []byte) *hold {
	q := t.byTransfer[name]
	var same *hold
	for _, h := range q {
		if h.requestID != string(requestID) {
			continue
		}
		if len(h.slots) == 0 {
			return h
		}
		if same == nil {
			same = h
		}
	}
	if same == nil && len(q) > 0 {
		same = q[0]
	}
	return same
}

func (t *holds) all() []*hold {
	out := make([]*hold, 0, t.len)
	for _, q := range t.byTransfer {
		out = append(out, q...)
	}
	return out
}

// holdLocked records that the worker of name knows slots, all of them held in
// the pool already.
func (s *Store) holdLocked(name Transfer, requestID []byte, slots []pool.Slot) *hold {
	h := &hold{
		transfer: name, requestID: string(requestID), slots: slots,
		deadline: time.Now().Add(s.opts.Quarantine),
	}
	s.mu.holds.add(h)
	return h
}

// endHoldLocked ends a hold: the worker no longer touches its slots. With
// publish, staged slots become resident; else they are dropped. It returns the
// chunks that became resident.
func (s *Store) endHoldLocked(h *hold, publish bool) (published int) {
	s.mu.holds.remove(h)
	// Tails first, so that heads are the more recently used.
	for i := len(h.slots) - 1; i >= 0; i-- {
		slot := h.slots[i]
		if s.mu.pool.StateOf(slot) == pool.Staged {
			if publish {
				s.mu.pool.Commit(slot)
				s.mu.n.StoredBytes += uint64(s.mu.pool.Length(slot))
				s.touchLocked(slot)
				s.unsummedLocked(slot)
				published++
				continue
			}
			s.dropLocked(slot, Failed)
		}
		s.mu.pool.Unhold(slot)
		s.touchLocked(slot)
	}
	return published
}

// Detach says that a worker instance unregistered, fell silent or registered
// anew. What it had reserved and not committed is never served; the memory that
// it may still touch stays out of use until its late commit or the end of the
// quarantine. It returns the number of transfers left in quarantine.
func (s *Store) Detach(instance int64) int {
	s.lock()
	defer s.unlock()
	n := 0
	for h := range s.mu.holds.byInstance[instance] {
		if len(h.slots) == 0 {
			s.mu.holds.remove(h)
			continue
		}
		n++
		if !h.orphan {
			h.orphan = true
			s.mu.holds.orphans++
		}
		if h.transfer.own == 0 {
			h.deadline = time.Now().Add(s.opts.Quarantine)
		}
		for _, slot := range h.slots {
			if s.mu.pool.StateOf(slot) == pool.Staged {
				s.dropLocked(slot, Failed)
			}
		}
	}
	return n
}
