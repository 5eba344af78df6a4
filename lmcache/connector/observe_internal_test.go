// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// Each operation counts in the one figure of its kind and its end.
func TestOperationsAreCountedByKindAndEnd(t *testing.T) {
	f := func(direction lmcache.Direction, ok bool, want [4]uint64) {
		t.Helper()
		n := workerCounters{storeTimes: histogram.Times(), loadTimes: histogram.Times()}
		n.observe(&job{LoadStore: lmcache.LoadStore{Direction: direction}}, ok, time.Millisecond)
		got := [4]uint64{n.stores.Load(), n.storesFailed.Load(), n.loads.Load(), n.loadsFailed.Load()}
		if got != want {
			t.Errorf("%v, %v: %v, want %v", direction, ok, got, want)
		}
	}
	f(lmcache.Store, true, [4]uint64{1, 0, 0, 0})
	f(lmcache.Store, false, [4]uint64{0, 1, 0, 0})
	f(lmcache.Retrieve, true, [4]uint64{0, 0, 1, 0})
	f(lmcache.Retrieve, false, [4]uint64{0, 0, 0, 1})
}
