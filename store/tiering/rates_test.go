// SPDX-License-Identifier: Apache-2.0

package tiering_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/store/tiering"
)

// compute has one request compute so many bytes in two workers' shards.
func compute(r *tiering.Rates, request string, bytes int64, took time.Duration) {
	r.Answered([]byte(request))
	time.Sleep(took)
	r.Stored([]byte(request), bytes/2)
	r.Stored([]byte(request), bytes/2)
}

// A tier is asked until both rates are known, and then if it is the faster one; a slower
// one is tried now and then, and is asked again once it has become faster.
func TestWorthLoading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r tiering.Rates
		for i := range 10 {
			if !r.WorthLoading() {
				t.Fatal("it is not asked before anything is known")
			}
			compute(&r, fmt.Sprint(i), 100e6, time.Second)
		}
		if got := r.Stats(); got.ComputeRate < 90e6 || got.ComputeRate > 110e6 || got.LoadRate != 0 {
			t.Errorf("%+v", got)
		}
		for range 10 {
			r.Loaded(10e6, time.Second)
		}
		asked := 0
		for range 160 {
			if r.WorthLoading() {
				asked++
			}
		}
		if got := r.Stats(); asked != 10 || got.Skipped != 160 || got.LoadRate < 9e6 || got.LoadRate > 11e6 {
			t.Errorf("asked %d of 160 times, %+v", asked, got)
		}
		for range 100 { // it has become faster
			r.Loaded(500e6, time.Second)
		}
		if !r.WorthLoading() {
			t.Errorf("it is not asked: %+v", r.Stats())
		}
	})
}

// Only what a request has computed counts, and requests that never store are forgotten.
func TestRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r tiering.Rates
		for range 10 {
			r.Stored([]byte("whole hit"), 1e9)
		}
		if got := r.Stats(); got.ComputeRate != 0 {
			t.Errorf("%+v", got)
		}
		for i := range 10_000 {
			r.Answered(fmt.Append(nil, i))
		}
		time.Sleep(time.Second)
		for i := range 10_000 {
			r.Stored(fmt.Append(nil, i), 1e6)
		}
		if got := r.Stats(); got.ComputeRate < 0.9e6 || got.ComputeRate > 1.1e6 {
			t.Errorf("%+v", got)
		}
	})
}

// At most 4,096 requests compute: the oldest of more is forgotten, and no other.
func TestRequestsThatComputeAreBounded(t *testing.T) {
	const most = 4096
	for _, n := range []int{most, most + 1} {
		synctest.Test(t, func(t *testing.T) {
			var r tiering.Rates
			for i := range n {
				r.Answered(fmt.Append(nil, i))
			}
			time.Sleep(time.Second)
			for range 8 { // so many make the rate known
				r.Stored([]byte("0"), 1e6)
			}
			if known := r.Stats().ComputeRate > 0; known != (n == most) {
				t.Errorf("the first of %d requests counts: %v", n, known)
			}
			for range 8 {
				r.Stored([]byte("1"), 1e6)
			}
			if r.Stats().ComputeRate == 0 {
				t.Errorf("the second of %d requests does not count", n)
			}
		})
	}
}
