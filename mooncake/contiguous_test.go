// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
)

// Every recorded grouping. Unequal lists are refused, whatever the original made
// of them.
func TestContiguousGolden(t *testing.T) {
	var doc struct {
		Cases []struct {
			Src, Dst []int
			Sizes    *[]int
		}
	}
	testkit.ReadVector(t, "mooncake-connector/group-contiguous.json", &doc)
	var spans []mooncake.Span
	refused := 0
	for i, c := range doc.Cases {
		var err error
		spans, err = mooncake.GroupConcurrentContiguous(spans[:0], c.Src, c.Dst)
		if c.Sizes == nil {
			var unequal *mooncake.LengthError
			if !errors.As(err, &unequal) || *unequal != (mooncake.LengthError{Src: len(c.Src), Dst: len(c.Dst)}) || len(spans) > 0 {
				t.Errorf("case %d: %d and %d ids: %v, %v", i, len(c.Src), len(c.Dst), spans, err)
			}
			refused++
			continue
		}
		if err != nil {
			t.Fatalf("case %d: %v", i, err)
		}
		sizes := []int{}
		for _, s := range spans {
			sizes = append(sizes, s.Len())
		}
		if fmt.Sprint(sizes) != fmt.Sprint(*c.Sizes) {
			t.Errorf("case %d: sizes %v, want %v", i, sizes, *c.Sizes)
		}
	}
	if refused == 0 || refused == len(doc.Cases) {
		t.Fatalf("%d of %d cases are refusals", refused, len(doc.Cases))
	}
	t.Logf("group-contiguous.json: %d cases, %d of them refused", len(doc.Cases), refused)
}

// Spans cover the lists in order, are contiguous on both sides, and no two of
// them could be one; ids of any type.
func TestContiguousProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := func(name string, n int) []int32 {
			out, step := make([]int32, n), rapid.SampledFrom([]int32{0, 1, 1, 1, 2, -1, 1 << 30})
			for i := range out {
				if i > 0 {
					out[i] = out[i-1]
				}
				out[i] += step.Draw(t, name)
			}
			return out
		}
		n := rapid.IntRange(0, 40).Draw(t, "n")
		src, dst := ids("src", n), ids("dst", n)
		wide := make([]int64, n) // the other side may have another type
		for i := range dst {
			wide[i] = int64(dst[i])
		}
		spans, err := mooncake.GroupConcurrentContiguous([]mooncake.Span{{From: -1}}, src, wide)
		if err != nil || spans[0].From != -1 {
			t.Fatal(spans, err)
		}
		at := 0
		for _, s := range spans[1:] {
			if s.From != at || s.Len() < 1 {
				t.Fatalf("span %v at %d", s, at)
			}
			for i := s.From + 1; i < s.To; i++ {
				if src[i]-src[i-1] != 1 || wide[i]-wide[i-1] != 1 {
					t.Fatalf("span %v is broken at %d", s, i)
				}
			}
			if at = s.To; at < n && src[at]-src[at-1] == 1 && wide[at]-wide[at-1] == 1 {
				t.Fatalf("span %v could go on", s)
			}
		}
		if at != n {
			t.Fatalf("%d of %d ids are covered", at, n)
		}
	})
}

// benchIDs is 100,000 ids whose runs have 1/(1-next) blocks on average;
// interop/mooncake/bench_original.py makes the same shapes.
func benchIDs(next float64, seed uint64) []int {
	rnd := rand.New(rand.NewPCG(seed, 1))
	out := make([]int, 100_000)
	for i := 1; i < len(out); i++ {
		if out[i] = out[i-1] + 1; rnd.Float64() >= next {
			out[i] = rnd.IntN(1 << 30)
		}
	}
	return out
}

func BenchmarkContiguous(b *testing.B) {
	for _, next := range []float64{0, 0.5, 0.9, 0.99, 1} {
		src, dst := benchIDs(next, 1), benchIDs(next, 2)
		b.Run(fmt.Sprintf("ids=100000/next=%v", next), func(b *testing.B) {
			b.ReportAllocs()
			var spans []mooncake.Span
			for b.Loop() {
				var err error
				if spans, err = mooncake.GroupConcurrentContiguous(spans[:0], src, dst); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Nothing is allocated once the spans have room.
func TestContiguousNoAllocations(t *testing.T) {
	src, dst := benchIDs(0.9, 1), benchIDs(0.9, 2)
	spans := make([]mooncake.Span, 0, len(src))
	if n := testing.AllocsPerRun(5, func() {
		spans, _ = mooncake.GroupConcurrentContiguous(spans[:0], src, dst)
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}
