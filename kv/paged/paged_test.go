// SPDX-License-Identifier: Apache-2.0

package paged_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/paged"
)

// A test tensor: named sizes, and the order in which they lie in memory.
type shape struct {
	form                        paged.Form
	blocks, slots, heads, elems int
	elem                        int // bytes
	pad                         int // elements between outermost entries
	offset                      int // elements
	permute                     bool
}

// order returns the dimensions of a form, as p(lane), b(lock), s(lot), h(ead), e(lement).
func (s *shape) order() string {
	return [...]string{"pbshe", "bpshe", "bshe", "pbhse", "bphse", "bhse", "bse"}[s.form]
}

func (s *shape) size(dim byte) int {
	return map[byte]int{'p': 2, 'b': s.blocks, 's': s.slots, 'h': s.heads, 'e': s.elems}[dim]
}

// strides returns the strides by dimension and the elements of the whole.
func (s *shape) strides() (map[byte]int, int) {
	out, n, o := map[byte]int{}, 1, s.order()
	for i := len(o) - 1; i >= 0; i-- {
		if i == 0 {
			n += s.pad
		}
		out[o[i]] = n
		n *= s.size(o[i])
	}
	return out, n + s.offset
}

func (s *shape) planes() int {
	if s.order()[0] == 'p' || s.order()[1] == 'p' {
		return 2
	}
	return 1
}

func (s *shape) hnd() bool { return s.form >= paged.PlanesHND && s.form <= paged.FusedHND }

// tensor describes the shape as a peer does; permuted, heads and tokens are named
// in the other order with the strides they have.
func (s *shape) tensor() (paged.Tensor, int64) {
	strides, n := s.strides()
	t := paged.Tensor{Offset: int64(s.offset), ElementBytes: s.elem}
	o := []byte(s.order())
	if i, j := bytes.IndexByte(o, 's'), bytes.IndexByte(o, 'h'); s.permute && j >= 0 {
		o[i], o[j] = o[j], o[i]
	}
	for _, d := range o {
		t.Shape = append(t.Shape, int64(s.size(d)))
		t.Stride = append(t.Stride, int64(strides[d]))
	}
	return t, int64(n * s.elem)
}

// places returns the naive place of a byte in a layer.
func (s *shape) places() func(plane, block, slot, head, elem, b int) int {
	st, _ := s.strides()
	p, bl, sl, h, e := st['p'], st['b'], st['s'], st['h'], st['e']
	return func(plane, block, slot, head, elem, b int) int {
		return (s.offset+plane*p+block*bl+slot*sl+head*h+elem*e)*s.elem + b
	}
}

func fill(rnd *rand.Rand, b []byte) {
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
}

// world is a group of layers of one shape and the same thing naively.
type world struct {
	shape  shape
	group  paged.Group
	layers int
}

func newWorld(t testing.TB, s shape, layers, perChunk, keep int, sparse bool, rnd *rand.Rand) *world {
	t.Helper()
	w := &world{shape: s, layers: layers, group: paged.Group{PerChunk: perChunk, Keep: keep, Sparse: sparse}}
	for range layers {
		tensor, size := s.tensor()
		v, err := paged.NewView(tensor, s.hnd(), size)
		if err != nil {
			t.Fatalf("%+v: %v", s, err)
		}
		mem := make([]byte, size)
		fill(rnd, mem)
		w.group.Layers = append(w.group.Layers, paged.Layer{Memory: mem, View: v})
	}
	if err := w.group.Check(); err != nil {
		t.Fatal(err)
	}
	return w
}

// each calls f with every byte of a chunk of the kept blocks: its layer, its place in the layer (in)
// and in the chunk (out), its slot of the whole chunk, and its block id.
func (w *world) each(kept []int, f func(layer, in, out, slot, id int)) {
	s, out, at := &w.shape, 0, w.shape.places()
	for plane := range s.planes() {
		for layer := range w.layers {
			for i, id := range kept {
				for slot := range s.slots {
					for head := range max(1, s.heads) {
						for e := range s.elems {
							for b := range s.elem {
								f(layer, at(plane, id, slot, head, e, b), out, (w.group.PerChunk-w.group.Keep+i)*s.slots+slot, id)
								out++
							}
						}
					}
				}
			}
		}
	}
}

// check gathers and scatters random chunks in one plan and compares all bytes
// with the naive index arithmetic.
func (w *world) check(t testing.TB, chunks, workers, skip int, nulls bool, rnd *rand.Rand) {
	t.Helper()
	g := &w.group
	perm := rnd.Perm(w.shape.blocks - 1)
	ids := make([]int, chunks*g.PerChunk)
	for i := range ids {
		ids[i] = perm[i] + 1
	}
	store, err := g.IDs(ids, chunks)
	if err != nil {
		t.Fatal(err)
	}
	size := int(g.Bytes())
	all := make([]byte, chunks*size)
	var plan paged.Plan
	for c := range chunks {
		if err := plan.Add(&store, c, all[c*size:(c+1)*size], 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := plan.Run(workers, nil); err != nil {
		t.Fatal(err)
	}
	for c := range chunks {
		w.each(kept(g, ids, c), func(layer, in, out, _, _ int) {
			if all[c*size+out] != g.Layers[layer].Memory[in] {
				t.Fatalf("%+v: chunk %d byte %d is not byte %d of layer %d", w.shape, c, out, in, layer)
			}
		})
	}
	if nulls {
		for i := range ids {
			if rnd.IntN(3) == 0 {
				ids[i] = 0
			}
		}
	}
	load, err := g.IDs(ids, chunks)
	if err != nil {
		t.Fatal(err)
	}
	fill(rnd, all)
	var want [][]byte
	for _, l := range g.Layers {
		want = append(want, slices.Clone(l.Memory))
	}
	for c := range chunks {
		w.each(kept(g, ids, c), func(layer, in, out, slot, id int) {
			if (id != 0 || !nulls) && c*g.PerChunk*w.shape.slots+slot >= skip {
				want[layer][in] = all[c*size+out]
			}
		})
	}
	plan = paged.Plan{Load: true}
	for c := range chunks {
		if err := plan.Add(&load, c, all[c*size:(c+1)*size], max(0, skip-c*g.PerChunk*w.shape.slots)); err != nil {
			t.Fatal(err)
		}
	}
	if err := plan.Run(workers, nil); err != nil {
		t.Fatal(err)
	}
	for i := range want {
		if !bytes.Equal(g.Layers[i].Memory, want[i]) {
			t.Fatalf("%+v, skip %d: layer %d is not what the naive copy makes of it", w.shape, skip, i)
		}
	}
}

func kept(g *paged.Group, ids []int, c int) []int {
	end := (c + 1) * g.PerChunk
	return ids[end-g.Keep : end]
}

func TestForms(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for form := paged.PlanesNHD; form <= paged.MLA; form++ {
		for _, permute := range []bool{false, true} {
			for _, skip := range []int{0, 1, 5, 8, 13, 24, 1000} {
				s := shape{form: form, blocks: 14, slots: 4, heads: 3, elems: 5, elem: 2, offset: 7, permute: permute && form != paged.MLA}
				if form != paged.PlanesNHD && form != paged.PlanesHND {
					s.pad = 11
				}
				if form == paged.MLA {
					s.heads = 0
				}
				newWorld(t, s, 3, 4, 4, false, rnd).check(t, 3, 1, skip, false, rnd)
				newWorld(t, s, 2, 4, 3, true, rnd).check(t, 3, 4, skip, true, rnd)
			}
		}
	}
}

// Many pieces: several goroutines and several moves per batch.
func TestParallel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	s := shape{form: paged.PlanesNHD, blocks: 60, slots: 16, heads: 4, elems: 64, elem: 2}
	newWorld(t, s, 6, 8, 8, false, rnd).check(t, 7, 8, 16, false, rnd)
	s = shape{form: paged.FusedHND, blocks: 6, slots: 512, heads: 4, elems: 128, elem: 2}
	newWorld(t, s, 2, 2, 1, true, rnd).check(t, 2, 3, 700, true, rnd)
}

// The same tokens give the same bytes of a chunk, whatever the form of the memory they came from.
func TestFormsAgree(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	var first []byte
	for _, form := range []paged.Form{paged.PlanesNHD, paged.BlocksNHD, paged.PlanesHND, paged.BlocksHND} {
		s := shape{form: form, blocks: 5, slots: 4, heads: 3, elems: 2, elem: 2}
		w, at := newWorld(t, s, 2, 4, 4, false, rnd), s.places()
		for layer, l := range w.group.Layers {
			for plane := range 2 {
				for block := range s.blocks {
					for slot := range s.slots {
						for head := range s.heads {
							for b := range 4 {
								l.Memory[at(plane, block, slot, head, b/2, b%2)] = byte(layer*97 + plane*53 + block*29 + slot*13 + head*7 + b)
							}
						}
					}
				}
			}
		}
		chunk := make([]byte, w.group.Bytes())
		w.group.Gather(chunk, []int{4, 1, 3, 2})
		if first == nil {
			first = chunk
		}
		if !bytes.Equal(chunk, first) {
			t.Errorf("%v: other bytes than %v", form, paged.PlanesNHD)
		}
	}
}

func TestViewRefuses(t *testing.T) {
	f := func(what string, shape, stride []int64, offset int64, elem int, memory int64) {
		t.Helper()
		v, err := paged.NewView(paged.Tensor{Shape: shape, Stride: stride, Offset: offset, ElementBytes: elem}, false, memory)
		if !errors.Is(err, paged.ErrTensor) {
			t.Errorf("%s: %+v, %v", what, v, err)
		}
	}
	const huge = math.MaxInt64
	f("too few dimensions", []int64{4, 4}, []int64{4, 1}, 0, 1, 100)
	f("too many", []int64{1, 1, 1, 1, 1, 1}, []int64{1, 1, 1, 1, 1, 1}, 0, 1, 100)
	f("no strides", []int64{4, 4, 4}, nil, 0, 1, 100)
	f("neither dimension of two", []int64{3, 5, 4, 2, 2}, []int64{80, 16, 4, 2, 1}, 0, 1, 1000)
	f("memory one byte short", []int64{4, 4, 4}, []int64{16, 4, 1}, 0, 1, 63)
	f("offset past the end", []int64{4, 4, 4}, []int64{16, 4, 1}, 1, 1, 64)
	f("negative offset", []int64{4, 4, 4}, []int64{16, 4, 1}, -1, 1, 64)
	f("huge offset", []int64{4, 4, 4}, []int64{16, 4, 1}, huge, 1, 64)
	f("an empty dimension", []int64{4, 0, 4}, []int64{16, 4, 1}, 0, 1, 64)
	f("a negative dimension", []int64{4, -4, 4}, []int64{16, 4, 1}, 0, 1, 64)
	f("a huge dimension", []int64{huge, 4, 4}, []int64{16, 4, 1}, 0, 1, 64)
	f("a product that overflows", []int64{1 << 32, 1 << 32, 1}, []int64{1 << 32, 1, 1}, 0, 1, 64)
	f("a negative stride", []int64{4, 4, 4}, []int64{16, -4, 1}, 0, 1, 64)
	f("a huge stride", []int64{4, 4, 4}, []int64{huge, 4, 1}, 0, 1, 64)
	f("blocks on top of each other", []int64{4, 4, 4}, []int64{0, 4, 1}, 0, 1, 64)
	f("blocks that overlap", []int64{4, 4, 4}, []int64{15, 4, 1}, 0, 1, 64)
	f("overlap behind a dimension of one", []int64{4, 1, 4, 4}, []int64{4, 4, 4, 1}, 0, 1, 64)
	f("elements apart", []int64{4, 4, 4}, []int64{32, 8, 2}, 0, 1, 128)
	f("no element size", []int64{4, 4, 4}, []int64{16, 4, 1}, 0, 0, 64)
	f("huge memory", []int64{4, 4, 4}, []int64{16, 4, 1}, 0, 1, huge)
	f("negative memory", []int64{4, 4, 4}, []int64{16, 4, 1}, 0, 1, -1)
}

func TestIDsRefuse(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	s := shape{form: paged.PlanesNHD, blocks: 6, slots: 2, heads: 1, elems: 2, elem: 2}
	g := &newWorld(t, s, 1, 2, 2, false, rnd).group
	f := func(ids []int, chunks int, ok bool) {
		t.Helper()
		if _, err := g.IDs(ids, chunks); (err == nil) != ok || err != nil && !errors.Is(err, paged.ErrBlocks) {
			t.Errorf("%v for %d chunks: %v", ids, chunks, err)
		}
	}
	f([]int{1, 2, 3, 4}, 2, true)
	f([]int{1, 2, 3, 4, 99}, 2, true) // beyond the range
	f([]int{0, 1}, 1, true)
	f([]int{0, 0, 1, 2}, 2, true)
	f([]int{1, 2, 3}, 2, false)
	f([]int{1, 6}, 1, false)
	f([]int{1, -1}, 1, false)
	f([]int{1, math.MaxInt}, 1, false)
	f([]int{1, math.MinInt}, 1, false)
	f([]int{1, 1}, 1, false)
	f([]int{1, 2, 2, 1}, 2, false)
	f(nil, math.MaxInt, false)
	f(nil, -1, false)
	f(nil, 0, true)
	whole := func(want bool, ids ...int) {
		t.Helper()
		d, err := g.IDs(ids, len(ids)/2)
		if err != nil || d.Whole(len(ids)/2-1) != want {
			t.Errorf("%v: whole %v, %v", ids, d.Whole(len(ids)/2-1), err)
		}
	}
	whole(true, 0, 1)        // a block like any
	whole(false, 0, 0)       // absent
	whole(true, 0, 0, 1, 2)  // the last chunk is there
	whole(false, 0, 1, 0, 2) // not whole
	g.Sparse = true
	whole(false, 0, 1)
	whole(true, 1, 2)
	d, _ := g.IDs([]int{0, 1}, 1)
	var p paged.Plan
	if err := p.Add(&d, 0, make([]byte, g.Bytes()), 0); !errors.Is(err, paged.ErrBlocks) {
		t.Errorf("storing an absent block: %v", err)
	}
	p.Load = true
	for _, bad := range []func() error{
		func() error { return p.Add(&d, 1, make([]byte, g.Bytes()), 0) },
		func() error { return p.Add(&d, -1, make([]byte, g.Bytes()), 0) },
		func() error { return p.Add(&d, 0, make([]byte, g.Bytes()-1), 0) },
		func() error { return p.Add(&d, 0, make([]byte, g.Bytes()), -1) },
	} {
		if err := bad(); !errors.Is(err, paged.ErrBlocks) {
			t.Errorf("a bad move: %v", err)
		}
	}
}

// The answers are the same for very many blocks, which a peer with a large sparse segment may claim.
func TestIDsOfManyBlocks(t *testing.T) {
	v, size, err := paged.Dense(paged.MLA, 1<<23, 1, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	g := paged.Group{Layers: []paged.Layer{{Memory: make([]byte, size), View: v}}, PerChunk: 2, Keep: 2}
	if _, err := g.IDs([]int{1, 1<<23 - 1}, 1); err != nil {
		t.Error(err)
	}
	for _, bad := range [][]int{{5, 5}, {1, 1 << 23}} {
		if _, err := g.IDs(bad, 1); !errors.Is(err, paged.ErrBlocks) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if d, err := g.IDs([]int{0, 0}, 1); err != nil || d.Whole(0) {
		t.Errorf("null blocks: %v", err)
	}
}

// Run returns the error of a guard, whichever goroutine met it.
func TestGuard(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 10))
	s := shape{form: paged.PlanesNHD, blocks: 40, slots: 16, heads: 8, elems: 64, elem: 2}
	w := newWorld(t, s, 4, 8, 8, false, rnd)
	ids, err := w.group.IDs(rnd.Perm(40)[:32], 4)
	if err != nil {
		t.Fatal(err)
	}
	var p paged.Plan
	for c := range 4 {
		if err := p.Add(&ids, c, make([]byte, w.group.Bytes()), 0); err != nil {
			t.Fatal(err)
		}
	}
	want := errors.New("fault")
	if err := p.Run(4, func(func()) error { return want }); !errors.Is(err, want) {
		t.Errorf("%v", err)
	}
}

// FuzzView offers any geometry. Either the package refuses it, or a copy of all blocks touches only
// bytes inside the memory, each once.
func FuzzView(f *testing.F) {
	f.Add(uint8(5), uint8(1), int64(2), int64(4), int64(3), int64(2), int64(4), int64(96), int64(24), int64(8), int64(4), int64(1), int64(0), uint16(400))
	f.Add(uint8(4), uint8(2), int64(5), int64(2), int64(3), int64(4), int64(0), int64(24), int64(12), int64(4), int64(1), int64(0), int64(3), uint16(300))
	f.Add(uint8(3), uint8(2), int64(5), int64(2), int64(3), int64(0), int64(0), int64(9), int64(3), int64(1), int64(0), int64(0), int64(1), uint16(99))
	f.Fuzz(func(t *testing.T, rank, elem uint8, a, b, c, d, e, sa, sb, sc, sd, se, offset int64, memory uint16) {
		n := min(int(rank), 5)
		tensor := paged.Tensor{Shape: []int64{a, b, c, d, e}[:n], Stride: []int64{sa, sb, sc, sd, se}[:n], Offset: offset, ElementBytes: int(elem % 9)}
		v, err := paged.NewView(tensor, elem&0x80 != 0, int64(memory))
		if err != nil {
			return
		}
		g := paged.Group{Layers: []paged.Layer{{Memory: make([]byte, memory), View: v}}, PerChunk: v.Blocks, Keep: v.Blocks}
		if err := g.Check(); err != nil {
			return
		}
		ids := make([]int, v.Blocks)
		for i := range ids {
			ids[i] = i
		}
		chunk := make([]byte, g.Bytes())
		for i := range chunk {
			chunk[i] = 1
		}
		g.Scatter(chunk, ids, 0)
		touched := bytes.Count(g.Layers[0].Memory, []byte{1})
		if touched != len(chunk) {
			t.Fatalf("%+v: %d bytes of a chunk of %d have a place of their own", tensor, touched, len(chunk))
		}
	})
}

// FuzzPlan offers any block ids. Either the package refuses them, or its copies equal those of the
// naive index arithmetic.
func FuzzPlan(f *testing.F) {
	f.Add(uint8(0), uint8(3), uint8(2), []byte{1, 2, 3, 4}, uint16(3), uint64(1))
	f.Add(uint8(5), uint8(2), uint8(1), []byte{0, 0, 3, 0xff}, uint16(9), uint64(2))
	f.Fuzz(func(t *testing.T, form, perChunk, keep uint8, raw []byte, skip uint16, seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		s := shape{form: paged.Form(form % 7), blocks: 9, slots: 2, heads: 2, elems: 3, elem: 1}
		if s.form == paged.MLA {
			s.heads = 0
		}
		per := 1 + int(perChunk)%4
		w := newWorld(t, s, 2, per, 1+int(keep)%per, form&0x80 != 0, rnd)
		g := &w.group
		ids, chunks := make([]int, len(raw)), len(raw)/per
		for i, b := range raw {
			ids[i] = int(int8(b))
		}
		d, err := g.IDs(ids, chunks)
		if err != nil {
			return
		}
		null := g.Sparse
		for i, id := range ids[:chunks*per] {
			null = null || id == 0 && slices.Contains(ids[:i], 0)
		}
		var want [][]byte
		for _, l := range g.Layers {
			want = append(want, slices.Clone(l.Memory))
		}
		p := paged.Plan{Load: true}
		for c := range chunks {
			chunk := make([]byte, g.Bytes())
			fill(rnd, chunk)
			left := max(0, int(skip)-c*per*s.slots)
			if err := p.Add(&d, c, chunk, left); err != nil {
				t.Fatal(err)
			}
			w.each(kept(g, ids, c), func(layer, in, out, slot, id int) {
				if (id != 0 || !null) && slot >= left {
					want[layer][in] = chunk[out]
				}
			})
		}
		if err := p.Run(2, nil); err != nil {
			t.Fatal(err)
		}
		for i := range want {
			if !bytes.Equal(g.Layers[i].Memory, want[i]) {
				t.Fatalf("ids %v, skip %d: layer %d differs", ids, skip, i)
			}
		}
	})
}

// 8 chunks of a model with 32 layers and 8 heads of 128, in each form.
func BenchmarkRun(b *testing.B) {
	for _, form := range []paged.Form{paged.PlanesNHD, paged.PlanesHND} {
		for _, workers := range []int{1, 2} {
			b.Run(fmt.Sprintf("%v-%d", form, workers), func(b *testing.B) {
				rnd := rand.New(rand.NewPCG(1, 2))
				s := shape{form: form, blocks: 128, slots: 16, heads: 8, elems: 128, elem: 2}
				w := newWorld(b, s, 32, 16, 16, false, rnd)
				ids, err := w.group.IDs(rnd.Perm(128), 8)
				if err != nil {
					b.Fatal(err)
				}
				var p paged.Plan
				for c := range 8 {
					if err := p.Add(&ids, c, make([]byte, w.group.Bytes()), 0); err != nil {
						b.Fatal(err)
					}
				}
				b.SetBytes(p.Bytes())
				for b.Loop() {
					if err := p.Run(workers, nil); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
