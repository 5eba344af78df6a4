// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"fmt"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

type noCache struct{}

func (noCache) SubmitLookup(string, []uint32, string)                    {}
func (noCache) LookupResult(string) (int, bool)                          { return 0, true }
func (noCache) CleanupLookup(string)                                     {}
func (noCache) FreeLookupLocks(string, []uint32, int, int, string)       {}
func (noCache) EndSession(string)                                        {}
func (noCache) ReportBlockAllocations(records []lmcache.BlockAllocation) {}

// A decode step of 256 requests with prompts of 2,048 tokens.
func BenchmarkDecodeStep(b *testing.B) {
	tr, err := connector.NewScheduler(noCache{}, connector.SchedulerOptions{BlockTokens: 16, ChunkTokens: 256})
	if err != nil {
		b.Fatal(err)
	}
	first, s := connector.Step{Scheduled: map[string]int{}}, connector.Step{Scheduled: map[string]int{}}
	for i := range 256 {
		r := &connector.Request{ID: fmt.Sprint(i), Tokens: make([]uint32, 2049), Hashes: 128}
		blocks := make([]int, 129)
		if _, err := tr.Match(r, 0); err != nil {
			b.Fatal(err)
		}
		if err := tr.Allocated(r, [][]int{blocks}, 0); err != nil {
			b.Fatal(err)
		}
		first.New = append(first.New, connector.NewRequest{ID: r.ID})
		first.Scheduled[r.ID] = 2048
		s.Cached = append(s.Cached, connector.CachedRequest{ID: r.ID, Computed: 2048})
		s.Scheduled[r.ID] = 1
	}
	if _, err := tr.Step(&first); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := tr.Step(&s); err != nil {
			b.Fatal(err)
		}
	}
}
