// SPDX-License-Identifier: Apache-2.0

package disk

import "testing"

// mixBits is the finalizer of MurmurHash3.
func mixBits(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// The chooser finds the rule that gives more hits, and finds the other one when the requests change.
func TestChooser(t *testing.T) {
	const capacity = 1000 // objects of one byte
	var c ruleChooser
	touch := func(key uint64) { c.Observe(mixBits(key), 1, capacity) }
	if c.PrefersFirst() {
		t.Error("first touch is preferred before anything is known")
	}
	next := uint64(1 << 40)
	oneAfterOther := func(n int) { // each twice in a row: the second rule never has it in time
		for i := range uint64(n) {
			touch(next + i)
			if i >= 500 {
				touch(next + i - 500)
			}
		}
		next += uint64(n)
	}
	hotAndOnce := func(n int) { // 200 come again and again, between many that come once
		for i := range uint64(n) {
			touch(i % 200)
			for range 20 {
				next++
				touch(next)
			}
		}
	}
	for range 2 {
		oneAfterOther(20 * capacity)
		if !c.PrefersFirst() {
			t.Errorf("what comes twice within the disk's size: %+v", c.mu.first)
		}
		hotAndOnce(2 * capacity)
		if c.PrefersFirst() {
			t.Errorf("some that are hot, many that come once: first %+v, second %+v", c.mu.first, c.mu.second)
		}
	}
}

// A ruleChooser samples so few of many keys that its memory has a limit, and still decides the same.
func TestChooserIsBounded(t *testing.T) {
	const capacity = 1 << 20
	var c ruleChooser
	for i := range uint64(1 << 21) {
		c.Observe(mixBits(i), 1, capacity)
		if i >= capacity/2 {
			c.Observe(mixBits(i-capacity/2), 1, capacity)
		}
		if len(c.mu.keys) > maxChooserKeys {
			t.Fatalf("%d keys", len(c.mu.keys))
		}
	}
	if c.mu.shift == 0 || c.mu.shift > 8 || !c.PrefersFirst() {
		t.Errorf("one key of 2^%d, first %+v, second %+v", c.mu.shift, c.mu.first, c.mu.second)
	}
	if n := c.mu.first.written; n < 3<<19 || n > 5<<19 {
		t.Errorf("%d bytes are taken for written, of 2 Mi", n)
	}
}

// seenKeys forgets old keys, so that its memory has a limit.
func TestSeenIsBounded(t *testing.T) {
	const most = 10_000
	x := seenKeys{Most: most}
	k := func(i int) uint64 { return mixBits(uint64(i)) }
	x.SeenBefore(k(0))
	for i := 1; i <= 2*most; i++ {
		if x.SeenBefore(k(i)) {
			t.Fatalf("key %d is known", i)
		}
	}
	if n := len(x.mu.now) + len(x.mu.before); n > 2*most {
		t.Errorf("%d keys", n)
	}
	if x.SeenBefore(k(0)) || !x.SeenBefore(k(2*most)) {
		t.Error("the oldest is known, or the newest is not")
	}
}
