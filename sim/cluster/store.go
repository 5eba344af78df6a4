// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"time"

	"github.com/kvasir-kv/kvasir/sim/replay"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// Store configures a cache that all engines that compute prompts share. Zero Blocks means that there is none.
type Store struct {
	Blocks  int           // capacity in blocks of the profile's block size; the least recently used ones are evicted
	GBps    float64       // speed of the store's own network, which all loads share
	Latency time.Duration // latency of a load
}

type store struct {
	run   *run
	o     Store
	names *replay.Cache[sched.Hash] // used without bytes
	real  *realStore                // used with bytes
	link  time.Duration             // the store's network is in use until this time
}

func newStore(r *run, o Store) (s *store, err error) {
	s = &store{run: r, o: o}
	if r.o.Bytes != nil {
		s.real, err = newKept(r, o.Blocks)
		return s, err
	}
	s.names = replay.NewCache[sched.Hash](o.Blocks)
	return s, nil
}

func (s *store) close() error {
	if s == nil || s.real == nil {
		return nil
	}
	return s.real.close()
}

// match returns how many tokens, beyond the first `local` ones, the store has. At least one token is left to compute.
func (s *store) match(q *request, local int) int {
	size := s.run.o.Profile.BlockTokens
	first, limit := local/size, (q.Input-1)/size
	n := first
	if s.real != nil && first < limit {
		n = max(first, s.real.hit(q, min(limit, first+maxLoad)))
	}
	for s.real == nil && n < limit && s.names.Has(q.hash(size, n)) {
		n++
	}
	return (n - first) * size
}

// load brings the KV of `external` tokens of a request of e into the request's blocks.
func (s *store) load(e *engine, r *sched.Request, external int) {
	p := s.run.o.Profile
	bytes := float64(external) * p.Model.KVBytes()
	begin := max(s.run.now, s.link)
	s.link = begin + time.Duration(bytes/(s.o.GBps*1e9)*1e9)
	s.run.loaded += int64(bytes)
	land := func() {}
	if s.real != nil {
		table, n := r.Tables()[0], external/p.BlockTokens
		land = s.real.load(e, r.Data.(*request), table, len(table)-n, len(table))
	}
	s.run.at(s.link+s.o.Latency, func() {
		land()
		e.out.Arrived = append(e.out.Arrived, r.ID)
		e.turn()
	})
}

// put keeps the hashes of the full blocks of q's prompt. In a run with bytes it does nothing: the blocks were stored when the engine
// still had them.
func (s *store) put(q *request) {
	if s.real != nil {
		return
	}
	size := s.run.o.Profile.BlockTokens
	s.names.PutRun(q.Input/size, func(i int) sched.Hash { return q.hash(size, i) })
}
