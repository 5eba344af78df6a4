// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// Bytes of the pool that change while no server runs, after an orderly stop or a kill, 0 to 15 s after the last store:
// no load has a wrong byte. What was not changed is served, unless it was stored in the last 2 s before a kill.
func TestFlippedBytesAreNeverServed(t *testing.T) {
	const chunks, prompts, each = 64, 8, 8
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	want := testkit.Volume(10_000)
	var loads, wrong, flippedChunks, unserved, young int
	for life := 0; loads < want; life++ {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, t.TempDir(), chunks, store.Options{ChecksumRate: 1 << 30})
			defer func() { b.stop() }()
			end := b.run()
			places, at := map[kv.Hash]int64{}, map[kv.Hash]time.Time{}
			var all [][]kv.Hash
			for p := range prompts {
				h := flippedPrompt(r, each)
				all = append(all, h)
				tr, place := hold.Transfer{Instance: 1, Shard: one, To: each, Last: h[each-1]}, store.Transfer{}
				if _, err := b.store.BeginStore(tr, []byte("s"), h, &place); err != nil || len(place.Offsets) != each {
					t.Fatalf("%d places, %v", len(place.Offsets), err)
				}
				for i, off := range place.Offsets {
					copy(b.at(off), content(h[i], 0))
					places[h[i]], at[h[i]] = off, time.Now()
				}
				b.store.CommitStore(tr, []byte("s"), h, true)
				if p < prompts-1 {
					time.Sleep(time.Duration(r.Int64N(int64(3 * time.Second))))
				}
			}
			if r.IntN(4) > 0 { // else at once
				time.Sleep(time.Duration(r.Int64N(int64(15 * time.Second))))
			}
			kill, stopped := r.IntN(2) == 0, time.Now()
			flipped := map[kv.Hash]bool{}
			b.between = func() {
				for h, off := range places {
					if r.IntN(8) == 0 {
						b.at(off)[r.IntN(chunkBytes)] ^= 1 << r.IntN(8)
						flipped[h] = true
					}
				}
			}
			end()
			if kill {
				b.kill()
			} else {
				b.restart()
			}
			b.between = nil
			flippedChunks += len(flipped)
			for _, h := range all {
				got := b.look(t, "l", one, h)
				due := 0 // what must be served: up to the first chunk that was changed, or is young after a kill
				for due < each && !flipped[h[due]] && (!kill || stopped.Sub(at[h[due]]) > 2*time.Second) {
					due++
				}
				if got.Hit < due {
					t.Errorf("seed %d, life %d, kill %v: %d chunks hit (%v), want %d", seed, life, kill, got.Hit, got.Why, due)
				}
				for i := got.Hit; i < each; i++ {
					unserved++
					if kill && !flipped[h[i]] && stopped.Sub(at[h[i]]) <= 2*time.Second {
						young++
					}
				}
				if got.Hit > 0 {
					tr, place := hold.Transfer{Instance: 1, Shard: one, To: got.Hit, Last: h[got.Hit-1], Load: true}, store.Transfer{}
					if why := b.store.BeginLoad([]byte("l"), tr, h, &place); why != miss.None {
						t.Fatal(why)
					}
					for i, off := range place.Offsets {
						loads++
						if !bytes.Equal(b.at(off), content(h[i], 0)) {
							wrong++
						}
					}
					b.store.CommitLoad(tr, []byte("l"))
				}
				b.store.EndSession([]byte("l"), lease.Owner{})
			}
		})
		if t.Failed() {
			break
		}
	}
	t.Logf("%d loads, %d wrong; %d chunks were changed, %d not served, %d of these because they were stored in the last 2 s before a kill (seed %d)",
		loads, wrong, flippedChunks, unserved, young, seed)
	if wrong > 0 || young == 0 || flippedChunks == 0 {
		t.Errorf("seed %d: %d of %d loads were wrong, %d chunks were changed, %d were young", seed, wrong, loads, flippedChunks, young)
	}
}

// flippedPrompt returns chunks that no other prompt has.
func flippedPrompt(r *rand.Rand, n int) []kv.Hash {
	h := make([]kv.Hash, n)
	for i := range h {
		for j := range h[i] {
			h[i][j] = byte(r.Uint32())
		}
	}
	return h
}
