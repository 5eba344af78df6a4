// SPDX-License-Identifier: Apache-2.0

package server

import (
	"io"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// Another node's names are found only in layouts that a worker has registered: of its model, its shards and its groups.
func TestNamesOfPeersFitALayout(t *testing.T) {
	s := newBareServer(t, io.Discard)
	(&engine{t, s}).register(7)
	keys := s.keysFor(&scratch{}, lmcache.OpP2PLookupAndLock)
	rank := func(world, shard int) kv.Rank {
		r, ok := kv.NewRank(world, shard)
		if !ok {
			t.Fatalf("no rank %d of %d", shard, world)
		}
		return r
	}
	for _, c := range []struct {
		what string
		name lmcache.ObjectKey
		ok   bool
	}{
		{"its own", lmcache.ObjectKey{Model: []byte("m"), Rank: rank(1, 0)}, true},
		{"another model", lmcache.ObjectKey{Model: []byte("n"), Rank: rank(1, 0)}, false},
		{"another group", lmcache.ObjectKey{Model: []byte("m"), Rank: rank(1, 0), Group: 1}, false},
		{"a group beyond integers", lmcache.ObjectKey{Model: []byte("m"), Rank: rank(1, 0), Group: 1 << 31}, false},
		{"another number of shards", lmcache.ObjectKey{Model: []byte("m"), Rank: rank(2, 0)}, false},
		{"no rank", lmcache.ObjectKey{Model: []byte("m"), Rank: rank(1, 0) + 1}, false},
	} {
		if _, ok := keys(&c.name); ok != c.ok {
			t.Errorf("%s: found is %v", c.what, ok)
		}
	}
}

// Names of objects do not say of which layout they are: of a model with two layouts nothing is found, also while one of them is asleep.
func TestNamesOfPeersWhileALayoutIsAsleep(t *testing.T) {
	s := newBareServer(t, io.Discard)
	(&engine{t, s}).register(7)
	awake := s.registry.List()[0]
	rank, _ := kv.NewRank(1, 0)
	name := lmcache.ObjectKey{Model: []byte("m"), Rank: rank}
	for i, c := range []struct {
		layers int
		ok     bool
	}{{awake.Layout.Layers, true}, {2 * awake.Layout.Layers, false}} {
		reg := lmcache.EngineDriven{
			InstanceID: int64(8 + i), Model: "m", WorldSize: 1, Layers: c.layers, Hidden: awake.Layout.Hidden, DType: awake.Layout.DType,
			SinglePlane: awake.Layout.SinglePlane, PhysicalSlots: awake.Layout.Slots,
		}
		in, err := s.newEngineDriven(&reg, awake.Chunk)
		if err != nil {
			t.Fatal(err)
		}
		in.BelongsTo(awake.By)
		in.Sleep()
		if _, _, err := s.registry.Add(in); err != nil {
			t.Fatal(err)
		}
		if _, ok := s.keysFor(&scratch{}, lmcache.OpP2PLookupAndLock)(&name); ok != c.ok {
			t.Errorf("%d layers are asleep beside %d: found is %v", c.layers, awake.Layout.Layers, ok)
		}
	}
}
