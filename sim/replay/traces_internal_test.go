// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/store/evict"
)

// On public traces the default policy closes a fifth of the gap between an LRU and the optimum on average. It is never far below an LRU, in
// caches up to the size of all blocks.
func TestTheDefaultOnPublicTraces(t *testing.T) {
	files, err := filepath.Glob("../../../shared/traces/*.jsonl")
	if err != nil || len(files) == 0 {
		t.Skip("no public trace is there")
	}
	for _, file := range files {
		requests := publicTrace(t, file)
		p := numbered(t, requests)
		rows := func(sizes []int, check func(r PolicyRow, lru int64)) {
			r, err := ComparePolicies(t.Context(), requests, PolicyOptions{Capacities: sizes, Policies: []string{"lru", evict.Default}})
			if err != nil {
				t.Fatal(err)
			}
			for i := 0; i < len(r.Rows); i += 3 { // lru, the default, the optimum
				check(r.Rows[i+1], r.Rows[i].HitBlocks)
			}
		}
		var doubled []int
		for size := 1000; size < 2*p.blocks; size *= 2 {
			doubled = append(doubled, size)
		}
		rows(doubled, func(r PolicyRow, lru int64) {
			points := 100 * float64(r.HitBlocks-lru) / float64(p.all)
			t.Logf("%s, %d blocks: %+.2f points, %.1f %% of the gap", filepath.Base(file), r.Capacity, points, 100*r.Gap)
			if points < -0.3 {
				t.Errorf("%s, %d blocks: %.2f points below an LRU; 0.3 are allowed", file, r.Capacity, -points)
			}
		})
		if filepath.Base(file) != "conversation_trace.jsonl" {
			continue
		}
		sum := 0.0
		rows([]int{1000, 2000, 5000, 10_000, 20_000}, func(r PolicyRow, _ int64) {
			if sum += r.Gap; r.Capacity == 10_000 && r.Gap < 0.15 {
				t.Errorf("%d blocks: %.1f %% of the gap, 15 are wanted", r.Capacity, 100*r.Gap)
			}
		})
		if t.Logf("mean %.1f %% of the gap", 100*sum/5); sum/5 < 0.2 {
			t.Errorf("%.1f %% of the gap on average, 20 are wanted", 100*sum/5)
		}
	}
}
