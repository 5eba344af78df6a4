// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// With OwnNames a lookup does the same, and says the same, whether or not its chunks are there under another name.
func TestOwnNamesLookNowhereElse(t *testing.T) {
	other := object.Shard{Namespace: kv.Namespace{2}, World: 1, Groups: full}
	f := func(own bool, want int) {
		t.Helper()
		b := newBench(t, t.TempDir(), 8, store.Options{OwnNames: own})
		defer b.stop()
		stored := prompt(1, 3)
		b.put("a", stored, 0, 3, 3)
		got := b.store.Lookup([]byte("b"), other, store.Hashed(stored), 1)
		b.store.EndSession([]byte("b"), lease.Owner{})
		if got.Hit != 0 || got.Why != miss.NeverStored || len(got.Others) != want {
			t.Errorf("own names %v: %+v, want %d others", own, got, want)
		}
	}
	f(false, 1)
	f(true, 0)
}
