// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"io"
	"slices"
	"sync"
	"sync/atomic"
)

// MaxRegions is the largest number of regions in a table. Their descriptor fits into maxHandshakeBytes.
const MaxRegions = 8192

// Range is a range of published addresses.
type Range struct {
	Addr uint64
	Len  uint64 // bytes
}

// end returns the address after the range. Call it only for a range that valid has accepted.
func (r Range) end() uint64 { return r.Addr + r.Len }

func (r Range) valid() bool {
	return r.Addr != 0 && r.Len != 0 && r.Len <= 1<<63 && r.Addr <= 1<<63-r.Len
}

func (r Range) overlaps(o Range) bool {
	return r.Len != 0 && o.Len != 0 && r.Addr < o.end() && o.Addr < r.end()
}

// Region is memory that peers may address. It stays registered until Close or Withdraw.
type Region struct {
	table *Table // immutable
	at    Range
	mem   []byte      // nil for a region of callbacks
	src   io.ReaderAt // answers reads; nil: reads are refused
	dst   io.WriterAt // receives writes; nil: writes are refused

	// closed are the ranges that accept no writes: sorted by address, disjoint, and not adjoining. The slice is replaced as a whole
	// under `closing`. nil means none.
	closed  atomic.Pointer[[]Range]
	closing sync.Mutex // a leaf: no other lock is taken under it

	arrived   arrivals
	ackedOnce atomic.Bool // arrived.acked is set already
	watched   atomic.Bool
	incoming  atomic.Pointer[Progress]
}

// Range returns the published address and length.
func (r *Region) Range() Range { return r.at }

// Table says which addresses peers may touch. Its methods are safe for concurrent use.
//
// Looking up an address takes no lock: the regions are one immutable view, which each change replaces as a whole; the closed ranges of
// a region are replaced in the same way. A connection first publishes its claim, then looks at regions and closed ranges. A fence first
// publishes the closed ranges, then looks at the claims. So at least one of the two sees the other. How long Table.mu is held does not
// depend on how much is fenced.
type Table struct {
	view atomic.Pointer[view]

	// order makes each claim happen after all writes that ended before it, also on other connections. Peers know that order, but Go's
	// memory model does not.
	order atomic.Uint64

	waiters atomic.Int64 // callers of Unwritten that wait for a write
	wake    struct {     // a leaf: no other lock is taken under it
		sync.Mutex
		c chan struct{} // closed at the next write; nil without waiters
	}

	mu struct {
		sync.Mutex // guards changes of view; its holder may lock a claims.mu
		users      map[*claims]struct{}
		lent       Range // the addresses that Publish has given out, with the gaps between them
	}
}

type view struct {
	regions []*Region // by address, disjoint
}

// The first address that Publish gives out is random: a multiple of lentAlign in [firstLent, 2*firstLent), one of 2^40. A peer that
// still knows addresses of another table, in this process or in an earlier one on the same ports, therefore does not hit this table's
// regions. All addresses lie below endLent.
const (
	firstLent = 1 << 61
	endLent   = 3 * firstLent
	lentAlign = 2 << 20
)

// NewTable returns an empty table.
func NewTable() *Table {
	t := new(Table)
	t.mu.users = make(map[*claims]struct{})
	t.view.Store(new(view))
	var b [8]byte
	rand.Read(b[:]) // never fails
	t.mu.lent.Addr = firstLent + binary.LittleEndian.Uint64(b[:])%(firstLent/lentAlign)*lentAlign
	return t
}

// Register publishes mem under the address base. Any address will do, because peers use it only as a name. The table reads and writes
// mem until the region's Close returns. The error is ErrOverlap if the region overlaps another one or an address that Publish has ever
// given out.
func (t *Table) Register(base uint64, mem []byte) (*Region, error) {
	return t.add(&Region{table: t, at: Range{base, uint64(len(mem))}, mem: mem})
}

// RegisterFunc publishes the range `at`. src answers reads and dst receives writes, at offsets from the range's base; a nil src or dst
// refuses that direction. Both are called from many goroutines and must return without outside help: a fence waits for them. An error
// of theirs refuses the request. A write reaches dst in pieces, in order.
func (t *Table) RegisterFunc(at Range, src io.ReaderAt, dst io.WriterAt) (*Region, error) {
	return t.add(&Region{table: t, at: at, src: src, dst: dst})
}

// Publish registers mems, all or none, at addresses that the table gives out only once. So a peer with an address from an earlier
// Publish reaches nothing. No two of the regions adjoin.
func (t *Table) Publish(mems ...[]byte) ([]*Region, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.view.Load().regions
	if len(old)+len(mems) > MaxRegions {
		return nil, ErrRegions
	}
	regions := make([]*Region, len(mems))
	next := t.mu.lent.end()
	for i, mem := range mems {
		if len(mem) == 0 {
			return nil, ErrRange
		}
		at := Range{next, uint64(len(mem))}
		for { // skip regions that their owners registered there
			if at.Addr > endLent || at.Len > endLent-at.Addr {
				return nil, ErrRegions // 2^61 bytes were given out
			}
			k, _ := slices.BinarySearchFunc(old, at.end()+lentAlign, func(r *Region, a uint64) int { return cmp.Compare(r.at.Addr, a) })
			if k == 0 || old[k-1].at.end()+lentAlign <= at.Addr {
				break
			}
			at.Addr = lentUp(old[k-1].at.end() + lentAlign)
		}
		regions[i] = &Region{table: t, at: at, mem: mem}
		next = lentUp(at.end() + lentAlign)
	}
	t.mu.lent.Len = next - t.mu.lent.Addr
	all := append(slices.Clone(old), regions...)
	slices.SortFunc(all, byAddress)
	t.view.Store(&view{all})
	return regions, nil
}

// lentUp rounds a up to a multiple of lentAlign.
func lentUp(a uint64) uint64 { return (a + lentAlign - 1) &^ (lentAlign - 1) }

func byAddress(a, b *Region) int { return cmp.Compare(a.at.Addr, b.at.Addr) }

func (t *Table) add(r *Region) (*Region, error) {
	if !r.at.valid() {
		return nil, ErrRange
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.view.Load().regions
	i, _ := slices.BinarySearchFunc(old, r, byAddress)
	switch {
	case i > 0 && old[i-1].at.overlaps(r.at), i < len(old) && old[i].at.overlaps(r.at), r.at.overlaps(t.mu.lent):
		return nil, ErrOverlap
	case len(old) >= MaxRegions:
		return nil, ErrRegions
	}
	t.view.Store(&view{slices.Insert(slices.Clone(old), i, r)})
	return r, nil
}

// Close withdraws the region; see Table.Withdraw.
func (r *Region) Close(ctx context.Context) (cut int) { return r.table.Withdraw(ctx, r) }

// Withdraw removes regions from the table. It refuses new requests for them at once. Requests in progress may finish until ctx ends;
// then Withdraw cuts their connections. When it returns, no peer touches the regions' memory any more. cut is the number of connections
// that it cut.
func (t *Table) Withdraw(ctx context.Context, regions ...*Region) (cut int) {
	ranges := make([]Range, len(regions))
	gone := make(map[*Region]bool, len(regions))
	for i, r := range regions {
		ranges[i], gone[r] = r.at, true
	}
	t.mu.Lock()
	old := t.view.Load().regions
	t.view.Store(&view{slices.DeleteFunc(slices.Clone(old), func(r *Region) bool { return gone[r] })})
	users := t.usersLocked()
	t.mu.Unlock()
	return drain(ctx, users, union(nil, ranges), true)
}

// Fence closes the ranges to new writes, which are rejected at once, and waits until the writes in progress end. When ctx ends first,
// Fence cuts their connections. When Fence returns, no write changes a byte of the ranges until Reopen. Reads go on. cut is the number
// of connections that it cut.
//
// A second Fence of the same range changes nothing, and one Reopen ends both. Fence ignores ranges, or parts of them, that lie in no
// region: a region registered later starts open.
func (t *Table) Fence(ctx context.Context, ranges ...Range) (cut int) {
	all := union(nil, ranges)
	t.change(all, union)
	t.mu.Lock()
	users := t.usersLocked()
	t.mu.Unlock()
	return drain(ctx, users, all, false)
}

// Reopen allows writes into the ranges again.
func (t *Table) Reopen(ranges ...Range) { t.change(union(nil, ranges), subtract) }

// change replaces the closed ranges of each region by the result of `by`. by gets the region's closed ranges, and the part of `ranges`
// that lies in the region. ranges are sorted and disjoint.
func (t *Table) change(ranges []Range, by func(closed, ranges []Range) []Range) {
	regions := t.view.Load().regions
	for len(ranges) > 0 {
		i, _ := slices.BinarySearchFunc(regions, ranges[0].Addr, func(r *Region, a uint64) int {
			if r.at.end() <= a {
				return -1
			}
			return 1
		})
		if i == len(regions) {
			return
		}
		regions = regions[i:]
		r := regions[0]
		n, _ := slices.BinarySearchFunc(ranges, r.at.end(), func(e Range, a uint64) int { return cmp.Compare(e.Addr, a) })
		own := clip(ranges[:n], r.at)
		if len(own) > 0 {
			r.closing.Lock()
			var old []Range
			if c := r.closed.Load(); c != nil {
				old = *c
			}
			list := by(old, own)
			r.closed.Store(&list)
			r.closing.Unlock()
		}
		// The last range may reach into the next region.
		if last := ranges[n-1]; last.end() > r.at.end() {
			rest := slices.Clone(ranges[n-1:])
			rest[0] = Range{r.at.end(), last.end() - r.at.end()}
			ranges = rest
		} else {
			ranges = ranges[n:]
		}
	}
}

// clip returns the parts of ranges that lie inside the range `at`.
func clip(ranges []Range, at Range) []Range {
	out := make([]Range, 0, len(ranges))
	for _, r := range ranges {
		first, end := max(r.Addr, at.Addr), min(r.end(), at.end())
		if first < end {
			out = append(out, Range{first, end - first})
		}
	}
	return out
}

// Observe orders the caller's accesses to regions after all confirmed writes of peers and before all later writes, in terms of Go's
// memory model. Call it after a peer has reported its writes and before you read them, and again before you let the peer write anew.
// Only the race detector needs it, and only if both peers run in one process.
func (t *Table) Observe() { t.order.Add(1) }

func (t *Table) usersLocked() []*claims {
	users := make([]*claims, 0, len(t.mu.users))
	for c := range t.mu.users {
		users = append(users, c)
	}
	return users
}

// buffers lists the regions for a descriptor. Peers need only that a buffer has some name; name is kept short, so that MaxRegions
// buffers fit into a frame.
func (t *Table) buffers(name string) []Buffer {
	name = name[:min(len(name), 47)] // the longest IPv6 address and port
	regions := t.view.Load().regions
	list := make([]Buffer, len(regions))
	for i, r := range regions {
		list[i] = Buffer{Addr: r.at.Addr, Length: r.at.Len, Name: name}
	}
	return list
}

// find returns the region that contains all of the range `at`, or nil. `at` may be any range, also an impossible one.
func (v *view) find(at Range) *Region {
	i, found := slices.BinarySearchFunc(v.regions, at.Addr, func(e *Region, a uint64) int { return cmp.Compare(e.at.Addr, a) })
	if !found {
		i--
	}
	if i < 0 {
		return nil
	}
	r := v.regions[i]
	off := at.Addr - r.at.Addr
	if at.Len == 0 || off >= r.at.Len || at.Len > r.at.Len-off {
		return nil
	}
	return r
}

// isClosed reports whether a byte of the range `at` is closed to writes. `at` must lie in the region.
func (r *Region) isClosed(at Range) bool {
	c := r.closed.Load()
	return c != nil && meets(*c, at)
}

// meets reports whether the range `at` overlaps a range of set, which is sorted and disjoint.
func meets(set []Range, at Range) bool {
	i, _ := slices.BinarySearchFunc(set, at.Addr, func(e Range, a uint64) int { return cmp.Compare(e.Addr, a) })
	return i > 0 && set[i-1].overlaps(at) || i < len(set) && set[i].overlaps(at)
}

// union returns the ranges of a and b, merged. a is sorted and disjoint; b may be in any order and overlap. Impossible ranges of b are
// left out.
func union(a, b []Range) []Range {
	all := make([]Range, 0, len(a)+len(b))
	all = append(all, a...)
	for _, r := range b {
		if r.valid() {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(x, y Range) int { return cmp.Compare(x.Addr, y.Addr) })
	out := all[:0]
	for _, r := range all {
		if n := len(out); n > 0 && r.Addr <= out[n-1].end() {
			out[n-1].Len = max(out[n-1].end(), r.end()) - out[n-1].Addr
			continue
		}
		out = append(out, r)
	}
	return out
}

// subtract returns the ranges of a without the bytes of b. a is sorted and disjoint.
func subtract(a, b []Range) []Range {
	holes := union(nil, b)
	out := make([]Range, 0, len(a)+len(holes))
	for _, r := range a {
		i, _ := slices.BinarySearchFunc(holes, r.Addr, func(e Range, at uint64) int { return cmp.Compare(e.Addr, at) })
		for i = max(0, i-1); i < len(holes) && holes[i].Addr < r.end(); i++ {
			h := holes[i]
			if h.end() <= r.Addr {
				continue
			}
			if h.Addr > r.Addr {
				out = append(out, Range{r.Addr, h.Addr - r.Addr})
			}
			if h.end() >= r.end() {
				r.Len = 0
				break
			}
			r = Range{h.end(), r.end() - h.end()}
		}
		if r.Len > 0 {
			out = append(out, r)
		}
	}
	return out
}
