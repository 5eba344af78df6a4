// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/store"
)

// A request whose whole prompt hit computes none of it: what it stores later, of its answer, is no measure of how fast engines compute
// prompts.
func TestWholeHitsMeasureNoComputing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, found := range []int{1, 2} {
			b := newTiered(t, 64, "", store.Options{LoadIfFaster: true, Write: store.WriteNever})
			for seed := range 8 {
				h := prompt(10+seed, 4)[1:]
				b.put("p", h, 0, found, found)
				if got := b.await(t, nobody, one, h[:2]); got.Hit != found {
					t.Fatalf("%+v", got)
				}
				time.Sleep(time.Second)
				b.put("r", h, 2, 3, 1)
				b.store.EndSession([]byte("r"), nobody)
			}
			if rate := b.store.Stats().Rates.ComputeRate; (rate > 0) != (found < 2) {
				t.Errorf("%d of 2 chunks found: engines compute %v bytes/s", found, rate)
			}
			b.close()
		}
	})
}

// Many sessions that say nothing any more end together.
func TestAllIdleSessionsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many = 5000 // more than end in one section of the lock
		b := newBench(t, t.TempDir(), 4, store.Options{SessionIdle: time.Minute})
		defer b.stop()
		for i := range many {
			b.store.NoHit(fmt.Append(nil, i), nobody)
		}
		time.Sleep(time.Minute)
		b.store.Expire()
		if got := b.store.Stats(); got.SessionsExpired != many || got.Sessions != 0 {
			t.Errorf("%d of %d ended, %d are left", got.SessionsExpired, many, got.Sessions)
		}
	})
}

// A hit that comes from below may have more objects than are taken in one section of the lock.
func TestLongHitsFromBelow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const many = 2500
		b := newTiered(t, many, "", store.Options{})
		defer b.close()
		h := prompt(1, many)
		keep(t, b.memory, one, h...)
		if got := b.await(t, nobody, one, h); got.Hit != many {
			t.Errorf("%+v", got)
		}
		b.store.EndSession([]byte("r"), nobody)
	})
}
