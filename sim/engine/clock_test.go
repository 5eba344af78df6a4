// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

// Steps take as long as the profile says: for two prompts one after the other, and for the tokens that each generates.
func TestStepsTakeTheTimeOfTheProfile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := costmodel.Get(costmodel.A10Qwen)
		if err != nil {
			t.Fatal(err)
		}
		e, err := engine.Open(t.Context(), engine.Options{KV: kvmem.Geometry{Layers: 1, Heads: 1, HeadBytes: 8, BlockTokens: 16, Blocks: 200}, MaxModel: 2048, Clock: p})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		for i, n := range []int{1000, 300} {
			tokens := make([]uint32, n)
			for k := range tokens {
				tokens[k] = uint32(i*1000 + k)
			}
			began := time.Now()
			if _, end := ask(t, e, engine.Request{ID: string(rune('a' + i)), Tokens: tokens, MaxTokens: 3}); end.Err != nil {
				t.Fatal(end.Err)
			}
			want := time.Duration(0)
			for _, w := range [][2]int{{0, n}, {n, 1}, {n + 1, 1}} {
				var work costmodel.Work
				work.Add(w[0], w[1], true)
				want += p.Step(work)
			}
			if got := time.Since(began); got < want || got > want+time.Millisecond {
				t.Errorf("%d prompt tokens and 3 more take %v, want %v", n, got, want)
			}
		}
	})
}
