// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"testing"
	"time"
)

// The reserve shrinks to three times the largest burst that was seen, and only while bursts can be seen.
func TestReserveFollowsBursts(t *testing.T) {
	now := time.Now()
	r := newReserve(1000<<20, now)
	r.file = 1 << 10
	pass := func(d time.Duration, excess int64) {
		for range d / time.Second {
			now = now.Add(time.Second)
			r.note(excess, now)
		}
	}
	want := func(what string, bytes int64) {
		t.Helper()
		if r.bytes != bytes {
			t.Errorf("%s: %d bytes, want %d", what, r.bytes, bytes)
		}
	}
	pass(time.Hour, -1)
	want("below the aim", 250<<20)
	pass(5*time.Minute, 10<<20)
	want("bursts of 10 MiB", 30<<20)
	pass(time.Second, 40<<20)
	want("one of 40 MiB", 120<<20)
	pass(9*time.Minute, 10<<20)
	want("soon after it", 120<<20)
	pass(15*time.Minute, 10<<20)
	want("long after it", 30<<20)
	pass(time.Second, 500<<20)
	want("a burst of half the limit", 250<<20)
	pass(30*time.Minute, 1)
	want("almost none", 1000<<20/leastReserve)
	r.file = 1 << 20
	pass(time.Second, 1)
	want("longer files", 32<<20)
}
