// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"pgregory.net/rapid"
)

// A window group needs ceil(W/c) chunks: LMCache's count, at least vLLM's.
func TestChunkTails(t *testing.T) {
	f := func(chunk, window, want int) {
		t.Helper()
		k, err := coordinator.NewChunks(chunk, []coordinator.ChunkGroup{{Window: -1}, {Window: window}, {Recurrent: true}, {Excluded: true}})
		if err != nil {
			t.Fatal(err)
		}
		if got := k.Need(1, 100); got != (coordinator.Run{Start: 100 - want, End: 100}) {
			t.Errorf("window %d of chunk %d: needs %v, want the last %d of 100", window, chunk, got, want)
		}
		if all, state, apart := k.Need(0, 100), k.Need(2, 100), k.Need(3, 100); all.Start != 0 || state.Start != 99 || apart.Start != 100 {
			t.Errorf("full %v, recurrent %v, apart %v", all, state, apart)
		}
		if short := k.Need(1, 1); short.Start != 0 {
			t.Errorf("one chunk: %v", short)
		}
	}
	f(256, 512, 2)
	f(256, 513, 3)
	f(256, 514, 3)
	f(256, 1, 1)
	f(256, 256, 1)
	f(2, 3, 2)
}

func TestChunkRefusals(t *testing.T) {
	f := func(chunk int, groups ...coordinator.ChunkGroup) {
		t.Helper()
		if _, err := coordinator.NewChunks(chunk, groups); err == nil {
			t.Errorf("chunks of %d, %v: accepted", chunk, groups)
		}
	}
	f(0)
	f(-1)
	f(1<<40, coordinator.ChunkGroup{Window: -1})
	f(256, coordinator.ChunkGroup{Window: 0})
	f(256, coordinator.ChunkGroup{Window: -2})
	f(256, coordinator.ChunkGroup{Window: 1 << 40})
	f(1, coordinator.ChunkGroup{Window: 5})
	f(256, make([]coordinator.ChunkGroup, 2000)...)
	k, err := coordinator.NewChunks(1, []coordinator.ChunkGroup{{Window: -1}})
	if err != nil {
		t.Fatal(err)
	}
	var r coordinator.Result
	for _, n := range []int{-1, 1 << 60} {
		if _, err := k.Hit(&r, coordinator.NewRuns(k.Coordinator()), n); err == nil {
			t.Errorf("%d chunks accepted", n)
		}
	}
}

// The hit is the largest n for which every group has its last chunks before n (its tail), and Reusable
// is the union of the tails of all such n. This test finds both by trying each n.
func TestChunksCounted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chunk := rapid.IntRange(2, 5).Draw(t, "chunk")
		var groups []coordinator.ChunkGroup
		var tails []int
		for range rapid.IntRange(1, 4).Draw(t, "groups") {
			g := coordinator.ChunkGroup{Window: rapid.IntRange(1, 25).Draw(t, "window")}
			tail := (g.Window + chunk - 1) / chunk
			switch rapid.IntRange(0, 5).Draw(t, "kind") {
			case 0, 1:
				g.Window, tail = -1, 1<<30
			case 2:
				g.Recurrent, tail = true, 1
			case 3:
				g.Excluded, tail = true, 0
			}
			groups, tails = append(groups, g), append(tails, tail)
		}
		k, err := coordinator.NewChunks(chunk, groups)
		if err != nil {
			t.Fatal(err)
		}
		n := rapid.IntRange(0, 24).Draw(t, "chunks")
		runs := coordinator.NewRuns(k.Coordinator())
		held := make([][]bool, len(groups))
		for g := range groups {
			held[g] = make([]bool, n)
			holes := rapid.IntRange(0, 6).Draw(t, "holes")
			for i := range n {
				if rapid.IntRange(0, 9).Draw(t, "hole") >= holes {
					held[g][i] = true
					runs.Add(g, i, i+1)
				}
			}
		}
		possible := func(hit int) bool {
			for g := range groups {
				for i := hit - min(tails[g], hit); i < hit; i++ {
					if !held[g][i] {
						return false
					}
				}
			}
			return true
		}
		anyPart := false
		for _, g := range groups {
			anyPart = anyPart || !g.Excluded
		}
		want := n
		for want > 0 && (!possible(want) || !anyPart) {
			want--
		}
		var r coordinator.Result
		if got, err := k.Hit(&r, runs, n); err != nil || got != want {
			t.Fatalf("hit %d, %v; counted %d", got, err, want)
		}
		shortest := rapid.IntRange(0, n).Draw(t, "shortest")
		longest := rapid.IntRange(shortest, n).Draw(t, "longest")
		for g := range groups {
			checkReusable(t, k, g, runs, shortest, longest, n, possible)
			if m := &r.Masks[g]; want > 0 && !groups[g].Excluded {
				need := k.Need(g, want)
				if run, ok := m.Next(0); !ok || run != need || m.Count() != need.End-need.Start {
					t.Fatalf("group %d: mask %v, need %v", g, run, need)
				}
			}
		}
	})
}

func checkReusable(t *rapid.T, k *coordinator.Chunks, g int, runs *coordinator.Runs, shortest, longest, n int, possible func(int) bool) {
	want := make([]bool, n)
	for hit := max(shortest, 1); hit <= longest; hit++ {
		if possible(hit) {
			for i := k.Need(g, hit).Start; i < hit; i++ {
				want[i] = true
			}
		}
	}
	got := make([]bool, n)
	last := -1
	for _, r := range k.Reusable(nil, g, runs, shortest, longest) {
		if r.Start <= last || r.End <= r.Start {
			t.Fatalf("runs are not rising and apart")
		}
		last = r.End
		for i := r.Start; i < r.End; i++ {
			got[i] = true
		}
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("group %d, hits %d to %d: chunk %d reusable %v, counted %v", g, shortest, longest, i, got[i], want[i])
		}
	}
}
