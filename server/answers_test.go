// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tier"
)

// In both transfer modes, with keys of 0.5.7 and of older clients, the server knows from the lookup which of the
// stored chunks hold tokens of the answer, also where the lookup leaves out the prompt's last token.
func TestAnswersAreKnownFromTheLookup(t *testing.T) {
	so := store.Options{Below: nil, WriteAnswers: store.AnswersNever, TrustUnsummed: true}
	for _, packed := range []bool{false, true} {
		t.Run("engine_driven", func(t *testing.T) {
			d := newDesk(t, server.Options{})
			d.stop()
			d.so = so
			d.so.Below = tier.NewMemory(1 << 20)
			d.open()
			d.register(1, 1, 2)
			look := deskKey(1, lmcache.AllWorkers, 2, "r")
			look.Packed, look.End = packed, 16
			d.ask(lmcache.OpLookup, look.Append(nil), lmcache.AppendInt(nil, 1))
			k := deskKey(1, 0, 5, "r")
			k.Packed = packed
			if got := d.put(1, k); got != 5 {
				t.Fatalf("%d chunks were stored, want 5", got)
			}
			if got := d.store.Stats().AnswerChunks; got != 3 {
				t.Errorf("packed %v: %d chunks of an answer, want 3", packed, got)
			}
			k = deskKey(1, 0, 8, "without a lookup")
			k.Packed = packed
			if got := d.put(1, k); got != 3 || d.store.Stats().AnswerChunks != 3 {
				t.Errorf("packed %v: %d chunks were stored, %+v", packed, got, d.store.Stats())
			}
		})
	}
	t.Run("lmcache_driven", func(t *testing.T) {
		so := so
		so.Below = tier.NewMemory(1 << 20)
		n := startDrivenOver(t, t.TempDir(), "pool", server.Options{}, so)
		defer n.stop()
		e := n.newEngine()
		e.register()
		tokens := make([]uint32, 2*drivenChunk)
		e.lookup(tokens[:drivenChunk], "s")
		if got := e.storeBlocks(tokens, 0, 2*drivenChunk, []int{1, 2, 3, 4}); !got.OK {
			t.Fatal("the store failed")
		}
		if got := n.store.Stats(); got.StoredChunks != 2 || got.AnswerChunks != 1 {
			t.Errorf("%d chunks, %d of an answer; want 2 and 1", got.StoredChunks, got.AnswerChunks)
		}
	})
}
