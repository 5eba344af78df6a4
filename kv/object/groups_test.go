// SPDX-License-Identifier: Apache-2.0

package object_test

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
)

const chunkTokens = 4

func groups(t rapid.TB, list ...object.Group) *object.Groups {
	g, err := object.NewGroups(chunkTokens, list)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func full(bytes int64) object.Group {
	return object.Group{Bytes: bytes, ChunkGroup: coordinator.ChunkGroup{Window: -1}}
}

func window(tokens int) object.Group {
	return object.Group{Bytes: 1, ChunkGroup: coordinator.ChunkGroup{Window: tokens}}
}

// TestHitIsTheLongestThatAllGroupsServe compares with a search from the longest hit down,
// and shows that the hit of the prompt needs no dead chunk.
func TestHitIsTheLongestThatAllGroupsServe(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		g := groups(r, full(1), window(rapid.IntRange(1, 13).Draw(r, "window")), window(rapid.IntRange(1, 13).Draw(r, "window")))
		chunks := rapid.IntRange(0, 12).Draw(r, "chunks")
		kept := map[[2]int]bool{}
		for i := range g.Len() {
			for c := range chunks {
				kept[[2]int{i, c}] = rapid.IntRange(0, 3).Draw(r, "kept") > 0
			}
		}
		has := func(group, chunk int) bool { return kept[[2]int{group, chunk}] }
		serves := func(hit int) bool {
			for i := range g.Len() {
				for need, c := g.Need(i, 0, hit), 0; c < hit; c++ {
					if c >= need.Start && c < need.End && !has(i, c) {
						return false
					}
				}
			}
			return true
		}
		before := make([]int, chunks+1)
		for limit := range before {
			want := limit
			for !serves(want) {
				want--
			}
			if before[limit] = g.Hit(limit, has); before[limit] != want {
				r.Fatalf("of %d chunks a hit of %d, want %d: %v", limit, before[limit], want, kept)
			}
		}
		g.Dead(chunks, has, func(group, chunk int) {
			if !has(group, chunk) || g.Full(group) {
				r.Fatalf("chunk %d of group %d is called dead", chunk, group)
			}
			delete(kept, [2]int{group, chunk})
		})
		if hit := g.Hit(chunks, has); hit != before[chunks] {
			r.Fatalf("without what is dead the hit is %d, was %d", hit, before[chunks])
		}
	})
}

// TestDeadAreWindowsThatAGapCutsOff has a prompt whose window group lacks chunks: a chunk next to
// a gap that completes no window serves no hit.
func TestDeadAreWindowsThatAGapCutsOff(t *testing.T) {
	g := groups(t, full(1), window(2*chunkTokens))
	has := func(group, chunk int) bool { return group == 0 || chunk%2 == 1 || chunk >= 6 }
	var dead []int
	g.Dead(10, has, func(_, chunk int) { dead = append(dead, chunk) })
	if want := []int{1, 3}; !slices.Equal(dead, want) {
		t.Errorf("dead are %v, want %v", dead, want)
	}
}

// TestShardsOfUnlikeLayoutsHaveTheirOwnKeysAndLengths shows two stages of a pipeline.
func TestShardsOfUnlikeLayoutsHaveTheirOwnKeysAndLengths(t *testing.T) {
	first, second := groups(t, full(100)), groups(t, full(300))
	sh := object.Shard{World: 2, Groups: first, Each: &object.Layouts{
		{Namespace: kv.Namespace{1}, Groups: first}, {Namespace: kv.Namespace{2}, Groups: second},
	}}
	var one, two kv.Key
	sh.Key(&one, 0, 0, kv.Hash{7})
	sh.Key(&two, 1, 0, kv.Hash{7})
	if one.Namespace == two.Namespace || one.Rank == two.Rank || one.Chunk != two.Chunk {
		t.Errorf("keys %v and %v", one, two)
	}
	if a, b := sh.Bytes(0, 0), sh.Bytes(1, 0); a != 100 || b != 300 {
		t.Errorf("objects of %d and %d bytes", a, b)
	}
	if !first.Like(second) || first.Like(groups(t, full(100), window(8))) {
		t.Error("groups are alike if hits need the same chunks of each, whatever their bytes")
	}
}
