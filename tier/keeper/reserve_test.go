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
			r.note(min(excess, 0), now) // the keeper has unlinked as much
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

// The reserve shrinks with the bytes that were unlinked, so fast engines shrink it in seconds and slow ones in minutes.
func TestReserveShrinksWithWhatWasUnlinked(t *testing.T) {
	now := time.Now()
	r := newReserve(1000<<20, now)
	r.file = 1 << 10
	second := func(excess, unlinked int64) {
		for range 100 {
			now = now.Add(10 * time.Millisecond)
			r.took(unlinked / 100)
			r.note(excess, now)
		}
	}
	want := func(what string, bytes int64) {
		t.Helper()
		if r.bytes != bytes {
			t.Errorf("%s: %d bytes, want %d", what, r.bytes, bytes)
		}
	}
	second(2<<20, 400<<20)
	want("less than half of the limit unlinked", 250<<20)
	second(2<<20, 400<<20)
	want("more than half of it", 125<<20)
	for range 10 {
		second(2<<20, 400<<20)
	}
	want("five times the limit unlinked, bursts of 2 MiB", 6<<20)
	second(50<<20, 400<<20)
	want("a burst of 50 MiB", 150<<20)
	for range 30 {
		second(-1, 0) // the keeper unlinks files for their age
	}
	want("nothing above the aim", 150<<20)
}

// When the reserve grows, the files are far above the new aim. That is no burst, and the reserve does not grow by it again.
func TestReserveThatGrewGrowsNoFurther(t *testing.T) {
	now := time.Now()
	const limit = 1000 << 20
	r := newReserve(limit, now)
	r.file, r.bytes = 1<<10, 20<<20
	files := r.aim() + 8<<20 // a burst of 8 MiB
	for range 1000 {         // an engine writes 1 MiB a time, and the keeper unlinks a little more
		now = now.Add(10 * time.Millisecond)
		r.note(files-r.aim(), now)
		if files += 1 << 20; files > r.aim() {
			files -= 2 << 20
		}
	}
	if r.bytes != 24<<20 {
		t.Errorf("a reserve of %d MiB, want three times the burst", r.bytes>>20)
	}
	files = r.aim() + 9<<20 // a larger one soon afterwards
	for range 4 {
		r.note(files-r.aim(), now)
	}
	if r.bytes != 27<<20 {
		t.Errorf("a reserve of %d MiB, want three times the larger burst", r.bytes>>20)
	}
}
