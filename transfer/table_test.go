package transfer

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
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
	for i := range uint64(maxRegions - 4) {
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
			set = subtract(set, list...)
		}
		for _, l := range list {
			for a := l.Addr; a < l.Addr+l.Len; a++ {
				model[a] = add
			}
		}
		v := view{closed: set}
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
