// SPDX-License-Identifier: Apache-2.0

package statefile_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/statefile"
)

// TestManyChangesAreFewWritesAndTheLastIsAmongThem changes something a thousand times in
// a second.
func TestManyChangesAreFewWritesAndTheLastIsAmongThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var state, written, writes atomic.Int64
		w := statefile.NewPacedWriter(100*time.Millisecond, func() {
			written.Store(state.Load())
			writes.Add(1)
		})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go w.Run(ctx)
		for i := range 1000 {
			state.Store(int64(i + 1))
			w.Changed()
			if i == 0 && written.Load() != 1 {
				t.Error("the first change is written at once")
			}
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if n := writes.Load(); written.Load() != 1000 || n < 8 || n > 12 {
			t.Errorf("%d writes, the last of state %d", n, written.Load())
		}
	})
}

// TestASlowWriteIsFollowedByARest and Flush does not wait for its end.
func TestASlowWriteIsFollowedByARest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var writes atomic.Int64
		w := statefile.NewPacedWriter(100*time.Millisecond, func() {
			time.Sleep(time.Second)
			writes.Add(1)
		})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go w.Run(ctx)
		w.Changed()
		w.Changed()
		time.Sleep(9 * time.Second)
		synctest.Wait()
		if n := writes.Load(); n != 1 {
			t.Errorf("%d writes of a second each in ten", n)
		}
		w.Flush()
		w.Flush()
		if n := writes.Load(); n != 2 {
			t.Errorf("what was due is flushed once: %d writes", n)
		}
	})
}
