// SPDX-License-Identifier: Apache-2.0

package histogram_test

import (
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
)

// An amount is counted in the first bucket whose bound it does not pass, and the counts of two
// goroutines add up.
func TestHistogram(t *testing.T) {
	h := histogram.Times()
	bounds := h.Counts().Bounds
	for i, b := range bounds {
		h.Observe(b)
		h.Observe(b + 1)
		if i > 0 && b <= bounds[i-1] {
			t.Errorf("bound %d is %v after %v", i, b, bounds[i-1])
		}
	}
	h.Took(-time.Second) // a clock that stepped back
	c := h.Counts()
	if c.Buckets[0] != 2 || c.Buckets[1] != 2 || c.Buckets[len(bounds)] != 1 {
		t.Errorf("buckets %v", c.Buckets)
	}
	if want := uint64(2*len(bounds) + 1); c.Total() != want {
		t.Errorf("%d in all, want %d", c.Total(), want)
	}
	if bound, n := c.Below(1); bound != 3e-05 || n != 4 {
		t.Errorf("%d at most %v", n, bound)
	}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for range 1000 {
				h.Took(time.Millisecond)
			}
		})
	}
	wg.Wait()
	after := h.Counts()
	if after.Total()-c.Total() != 2000 || after.Sum-c.Sum != int64(2*time.Second) {
		t.Errorf("%d more, %v longer", after.Total()-c.Total(), after.Sum-c.Sum)
	}
	if n := testing.AllocsPerRun(10, func() { h.Took(time.Second) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	items := histogram.New(1, 1, 4)
	items.Observe(3)
	counts := items.Counts()
	if bound, n := counts.Below(1); bound != 4 || n != 1 {
		t.Errorf("%d at most %v", n, bound)
	}
}
