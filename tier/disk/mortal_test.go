// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// The disk keeps the ends of lives: while it is open, after a restart by its checkpoint, and after a crash by the
// records alone.
func TestEndsOfLives(t *testing.T) {
	o := Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}
	t.Run("conformance", func(t *testing.T) {
		o := small(t.TempDir())
		d, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		defer closeDisk(t, d)
		tiertest.Mortal(t, d)
	})
	for _, crash := range []bool{false, true} {
		m, c := newMemFiles(1, 1<<30), newClock()
		d := openMem(t, o, 16<<20, c, m)
		life := map[int]time.Duration{1: 0, 2: time.Hour, 3: 3 * time.Hour}
		for seed, left := range life {
			b, meta := tiertest.Object(seed, 9000)
			if left > 0 {
				meta.End = uint32(c.now().Add(left).Unix())
			}
			if err := d.Write(t.Context(), tiertest.Key(seed), meta, b); err != nil {
				t.Fatal(err)
			}
		}
		check := func(passed time.Duration) {
			t.Helper()
			for seed, left := range life {
				_, err := d.Read(t.Context(), tiertest.Key(seed), make([]byte, 9000))
				if there := left == 0 || passed < left; there != (err == nil) || !there && !errors.Is(err, tier.ErrMissing) {
					t.Errorf("crash %v, after %v: object %d of %v: %v", crash, passed, seed, left, err)
				}
			}
		}
		reopen := func() {
			t.Helper()
			if err := d.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			if closeDisk(t, d); crash {
				m.mu.Lock()
				delete(m.names, checkName)
				m.mu.Unlock()
			}
			d = openMem(t, o, 16<<20, c, m)
		}
		check(0)
		reopen()
		check(0)
		c.pass(2 * time.Hour)
		check(2 * time.Hour)
		reopen()
		check(2 * time.Hour)
		c.pass(2 * time.Hour)
		check(4 * time.Hour)
		closeDisk(t, d)
	}
}
