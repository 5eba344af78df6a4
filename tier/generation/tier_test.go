// SPDX-License-Identifier: Apache-2.0

package generation_test

import (
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// A write that began before a clear is refused, and one that began after it is taken. Each write names the moment when it began.
func TestWriteOfAnEarlierMomentIsRefused(t *testing.T) {
	names := tier.NewNames()
	names.Add(keyOf(1).Namespace, "m", nil)
	b := open(t, names, filepath.Join(t.TempDir(), generation.FileName))
	place := b.Tier(tier.NewMemory(1 << 20))
	for _, models := range [][]string{{"m"}, nil} {
		before := tier.AtMoment(t.Context(), b.Moment())
		commit, err := b.Prepare(models)
		if err != nil {
			t.Fatal(err)
		}
		commit()
		if err := place.Write(before, keyOf(1), tier.Meta{Len: 1}, []byte{1}); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("clear of %v: a write from before it: %v", models, err)
		}
		if err := place.Write(tier.AtMoment(t.Context(), b.Moment()), keyOf(1), tier.Meta{Len: 1}, []byte{1}); err != nil {
			t.Errorf("clear of %v: a write from after it: %v", models, err)
		}
	}
}

// After a clear of all, objects of a namespace whose model no one has named are stored and found. After a clear of one model
// they are not: they may be of that model. Stat reports them as missing, whatever its slice of answers had before.
func TestNamespaceWithoutAModel(t *testing.T) {
	b := open(t, tier.NewNames(), filepath.Join(t.TempDir(), generation.FileName))
	place := b.Tier(tier.NewMemory(1 << 20))
	for _, c := range []struct {
		cleared []string
		found   bool
	}{{nil, true}, {[]string{"m"}, false}} {
		commit, err := b.Prepare(c.cleared)
		if err != nil {
			t.Fatal(err)
		}
		commit()
		if err := place.Write(t.Context(), keyOf(9), tier.Meta{Len: 1}, []byte{1}); (err == nil) != c.found || err != nil && !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("clear of %v: Write: %v", c.cleared, err)
		}
		metas := []tier.Meta{{Len: 77}}
		if err := place.Stat(t.Context(), []kv.Key{keyOf(9)}, metas); err != nil || (metas[0].Len == 1) != c.found || !c.found && metas[0] != (tier.Meta{}) {
			t.Errorf("clear of %v: Stat: %+v, %v", c.cleared, metas[0], err)
		}
		if _, err := place.Read(t.Context(), keyOf(9), make([]byte, 1)); (err == nil) != c.found || err != nil && !errors.Is(err, tier.ErrMissing) {
			t.Errorf("clear of %v: Read: %v", c.cleared, err)
		}
	}
}

// A clear of one model makes no object of another model stale: stale objects are removed from the tier.
func TestObjectsOfOtherModelsAreNotStale(t *testing.T) {
	names := tier.NewNames()
	names.Add(keyOf(1).Namespace, "m", nil)
	names.Add(keyOf(2).Namespace, "other", nil)
	b := open(t, names, filepath.Join(t.TempDir(), generation.FileName))
	commit, err := b.Prepare([]string{"m"})
	if err != nil {
		t.Fatal(err)
	}
	commit()
	if !b.Stale(tier.Content{Key: keyOf(1)}) || b.Stale(tier.Content{Key: keyOf(2)}) {
		t.Errorf("stale: the cleared model's %v, the other's %v", b.Stale(tier.Content{Key: keyOf(1)}), b.Stale(tier.Content{Key: keyOf(2)}))
	}
}

// While no generation is known, an object that a tier has under its first name is not served: it may have been cleared.
func TestNothingIsReadBeforeAGenerationIsKnown(t *testing.T) {
	p := newPlace()
	if err := p.Write(t.Context(), keyOf(1), tier.Meta{Len: 1}, []byte{1}); err != nil {
		t.Fatal(err)
	}
	p.down = errDown
	s := startServer(t, p, filepath.Join(t.TempDir(), "g"), true)
	metas := []tier.Meta{{Len: 77}}
	if err := s.book.Tier(p.Tier).Stat(t.Context(), []kv.Key{keyOf(1)}, metas); err != nil || metas[0] != (tier.Meta{}) {
		t.Errorf("Stat: %+v, %v", metas[0], err)
	}
	s.want("the tier is down", 1, false)
	if _, _, err := s.book.Tier(p.Tier).ReadSummed(t.Context(), keyOf(1), make([]byte, 1)); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("ReadSummed while the tier is down: %v", err)
	}
	p.set(func() { p.down = nil })
	s.book.Sync(t.Context())
	s.want("the tier is up", 1, true)
}

// A server that stood still for longer than a few seconds reads the notes before it answers: it may have missed a clear.
func TestStandstillMissesNoClear(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		a := startServer(t, p, filepath.Join(t.TempDir(), "a"), false)
		b := startServer(t, p, filepath.Join(t.TempDir(), "b"), false)
		a.store(1)
		b.want("stored", 1, true)
		if err := a.clear("m"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(4 * time.Second) // b runs nothing that reads notes
		b.want("cleared while the server stood still", 1, false)
	})
}
