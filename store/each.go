// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// EachLookup looks up objects that need not continue each other, and lends each one that it finds to a reader. LookupEach lends the objects
// that are ready; Fetch waits for the rest. Only one goroutine may use an EachLookup.
type EachLookup struct {
	// Places has one place for each key. For a key that is not lent its Bytes is 0.
	Places []Place
	// Loan keeps the lent objects in place for as long as its owner wants; nil if none is lent. It is complete after Fetch.
	Loan *Loan
	// Bytes is the sum of the bytes of all lent objects.
	Bytes int64

	store *Store
	query EachQuery
	rest  []int // keys that are not lent yet but may be later
	pf    *prefetch
	held  []heldObject
}

// EachQuery says what an EachLookup looks up.
type EachQuery struct {
	Owner     lease.Owner
	Keys      []kv.Key
	Bytes     int64 // of one object
	AnyLength bool  // lend objects of other lengths than Bytes, too
	Most      int64 // the most bytes to lend

	// Lent is the sum of the bytes that several lookups of one owner have lent; together they may lend Most. Each lookup adds its
	// EachLookup.Bytes, and the owner subtracts them when it ends the Loan. nil: Most is for this lookup alone.
	Lent *atomic.Int64
}

// longestOther bounds the length of an object of another length in the tier below, as a multiple of EachQuery.Bytes. A longer object is not
// read and not lent.
const longestOther = 4

// LookupEach begins a lookup and lends the objects that may be served at once. Error: ErrBusy.
func (s *Store) LookupEach(q EachQuery) (*EachLookup, error) {
	if q.Lent == nil {
		q.Lent = new(atomic.Int64)
	}
	x := &EachLookup{Places: make([]Place, len(q.Keys)), store: s, query: q}
	all := make([]int, len(q.Keys))
	for i := range all {
		all[i] = i
	}
	if err := x.lend(all); err != nil {
		x.giveBack()
		return nil, err
	}
	return x, nil
}

// Incomplete reports whether Fetch may lend more: objects whose checksums must be compared first, or objects that the tier below may have.
func (x *EachLookup) Incomplete() bool { return len(x.rest) > 0 }

// lend lends those of the keys whose objects may be served. Afterwards x.rest has the keys that may be lent later.
func (x *EachLookup) lend(keys []int) error {
	x.rest = nil
	for ; len(keys) > 0; keys = keys[min(batch, len(keys)):] {
		if err := x.lendSome(keys[:min(batch, len(keys))]); err != nil {
			return err
		}
	}
	return nil
}

func (x *EachLookup) lendSome(keys []int) error {
	s := x.store
	below := s.AsksBelow()
	s.lock()
	defer s.unlock()
	if s.busyLocked(x.query.Owner.Peer) {
		return ErrBusy
	}
	for _, i := range keys {
		k := &x.query.Keys[i]
		slot, ready, ok := s.servableLocked(k)
		if !ok || !ready {
			if ok || below {
				x.rest = append(x.rest, i)
			}
			continue
		}
		n := s.mu.pool.Length(slot)
		if n != x.query.Bytes && !x.query.AnyLength || len(x.held) == maxTransfer || !x.mayLend(n) {
			continue
		}
		s.mu.pool.Hold(slot)
		s.keepLocked(slot)
		s.hitLocked(slot)
		s.offerLocked(slot)
		x.Places[i], x.Bytes = Place{s.mu.pool.Offset(slot), n}, x.Bytes+n
		x.held = append(x.held, heldObject{slot: slot, offset: x.Places[i].Offset, bytes: n})
	}
	return nil
}

// mayLend reports whether n more bytes may be lent, and adds them to Lent if so.
func (x *EachLookup) mayLend(n int64) bool {
	if x.query.Lent.Add(n) <= x.query.Most {
		return true
	}
	x.query.Lent.Add(-n)
	return false
}

// Fetch waits, for Options.LoadTimeout at most, until objects have been read from the tier below and compared with their checksums. Then it
// lends them. An object that comes later stays in the pool. A goroutine that calls Fetch must be started by Store.Go.
func (x *EachLookup) Fetch(ctx context.Context) {
	s, rest := x.store, x.rest
	x.pf = &prefetch{objects: len(rest), landed: make(chan struct{}), began: time.Now()}
	x.pf.prompt.Owner = x.query.Owner
	x.pf.ctx, x.pf.cancel = context.WithTimeout(ctx, s.opts.LoadTimeout)
	defer x.pf.cancel()
	if !x.beginFetch() {
		x.rest = nil
		return
	}
	x.take(rest)
	s.flyers.Wake()
	s.plannedAll(x.pf)
	select {
	case <-x.pf.landed:
	case <-x.pf.ctx.Done():
	case <-s.life.Done():
	}
	s.leaveFlights(x.pf)
	_ = x.lend(rest) // if too many transfers are in progress, the rest is not lent
	x.rest = nil
	for to := len(x.pf.pins); to > 0; to -= batch {
		s.unpinSome(x.pf.pins[max(0, to-batch):to])
	}
	s.forget(x.pf)
}

// beginFetch counts the lookup as pending. It reports false if too many lookups are pending, or if the store is closed.
func (x *EachLookup) beginFetch() bool {
	s := x.store
	s.lock()
	defer s.unlock()
	if s.mu.closed || !s.mayPendLocked(x.query.Owner.Peer, x.pf.objects) {
		return false
	}
	s.mu.pending.Add(x.query.Owner.Peer, fair.Amount{Count: 1, Size: int64(x.pf.objects)})
	s.mu.n.PendingLookups++
	return true
}

// take looks for those of the query's keys whose indexes are in `rest`. It pins the objects that are ready, and joins the flights of those
// that are being read or compared. It begins a flight for each object that the tier has.
func (x *EachLookup) take(rest []int) {
	var absent []int
	for ; len(rest) > 0; rest = rest[min(batch, len(rest)):] {
		absent = x.takeSome(absent, rest[:min(batch, len(rest))])
	}
	s := x.store
	if len(absent) == 0 || !s.AsksBelow() {
		return
	}
	keys := make([]kv.Key, len(absent))
	for j, i := range absent {
		keys[j] = x.query.Keys[i]
	}
	metas, err := s.below.Ask(x.pf.ctx, keys, s.Go)
	if err != nil {
		s.belowFailed(x.pf, miss.BelowFailed, "")
		return
	}
	s.memory.Prepare(x.query.Bytes * int64(len(keys)))
	for j := range keys {
		if n := metas[j].Len; x.fits(n) && !s.load(x.pf, keys[j], n, absent[j]) {
			return
		}
	}
}

// fits reports whether an object of n bytes in the tier below may be lent for this query.
func (x *EachLookup) fits(n int64) bool {
	return n == x.query.Bytes || x.query.AnyLength && n > 0 && n <= min(longestOther*x.query.Bytes, kv.MaxChunkBytes)
}

func (x *EachLookup) takeSome(absent, rest []int) []int {
	s := x.store
	s.lock()
	defer s.unlock()
	for _, i := range rest {
		if !s.mu.closed && !s.takeLocked(x.pf, &x.query.Keys[i], i) {
			absent = append(absent, i)
		}
	}
	return absent
}

// Result ends the lookup. It makes the Loan, and returns a result as if the keys were a prompt: Hit is the number of leading keys that are
// lent.
func (x *EachLookup) Result() LookupResult {
	s := x.store
	out := LookupResult{State: Ready, Asked: len(x.query.Keys), Hit: len(x.query.Keys)}
	for i := range x.Places {
		if x.Places[i].Bytes == 0 {
			out.Hit = i
			break
		}
	}
	s.lock()
	defer s.unlock()
	s.mu.n.Lookups++
	if len(x.held) > 0 && !s.mu.closed {
		h := s.newHold(hold.Transfer{By: x.query.Owner.Peer, Load: true}, nil, x.held)
		h.Deadline = h.Deadline.Add(hold.Forever)
		s.mu.holds.AddLoan(h)
		x.Loan = &Loan{s, h}
	}
	out.Objects = out.Hit
	if len(x.query.Keys) > 0 {
		out.Namespace = x.query.Keys[0].Namespace
	}
	if out.Hit < out.Asked {
		k := &x.query.Keys[out.Hit]
		_, st := s.mu.pool.Find(k)
		out.Missing, out.Gone = *k, s.whyLocked(k, st)
		out.Why = out.Gone.Why
	}
	x.belowLocked(&out)
	return out
}

// belowLocked adds the tier's part to the result of a lookup.
func (x *EachLookup) belowLocked(out *LookupResult) {
	if x.pf == nil {
		return
	}
	out.Waited = true
	out.Below, out.BelowObjects = x.pf.fromBelowLocked(out.Hit)
	if x.pf.loaded > 0 {
		x.store.rates.Loaded(x.pf.loaded, time.Since(x.pf.began))
	}
	if x.pf.belowWhy != miss.None && out.Why != miss.None {
		out.Why, out.Gone = out.Why.Because(x.pf.belowWhy, out.Gone)
		out.Tier = x.pf.tier
	}
}

// giveBack ends the lookup and its holds without a Loan.
func (x *EachLookup) giveBack() {
	x.store.giveBackLent(x.held)
	x.query.Lent.Add(-x.Bytes)
	x.held, x.Bytes = nil, 0
}

// Counted adds objects that the reader of a Loan has read to the store's figures.
func (l *Loan) Counted(objects int, bytes int64) {
	l.store.lock()
	defer l.store.unlock()
	l.store.mu.n.LoadedChunks += uint64(objects)
	l.store.mu.n.LoadedBytes += uint64(bytes)
}
