// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"
	"testing/synctest"

	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// What the tier brings for a lookup is known by its place in the prompt, as what is stored: eviction goes from the end.
func TestChunksFromBelowKnowTheirPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 32, "", store.Options{Write: store.WriteNever})
		defer b.close()
		end := b.run()
		defer func() { end() }()
		h := prompt(1, 5)
		keep(t, b.memory, one, h...)
		if got := b.await(t, nobody, one, h); got.Hit != 5 || got.Below != 5 {
			t.Fatalf("%+v", got)
		}
		for i := range h {
			k := objectKey(one, 0, h[i])
			want := uint64(0)
			if i > 0 {
				before := objectKey(one, 0, h[i-1])
				want = miss.ID(&before)
			}
			if got := b.store.ParentOf(&k); got != want {
				t.Errorf("chunk %d continues %#x, want %#x", i, got, want)
			}
		}
		b.store.EndSession([]byte("r"), nobody)
		b.idle()
	})
}
