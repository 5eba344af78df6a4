// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"testing"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/store/evict"
)

// liveBlocks returns the mean number of blocks of the live sessions.
func liveBlocks(requests []workload.Request) int {
	left, live := map[int]int{}, map[int]int{}
	for i := range requests {
		left[requests[i].Conversation]++
	}
	sum, now := 0, 0
	for i := range requests {
		q := &requests[i]
		now += len(q.Blocks) - live[q.Conversation]
		live[q.Conversation] = len(q.Blocks)
		if left[q.Conversation]--; left[q.Conversation] == 0 {
			now -= len(q.Blocks)
		}
		sum += now
	}
	return sum / max(1, len(requests))
}

// 14 coding agents run at a time, and their live KV is 1.8 times the pool. Where all pause equally long, an LRU evicts each session
// just before its next request.
func TestTheDefaultServesAgents(t *testing.T) {
	f := func(name string, o workload.AgentOptions, more float64) {
		t.Helper()
		requests := workload.Agents(2212, o)
		p := numbered(t, requests)
		pool := liveBlocks(requests) * 10 / 18
		r, err := ComparePolicies(t.Context(), requests, PolicyOptions{Capacities: []int{pool}, Policies: []string{"lru", evict.Default}})
		if err != nil {
			t.Fatal(err)
		}
		lru, own, most := r.Rows[0].TokenHit, r.Rows[1].TokenHit, r.Rows[2].TokenHit
		t.Logf("%s: pool of %d blocks, %.1f times that distinct: optimum %.1f %%, lru %.1f %%, %s %.1f %% of the prompt tokens",
			name, pool, float64(p.blocks)/float64(pool), 100*most, 100*lru, evict.Default, 100*own)
		if own < min(0.45, 0.8*most) || own < lru+more {
			t.Errorf("%s: %.1f %% of the prompt tokens hit; lru %.1f %%, optimum %.1f %%", name, 100*own, 100*lru, 100*most)
		}
	}
	for seed := range uint64(3) {
		f("pauses of seconds and minutes", workload.AgentOptions{Seed: seed}, 0)
		f("equal pauses", workload.AgentOptions{Seed: seed, Spread: 0.05, SubAgents: -1}, 0.15)
	}
}
