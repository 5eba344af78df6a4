// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"log/slog"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/generation"
	"github.com/kvasir-kv/kvasir/tier/redis"
)

// A cleared tier on other hosts stays cleared for the next server, also when that server has other tiers beside it,
// another order of tiers, or another address of the tier.
func TestClearOutlivesAChangeOfTiers(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	at := func(addrs ...string) adapter.Adapter {
		return adapter.Adapter{Type: "redis", Redis: &redis.Options{Addrs: addrs}}
	}
	dir := adapter.Adapter{Type: "fs", Path: t.TempDir()}
	c := &serverCmd{}
	place, k := tier.NewMemory(1<<20), kv.Key{Namespace: kv.Namespace{1}}
	there := func(o *adapter.Options) int64 {
		t.Helper()
		book, err := generation.Open(c.generationFiles(o), tier.NewNames(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		metas := make([]tier.Meta, 1)
		if err := book.Tier(place).Stat(t.Context(), []kv.Key{k}, metas); err != nil {
			t.Fatal(err)
		}
		return metas[0].Len
	}
	if err := place.Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
		t.Fatal(err)
	}
	one := &adapter.Options{Adapters: []adapter.Adapter{at("a:1", "b:1")}}
	if there(one) != 1 {
		t.Fatal("the object is not there before the clear")
	}
	book, err := generation.Open(c.generationFiles(one), tier.NewNames(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := book.Prepare(nil); err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]*adapter.Options{
		"a disk before it":    {Disk: disk.Options{Dirs: []disk.Dir{{Path: t.TempDir()}}}, Adapters: one.Adapters},
		"a directory after":   {Adapters: []adapter.Adapter{one.Adapters[0], dir}},
		"another one before":  {Adapters: []adapter.Adapter{at("c:1"), one.Adapters[0]}},
		"its addresses turn":  {Adapters: []adapter.Adapter{at("b:1", "a:1")}},
		"one address is left": {Adapters: []adapter.Adapter{at("b:1")}},
	} {
		if n := there(o); n != 0 {
			t.Errorf("%s: an object from before the clear is there: %d bytes", name, n)
		}
	}
	if there(&adapter.Options{Adapters: []adapter.Adapter{at("c:2")}}) != 1 {
		t.Error("a clear counts for a tier elsewhere")
	}
}
