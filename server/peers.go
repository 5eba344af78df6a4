// SPDX-License-Identifier: Apache-2.0

package server

import (
	"slices"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/workers"
)

// answerPeer answers a request of another node. A peer that may not open the pool gets the answer that the server has nothing.
func (s *Server) answerPeer(sc *scratch, r lmcache.Request) {
	by := sc.caller().Name
	if sc.conn != nil && !sc.conn.asksAsPeer {
		sc.conn.asksAsPeer = true
		s.p2p.Join(by)
	}
	switch r := r.(type) {
	case *lmcache.P2PLookupRequest:
		find := s.keysFor(sc, r.Op())
		if s.draining.Load() {
			find = func(*lmcache.ObjectKey) (kv.Key, bool) { return kv.Key{}, false }
		}
		sc.out = lmcache.AppendInt(sc.out, s.p2p.Lookup(by, r.Keys, find))
	case *lmcache.P2PResultRequest:
		if places, ok := s.p2p.Result(by, r.Task); ok {
			sc.out = lmcache.AppendPeerPlaces(sc.out, places)
		}
	case *lmcache.P2PUnlockRequest:
		s.p2p.Unlock(by, r.Keys, s.keysFor(sc, r.Op()))
	}
}

// keysFor returns the function that finds an object by a peer's name for it. It finds only objects of models with one layout in each chunk
// size, layouts of sleeping workers included, because the name of an object does not tell its layout. A hash belongs to one chunk size; of
// several sizes the function takes the one whose object is in the pool.
func (s *Server) keysFor(sc *scratch, op lmcache.Op) keyFinder {
	c, limit, foreign := sc.caller(), s.limitOf(sc), false
	may := c.MayOpen() == nil
	var of struct { // for the last name
		model string
		world int
		sizes []int // chunk sizes in which it has one layout
	}
	return func(name *lmcache.ObjectKey) (k kv.Key, ok bool) {
		world, shard := int(name.Rank>>24), int(name.Rank>>16&0xff)
		if rank, fits := kv.NewRank(world, shard); !may || !fits || rank != name.Rank {
			return k, false
		}
		salt := name.Salt
		if s.opts.Salts != nil {
			if salt, ok = s.tenantOf(op, salt); !ok {
				return k, false
			}
		}
		if !limit.Allows(string(salt)) {
			if !foreign { // once for each request
				foreign = true
				s.refuse(op, errTenant)
			}
			return k, false
		}
		if of.world != world || of.model != string(name.Model) {
			of.model, of.world, of.sizes = string(name.Model), world, nil
			sizes, _ := s.registry.ChunksOf(0, c.By, name.Model, world, workers.AnyBase)
			for _, size := range sizes {
				if s.registry.CountLayouts(&workers.Query{Model: name.Model, World: world, Chunk: size}) == 1 {
					of.sizes = append(of.sizes, size)
				}
			}
		}
		var keys []kv.Key
		for _, size := range of.sizes {
			list := s.registry.EachShardsOf(&workers.Query{Model: name.Model, Salt: salt, World: world, Chunk: size})
			if len(list) == 1 && int64(name.Group) < int64(list[0].Groups.Len()) {
				list[0].Key(&k, shard, int(name.Group), name.Chunk)
				keys = append(keys, k)
			}
		}
		switch len(keys) {
		case 0:
			return kv.Key{}, false
		case 1:
			return keys[0], true
		}
		resident := s.store.OfChunk(name.Chunk)
		i := slices.IndexFunc(keys, func(k kv.Key) bool { return slices.Contains(resident, k) })
		return keys[max(i, 0)], true
	}
}
