// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// Reads and writes that do not count as a use, as those of a rekey, do not change whether an object counts as used. Other reads do,
// and an object that is written anew is not used yet.
func TestUpkeepIsNoUse(t *testing.T) {
	o := small(t.TempDir())
	o.Sealed = true
	d := open(t, o)
	defer closeDisk(t, d)
	key := func(i int) (hot bool, heat float64) {
		v := d.volumes[0]
		v.mu.Lock()
		defer v.mu.Unlock()
		k := tiertest.Key(i)
		e, ok := v.mu.index.get(&k)
		if !ok {
			t.Fatal("it is gone")
		}
		for _, s := range v.mu.segs {
			heat += s.heat
		}
		return e.hot, heat
	}
	put(t, d, 1, 5000) // stays unused
	put(t, d, 2, 5000)
	if err := get(t, d, 2, 5000, 0); err != nil {
		t.Fatal(err)
	}
	_, before := key(2)
	quiet := tier.WithoutUse(t.Context())
	for i := 1; i <= 2; i++ {
		b, m := object(i, 5000, 0)
		if _, err := d.Read(quiet, tiertest.Key(i), b); err != nil {
			t.Fatal(err)
		}
		m.Seal = 7 // as encrypted with another key
		if err := d.Write(quiet, tiertest.Key(i), m, b); err != nil {
			t.Fatal(err)
		}
		if hot, _ := key(i); hot != (i == 2) {
			t.Errorf("object %d is used: %t", i, hot)
		}
	}
	if _, after := key(2); after != before+5000 { // its new segment is as warm as it made the former one
		t.Errorf("heat of %.0f became %.0f", before, after)
	}
	b, m := object(2, 5000, 0)
	m.Seal = 8
	if err := d.Write(t.Context(), tiertest.Key(2), m, b); err != nil {
		t.Fatal(err)
	}
	if hot, _ := key(2); hot {
		t.Error("what was written anew counts as used")
	}
}
