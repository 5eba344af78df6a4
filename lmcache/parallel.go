// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/kv"
)

// ErrParallel means that the sizes of a Parallel contradict each other.
var ErrParallel = errors.New("lmcache: bad parallel sizes")

// Parallel is one worker's place in its engine. It decides which KV shard the worker keeps, and which workers store and read that shard. A
// zero size means 1.
//
// Follows ParallelStrategy of lmcache 0.5.6. With Servers and DCP 1 it agrees
// with vLLM's own adapter, which has neither.
type Parallel struct {
	World   int  // workers of the engine: TP x pipeline stages
	Rank    int  // of this worker, 0 <= Rank < World
	TP      int  // tensor-parallel size, divides World
	DCP     int  // decode-context-parallel size, divides TP
	Servers int  // cache servers that share the workers, divides World
	MLA     bool // every layer keeps one KV for all heads: the workers of a TP group hold the same bytes

	// EveryRankStores makes each MLA rank store its shard, although its peers store the same bytes, as vLLM 0.18 to 0.20 did.
	EveryRankStores bool
}

// Check sets sizes of 0 to 1. It returns an error for sizes that do not divide each other.
func (p Parallel) Check() (Parallel, error) {
	for _, n := range []*int{&p.World, &p.TP, &p.DCP, &p.Servers} {
		if *n == 0 {
			*n = 1
		}
		if *n < 0 {
			return p, fmt.Errorf("%w: %d is negative", ErrParallel, *n)
		}
	}
	switch {
	case p.Rank < 0 || p.Rank >= p.World:
		return p, fmt.Errorf("%w: rank %d is outside 0 to %d", ErrParallel, p.Rank, p.World-1)
	case p.World%p.TP != 0 || p.World%p.Servers != 0 || p.TP%p.DCP != 0:
		return p, fmt.Errorf("%w: %d workers, tensor parallel %d, decode context parallel %d, %d servers: "+
			"tensor parallel and servers must divide the workers, decode context parallel must divide tensor parallel", ErrParallel, p.World, p.TP, p.DCP, p.Servers)
	case p.MLA && p.TP%p.Servers != 0:
		return p, fmt.Errorf("%w: tensor parallel %d, %d servers: for a model of MLA the servers must divide tensor parallel", ErrParallel, p.TP, p.Servers)
	case p.Shards() > kv.MaxWorldSize:
		return p, fmt.Errorf("%w: %d shards per chunk, at most %d", ErrParallel, p.Shards(), kv.MaxWorldSize)
	}
	return p, nil
}

// The methods below are for sizes that passed Check.

// Shards returns the number of KV shards per chunk on one server: the world_size
// of keys and registrations.
func (p Parallel) Shards() int {
	if p.MLA {
		return p.World / p.TP * p.DCP
	}
	return p.World / p.Servers
}

// Shard returns which of the Shards this worker keeps: the worker_id of keys.
func (p Parallel) Shard() int {
	if p.MLA {
		return p.Rank/p.TP*p.DCP + p.Rank%p.TP%p.DCP
	}
	return p.Rank % (p.World / p.Servers)
}

// Readers returns how many workers of one server retrieve the same object: the
// num_kv_readers of a lookup.
func (p Parallel) Readers() int {
	if p.MLA {
		return (p.TP/p.Servers + p.DCP - 1) / p.DCP
	}
	return 1
}

// Stores reports whether this worker stores its shard. Of MLA workers with equal bytes, only the first on each server stores.
func (p Parallel) Stores() bool {
	if !p.MLA || p.EveryRankStores {
		return true
	}
	if p.DCP > 1 {
		return p.Rank%min(p.World/p.Servers, p.TP) < p.DCP
	}
	return p.Rank%(p.TP/p.Servers) == 0
}
