// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
)

// A chunk that is many times as long as those that fill the pool takes the place
// of a few neighbours, not of most of the cache.
func TestLongChunkTakesTheCheapestPlace(t *testing.T) {
	f := func(times int, busy bool) {
		t.Helper()
		const chunks = 4000
		b := newBench(t, t.TempDir(), chunks, store.Options{})
		defer b.stop()
		rnd := rand.New(rand.NewPCG(1, uint64(times)))
		hash := func(i int) []kv.Hash {
			var h kv.Hash
			binary.LittleEndian.PutUint32(h[:], uint32(i+1))
			return []kv.Hash{h}
		}
		for i := range chunks {
			b.put("fill", hash(i), 0, 1, 1)
		}
		for _, i := range rnd.Perm(chunks) { // used in random order
			b.hit(hash(i))
		}
		if busy { // every fiftieth is being read
			for i := 0; i < chunks; i += 50 {
				b.store.Lookup([]byte{byte(i), byte(i >> 8)}, one, store.Hashed(hash(i)), 1)
			}
		}
		before := b.store.Stats().EvictedChunks
		var p store.Transfer
		long := prompt(99, 1)
		tr := transfer(7, long, 0, 1, false)
		tr.Shard.Groups = object.FullAttention(1, int64(times)*chunkBytes)
		if _, err := b.store.BeginStore(tr, []byte("long"), long, &p); err != nil || len(p.Offsets) != 1 {
			t.Fatalf("%v, %v", p, err)
		}
		// Twice its length in plain order, then its length in one place.
		if n := b.store.Stats().EvictedChunks - before; n > uint64(3*times+1) {
			t.Errorf("a chunk of %d times the length evicted %d of %d", times, n, chunks)
		}
		checkUsageOf(t, b)
	}
	f(8, false)
	f(32, false)
	f(200, false)
	f(32, true)
}

func checkUsageOf(t *testing.T, b *bench) {
	t.Helper()
	got := b.store.Stats()
	if got.FreeBytes+got.StagedBytes+got.ResidentBytes+got.CondemnedBytes != got.Bytes {
		t.Fatalf("bytes do not add up: %+v", got)
	}
}
