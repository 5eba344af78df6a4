// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/tenant"
	"github.com/kvasir-kv/kvasir/tier"
)

// A server that stood still, or whose background was slow, knows how late it is before it notes a use or a pin:
// neither ends before its time.
func TestLivesAfterAStandstill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 16, store.Options{TTL: 10 * time.Minute})
		defer b.stop()
		x := b.tenantOf("x", chunkBytes)
		x.put(0)
		x.put(1)
		if err := b.store.SetPinLimit("x", chunkBytes); err != nil {
			t.Fatal(err)
		}
		time.Sleep(9 * time.Minute) // nobody calls Expire
		if !x.has(0) {
			t.Fatal("what was stored nine minutes ago is gone")
		}
		if n, err := b.store.Pin("x", x.keys(1), 5*time.Minute); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		b.pass(4*time.Minute + 50*time.Second)
		if u := x.usage(); u.PinnedObjects != 1 {
			t.Errorf("a pin of 5 minutes ended after less: %+v", u)
		}
		if !b.resident(x.keys(0)[0]) {
			t.Error("what was used less than five minutes ago has expired after ten")
		}
		b.pass(20 * time.Second)
		if u := x.usage(); u.PinnedObjects != 0 {
			t.Errorf("%+v", u)
		}
		time.Sleep(11 * time.Minute)
		if x.has(0) || x.has(1) {
			t.Error("what nobody used for 11 minutes is served")
		}
		b.idle()
	})
}

// Pins of one call that do not fit leave no pin behind and take none away that was there.
func TestPinsThatDoNotFitChangeNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 16, store.Options{})
		defer b.stop()
		x := b.tenantOf("x", chunkBytes)
		for i := range 4 {
			x.put(i)
		}
		if err := b.store.SetPinLimit("x", 2*chunkBytes); err != nil {
			t.Fatal(err)
		}
		if n, err := b.store.Pin("x", x.keys(1), time.Hour); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if n, err := b.store.Pin("x", x.keys(0, 1, 2), time.Hour); n != 0 || !errors.Is(err, tenant.ErrPinLimit) {
			t.Errorf("%d are pinned, %v", n, err)
		}
		list, _ := b.store.Pins(0, nil)
		if len(list) != 1 || list[0].Key != x.keys(1)[0] {
			t.Errorf("pinned are %+v, want only what was before", list)
		}
		if n := b.store.Clear(false); n != 3 {
			t.Errorf("a clear dropped %d, want the 3 that are not pinned", n)
		}
		b.store.Unpin(x.keys(1))
		b.idle()
	})
}

// A chunk's time to live holds below, too: it is counted from the last use before it was written, its tenant's own where it
// has one, and survives a restart of the store. Chunks without a TTL stay.
func TestTTLBelow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 2
		b := newBench(t, t.TempDir(), 8, store.Options{TTL: 10 * time.Minute, ChecksumRate: 1 << 30, Place: "one"})
		defer func() { b.release(); b.stop() }()
		b.memory = tier.NewMemory(1 << 20)
		b.restart()
		end := b.run()
		defer func() { end() }()
		common, own, ever := b.tenantOf("common", n*chunkBytes), b.tenantOf("own", n*chunkBytes), b.tenantOf("ever", n*chunkBytes)
		for x, ttl := range map[*tenantOf]time.Duration{own: time.Hour, ever: tenant.Forever} {
			if err := b.store.SetTTL(x.salt, ttl); err != nil {
				t.Fatal(err)
			}
		}
		for _, x := range []*tenantOf{common, own, ever} {
			x.put(1)
		}
		f := func(passed time.Duration, want int) {
			t.Helper()
			time.Sleep(passed)
			got := 0
			if err := b.memory.List(t.Context(), func(kv.Key, tier.Meta) bool { got++; return true }); err != nil {
				t.Fatal(err)
			}
			if got != want {
				t.Errorf("after %v more %d chunks are below, want %d", passed, got, want)
			}
		}
		f(time.Minute, 3)
		f(8*time.Minute, 3)
		f(2*time.Minute, 2)
		end()
		b.restart()
		end = b.run()
		f(40*time.Minute, 2)
		f(20*time.Minute, 1)
		f(2*time.Hour, 1)
	})
}
