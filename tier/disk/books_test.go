// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// All files of a directory together, with the checkpoint and the journal, stay within its limit, however small the objects are and
// however many are deleted. This holds also while the checkpoint or the journal is replaced.
func TestBooksAreWithinTheLimit(t *testing.T) {
	const segment = 256 << 10
	limit := segment * int64(max(8, testkit.Volume(32)))
	m, c := newMemFiles(1, 1<<30), newClock()
	o := Options{SegmentBytes: segment, MinFree: 1, FirstTouch: true}
	worst := int64(0)
	m.fail = func(string, string) error {
		_, all := m.usedLocked()
		worst = max(worst, all)
		return nil
	}
	d := openMem(t, o, limit, c, m)
	var some []kv.Key
	for i := range int(3 * limit / block) {
		put(t, d, i, 100)
		if some = append(some, tiertest.Key(i)); i%8 == 7 {
			if err := d.Delete(t.Context(), some[:1]); err != nil {
				t.Fatal(err)
			}
			some = some[:0]
		}
	}
	closeDisk(t, d)
	m.fail = nil
	if worst > limit {
		t.Errorf("%d bytes were used, the limit is %d and a segment %d", worst, limit, segment)
	}
	if n := d.Stats().Evicted; n == 0 {
		t.Error("nothing was evicted")
	}
}
