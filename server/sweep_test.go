// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/generation"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// The bytes that a clear makes absent leave a tier in the background, those stored afterwards stay, and an operator removes
// them from the running server.
func TestClearedBytesLeaveTheTier(t *testing.T) {
	var d *disk.Disk
	dir := t.TempDir()
	n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), generation.FileName)}, open: func(*tier.Names) tier.Tier {
		var err error
		if d, err = disk.Open(disk.Options{Dirs: []disk.Dir{{Path: dir, Bytes: 256 << 20}}, FirstTouch: true}); err != nil {
			t.Fatal(err)
		}
		<-d.Opened()
		return d
	}}
	n.start()
	defer func() { n.stop() }()
	e := n.newEngine()
	e.register()
	put := func(seed int) {
		t.Helper()
		written := n.store.Stats().WrittenChunks
		if got := e.storeBlocks(tokens(3*drivenChunk, seed), 0, 96, span(1, 6)); got != done {
			t.Fatal(got)
		}
		testkit.Eventually(t, "writes below", func() bool { return n.store.Stats().WrittenChunks == written+3 })
	}
	put(6)
	if _, err := n.Clear(server.Clear{Tier: server.ClearAll, By: "a test"}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the old bytes leave", func() bool { return d.Space().Objects == 0 })
	put(7)
	if _, err := n.Clear(server.Clear{Tier: server.ClearL2, By: "a test", Models: []string{"another model"}}); err != nil {
		t.Fatal(err)
	}
	put(8)
	if got := d.Space().Objects; got != 6 {
		t.Errorf("%d objects after a clear of another model, want 6", got)
	}
	if _, err := n.DropTier(t.Context(), "fs", "", "a test"); !errors.Is(err, server.ErrNoTier) || !strings.Contains(err.Error(), "has below") {
		t.Errorf("another tier: %v", err)
	}
	if removed, err := n.DropTier(t.Context(), "below", "m", "a test"); err == nil || removed != 0 {
		t.Errorf("a model of a disk: removed %d, %v", removed, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := n.DropTier(ended, "below", "", "a test"); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that left: %v", err)
	}
	if removed, err := n.DropTier(t.Context(), "below", "", "a test"); err != nil || removed != 6 {
		t.Errorf("removed %d, %v", removed, err)
	}
	_, _ = n.Clear(server.Clear{Tier: server.ClearL1, Force: true})
	if hit := n.hit(e, tokens(3*drivenChunk, 8), "after"); hit != 0 {
		t.Errorf("hit %d after the drop", hit)
	}
}

// A tier of any kind that was emptied is reported to those who follow what the tiers have, by its number; one that had
// nothing is not.
func TestEmptiedTiersAreReported(t *testing.T) {
	changes, place := tier.NewChanges(), tier.NewMemory(1<<20)
	changes.Watch(16)
	d := newDesk(t, server.Options{Contents: map[string]tier.Tier{"redis": place}, Numbers: map[string]uint8{"redis": 3}, Changes: changes, DropRate: 1 << 20})
	f := func(objects int, want ...tier.Change) {
		t.Helper()
		for i := range objects {
			b, m := tiertest.Object(i, 100)
			if err := place.Write(t.Context(), tiertest.Key(i), m, b); err != nil {
				t.Fatal(err)
			}
		}
		if removed, err := d.DropTier(t.Context(), "redis", "", "a test"); removed != objects || err != nil {
			t.Fatalf("removed %d of %d, %v", removed, objects, err)
		}
		got := make([]tier.Change, 16)
		n, _ := changes.After(0, got)
		if !slices.Equal(got[:n], want) {
			t.Errorf("%+v, want %+v", got[:n], want)
		}
	}
	f(0)
	f(2, tier.Change{Tier: 3, Removed: true, All: true})
}

// A model that was removed from a tier is reported as that model, under the names that the tier has for it: of its revisions, its
// generations, and its digests.
func TestRemovedModelsAreReported(t *testing.T) {
	changes, names := tier.NewChanges(), tier.NewNames()
	changes.Watch(16)
	place, err := fs.Open(fs.Options{Path: t.TempDir(), Names: names})
	if err != nil {
		t.Fatal(err)
	}
	defer place.Close()
	d := newDesk(t, server.Options{
		Names: names, Contents: map[string]tier.Tier{"fs": place}, Numbers: map[string]uint8{"fs": 2}, Changes: changes, DropRate: 1 << 20,
	})
	long := strings.Repeat("x", 200)
	for i, model := range []string{"m", "m~rev", "m2", long, "m@3"} {
		k := tiertest.Key(i)
		k.Namespace[1] = byte(i + 1)
		names.Add(k.Namespace, model, nil)
		b, meta := tiertest.Object(i, 100)
		if err := place.Write(t.Context(), k, meta, b); err != nil {
			t.Fatal(err)
		}
	}
	after := uint64(0)
	f := func(model string, removed int, want ...tier.Change) {
		t.Helper()
		if n, err := d.DropTier(t.Context(), "fs", model, "a test"); n != removed || err != nil {
			t.Errorf("%.20s: removed %d of %d, %v", model, n, removed, err)
		}
		got := make([]tier.Change, 16)
		n, _ := changes.After(after, got)
		if after += uint64(n); !slices.Equal(got[:n], want) {
			t.Errorf("%.20s: %+v, want %+v", model, got[:n], want)
		}
	}
	of := func(model string) tier.Change { return tier.Change{Tier: 2, Removed: true, All: true, Model: model} }
	f("m~rev", 1, of(""))
	f("m", 1, of("m"))
	f("m", 0)
	f(long, 1, of(long))
	f("m@3", 1, of("m@3"))
	f("", 1, of(""))
}
