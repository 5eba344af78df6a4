// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/store"
)

// A LoadTimeout that means "never" is one: however long it is, objects are read.
func TestLoadTimeoutOfYears(t *testing.T) {
	for _, timeout := range []time.Duration{999_999_999 * time.Second, math.MaxInt64} {
		synctest.Test(t, func(t *testing.T) {
			const n = 5
			b := newTiered(t, n, "read * slow 1s", store.Options{LoadTimeout: timeout})
			defer b.close()
			h := prompt(1, n)
			keep(t, b.memory, one, h...)
			if got := b.await(t, nobody, one, h); got.Hit != n || got.Below != n {
				t.Errorf("%v: %+v", timeout, got)
			}
			b.store.EndSession([]byte("r"), nobody)
			b.idle()
		})
	}
}
