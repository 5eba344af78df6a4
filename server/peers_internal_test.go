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
