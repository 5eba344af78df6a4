// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/workers"
)

// answerPeer answers a request of another node. A peer that may not open the pool gets the
// answer that the server holds nothing.
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

// keysFor finds objects of models that have one layout: names of objects do not say of which they are.
func (s *Server) keysFor(sc *scratch, op lmcache.Op) keyFinder {
	c := sc.caller()
	sc.conn = cmp.Or(sc.conn, c.connection())
	may := c.MayOpen() == nil
	return func(name *lmcache.ObjectKey) (k kv.Key, ok bool) {
		world, shard := int(name.Rank>>24), int(name.Rank>>16&0xff)
		if rank, fits := kv.NewRank(world, shard); !may || !fits || rank != name.Rank {
			return k, false
		}
		chunk, err := s.chunkOf(sc, 0, name.Model, world)
		if err != nil {
			return k, false
		}
		salt := name.Salt
		if s.opts.Salts != nil {
			if salt, ok = s.tenantOf(op, salt); !ok {
				return k, false
			}
		}
		list := s.registry.EachShardsOf(&workers.Query{Model: name.Model, Salt: salt, World: world, Chunk: chunk.tokens})
		if len(list) != 1 {
			return k, false
		}
		sh := list[0]
		if int64(name.Group) >= int64(sh.Groups.Len()) {
			return k, false
		}
		sh.Key(&k, shard, int(name.Group), name.Chunk)
		return k, true
	}
}
