package disk

import (
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// The rule that gives more hits is found, and found again when what is asked for changes.
func TestChooser(t *testing.T) {
	const capacity = 1000 // objects of one byte
	var c chooser
	touch := func(key uint64) { c.touch(mix(key), 1, capacity) }
	if c.prefersFirst() {
		t.Error("first touch is preferred before anything is known")
	}
	next := uint64(1 << 40)
	oneAfterOther := func(n int) { // each twice, soon: the second rule never has it in time
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
		if !c.prefersFirst() {
			t.Errorf("what comes twice within the disk's size: %+v", c.mu.first)
		}
		hotAndOnce(2 * capacity)
		if c.prefersFirst() {
			t.Errorf("some that are hot, many that come once: first %+v, second %+v", c.mu.first, c.mu.second)
		}
	}
}

// A chooser looks at so few of many keys that its memory has a limit, and decides the same.
func TestChooserIsBounded(t *testing.T) {
	const capacity = 1 << 20
	var c chooser
	for i := range uint64(1 << 21) {
		c.touch(mix(i), 1, capacity)
		if i >= capacity/2 {
			c.touch(mix(i-capacity/2), 1, capacity)
		}
		if len(c.mu.keys) > mostPlayed {
			t.Fatalf("%d keys", len(c.mu.keys))
		}
	}
	if c.mu.shift == 0 || c.mu.shift > 8 || !c.prefersFirst() {
		t.Errorf("one key of 2^%d, first %+v, second %+v", c.mu.shift, c.mu.first, c.mu.second)
	}
	if n := c.mu.first.written; n < 3<<19 || n > 5<<19 {
		t.Errorf("%d bytes are taken for written, of 2 Mi", n)
	}
}

// Without a rule a disk keeps everything while it has room, what comes again afterwards, and everything
// once that gives more hits.
func TestAdmission(t *testing.T) {
	m := newMemFiles(1, 1<<30)
	d := openMem(t, Options{SegmentBytes: 256 << 10, MinFree: 1}, 4<<20, newClock(), m)
	defer closeDisk(t, d)
	<-d.Opened()
	const n = 20_000
	offer := func(seed int) bool {
		b, meta := object(seed, n, 0)
		err := d.Write(t.Context(), tiertest.Key(seed), meta, b)
		if err != nil && !errors.Is(err, tier.ErrNotKept) {
			t.Fatal(err)
		}
		return err == nil
	}
	if !d.Stats().First {
		t.Error("first touch does not do while there is room")
	}
	for seed := range 100 {
		if !offer(seed) {
			t.Fatalf("object %d was not kept, and there is room", seed)
		}
	}
	for seed := 100; d.Stats().First; seed++ {
		if offer(seed); seed > 1000 {
			t.Fatal("a full disk keeps everything")
		}
	}
	if offer(2000) || !offer(2000) {
		t.Error("a full disk keeps what comes once, or not what comes again")
	}
	for seed := 3000; !d.Stats().First; seed++ { // each twice: on a disk of 200 objects a first touch would be a hit
		offer(seed)
		if offer(seed - 50); seed > 6000 {
			t.Fatal("a full disk does not learn that the first touch gives hits")
		}
	}
	if !offer(7000) {
		t.Error("first touch is better, and an object was not kept")
	}
}
