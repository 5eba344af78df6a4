// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// Lookups from any chunk over a tier, given up, freed in any ranges, loaded and ended in any order: what a lookup has told
// can be loaded and has the right bytes, and once all sessions have ended nothing is kept.
func TestRandomLookupsFromChunks(t *testing.T) {
	groups, err := object.NewGroups(2, []object.Group{
		{ChunkGroup: coordinator.ChunkGroup{Window: -1}, Bytes: chunkBytes}, {ChunkGroup: coordinator.ChunkGroup{Window: 6}, Bytes: chunkBytes},
	})
	if err != nil {
		t.Fatal(err)
	}
	sh := object.Shard{Namespace: one.Namespace, World: 1, Groups: groups}
	const chunks = 8
	h := prompt(1, chunks)
	for seed := range uint64(max(4, testkit.Volume(60))) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 37))
			b := newTiered(t, 20, "", store.Options{})
			defer b.close()
			for g := range groups.Len() {
				for _, hash := range h {
					if r.IntN(4) == 0 {
						continue
					}
					k := objectKey(sh, 0, hash)
					k.Group = uint32(g)
					data := content(hash, g)
					if err := b.memory.Write(t.Context(), k, tier.Meta{Len: chunkBytes, Sum: xxh3.Hash(data)}, data); err != nil {
						t.Fatal(err)
					}
				}
			}
			span := func() (from, to int) {
				from = r.IntN(chunks)
				return from, from + 1 + r.IntN(chunks-from)
			}
			load := func(id []byte, from, to int) miss.Reason {
				name := hold.Transfer{Instance: 1, Shard: sh, From: from, To: to, Last: h[to-1], Load: true}
				p := store.Transfer{Own: true}
				why := b.store.BeginLoad(id, name, h, &p)
				if why != miss.None {
					return why
				}
				for _, part := range p.Parts {
					if !bytes.Equal(part.Bytes, content(h[from+part.Chunk], part.Group)) {
						t.Errorf("seed %d: chunk %d of group %d has other bytes", seed, from+part.Chunk, part.Group)
					}
				}
				p.Done(h, true)
				return why
			}
			for range 200 {
				id := fmt.Append(nil, "r", r.IntN(3))
				from, to := span()
				switch r.IntN(9) {
				case 0, 1, 2, 3:
					p := store.Hashed(h[:to])
					p.From = r.IntN(to + 1)
					got := b.store.Lookup(id, sh, p, 1)
					if got.State == store.Pending && r.IntN(2) == 0 {
						break // it is given up, or answered later
					}
					if got.State == store.Pending {
						got = b.store.Await(t.Context(), id, nobody)
					}
					if got.State != store.Ready || got.Hit < p.From || got.Hit > to {
						t.Fatalf("seed %d: from %d of %d: %+v", seed, p.From, to, got)
					}
					if got.Hit > p.From && r.IntN(2) == 0 {
						if why := load(id, p.From, got.Hit); why != miss.None {
							t.Fatalf("seed %d: a hit of [%d, %d) cannot be loaded: %v", seed, p.From, got.Hit, why)
						}
					}
				case 4:
					b.store.FreePins(id, nobody, from, to, 1+r.IntN(2))
				case 5:
					b.store.FreeAbandoned(id, nobody, from, to+r.IntN(2), 1+r.IntN(2))
				case 6:
					load(id, from, to)
				case 7:
					if r.IntN(2) == 0 {
						b.store.EndSession(id, nobody)
					} else {
						b.store.Leave(nobody)
					}
				case 8:
					own := store.Transfer{Own: true, Skip: func(group, chunk int) bool { return (group+chunk+int(seed))%3 == 0 }}
					name := hold.Transfer{Instance: 1, Shard: sh, From: from, To: to, Last: h[to-1]}
					if _, err := b.store.BeginStore(name, id, h, &own); err != nil {
						t.Fatal(err)
					}
					for _, part := range own.Parts {
						copy(part.Bytes, content(h[from+part.Chunk], part.Group))
					}
					if len(own.Parts) > 0 {
						own.Done(h, true)
					}
					if r.IntN(3) == 0 {
						b.store.Clear(false)
					}
				}
			}
			for i := range 3 {
				b.store.EndSession(fmt.Append(nil, "r", i), lease.Owner{})
			}
			synctest.Wait()
			b.idle()
		})
	}
}
