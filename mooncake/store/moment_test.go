// SPDX-License-Identifier: Apache-2.0

package store

import (
	"sync/atomic"
	"testing"
	"time"
)

// The wall's time is without the steady clock's reading: else both would stand still while the machine sleeps.
func TestMomentHasBothClocks(t *testing.T) {
	if m := now(); m.wall != m.wall.Round(0) || m.steady == m.steady.Round(0) {
		t.Error(m)
	}
}

// Bytes that have all come are not believed where the machine slept while they came.
func TestSleepDuringTheRead(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{7}}}}); errs[0] != nil {
		t.Fatal(errs)
	}
	var looks atomic.Int64
	c.client.now = func() twoClocks {
		m := now()
		if looks.Add(1) > 2 { // the question, and how much of the lease is left for the read
			m.wall = m.wall.Add(time.Hour)
		}
		return m
	}
	got := []byte{0}
	if err := c.client.Get(t.Context(), []Object{{"a", [][]byte{got}}})[0]; err != LeaseExpired {
		t.Error(err)
	}
	if got[0] != 7 || looks.Load() != 3 {
		t.Error("the bytes did not come, or the clocks were looked at otherwise", got, looks.Load())
	}
}
