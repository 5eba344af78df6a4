// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
)

// remembered returns how many leading chunks of a prompt a Memo hashes from memory, and
// has it learn the others.
func remembered(t *testing.T, m *Memo, tokens []uint32) int {
	t.Helper()
	var view KeyView
	if err := m.DecodeKey((&Key{Model: "m", WorldSize: 1, Tokens: tokens, RequestID: "r"}).Append(nil), &view); err != nil {
		t.Fatal(err)
	}
	n := len(view.Hashes)
	m.Hash(&view, view.Chunks)
	if want := kv.ChunkHashes(tokens, m.ChunkTokens()); !slices.Equal(view.Hashes, want) {
		t.Fatalf("%v, want %v", view.Hashes, want)
	}
	return n
}

func manyTokens(first uint32, chunks, chunkTokens int) []uint32 {
	out := make([]uint32, chunks*chunkTokens)
	for i := range out {
		out[i] = first + uint32(i)
	}
	return out
}

// A Memo remembers whole prompts, of the widest tokens, too, and what is not a whole
// chunk never. What forks is hashed from the fork on.
func TestMemoRemembersWhatItSaw(t *testing.T) {
	const chunk, chunks = 16, 20
	m := NewMemo(chunk, 1<<20)
	wide := manyTokens(1<<31, chunks, chunk) // 5 bytes each
	for turn, want := range []int{0, chunks, chunks} {
		if got := remembered(t, m, wide); got != want {
			t.Errorf("turn %d: %d of %d chunks were remembered, want %d", turn, got, chunks, want)
		}
	}
	if got := remembered(t, m, wide[:5*chunk+3]); got != 5 {
		t.Errorf("of a shorter prompt %d chunks were remembered, want 5", got)
	}
	fork := append(slices.Clone(wide[:7*chunk]), manyTokens(7, 3, chunk)...)
	for turn, want := range []int{7, 10, 10} {
		if got := remembered(t, m, fork); got != want {
			t.Errorf("turn %d of a fork: %d chunks were remembered, want %d", turn, got, want)
		}
		if got := remembered(t, m, wide); got != chunks {
			t.Errorf("after turn %d of a fork %d of %d chunks are remembered", turn, got, chunks)
		}
	}
	if got := remembered(t, m, wide[chunk:]); got != 0 {
		t.Errorf("%d chunks of other positions were taken for these", got)
	}
}

// A full Memo gives up what was not used since, takes no more memory, and still works.
func TestMemoGivesUpWhatIsNotUsed(t *testing.T) {
	const chunk = 16
	m := NewMemo(chunk, memoBlockEntries*(5*chunk+32+32+20+4))
	if m.max != memoBlockEntries || len(m.buckets) < m.max {
		t.Fatalf("%d entries, %d buckets", m.max, len(m.buckets))
	}
	const half = memoBlockEntries / 2
	used, unused := manyTokens(1000, half, chunk), manyTokens(100_000, half, chunk)
	remembered(t, m, used)
	remembered(t, m, unused)
	if got := remembered(t, m, used); got != half {
		t.Fatalf("%d of %d chunks are remembered", got, half)
	}
	remembered(t, m, manyTokens(200_000, half, chunk)) // in place of the unused
	if got := remembered(t, m, used); got != half {
		t.Errorf("of what was used %d of %d chunks are remembered", got, half)
	}
	if got := remembered(t, m, unused); got != 0 {
		t.Errorf("of what was not used %d chunks are remembered", got)
	}
	for i := range uint32(50) {
		remembered(t, m, manyTokens(1_000_000+10_000*i, half, chunk))
	}
	if m.count != m.max || len(m.blocks) != 1 {
		t.Errorf("%d entries in %d blocks, at most %d in one", m.count, len(m.blocks), m.max)
	}
	for _, bytes := range []int64{0, memoBlockEntries*(5*chunk+32+32+20+4) - 1} {
		if got := NewMemo(chunk, bytes); got.max != 0 || remembered(t, got, used) != 0 || remembered(t, got, used) != 0 {
			t.Errorf("with %d bytes it has %d entries", bytes, got.max)
		}
	}
}
