// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/store/evict"
)

// ErrOptions means that options are not valid.
var ErrOptions = errors.New("replay: invalid options")

// Optimum is the name, in rows, of the policy that knows the future.
const Optimum = "optimum"

// MaxCapacity is the largest size of a cache, in blocks. A larger one is ErrOptions.
const MaxCapacity = 1 << 30

// PolicyOptions says which policies to play, at which sizes. A zero field means its default.
type PolicyOptions struct {
	Policies   []string // default all of evict.Names; Optimum is always played, too
	Capacities []int    // sizes of the cache in blocks

	held      int // words of a tape that stay in memory; default maxHeldWords
	different int // most distinct blocks; default maxDifferent
}

// PolicyRow is the result of one policy at one size.
type PolicyRow struct {
	Policy   string  `json:"policy"`
	Capacity int     `json:"capacity_blocks"`
	BlockHit float64 `json:"block_hit"` // hits: share of the full blocks of all prompts that were in the cache, counted in a row from a prompt's start
	TokenHit float64 `json:"token_hit"` // share of all prompt tokens that lie in these blocks

	HitBlocks int64   `json:"hit_blocks"`
	Gap       float64 `json:"gap"` // how much of the way from lru to the optimum the policy achieves; 0 if lru is the optimum
}

// PolicyResult is the result of CompareStream.
type PolicyResult struct {
	Default  string      `json:"default"` // a server's default policy
	Requests int         `json:"requests"`
	Blocks   int64       `json:"blocks"` // full blocks of all prompts
	Tokens   int64       `json:"tokens"`
	Best     int64       `json:"hit_blocks_unlimited"` // hits with room for all blocks
	Rows     []PolicyRow `json:"rows"`
}

func (o *PolicyOptions) check() error {
	for _, c := range o.Capacities {
		if c < 1 || c > MaxCapacity {
			return fmt.Errorf("%w: a capacity of %d blocks is outside 1 to %d", ErrOptions, c, MaxCapacity)
		}
	}
	if len(o.Capacities) == 0 {
		return fmt.Errorf("%w: no capacity of the cache is given", ErrOptions)
	}
	for _, name := range o.Policies {
		if !slices.Contains(evict.Names, name) {
			return fmt.Errorf("%w: policy %q; known are %s", ErrOptions, name, strings.Join(evict.Names, ", "))
		}
	}
	return nil
}

// ComparePolicies does what CompareStream does, for requests that are in memory.
func ComparePolicies(ctx context.Context, requests []workload.Request, o PolicyOptions) (*PolicyResult, error) {
	return CompareStream(ctx, workload.Each(requests), o)
}

// CompareStream plays eviction policies against a trace: it counts how many blocks of the prompts a store of a given size would have
// had under each policy, and under the best policy, which knows the future. It plays every policy at every size. When ctx ends first,
// it returns the rows so far with ctx's error.
//
// It reads the requests once, and keeps 8 bytes for each full block of each prompt: 2^26 of them in memory, the others in temporary
// files without a name in os.TempDir. In addition it takes about 100 bytes for each distinct block. The error is one of the requests,
// ErrOptions, workload.ErrTrace if there are more than 2^26 distinct blocks, one of temporary files, of evict.New, or ctx's.
func CompareStream(ctx context.Context, requests iter.Seq2[workload.Request, error], o PolicyOptions) (*PolicyResult, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if len(o.Policies) == 0 {
		o.Policies = evict.Names
	}
	p, err := numberPrompts(ctx, requests, cmp.Or(o.held, maxHeldWords), cmp.Or(o.different, maxDifferent))
	if err != nil {
		return nil, err
	}
	defer p.close()
	next, err := p.nextUses(ctx)
	if err != nil {
		return nil, err
	}
	defer next.close()
	r := &PolicyResult{Default: evict.Default, Requests: p.requests, Blocks: p.all, Tokens: p.tokens, Best: p.all - int64(p.blocks)}
	for _, capacity := range o.Capacities {
		most, err := optimum(ctx, p, next, capacity)
		if err != nil {
			return r, err
		}
		least, err := playPolicy(ctx, p, "lru", capacity)
		if err != nil {
			return r, err
		}
		add := func(policy string, hits int64) {
			row := PolicyRow{Policy: policy, Capacity: capacity, HitBlocks: hits}
			if p.all > 0 {
				row.BlockHit = float64(hits) / float64(p.all)
				row.TokenHit = float64(hits*int64(p.size)) / float64(p.tokens)
			}
			if most > least {
				row.Gap = float64(hits-least) / float64(most-least)
			}
			r.Rows = append(r.Rows, row)
		}
		for _, policy := range o.Policies {
			hits := least
			if policy != "lru" {
				if hits, err = playPolicy(ctx, p, policy, capacity); err != nil {
					return r, err
				}
			}
			add(policy, hits)
		}
		add(Optimum, most)
	}
	return r, nil
}

// playPolicy counts the hits of one policy at one size.
func playPolicy(ctx context.Context, p *prompts, policy string, capacity int) (hits int64, err error) {
	e, err := evict.New(policy, int64(capacity))
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrOptions, err)
	}
	c := newPlayer(e, capacity, p.blocks)
	err = p.play(ctx, nil, func(_ int, blocks, _ []uint32) bool {
		hits += int64(c.find(blocks))
		c.store(blocks)
		return true
	})
	return hits, err
}

// player is a cache of blocks under a policy. It calls the policy in the same order as a store does: the blocks of a prompt that are in
// the cache are busy while the rest is stored, head first. Then it adds the new blocks and marks the others as used, tail first.
type player struct {
	policy   evict.Policy
	capacity int
	at       []uint32 // slot of each block
	holds    []uint32 // block in each slot
	busyIn   []int    // by slot: number, from 1, of the last request of which its block was a part
	isNew    []bool   // for each block of the current request: it is new
	requests int
}

// absent is the slot of a block that is not in the cache.
const absent = ^uint32(0)

func newPlayer(policy evict.Policy, capacity, blocks int) *player {
	return &player{policy: policy, capacity: capacity, at: slices.Repeat([]uint32{absent}, blocks+1)}
}

// find returns how many leading blocks of a prompt are in the cache.
func (c *player) find(blocks []uint32) (hits int) {
	for hits < len(blocks) && c.at[blocks[hits]] != absent {
		hits++
	}
	return hits
}

// store stores the blocks of a prompt.
func (c *player) store(blocks []uint32) {
	c.requests++
	for _, b := range blocks {
		if c.at[b] != absent {
			c.busyIn[c.at[b]] = c.requests
		}
	}
	c.isNew = append(c.isNew[:0], make([]bool, len(blocks))...)
	for k, b := range blocks {
		if c.at[b] != absent {
			continue
		}
		slot, ok := c.take()
		if !ok {
			break // there is no room for the rest of the prompt
		}
		c.holds[slot], c.at[b], c.busyIn[slot], c.isNew[k] = b, slot, c.requests, true
	}
	for k := len(blocks) - 1; k >= 0; k-- {
		switch slot := c.at[blocks[k]]; {
		case c.isNew[k]:
			parent := uint64(0)
			if k > 0 {
				parent = nameOf(blocks[k-1])
			}
			c.policy.Add(slot, nameOf(blocks[k]), parent, 1)
		case slot != absent:
			c.policy.Use(slot)
		}
	}
}

// take returns a free slot. If there is none, it evicts a block.
func (c *player) take() (slot uint32, ok bool) {
	if len(c.holds) < c.capacity {
		c.holds, c.busyIn = append(c.holds, 0), append(c.busyIn, 0)
		return uint32(len(c.holds) - 1), true
	}
	if slot, ok = victim(c.policy, func(s uint32) bool { return c.busyIn[s] == c.requests }); ok {
		c.policy.Remove(slot)
		c.at[c.holds[slot]] = absent
	}
	return slot, ok
}

// nameOf returns a name for a block with uniform bits, as a hash has (the finalizer of splitmix64).
func nameOf(block uint32) uint64 {
	x := uint64(block) * 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func victim(e evict.Policy, busy func(uint32) bool) (slot uint32, ok bool) {
	for more := true; more && !ok; {
		slot, ok, more = e.Victim(busy)
	}
	return slot, ok
}
