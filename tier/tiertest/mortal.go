// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"errors"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Mortal checks that an empty Tier respects Meta.End: an object after its End is missing and may be written
// again, and an object before its End is present.
func Mortal(t *testing.T, x tier.Tier) {
	t.Helper()
	now := time.Now()
	ended, lives := uint32(now.Add(-time.Second).Unix()), uint32(now.Add(time.Hour).Unix())
	store := func(seed int, end uint32) {
		t.Helper()
		b, meta := Object(seed, 9000)
		meta.End = end
		if err := x.Write(t.Context(), Key(seed), meta, b); err != nil && !errors.Is(err, tier.ErrNotKept) {
			t.Fatal(err)
		}
	}
	f := func(seed int, there bool) {
		t.Helper()
		want, meta := Object(seed, 9000)
		metas, dst := make([]tier.Meta, 1), make([]byte, 9000)
		if err := x.Stat(t.Context(), []kv.Key{Key(seed)}, metas); err != nil {
			t.Fatal(err)
		}
		_, err := x.Read(t.Context(), Key(seed), dst)
		switch {
		case there && (metas[0].Len != meta.Len || err != nil || string(dst) != string(want)):
			t.Errorf("object %d, which lives: %+v, %v", seed, metas[0], err)
		case !there && (metas[0] != (tier.Meta{}) || !errors.Is(err, tier.ErrMissing)):
			t.Errorf("object %d, whose life is over: %+v, %v", seed, metas[0], err)
		}
		if l, ok := x.(tier.Lister); ok {
			listed := false
			if err := l.List(t.Context(), func(k kv.Key, m tier.Meta) bool {
				listed = listed || k == Key(seed)
				return true
			}); err != nil && !errors.Is(err, tier.ErrNoList) {
				t.Fatal(err)
			} else if err == nil && listed && !there {
				t.Errorf("object %d, whose life is over, is listed", seed)
			}
		}
	}
	store(1, ended)
	f(1, false)
	store(2, lives)
	f(2, true)
	store(1, lives)
	f(1, true)
	store(3, 0)
	f(3, true)
	store(2, lives+60) // the object exists and may stay as it is
	f(2, true)
	if err := x.Delete(t.Context(), []kv.Key{Key(2)}); err != nil {
		t.Fatal(err)
	}
	f(2, false)
}

// Ending checks that an object is present before its end, and a miss from then on, by the clock of this machine.
func Ending(t *testing.T, x tier.Tier) {
	t.Helper()
	b, meta := Object(7, 9000)
	for soon := time.Second; ; soon *= 2 { // on a busy machine the end may come before the read
		meta.End = uint32(time.Now().Add(soon).Unix()) + 1
		if err := x.Write(t.Context(), Key(7), meta, b); err != nil {
			t.Fatal(err)
		}
		_, err := x.Read(t.Context(), Key(7), make([]byte, len(b)))
		if meta.Over(time.Now()) && soon < time.Minute {
			continue
		}
		if err != nil {
			t.Fatalf("before its end: %v", err)
		}
		break
	}
	metas := make([]tier.Meta, 1)
	testkit.Eventually(t, "the object ends", func() bool {
		err := x.Stat(t.Context(), []kv.Key{Key(7)}, metas)
		return err == nil && metas[0] == tier.Meta{}
	})
	if !meta.Over(time.Now().Add(2 * time.Second)) { // a tier that counts in whole seconds may be early by one
		t.Errorf("it ended %v before its end", time.Until(time.Unix(int64(meta.End), 0)))
	}
	if _, err := x.Read(t.Context(), Key(7), make([]byte, len(b))); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("a read after its end: %v", err)
	}
	if err := x.Write(t.Context(), Key(7), tier.Meta{Len: meta.Len, Sum: meta.Sum}, b); err != nil && !errors.Is(err, tier.ErrNotKept) {
		t.Errorf("a write after its end: %v", err)
	}
}
