// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// A request is granted when it lies wholly inside one region, at every edge.
func TestFindEdges(t *testing.T) {
	table := NewTable()
	const base, n = 0x10000, 4096
	for _, at := range []uint64{base, base + n} { // they adjoin and do not merge
		if _, err := table.Register(at, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	c := table.newClaims(func() {})
	defer c.drop()
	f := func(addr, size uint64, want bool) {
		t.Helper()
		_, w := c.claimWrite(Range{addr, size})
		c.releaseWrite()
		_, r := c.claimRead(Range{addr, size})
		c.releaseReads()
		if w == granted != want || r == granted != want {
			t.Errorf("%#x + %#x: write %v, read %v, want granted: %v", addr, size, w, r, want)
		}
	}
	f(base, 1, true)
	f(base, n, true)
	f(base+n-1, 1, true)
	f(base+n, n, true)
	f(base+2*n-1, 1, true)
	f(base, n+1, false)
	f(base+n-1, 2, false)
	f(base, 2*n, false)
	f(base-1, 1, false)
	f(base-1, 2, false)
	f(base+2*n, 1, false)
	f(base+2*n-1, 2, false)
	f(base, 0, false)
	f(0, 0, false)
	f(0, 1, false)
	f(base, math.MaxUint64, false)
	f(base, math.MaxUint64-base, false)
	f(base, math.MaxUint64-base+1, false) // ends at 2^64
	f(base+1, math.MaxUint64-base, false) // ends at 2^64 too
	f(math.MaxUint64, 1, false)
	f(math.MaxUint64, math.MaxUint64, false)
	f(math.MaxUint64-n+2, n, false)
	f(1<<63, 1<<63, false)
}

func TestRegister(t *testing.T) {
	table := NewTable()
	f := func(base uint64, n int, want error) *Region {
		t.Helper()
		r, err := table.Register(base, make([]byte, n))
		if !errors.Is(err, want) {
			t.Errorf("%#x + %d: %v, want %v", base, n, err, want)
		}
		return r
	}
	f(0, 10, ErrRange)
	f(10, 0, ErrRange)
	f(1<<63-5, 10, ErrRange)
	f(math.MaxUint64, 10, ErrRange)
	r := f(1000, 100, nil)
	f(1000, 100, ErrOverlap)
	f(1099, 1, ErrOverlap)
	f(901, 100, ErrOverlap)
	f(900, 1000, ErrOverlap)
	f(900, 100, nil)
	f(1100, 100, nil)
	r.Close(t.Context())
	f(1000, 100, nil)
	f(1<<63-10, 10, nil)
	for i := range uint64(MaxRegions - 4) {
		f(1<<40+i*64, 64, nil)
	}
	f(1<<50, 1, ErrRegions)
}

// union and subtract against a map of single addresses.
func TestRangesModel(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	var set []Range
	model := make(map[uint64]bool)
	for range 5000 {
		var list []Range
		for range r.IntN(4) {
			list = append(list, Range{1 + r.Uint64N(200), r.Uint64N(20)})
		}
		add := r.IntN(2) == 0
		if add {
			set = union(set, list)
		} else {
			set = subtract(set, union(nil, list))
		}
		for _, l := range list {
			for a := l.Addr; a < l.Addr+l.Len; a++ {
				model[a] = add
			}
		}
		var v Region
		v.closed.Store(&set)
		for a := range uint64(230) {
			if v.isClosed(Range{a, 1}) != model[a] {
				t.Fatalf("seed %d: address %d closed: %v, want %v; %v", seed, a, !model[a], model[a], set)
			}
		}
		for i := 1; i < len(set); i++ {
			if set[i].Addr <= set[i-1].end() {
				t.Fatalf("seed %d: not disjoint or adjoining: %v", seed, set)
			}
		}
		for range 10 {
			at := Range{1 + r.Uint64N(200), 1 + r.Uint64N(30)}
			want := false
			for a := at.Addr; a < at.end(); a++ {
				want = want || model[a]
			}
			if v.isClosed(at) != want {
				t.Fatalf("seed %d: %v closed: %v, want %v; %v", seed, at, !want, want, set)
			}
		}
	}
}

// Planned requests cover each byte of each entry once, at the right place.
func TestPlanModel(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	for range 2000 {
		var entries []Entry
		at := uint64(1)
		arena := pattern(2000, byte(r.Uint32())) // some local pieces adjoin
		for range r.IntN(20) {
			n := r.IntN(50)
			arena = arena[r.IntN(2)*r.IntN(30):]
			local := arena[:n]
			if r.IntN(4) == 0 {
				local = arena[:n:n]
			}
			arena = arena[n:]
			entries = append(entries, Entry{local, at})
			at += uint64(n) + uint64(r.IntN(2)*r.IntN(30))
		}
		r.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
		want, got := make([]byte, at+1), make([]byte, at+1)
		for _, e := range entries {
			copy(want[e.Remote:], e.Local)
		}
		var p plan
		if err := p.build(entries); err != nil {
			t.Fatal(err)
		}
		p.cut(entries, 1+r.Uint64N(100))
		shares := share(p.reqs, 1+r.IntN(4), p.bytes)
		total := uint64(0)
		for _, reqs := range shares {
			var cur cursor
			for cur.req < len(reqs) {
				q := &reqs[cur.req]
				total += q.size
				off := q.addr
				for cur.start(q); cur.left > 0; {
					b := cur.next(&p, entries, 1+r.IntN(40))
					off += uint64(copy(got[off:], b))
				}
			}
		}
		if string(got) != string(want) || total != p.bytes {
			t.Fatalf("seed %d: planned bytes differ", seed)
		}
	}
	f := func(want error, entries ...Entry) {
		t.Helper()
		if err := new(plan).build(entries); !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
	b := make([]byte, 8)
	f(nil, Entry{nil, 0}, Entry{nil, math.MaxUint64})
	f(ErrRange, Entry{b, 0})
	f(ErrRange, Entry{b, 16}, Entry{b, 1<<63 - 7})
	f(nil, Entry{b, 1<<63 - 8})
	f(ErrRange, Entry{b, math.MaxUint64 - 3})
}

// Addresses that Publish gives out come once in the life of a table, and two tables
// do not share them, however they are withdrawn in between.
func TestPublishedAddressesComeOnce(t *testing.T) {
	seen := make(map[uint64]bool)
	var all []Range
	tables := []*Table{NewTable(), NewTable()}
	for round := range 50 {
		for _, table := range tables {
			if _, err := table.Register(uint64(round+1)<<20, make([]byte, 64)); err != nil {
				t.Fatal(err)
			}
			regions, err := table.Publish(make([]byte, 1), make([]byte, lentAlign), make([]byte, lentAlign+1))
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range regions {
				at := r.Range()
				if seen[at.Addr] || at.Addr < firstLent || at.end() > endLent || at.Addr%lentAlign != 0 {
					t.Fatalf("%#x was given out before, or is out of bounds", at.Addr)
				}
				for _, o := range all {
					if at.overlaps(Range{o.Addr - 1, o.Len + 2}) {
						t.Fatalf("%v adjoins or overlaps %v", at, o)
					}
				}
				seen[at.Addr], all = true, append(all, at)
			}
			if round%3 > 0 {
				table.Withdraw(t.Context(), regions...)
			}
		}
	}
	lent := tables[0].mu.lent
	if _, err := tables[0].Register(lent.Addr, make([]byte, 1)); !errors.Is(err, ErrOverlap) {
		t.Fatal(err)
	}
	inTheWay := Range{lent.end() + 100, 5 * lentAlign}
	if _, err := tables[0].RegisterFunc(inTheWay, nil, nil); err != nil {
		t.Fatal(err)
	}
	regions, err := tables[0].Publish(make([]byte, 1), make([]byte, 200))
	if err != nil || regions[0].at.overlaps(inTheWay) || regions[1].at.overlaps(inTheWay) || regions[0].at.Addr < inTheWay.end() {
		t.Fatal(err, regions[0].at, regions[1].at)
	}
	if _, err := tables[0].Publish(make([]byte, 1), nil); !errors.Is(err, ErrRange) {
		t.Fatal(err)
	}
}

// Fences over several regions, their edges and the gaps between them, against a map
// of single addresses; a region that comes later starts open.
func TestFenceRegionsModel(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 2))
	table := NewTable()
	regions := map[uint64]*Region{}
	closed := map[uint64]bool{}
	c := table.newClaims(func() {})
	defer c.drop()
	for range 3000 {
		base := 100 * (1 + r.Uint64N(4))
		n := 40 + 60*r.Uint64N(2) // a gap follows, or the next region adjoins
		switch old := regions[base]; {
		case old == nil:
			g, err := table.Register(base, make([]byte, n))
			if err != nil {
				t.Fatal(err)
			}
			regions[base] = g
		case r.IntN(10) == 0:
			old.Close(t.Context())
			delete(regions, base)
			for a := base; a < base+100; a++ {
				delete(closed, a)
			}
		}
		var list []Range
		for range r.IntN(4) {
			list = append(list, Range{1 + r.Uint64N(600), r.Uint64N(150)})
		}
		shut := r.IntN(2) == 0
		if shut {
			table.Fence(t.Context(), list...)
		} else {
			table.Reopen(list...)
		}
		for _, l := range list {
			for a := l.Addr; a < l.Addr+l.Len; a++ {
				if table.view.Load().find(Range{a, 1}) != nil {
					closed[a] = shut
				}
			}
		}
		for a := uint64(95); a < 520; a++ {
			_, why := c.claimWrite(Range{a, 1})
			want := granted
			if table.view.Load().find(Range{a, 1}) == nil {
				want = refusedAddress
			} else if closed[a] {
				want = refusedFence
			}
			if c.releaseWrite(); why != want {
				t.Fatalf("seed %d: address %d: %v, want %v", seed, a, why, want)
			}
		}
	}
}

// A fence of many ranges in many regions lets other fences and connections go on:
// only looking at the list of connections is done under the table's lock.
func TestFenceOfManyRangesDelaysNoOtherFence(t *testing.T) {
	const storages, blocks = 64, 4000
	table := NewTable()
	mems := make([][]byte, storages)
	for i := range mems {
		mems[i] = make([]byte, 2*blocks*64)
	}
	var ranges []Range
	for range 6 { // windows
		regions, err := table.Publish(mems...)
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range regions {
			for i := range uint64(blocks) {
				ranges = append(ranges, Range{g.Range().Addr + 2*i*64, 64})
			}
		}
	}
	for try := 1; ; try++ {
		others, longest, took := besideFence(table, ranges)
		t.Logf("a fence of %v, %d others, the longest took %v", took, others, longest)
		if others >= 10 && longest < took/4 {
			return
		}
		if try == 10 { // a busy machine may delay anything
			t.Fatalf("%d others beside a fence of %v, one of them was held up for %v", others, took, longest)
		}
		table.Reopen(ranges...)
	}
}

// besideFence fences ranges, and has connections come and go meanwhile. It returns how many did, and how long the slowest of them took.
func besideFence(table *Table, ranges []Range) (others int, longest, took time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		began := time.Now()
		table.Fence(context.Background(), ranges...)
		took = time.Since(began)
	}()
	for {
		start := time.Now()
		table.newClaims(func() {}).drop()
		longest = max(longest, time.Since(start))
		select {
		case <-done:
			return others, longest, took
		default:
		}
		others++
		time.Sleep(100 * time.Microsecond)
	}
}
