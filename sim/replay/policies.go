// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/store/evict"
)

// ErrOptions means that the options cannot be played.
var ErrOptions = errors.New("replay: invalid options")

// Optimum names the rows of the policy that knows the future.
const Optimum = "optimum"

// MaxCapacity bounds a size, in blocks.
const MaxCapacity = 1 << 30

// PolicyOptions says what to play. A zero field means its default.
type PolicyOptions struct {
	Policies   []string // default all of evict.Names; Optimum is always played
	Capacities []int    // sizes in blocks
}

// PolicyRow is one policy at one size.
type PolicyRow struct {
	Policy   string  `json:"policy"`
	Capacity int     `json:"capacity_blocks"`
	BlockHit float64 `json:"block_hit"` // of the full blocks of all prompts, those in a row from a prompt's start that were there
	TokenHit float64 `json:"token_hit"` // the tokens of these blocks, of all tokens of the prompts

	HitBlocks int64   `json:"hit_blocks"`
	Gap       float64 `json:"gap"` // part of the way from lru to the optimum; 0 where there is none
}

// PolicyResult is the outcome of ComparePolicies.
type PolicyResult struct {
	Default  string      `json:"default"` // a server's default policy
	Requests int         `json:"requests"`
	Blocks   int64       `json:"blocks"` // full ones
	Tokens   int64       `json:"tokens"`
	Best     int64       `json:"hit_blocks_unlimited"` // with room for all
	Rows     []PolicyRow `json:"rows"`
}

// prompts are the full blocks of a trace's prompts, numbered from 1; 0 is no block.
type prompts struct {
	of     [][]uint32
	blocks int // distinct
	size   int // tokens of a block
}

// numberPrompts names the full blocks of the requests by numbers. A block is what its name and all before
// it say: a name that comes after two beginnings is two blocks.
func numberPrompts(requests []workload.Request) (p prompts, all, tokens int64) {
	type step struct {
		before uint32
		name   int64
	}
	seen := make(map[step]uint32)
	p.of = make([][]uint32, len(requests))
	for i := range requests {
		q := &requests[i]
		p.size = q.BlockTokens
		tokens += int64(q.Input)
		at := uint32(0)
		for _, name := range q.Blocks[:min(len(q.Blocks), q.Input/q.BlockTokens)] {
			n := seen[step{at, name}]
			if n == 0 {
				n = uint32(len(seen) + 1)
				seen[step{at, name}] = n
			}
			p.of[i] = append(p.of[i], n)
			at = n
		}
		all += int64(len(p.of[i]))
	}
	p.blocks = len(seen)
	return p, all, tokens
}

func (o *PolicyOptions) check() error {
	for _, c := range o.Capacities {
		if c < 1 || c > MaxCapacity {
			return fmt.Errorf("%w: a capacity of %d blocks is outside 1 to %d", ErrOptions, c, MaxCapacity)
		}
	}
	if len(o.Capacities) == 0 {
		return fmt.Errorf("%w: no capacity", ErrOptions)
	}
	for _, name := range o.Policies {
		if !slices.Contains(evict.Names, name) {
			return fmt.Errorf("%w: policy %q; known are %s", ErrOptions, name, strings.Join(evict.Names, ", "))
		}
	}
	return nil
}

// ComparePolicies plays eviction policies against a trace: it counts what a store of a given size would have had of the
// prompts under each policy, and what the best one, which knows the future, would have had. It plays every policy at every
// size. When ctx ends, the rows so far are returned with its error.
// Errors: ErrOptions, that of evict.New, that of ctx.
func ComparePolicies(ctx context.Context, requests []workload.Request, o PolicyOptions) (*PolicyResult, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if len(o.Policies) == 0 {
		o.Policies = evict.Names
	}
	p, blocks, tokens := numberPrompts(requests)
	r := &PolicyResult{Default: evict.Default, Requests: len(requests), Blocks: blocks, Tokens: tokens}
	best, err := optimum(ctx, p, p.blocks+1)
	if err != nil {
		return nil, err
	}
	r.Best = best
	for _, capacity := range o.Capacities {
		most, err := optimum(ctx, p, capacity)
		if err != nil {
			return r, err
		}
		least, err := playPolicy(ctx, p, "lru", capacity)
		if err != nil {
			return r, err
		}
		add := func(policy string, hits int64) {
			row := PolicyRow{Policy: policy, Capacity: capacity, HitBlocks: hits}
			if blocks > 0 {
				row.BlockHit = float64(hits) / float64(blocks)
				row.TokenHit = float64(hits*int64(p.size)) / float64(tokens)
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

// playPolicy counts the hits of a policy. It is asked as a store asks: what is there of a prompt is busy
// while the rest is stored, head first; then the new blocks are added and the others used, tail
// first.
func playPolicy(ctx context.Context, p prompts, policy string, capacity int) (hits int64, err error) {
	e, err := evict.New(policy, int64(capacity))
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrOptions, err)
	}
	const absent = ^uint32(0)
	at := make([]uint32, p.blocks+1) // the slot of each block
	for i := range at {
		at[i] = absent
	}
	var holds []uint32 // the block of each slot
	var busyIn []int   // by slot: the last request, from 1, that it was part of
	var free []uint32
	for i, blocks := range p.of {
		if i%256 == 0 && ctx.Err() != nil {
			return 0, ctx.Err()
		}
		there := 0
		for there < len(blocks) && at[blocks[there]] != absent {
			there++
		}
		hits += int64(there)
		for _, b := range blocks {
			if at[b] != absent {
				busyIn[at[b]] = i + 1
			}
		}
		isNew := make([]bool, len(blocks))
		for k, b := range blocks {
			if at[b] != absent {
				continue
			}
			slot, ok := uint32(len(holds)), true
			switch {
			case len(free) > 0:
				slot, free = free[len(free)-1], free[:len(free)-1]
			case len(holds) < capacity:
				holds, busyIn = append(holds, 0), append(busyIn, 0)
			default:
				if slot, ok = victim(e, func(s uint32) bool { return busyIn[s] == i+1 }); ok {
					e.Remove(slot)
					at[holds[slot]] = absent
				}
			}
			if !ok {
				break // the prompt's tail finds no room
			}
			holds[slot], at[b], busyIn[slot], isNew[k] = b, slot, i+1, true
		}
		for k := len(blocks) - 1; k >= 0; k-- {
			switch slot := at[blocks[k]]; {
			case isNew[k]:
				parent := uint64(0)
				if k > 0 {
					parent = uint64(blocks[k-1])
				}
				e.Add(slot, uint64(blocks[k]), parent, 1)
			case slot != absent:
				e.Use(slot)
			}
		}
	}
	return hits, nil
}

func victim(e evict.Policy, busy func(uint32) bool) (slot uint32, ok bool) {
	for more := true; more && !ok; {
		slot, ok, more = e.Victim(busy)
	}
	return slot, ok
}
