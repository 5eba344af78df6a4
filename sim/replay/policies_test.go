// SPDX-License-Identifier: Apache-2.0

package replay_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/replay"
	"github.com/kvasir-kv/kvasir/store/evict"
)

// best returns the true optimum: it tries every set of blocks that a cache could keep after each request.
func best(prompts [][]int64, capacity int) int {
	type state = uint32 // a bit for each block
	at := map[state]int{0: 0}
	for _, prompt := range prompts {
		next := map[state]int{}
		for kept, hits := range at {
			for _, b := range prompt {
				if kept&(1<<b) == 0 {
					break
				}
				hits++
			}
			all := kept
			for _, b := range prompt {
				all |= 1 << b
			}
			for sub := all; ; sub = (sub - 1) & all {
				n := 0
				for x := sub; x != 0; x &= x - 1 {
					n++
				}
				if h, ok := next[sub]; n <= capacity && (!ok || h < hits) {
					next[sub] = hits
				}
				if sub == 0 {
					break
				}
			}
		}
		at = next
	}
	most := 0
	for _, hits := range at {
		most = max(most, hits)
	}
	return most
}

// On small random trees of prompts the optimum equals the result of best, and no policy has more hits.
// With room for all blocks, all policies have the same hits.
func TestOptimumIsExact(t *testing.T) {
	paths := [][]int64{{0, 1, 2}, {0, 1, 3}, {0, 4}, {5, 6, 7}, {5}, {8}}
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 9))
		var prompts [][]int64
		var requests []workload.Request
		for range 12 {
			p := paths[r.IntN(len(paths))]
			p = p[:1+r.IntN(len(p))]
			prompts = append(prompts, p)
			requests = append(requests, workload.Request{Input: 10*len(p) + 3, Blocks: append(append([]int64(nil), p...), 99), BlockTokens: 10})
		}
		for _, capacity := range []int{1, 2, 3, 5, 9} {
			got, err := replay.ComparePolicies(t.Context(), requests, replay.PolicyOptions{Capacities: []int{capacity}})
			if err != nil {
				t.Fatal(err)
			}
			want := best(prompts, capacity)
			for _, row := range got.Rows {
				switch {
				case row.Policy == replay.Optimum && int(row.HitBlocks) != want:
					t.Errorf("seed %d, %d blocks: the optimum has %d hits, trying all finds %d", seed, capacity, row.HitBlocks, want)
				case int(row.HitBlocks) > want:
					t.Errorf("seed %d, %d blocks: %s has %d hits, of %d possible", seed, capacity, row.Policy, row.HitBlocks, want)
				case capacity == 9 && row.HitBlocks != got.Best:
					t.Errorf("seed %d: %s has %d hits with room for all, want %d", seed, row.Policy, row.HitBlocks, got.Best)
				}
			}
		}
	}
}

// All tokens of hit blocks count, those of the last, partial block never. A block hits only when all blocks
// before it hit.
func TestRates(t *testing.T) {
	r, err := replay.ComparePolicies(t.Context(), []workload.Request{
		{Input: 25, Blocks: []int64{1, 2, 3}, BlockTokens: 10},
		{Input: 25, Blocks: []int64{1, 2, 3}, BlockTokens: 10},
		{Input: 20, Blocks: []int64{4, 2}, BlockTokens: 10},
	}, replay.PolicyOptions{Capacities: []int{10}, Policies: []string{"lru"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Rows[0]; r.Blocks != 6 || r.Tokens != 70 || r.Best != 2 || got.HitBlocks != 2 || got.BlockHit != 2.0/6 || got.TokenHit != 20.0/70 {
		t.Errorf("%+v", r)
	}
}

// turns makes conversations with very different pauses, each of which continues with a chance that
// depends on the turn. Beside them are long prompts that come once.
func turns(n int, seed uint64) (out []workload.Request) {
	r := rand.New(rand.NewPCG(seed, 7))
	type chat struct {
		blocks []int64
		at     int
	}
	var open []chat
	block := int64(0)
	fresh := func(n int) (b []int64) {
		for range n {
			block++
			b = append(b, block)
		}
		return b
	}
	for now := 0; len(out) < n; now++ {
		var c chat
		due := -1
		for i := range open {
			if open[i].at <= now && (due < 0 || open[i].at < open[due].at) {
				due = i
			}
		}
		if due >= 0 {
			c = open[due]
			open[due] = open[len(open)-1]
			open = open[:len(open)-1]
			c.blocks = append(c.blocks[:len(c.blocks):len(c.blocks)], fresh(1+r.IntN(2))...)
		} else {
			c.blocks = append([]int64{-int64(r.IntN(4)) - 1}, fresh(1<<r.IntN(7))...)
		}
		out = append(out, workload.Request{
			Arrival: time.Duration(now) * time.Millisecond, Input: 512 * len(c.blocks), Blocks: c.blocks, BlockTokens: 512,
		})
		if goesOn := 0.2; due >= 0 || len(c.blocks) < 8 {
			if due >= 0 {
				goesOn = 0.7
			}
			if r.Float64() < goesOn {
				c.at = now + 20 + int(r.ExpFloat64()*80)
				open = append(open, c)
			}
		}
	}
	return out
}

// The default policy closes a part of the gap on workloads to which it was not fitted, and is not below an LRU at
// any size: on two kinds of conversations, also one after the other, and on those of package workload.
func TestTheDefaultLearnsOtherWorkloads(t *testing.T) {
	f := func(name string, requests []workload.Request, gap float64, sizes ...int) {
		t.Helper()
		r, err := replay.ComparePolicies(t.Context(), requests, replay.PolicyOptions{Capacities: sizes, Policies: []string{"lru", evict.Default}})
		if err != nil {
			t.Fatal(err)
		}
		sum, lru := 0.0, int64(0)
		for _, row := range r.Rows {
			switch row.Policy {
			case "lru":
				lru = row.HitBlocks
			case evict.Default:
				sum += row.Gap
				t.Logf("%s, %d blocks: lru %d, %s %d, %.1f %% of the gap", name, row.Capacity, lru, row.Policy, row.HitBlocks, 100*row.Gap)
				if row.HitBlocks < lru-r.Blocks/500 {
					t.Errorf("%s, %d blocks: %s has %d hits, lru %d", name, row.Capacity, row.Policy, row.HitBlocks, lru)
				}
			}
		}
		if sum/float64(len(sizes)) < gap {
			t.Errorf("%s: %.1f %% of the gap on average, want %.1f %%", name, 100*sum/float64(len(sizes)), 100*gap)
		}
	}
	f("turns", turns(3000, 1), 0.15, 200, 1000, 4000)
	f("chats", workload.Chats(3000, workload.ChatOptions{Seed: 1, Open: 100, Turns: 6}), -0.01, 100, 600)
	f("documents", documentRequests(4000), 0.3, 250, 1000, 4000, 16000)
	f("turns, then chats", append(turns(1500, 3), workload.Chats(1500, workload.ChatOptions{Open: 100})...), 0.05, 200, 1000)
}

// documentRequests returns questions about documents of different popularity. A question comes once. Its document comes again, and is never at
// the end of a prompt.
func documentRequests(n int) (out []workload.Request) {
	r := rand.New(rand.NewPCG(5, 2))
	popularity := rand.NewZipf(r, 1.1, 4, 8000)
	for i := range n {
		document := int64(popularity.Uint64())
		var blocks []int64
		for b := range 4 + document*7919%40 {
			blocks = append(blocks, 1000+document*64+b)
		}
		blocks = append(blocks, 1<<30+int64(i))
		out = append(out, workload.Request{Input: 512 * len(blocks), Blocks: blocks, BlockTokens: 512})
	}
	return out
}

func TestRefuses(t *testing.T) {
	one := []workload.Request{{Input: 10, Blocks: []int64{1}, BlockTokens: 10}}
	f := func(want string, o replay.PolicyOptions) {
		t.Helper()
		if r, err := replay.ComparePolicies(t.Context(), one, o); !errors.Is(err, replay.ErrOptions) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, %v", o, r, err)
		}
	}
	f("capacity of 0", replay.PolicyOptions{Capacities: []int{5, 0}})
	f("capacity of 1073741825", replay.PolicyOptions{Capacities: []int{1 << 30, 1<<30 + 1}})
	f("no capacity", replay.PolicyOptions{})
	f(`"mru"`, replay.PolicyOptions{Capacities: []int{1}, Policies: []string{"mru"}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r, err := replay.ComparePolicies(ctx, one, replay.PolicyOptions{Capacities: []int{1}}); !errors.Is(err, context.Canceled) {
		t.Error(r, err)
	}
}

func TestPrints(t *testing.T) {
	r, err := replay.ComparePolicies(t.Context(), turns(300, 1), replay.PolicyOptions{Capacities: []int{50, 100}})
	if err != nil {
		t.Fatal(err)
	}
	var table, rows, svg bytes.Buffer
	if err := errors.Join(r.Print(&table), r.WriteCSV(&rows), r.WriteSVG(&svg)); err != nil {
		t.Fatal(err)
	}
	lines := 2 * (len(evict.Names) + 1)
	if got := strings.Count(table.String(), " %"); got != 3*lines || !strings.Contains(table.String(), "leaf-hazard") {
		t.Error(table.String())
	}
	if got := strings.Count(rows.String(), "\n"); got != lines+1 || !strings.HasPrefix(rows.String(), "policy,capacity_blocks,block_hit,token_hit,") {
		t.Error(rows.String())
	}
	if got := strings.Count(svg.String(), `<g class="s`); got != len(evict.Names)+1 || strings.Contains(svg.String(), "NaN") {
		t.Error(svg.String())
	}
}
