// SPDX-License-Identifier: Apache-2.0

package replay_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/replay"
)

func requests(prompts ...[]int64) (out []workload.Request) {
	for _, b := range prompts {
		out = append(out, workload.Request{Input: len(b)*8 - 3, Blocks: b, BlockTokens: 8})
	}
	return out
}

// Hits are a run of blocks from the start: blocks behind a missing one do not count.
func TestHitsAreRunsFromTheStart(t *testing.T) {
	got, err := replay.Run(t.Context(), requests([]int64{1, 2, 3}, []int64{1, 2, 4}, []int64{9, 2, 3}, []int64{1, 2, 3}), 0)
	if err != nil || got.Requests != 4 || got.Blocks != 12 || got.HitBlocks != 2+0+3 || got.Tokens != 4*21 || got.HitTokens != 16+21 {
		t.Errorf("%+v, %v", got, err)
	}
}

// With little room a prompt's end goes before its start, and the least recently used prompt first.
func TestEviction(t *testing.T) {
	got, _ := replay.Run(t.Context(), requests([]int64{1, 2, 3}, []int64{4, 5}, []int64{1, 2, 3}), 4)
	if got.HitBlocks != 2 || got.Evicted != 2 || got.Kept != 4 {
		t.Errorf("%+v: the last block of the first prompt is to go first", got)
	}
	got, _ = replay.Run(t.Context(), requests([]int64{1, 2, 3, 4, 5}, []int64{1, 2, 3, 4, 5}), 2)
	if got.HitBlocks != 2 {
		t.Errorf("%+v: of a prompt that does not fit, the start stays", got)
	}
}

// Against a plain list: random prompts, every capacity.
func TestAgainstList(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	for capacity := range 12 {
		var list []workload.Request
		for range 300 {
			n := 1 + rnd.IntN(6)
			var b []int64
			for i := range n {
				b = append(b, int64(i*10+rnd.IntN(2)))
			}
			list = append(list, requests(b)...)
		}
		var kept []int64 // most recently used last
		hits := 0
		for _, r := range list {
			for _, b := range r.Blocks {
				if !slices.Contains(kept, b) {
					break
				}
				hits++
			}
			var known []int64 // these count as used before the others need room
			for _, b := range r.Blocks {
				if slices.Contains(kept, b) && !slices.Contains(known, b) {
					known = append(known, b)
				}
			}
			kept = append(slices.DeleteFunc(kept, func(k int64) bool { return slices.Contains(known, k) }), known...)
			for _, b := range slices.Backward(r.Blocks) {
				kept = append(slices.DeleteFunc(kept, func(k int64) bool { return k == b }), b)
				if capacity > 0 && len(kept) > capacity {
					kept = kept[1:]
				}
			}
		}
		got, err := replay.Run(t.Context(), list, capacity)
		if err != nil || got.HitBlocks != hits || got.Kept != len(kept) {
			t.Errorf("capacity %d: %d hits, %d kept, %v; a plain list has %d and %d", capacity, got.HitBlocks, got.Kept, err, hits, len(kept))
		}
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := replay.Run(ctx, requests([]int64{1}), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
