// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// Stages of a pipeline may have unlike object groups: one with windows, one without. What
// a lookup promises of them can be loaded, whichever registered last; what cannot be
// looked up together is a miss.
func TestStagesOfUnlikeGroupsLoadWhatHits(t *testing.T) {
	full := lmcache.EngineGroup{ID: 0, Layers: []int{0, 1}, TokensPerBlock: 16, WindowTokens: -1}
	window := lmcache.EngineGroup{ID: 1, Layers: []int{2}, TokensPerBlock: 16, WindowTokens: 40}
	longer := window
	longer.WindowTokens = 80
	f := func(name string, want int64, order []int, stages ...[]lmcache.EngineGroup) {
		t.Helper()
		n := startDriven(t, t.TempDir(), "pool", server.Options{SeparateGroups: true})
		defer n.stop()
		var workers []*engine
		for _, groups := range stages {
			e := n.newEngine(groups...)
			e.reg.WorldSize = len(stages)
			workers = append(workers, e)
		}
		for _, i := range order {
			workers[i].register()
		}
		prompt := tokens(5*drivenChunk+3, 1)
		key := func(worker int, request string) []byte {
			k := workers[0].key(prompt, 0, 5*drivenChunk, request)
			k.WorldSize, k.Worker = len(stages), worker
			return k.Append(nil)
		}
		blocks := func(i int) []byte {
			var of [][]int
			for range stages[i] {
				of = append(of, span(1+10*len(of), 10))
			}
			return lmcache.AppendBlockIDs(nil, of)
		}
		id := func(i int) []byte { return lmcache.AppendInt(nil, workers[i].reg.InstanceID) }
		for i := range workers {
			got, err := lmcache.DecodeCopied(n.call(lmcache.OpStore, key(i, "s"), id(i), blocks(i), lmcache.AppendBytes(nil, nil)))
			if err != nil || !got.OK {
				t.Fatal(got, err)
			}
		}
		n.call(lmcache.OpLookup, key(lmcache.AllWorkers, "r"), lmcache.AppendInt(nil, 1))
		hit, err := lmcache.DecodeInt(n.call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, "r")))
		if err != nil {
			t.Fatal(err)
		}
		for i := range workers {
			if hit == 0 {
				break
			}
			got, err := lmcache.DecodeCopied(n.call(lmcache.OpRetrieve, key(i, "r"), id(i), blocks(i), lmcache.AppendBytes(nil, nil), lmcache.AppendInt(nil, 0)))
			if err != nil || !got.OK {
				t.Errorf("%s, registered as %v: a hit of %d chunks, and stage %d cannot load them: %+v, %v\n%s", name, order, hit, i, got, err, n.log)
			}
		}
		if got := strings.Contains(n.log.String(), "unlike object groups"); got != (want == 0) || hit != want {
			t.Errorf("%s, registered as %v: a hit of %d chunks, want %d; said that they are unlike: %v", name, order, hit, want, got)
		}
	}
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		f("windows in the first stage", 0, order, []lmcache.EngineGroup{full, window}, []lmcache.EngineGroup{full})
		f("windows in the last stage", 0, order, []lmcache.EngineGroup{full}, []lmcache.EngineGroup{full, window})
		f("windows in both", 5, order, []lmcache.EngineGroup{full, window}, []lmcache.EngineGroup{full, window})
		f("unlike windows", 0, order, []lmcache.EngineGroup{full, window}, []lmcache.EngineGroup{full, longer})
	}
}
