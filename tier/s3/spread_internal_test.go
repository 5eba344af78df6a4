// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A fault that goes on is logged once an hour, each kind separately.
func TestSaidOnceAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s warnings
		f := func(what string, want bool) {
			t.Helper()
			if got := s.now(what); got != want {
				t.Errorf("%s: %v", what, got)
			}
		}
		f("a", true)
		f("a", false)
		f("b", true)
		time.Sleep(sayEvery - time.Nanosecond)
		f("a", false)
		time.Sleep(time.Nanosecond)
		f("a", true)
		f("a", false)
	})
}

// The requests of one call go out at the same time, as many as the width allows.
func TestRequestsOfOneCallGoTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls, now, most atomic.Int64
		err := spread(t.Context(), 4, 10, func(context.Context, int) error {
			calls.Add(1)
			if n := now.Add(1); n > most.Load() {
				most.Store(n)
			}
			time.Sleep(time.Second)
			now.Add(-1)
			return nil
		})
		if err != nil || calls.Load() != 10 || most.Load() != 4 {
			t.Errorf("%d calls, %d at once, %v", calls.Load(), most.Load(), err)
		}
	})
}
