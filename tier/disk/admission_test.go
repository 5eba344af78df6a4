// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// Without a rule a disk keeps every object while it has room. When it is full it keeps only objects that are offered
// again, and every object once that rule gives more hits.
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
