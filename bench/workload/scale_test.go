// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// A scaled prompt has as many blocks as the original, and two scaled prompts share as many blocks as the originals.
func TestScaledKeepsBlocks(t *testing.T) {
	list := []workload.Request{
		{Arrival: 32 * time.Second, Input: 1025, Output: 33, Blocks: []int64{1, 2, 3}, BlockTokens: 512},
		{Arrival: 64 * time.Second, Input: 1536, Output: 0, Blocks: []int64{1, 2, 4}, BlockTokens: 512},
	}
	got, err := workload.Scaled(list, 32)
	if err != nil {
		t.Fatal(err)
	}
	if q := got[0]; q.Arrival != time.Second || q.Input != 33 || q.Output != 2 || q.BlockTokens != 16 || len(q.Blocks) != 3 {
		t.Errorf("%+v", q)
	}
	if q := got[1]; q.Arrival != 2*time.Second || q.Input != 48 || q.Output != 0 {
		t.Errorf("%+v", q)
	}
	a, b := got[0].Tokens(), got[1].Tokens()
	if len(a) != 33 || len(b) != 48 || !slices.Equal(a[:32], b[:32]) || a[32] == b[32] {
		t.Errorf("prompts of %d and %d tokens, which are to differ from token 32 on", len(a), len(b))
	}
	if list[0].Input != 1025 {
		t.Error("the list itself was changed")
	}
	for _, n := range []int{0, -1, 3, 1024} {
		if _, err := workload.Scaled(list, n); !errors.Is(err, workload.ErrScale) {
			t.Errorf("scale %d: %v", n, err)
		}
	}
}
