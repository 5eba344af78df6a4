// SPDX-License-Identifier: Apache-2.0

package transfer

import "sync"

// arrivals records which bytes of a region have been written: by unacknowledged writes, and in a watched region by all writes. An
// engine that does not wait for acknowledgements reports success when the bytes have left it, so a receiver must check here that they
// arrived. Acknowledged writes are in memory before their sender reports success.
type arrivals struct {
	sync.Mutex         // a leaf: no other lock is taken under it
	begun      bool    // an unacknowledged write has begun, whether or not it ended
	acked      bool    // an acknowledged write has ended
	list       []Range // written ranges; the first `merged` of them are sorted, disjoint and not adjoining
	merged     int
}

// began records that a write into the region begins. acked means that the peer gets an acknowledgement of it.
func (r *Region) began(acked bool) {
	if acked {
		return
	}
	r.arrived.Lock()
	first := !r.arrived.begun
	r.arrived.begun = true
	r.arrived.Unlock()
	if first {
		r.table.signal()
	}
}

// wrote records that the write of the range `at` has ended: all its bytes are in memory. acked means that the peer gets an acknowledgement
// of the write.
func (r *Region) wrote(at Range, acked bool) {
	a := &r.arrived
	if acked {
		if !r.ackedOnce.Swap(true) {
			a.Lock()
			a.acked = true
			a.Unlock()
			r.table.signal()
		}
		if !r.watched.Load() {
			return
		}
	}
	a.Lock()
	a.list = append(a.list, at)
	if len(a.list) > 2*a.merged+64 {
		a.mergeLocked()
	}
	a.Unlock()
	r.table.signal()
}

func (a *arrivals) mergeLocked() {
	a.list = union(nil, a.list)
	a.merged = len(a.list)
}

// Watch makes Unwritten count acknowledged writes into the region, too, from now on. A receiver needs that if its peer may report
// success without having written anything.
func (r *Region) Watch() { r.watched.Store(true) }

// signal wakes the callers of Unwritten that wait for the next write.
func (t *Table) signal() {
	if t.waiters.Load() == 0 {
		return
	}
	t.wake.Lock()
	defer t.wake.Unlock()
	if t.wake.c != nil {
		close(t.wake.c)
		t.wake.c = nil
	}
}

// Confirmation says whether the senders of all writes into some regions so far could know that their bytes had arrived.
type Confirmation int

// The kinds of Confirmation.
const (
	NoWrites    Confirmation = iota // no write has come
	Confirmed                       // all writes were acknowledged
	Unconfirmed                     // some writes were not acknowledged: their sender's success proves nothing
)

// Confirmation returns how the writes into the given regions were confirmed so far.
func (t *Table) Confirmation(regions ...*Region) Confirmation {
	c := NoWrites
	for _, r := range regions {
		r.arrived.Lock()
		begun, acked := r.arrived.begun, r.arrived.acked
		r.arrived.Unlock()
		switch {
		case begun:
			return Unconfirmed
		case acked:
			c = Confirmed
		}
	}
	return c
}

// Unwritten returns how many bytes of the ranges no counted write has filled since Forget. The channel `next` closes at the next counted
// write, and when Confirmation may change. Counted are unacknowledged writes, and all writes into watched regions. The caller must call
// stop when it needs `next` no longer.
func (t *Table) Unwritten(ranges ...Range) (n uint64, next <-chan struct{}, stop func()) {
	t.waiters.Add(1)
	t.wake.Lock()
	if t.wake.c == nil {
		t.wake.c = make(chan struct{})
	}
	next = t.wake.c
	t.wake.Unlock()
	all := union(nil, ranges)
	for _, r := range all {
		n += r.Len
	}
	for _, r := range t.view.Load().regions {
		r.arrived.Lock()
		if len(r.arrived.list) > r.arrived.merged {
			r.arrived.mergeLocked()
		}
		n -= overlap(all, r.arrived.list)
		r.arrived.Unlock()
	}
	return n, next, func() { t.waiters.Add(-1) }
}

// Forget makes the ranges count as unwritten again, before a peer fills them anew.
func (t *Table) Forget(ranges ...Range) {
	all := union(nil, ranges)
	for _, r := range t.view.Load().regions {
		r.arrived.Lock()
		if len(r.arrived.list) > 0 {
			r.arrived.mergeLocked()
			r.arrived.list = subtract(r.arrived.list, all)
			r.arrived.merged = len(r.arrived.list)
		}
		r.arrived.Unlock()
	}
}

// overlap returns how many bytes the sets a and b have in common. Each set is sorted and disjoint.
func overlap(a, b []Range) (n uint64) {
	for len(a) > 0 && len(b) > 0 {
		first, end := max(a[0].Addr, b[0].Addr), min(a[0].end(), b[0].end())
		if first < end {
			n += end - first
		}
		if a[0].end() < b[0].end() {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return n
}
