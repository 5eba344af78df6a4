// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// A cache that has the first 64 tokens of any prompt.
type cacheOf64 struct{}

func (cacheOf64) SubmitLookup(string, []uint32, string)                    {}
func (cacheOf64) LookupResult(string) (int, bool)                          { return 64, true }
func (cacheOf64) CleanupLookup(string)                                     {}
func (cacheOf64) FreeLookupLocks(string, []uint32, int, int, string)       {}
func (cacheOf64) EndSession(string)                                        {}
func (cacheOf64) ReportBlockAllocations(records []lmcache.BlockAllocation) {}

// One request through the scheduler: 104 tokens, blocks of 16, chunks of 32. The
// engine's own cache has 16 tokens, the server 64.
func ExampleScheduler() {
	s, err := connector.NewScheduler(cacheOf64{}, connector.SchedulerOptions{BlockTokens: 16, ChunkTokens: 32})
	if err != nil {
		panic(err)
	}
	r := &connector.Request{ID: "r", Tokens: make([]uint32, 104), Hashes: 6}
	m, err := s.Match(r, 16)
	if err != nil {
		panic(err)
	}
	fmt.Println("load", m.Tokens, "tokens")
	if err := s.Allocated(r, [][]int{{10, 11, 12, 13, 14, 15, 16}}, m.Tokens); err != nil {
		panic(err)
	}
	show := func(step *connector.Step) {
		ops, err := s.Step(step)
		if err != nil {
			panic(err)
		}
		for _, op := range ops {
			fmt.Println(op.Direction, op.Start, "to", op.End, "skip", op.SkipFirst, "blocks", op.Blocks[0])
		}
	}
	show(&connector.Step{}) // the request waits for its load
	show(&connector.Step{New: []connector.NewRequest{{ID: "r", Computed: 64}}, Scheduled: map[string]int{"r": 40}})
	// Output:
	// load 48 tokens
	// RETRIEVE 0 to 64 skip 16 blocks [10 11 12 13]
	// STORE 64 to 96 skip 0 blocks [14 15]
}
