// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Exchanged checks that whole objects under the names of other objects are misses, and that a store replaces them. move moves an object,
// with all that the tier stores beside it, from one key's name to another's; the object that was there is lost. unbind changes an object to
// the form of earlier releases, which did not store the key.
func Exchanged(t *testing.T, x tier.Tier, move func(from, to kv.Key), unbind func(kv.Key)) {
	t.Helper()
	const size = 700
	miss := func(what string, k kv.Key) {
		t.Helper()
		metas := make([]tier.Meta, 1)
		if err := x.Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0] != (tier.Meta{}) {
			t.Errorf("%s: Stat: %+v, %v", what, metas[0], err)
		}
		if m, err := x.Read(t.Context(), k, make([]byte, size)); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("%s: Read: %+v, %v", what, m, err)
		}
	}
	for i := range 5 {
		write(t, x, Key(i), i, size)
	}
	spare := Key(9)
	move(Key(0), spare) // 0 and 1 exchanged
	move(Key(1), Key(0))
	move(spare, Key(1))
	miss("exchanged", Key(0))
	miss("exchanged", Key(1))
	move(Key(3), Key(2)) // 3 and 4 shifted by one
	move(Key(4), Key(3))
	miss("shifted", Key(2))
	miss("shifted", Key(3))
	for i := range 4 {
		b, m := write(t, x, Key(i), i, size)
		expect(t, x, Key(i), b, m)
	}
	stale := Key(0)
	stale.Namespace[15]++ // the name of another generation, salt or layout
	move(Key(0), stale)
	miss("stale", stale)
	for i := 1; i < 4; i++ {
		unbind(Key(i))
		b, m := Object(i, size)
		expect(t, x, Key(i), b, m)
	}
}
