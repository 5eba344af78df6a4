// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// atOnce is a Pace without a wait.
func atOnce(ctx context.Context, _ int) error { return ctx.Err() }

// ownContent returns a function that reports whether an object has one of the Tier's own names, since several Tiers may share a real server.
func ownContent(x tier.Tier) func(tier.Content) bool {
	s, ok := x.(*summed)
	return func(c tier.Content) bool { return !ok || strings.HasPrefix(c.Model, s.model) }
}

// contents counts the objects of a Tier with tier.RemoveIf, without removing any.
func contents(t *testing.T, x tier.Tier) (n int, named bool) {
	t.Helper()
	own := ownContent(x)
	if s, ok := x.(*summed); ok {
		x = s.Tier
	}
	_, err := tier.RemoveIf(t.Context(), x, func(c tier.Content) bool {
		if own(c) {
			n++
			named = named || c.Model != ""
		}
		return false
	}, atOnce)
	if errors.Is(err, tier.ErrNoList) {
		t.Skip("it does not list")
	}
	if err != nil {
		t.Fatal(err)
	}
	return n, named
}

// removed checks that RemoveIf removes the objects that meet a condition and keeps the others, and that a failing Pace ends it.
func removed(t *testing.T, x tier.Tier) {
	raw := x
	if s, ok := x.(*summed); ok {
		raw = s.Tier
	}
	for i := range 10 {
		write(t, x, Key(i), i, 300)
	}
	contents(t, x)
	tired := errors.New("tired")
	own := ownContent(x)
	odd := func(c tier.Content) bool { return own(c) && c.Key.Rank%2 == 1 }
	if n, err := tier.RemoveIf(t.Context(), raw, odd, func(context.Context, int) error { return tired }); n != 0 || !errors.Is(err, tired) {
		t.Errorf("a pace that fails: removed %d, %v", n, err)
	}
	if n, err := tier.RemoveIf(t.Context(), raw, odd, atOnce); n != 5 || err != nil {
		t.Fatalf("removed %d, %v", n, err)
	}
	for i := range 10 {
		b, m := Object(i, 300)
		if i%2 == 0 {
			expect(t, x, Key(i), b, m)
			continue
		}
		metas := make([]tier.Meta, 1)
		if err := x.Stat(t.Context(), []kv.Key{Key(i)}, metas); err != nil || metas[0].Len != 0 {
			t.Errorf("object %d: %+v, %v", i, metas[0], err)
		}
	}
}

// swept checks that a removal of stale objects removes those from before a clear, and keeps current objects and those that LMCache servers
// may have written.
func swept(t *testing.T, x tier.Tier) {
	raw, names := x, Names()
	if s, ok := x.(*summed); ok {
		raw, names = s.Tier, s.names
	}
	book, err := generation.Open([]string{filepath.Join(t.TempDir(), generation.FileName)}, names, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	over := book.Tier(x)
	var named bool
	for life := range 3 {
		for i := range 3 {
			b, meta := Object(10*life+i, 300)
			if err := over.Write(t.Context(), Key(i), meta, b); err != nil {
				t.Fatal(err)
			}
		}
		var n int
		if n, named = contents(t, x); n != 3*(life+1) {
			t.Fatalf("life %d: %d objects", life, n)
		}
		if life < 2 {
			commit, err := book.Prepare(nil)
			if err != nil {
				t.Fatal(err)
			}
			commit()
		}
	}
	if _, err := tier.RemoveIf(t.Context(), raw, book.Stale, atOnce); err != nil {
		t.Fatal(err)
	}
	want := 3
	if named {
		want = 6 // those of before the first clear
	}
	if n, _ := contents(t, x); n != want {
		t.Errorf("%d objects are left, want %d", n, want)
	}
	for i := range 3 {
		b, meta := Object(20+i, 300)
		expect(t, over, Key(i), b, meta)
	}
}
