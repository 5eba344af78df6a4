package transfer

import (
	"cmp"
	"context"
	"io"
	"slices"
	"sync"
	"sync/atomic"
)

// maxRegions keeps a descriptor below MaxHandshakeBytes.
const maxRegions = 8192

// Range is a range of published addresses.
type Range struct {
	Addr uint64
	Len  uint64 // bytes
}

// end needs a range that valid has seen.
func (r Range) end() uint64 { return r.Addr + r.Len }

func (r Range) valid() bool {
	return r.Addr != 0 && r.Len != 0 && r.Len <= 1<<63 && r.Addr <= 1<<63-r.Len
}

func (r Range) overlaps(o Range) bool {
	return r.Len != 0 && o.Len != 0 && r.Addr < o.end() && o.Addr < r.end()
}

// Region is memory that peers may address. It stays registered until Close.
type Region struct {
	table *Table // immutable
	at    Range
	mem   []byte      // nil for a region of callbacks
	src   io.ReaderAt // answers reads; nil refuses them
	dst   io.WriterAt // takes writes; nil refuses them
}

// Range returns the published address and length.
func (r *Region) Range() Range { return r.at }

// Table says which addresses peers may touch. Its methods are safe for
// concurrent use.
//
// Looking up an address takes no lock that a fence holds: the regions and the
// closed ranges are one immutable view, replaced at each change. A connection
// first publishes its claim, then looks at the view; a fence first publishes
// the view, then looks at the claims. So one of them sees the other.
type Table struct {
	view atomic.Pointer[view]

	// order makes each claim happen after the writes that ended before it, also
	// on other connections: peers know that order, the memory model does not.
	order atomic.Uint64

	mu struct {
		sync.Mutex // writers of view; holders may lock a claims.mu
		users      map[*claims]struct{}
	}
}

type view struct {
	regions []*Region // by address, disjoint
	closed  []Range   // to writes; by address, disjoint, not adjoining
}

// NewTable returns an empty table.
func NewTable() *Table {
	t := new(Table)
	t.mu.users = make(map[*claims]struct{})
	t.view.Store(new(view))
	return t
}

// Register publishes mem under the address base, which is any number: peers
// use it as a name. The table reads and writes mem until the region's Close
// returns.
func (t *Table) Register(base uint64, mem []byte) (*Region, error) {
	return t.add(&Region{table: t, at: Range{base, uint64(len(mem))}, mem: mem})
}

// RegisterFunc publishes a range that src and dst answer, at offsets from its
// base; a nil one refuses that direction. Both are called from many goroutines
// and must return on their own: a fence waits for them. An error refuses the
// request. A write reaches dst in pieces, in order.
func (t *Table) RegisterFunc(at Range, src io.ReaderAt, dst io.WriterAt) (*Region, error) {
	return t.add(&Region{table: t, at: at, src: src, dst: dst})
}

func (t *Table) add(r *Region) (*Region, error) {
	if !r.at.valid() {
		return nil, ErrRange
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.view.Load()
	i, _ := slices.BinarySearchFunc(old.regions, r.at.Addr, func(e *Region, a uint64) int { return cmp.Compare(e.at.Addr, a) })
	switch {
	case i > 0 && old.regions[i-1].at.overlaps(r.at), i < len(old.regions) && old.regions[i].at.overlaps(r.at):
		return nil, ErrOverlap
	case len(old.regions) >= maxRegions:
		return nil, ErrRegions
	}
	t.view.Store(&view{regions: slices.Insert(slices.Clone(old.regions), i, r), closed: old.closed})
	return r, nil
}

// Close takes the region back: new requests for it are refused at once, and
// those in progress may finish until ctx is done; then their connections are
// cut. When it returns nobody touches the memory any more. It returns the
// number of connections cut.
func (r *Region) Close(ctx context.Context) (cut int) {
	t := r.table
	t.mu.Lock()
	old := t.view.Load()
	if i := slices.Index(old.regions, r); i >= 0 {
		t.view.Store(&view{
			regions: slices.Delete(slices.Clone(old.regions), i, i+1),
			closed:  subtract(old.closed, r.at), // a later region starts open
		})
	}
	users := t.usersLocked()
	t.mu.Unlock()
	return drain(ctx, users, []Range{r.at}, true)
}

// Fence closes the ranges to new writes, which are rejected at once, and waits
// for the writes in progress. They may finish until ctx is done; then their
// connections are cut. When Fence returns no write changes a byte of the
// ranges until Reopen. It returns the number of connections cut; reads go on.
//
// Fencing twice is fencing once; a fence does not count its callers.
func (t *Table) Fence(ctx context.Context, ranges ...Range) (cut int) {
	t.mu.Lock()
	old := t.view.Load()
	t.view.Store(&view{regions: old.regions, closed: union(old.closed, ranges)})
	users := t.usersLocked()
	t.mu.Unlock()
	return drain(ctx, users, ranges, false)
}

// Reopen allows writes into the ranges again.
func (t *Table) Reopen(ranges ...Range) {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.view.Load()
	t.view.Store(&view{regions: old.regions, closed: subtract(old.closed, ranges...)})
}

// Observe orders the caller's looks at regions among the writes of peers, as
// Go's memory model sees it: what it does next follows all writes confirmed
// before, what it did before precedes all requests yet to come. Call it between
// a peer's word that it is done and the first look, and after the last look
// before another word to the peer. It matters only to the race detector, and
// only where both peers live in one process.
func (t *Table) Observe() { t.order.Add(1) }

func (t *Table) usersLocked() []*claims {
	users := make([]*claims, 0, len(t.mu.users))
	for c := range t.mu.users {
		users = append(users, c)
	}
	return users
}

// buffers lists the regions for a descriptor. Peers only ask that a buffer has a
// name; it is kept short, so that maxRegions fit a frame.
func (t *Table) buffers(name string) []Buffer {
	name = name[:min(len(name), 47)] // the longest IPv6 address and port
	regions := t.view.Load().regions
	list := make([]Buffer, len(regions))
	for i, r := range regions {
		list[i] = Buffer{Addr: r.at.Addr, Length: r.at.Len, Name: name}
	}
	return list
}

// find returns the region that holds all of at, or nil. at may be anything.
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

// isClosed says whether a byte of at is closed to writes. at lies in a region.
func (v *view) isClosed(at Range) bool {
	i, _ := slices.BinarySearchFunc(v.closed, at.Addr, func(e Range, a uint64) int { return cmp.Compare(e.Addr, a) })
	return i > 0 && v.closed[i-1].overlaps(at) || i < len(v.closed) && v.closed[i].overlaps(at)
}

// union returns the merge of a, which is sorted and disjoint, and b, which may
// be anything; impossible ranges are left out.
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

// subtract returns a, which is sorted and disjoint, without the bytes of b.
func subtract(a []Range, b ...Range) []Range {
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
