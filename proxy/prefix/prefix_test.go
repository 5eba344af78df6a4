// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func text(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte('a' + r.IntN(26))
	}
	return b
}

// Two prompts share exactly the marks that lie within their common beginning, whatever lengths
// they have; another seed shares none.
func TestMarksFollowTheCommonBeginning(t *testing.T) {
	whole := text(1, 300<<10)
	for _, common := range []int{0, 1, 511, 512, 513, 5000, 8192, 100 << 10, 299 << 10} {
		a := Marks(nil, 7, whole)
		b := Marks(nil, 7, append(bytes.Clone(whole[:common]), text(2, 40<<10)...))
		shared := 0
		for i := range min(len(a), len(b)) {
			if a[i] != b[i] {
				break
			}
			shared = a[i].End
		}
		if shared > common || common-shared > max(step, common/16) {
			t.Errorf("common %d, shared %d", common, shared)
		}
		if other := Marks(nil, 8, whole); other[0].Hash == a[0].Hash {
			t.Error("seeds do not tell apart")
		}
	}
	if n := len(Marks(nil, 0, text(1, 1<<20))); n > 120 {
		t.Errorf("%d marks of 1 MiB", n)
	}
	if m := Marks(nil, 0, nil); len(m) != 0 {
		t.Error(m)
	}
}

// Lookup finds each of two engines with the longest beginning of the prompt that it has seen.
func TestLookup(t *testing.T) {
	x := New(1 << 12)
	long, short := text(1, 20000), text(1, 20000)[:6000]
	x.Add(Marks(nil, 0, long), 1)
	x.Add(Marks(nil, 0, short), 2)
	got := map[uint32]int{}
	for _, s := range x.Lookup(nil, Marks(nil, 0, append(bytes.Clone(long), "and more"...))) {
		got[s.Engine] = s.Bytes
	}
	if got[1] < 20000-20000/16 || got[2] < 5632 || got[2] > 6000 || len(got) != 2 {
		t.Fatal(got)
	}
	if s := x.Lookup(nil, Marks(nil, 0, text(3, 20000))); len(s) != 0 {
		t.Fatal(s)
	}
	if s := x.Lookup(nil, Marks(nil, 0, short)); s[0].Bytes != 5632 && s[0].Bytes != 6000 {
		t.Fatal(s)
	}
}

// The memory of the index is bounded, however many prompts come. Entries that are used again and again stay.
func TestIndexIsBounded(t *testing.T) {
	x := New(4096)
	hot := Marks(nil, 0, text(1, 4000))
	for i := range 3000 {
		x.Add(Marks(nil, 0, text(uint64(i)+10, 2000)), uint32(i%5))
		if i%50 == 0 {
			x.Add(hot, 9)
		}
	}
	used := 0
	for i := range x.shards {
		for _, row := range x.shards[i].rows {
			for _, e := range row {
				if e.hash != 0 {
					used++
				}
			}
		}
	}
	if used > x.Entries() || x.Entries() != 4096 {
		t.Fatal(used, x.Entries())
	}
	if s := x.Lookup(nil, hot); len(s) != 1 || s[0].Engine != 9 || s[0].Bytes != 4000 {
		t.Fatalf("%+v", s)
	}
}

// When an engine goes, only its keys move.
func TestWeight(t *testing.T) {
	home := func(key uint64, engines ...string) string {
		best := engines[0]
		for _, e := range engines {
			if Weight(key, e) > Weight(key, best) {
				best = e
			}
		}
		return best
	}
	n := map[string]int{}
	for key := range uint64(3000) {
		all, without := home(key, "a", "b", "c"), home(key, "a", "b")
		if n[all]++; all != "c" && all != without {
			t.Fatalf("key %d moved from %s to %s", key, all, without)
		}
	}
	for e, k := range n {
		if k < 800 {
			t.Errorf("engine %s has %d of 3000 keys", e, k)
		}
	}
}

func BenchmarkMarks(b *testing.B) {
	for _, size := range []int{2 << 10, 16 << 10, 220 << 10, 1 << 20} {
		prompt := text(1, size)
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			x, marks := New(1<<20), make([]Mark, 0, 128)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				marks = Marks(marks[:0], 0, prompt)
				x.Add(marks, 1)
			}
		})
	}
}
