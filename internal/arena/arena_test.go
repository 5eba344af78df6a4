// SPDX-License-Identifier: Apache-2.0

package arena_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/internal/arena"
)

// Random operations against a byte map: lowest-first, disjoint, aligned,
// coalescing, exact accounting.
func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const align = 4
		units := rapid.IntRange(1, 64).Draw(t, "units")
		a := arena.New(int64(units*align), align)
		used := make([]bool, units)
		type span struct{ off, n int64 }
		var held []span
		lowest := func(n int) int { // first run of n free units
			for i := 0; i+n <= units; i++ {
				j := i
				for j < i+n && !used[j] {
					j++
				}
				if j == i+n {
					return i
				}
			}
			return -1
		}
		set := func(off, n int64, v bool) {
			for i := off / align; i < (off+n+align-1)/align; i++ {
				if used[i] == v {
					t.Fatalf("unit %d is already used=%v", i, v)
				}
				used[i] = v
			}
		}
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			switch rapid.IntRange(0, 2).Draw(t, "op") {
			case 0:
				n := int64(rapid.IntRange(1, units*align).Draw(t, "n"))
				want := lowest(int((n + align - 1) / align))
				off, ok := a.Alloc(n)
				if ok != (want >= 0) || ok && off != int64(want*align) {
					t.Fatalf("Alloc(%d) = %d, %v, want unit %d", n, off, ok, want)
				}
				if ok {
					set(off, n, true)
					held = append(held, span{off, n})
				}
			case 1:
				if len(held) == 0 {
					continue
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				s := held[i]
				held = append(held[:i], held[i+1:]...)
				a.Release(s.off, s.n)
				set(s.off, s.n, false)
			case 2:
				off := int64(rapid.IntRange(0, units).Draw(t, "unit") * align)
				n := int64(rapid.IntRange(1, 12).Draw(t, "n"))
				free := off+a.Round(n) <= int64(units*align)
				for i := off / align; free && i < (off+a.Round(n))/align; i++ {
					free = !used[i]
				}
				if got := a.Take(off, n); got != free {
					t.Fatalf("Take(%d, %d) = %v, want %v", off, n, got, free)
				}
				if free {
					set(off, n, true)
					held = append(held, span{off, n})
				}
			}
			free, run, longest := int64(0), int64(0), int64(0)
			for _, u := range used {
				if u {
					run = 0
					continue
				}
				free += align
				run += align
				longest = max(longest, run)
			}
			if a.Free() != free || a.Longest() != longest {
				t.Fatalf("Free, Longest = %d, %d, want %d, %d", a.Free(), a.Longest(), free, longest)
			}
		}
	})
}

func TestReleaseTwicePanics(t *testing.T) {
	a := arena.New(64, 4)
	off, _ := a.Alloc(8)
	a.Release(off, 8)
	defer func() {
		if recover() == nil {
			t.Fatal("a double release went unnoticed")
		}
	}()
	a.Release(off, 8)
}

func TestBadRequests(t *testing.T) {
	a := arena.New(10, 4) // rounds down to 8
	if a.Size() != 8 {
		t.Fatalf("Size = %d, want 8", a.Size())
	}
	for _, n := range []int64{0, -1, 9, 1 << 62} {
		if off, ok := a.Alloc(n); ok {
			t.Errorf("Alloc(%d) = %d", n, off)
		}
	}
	for _, c := range [][2]int64{{-4, 4}, {2, 4}, {8, 4}, {0, 12}, {4, 1 << 62}, {1 << 62, 4}} {
		if a.Take(c[0], c[1]) {
			t.Errorf("Take(%d, %d) succeeded", c[0], c[1])
		}
	}
}

// Half the pool in holes of one chunk each: the worst a cache does to it.
func BenchmarkAllocRelease(b *testing.B) {
	const chunk, n = 1 << 21, 8192
	a := arena.New(chunk*n, 4096)
	for range n {
		a.Alloc(chunk)
	}
	for i := int64(0); i < n; i += 2 {
		a.Release(i*chunk, chunk)
	}
	b.ReportAllocs()
	for b.Loop() {
		off, _ := a.Alloc(chunk)
		a.Release(off, chunk)
	}
}
