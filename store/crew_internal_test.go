// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// One call of Wake makes as many goroutines work at once as there are, and as there is work for.
// All end with the context.
func TestOneWakesTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		c := newCrew()
		left := atomic.Int64{}
		left.Store(12)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			c.Run(ctx, 4, func() bool {
				if left.Add(-1) < 0 {
					return false
				}
				time.Sleep(time.Second)
				return true
			})
		}()
		synctest.Wait()
		if left.Load() != 12 {
			t.Error("somebody works although nobody was woken")
		}
		c.Wake()
		time.Sleep(6 * time.Second) // the first one works alone for a second; then others join it
		if n := left.Load(); n > 0 {
			t.Errorf("%d pieces of work are left", n)
		}
		cancel()
		<-ended
	})
}
