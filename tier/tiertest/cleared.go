// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"errors"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// cleared checks that a Tier serves no object from before a clear, even after the
// generations were read again, and that it serves objects stored afterwards.
func cleared(all bool) func(t *testing.T, x tier.Tier) {
	return func(t *testing.T, x tier.Tier) {
		names, models := Names(), []string{model}
		if s, ok := x.(*summed); ok {
			names, models = s.names, []string{s.model}
		}
		if all {
			models = nil
		}
		files := []string{filepath.Join(t.TempDir(), "a", generation.FileName), filepath.Join(t.TempDir(), generation.FileName)}
		var book *generation.Book
		var over tier.Tier
		restart := func() {
			t.Helper()
			var err error
			if book, err = generation.Open(files, names, slog.New(slog.DiscardHandler)); err != nil {
				t.Fatal(err)
			}
			over = book.Tier(x)
		}
		restart()
		salted := Key(2)
		salted.Namespace[15]++
		keys := []kv.Key{Key(0), Key(1), salted}
		gone := func(when string) {
			t.Helper()
			metas := make([]tier.Meta, len(keys))
			if err := over.Stat(t.Context(), keys, metas); err != nil {
				t.Fatal(err)
			}
			for i, k := range keys {
				_, err := over.Read(t.Context(), k, make([]byte, 700))
				if metas[i] != (tier.Meta{}) || !errors.Is(err, tier.ErrMissing) {
					t.Errorf("%s: object %d: %+v, %v", when, i, metas[i], err)
				}
			}
		}
		there := func(when string, seed int) {
			t.Helper()
			for i, k := range keys {
				want, meta := Object(seed+i, 700)
				dst := make([]byte, len(want))
				if got, err := over.Read(t.Context(), k, dst); err != nil || !same(got, meta) || string(dst) != string(want) {
					t.Errorf("%s: object %d: %+v, %v", when, i, got, err)
				}
			}
		}
		for i, k := range keys {
			write(t, over, k, 10+i, 700)
			expect(t, x, k, first(Object(10+i, 700)), second(Object(10+i, 700))) // under its own name before any clear
		}
		for round := 1; round <= 2; round++ {
			late := tier.AtMoment(t.Context(), book.Moment())
			commit, err := book.Prepare(models)
			if err != nil {
				t.Fatal(err)
			}
			commit()
			b, meta := Object(1, 700)
			if err := over.Write(late, keys[0], meta, b); !errors.Is(err, tier.ErrNotKept) {
				t.Errorf("a write from before clear %d: %v", round, err)
			}
			gone("cleared")
			restart()
			gone("cleared and restarted")
			for i, k := range keys {
				write(t, over, k, 20*round+i, 700)
			}
			there("stored again", 20*round)
			restart()
			there("stored again and restarted", 20*round)
		}
		if err := over.Delete(t.Context(), keys); err != nil {
			t.Fatal(err)
		}
		gone("deleted")
		expect(t, x, keys[0], first(Object(10, 700)), second(Object(10, 700))) // the bytes of before
	}
}

func first[A, B any](a A, _ B) A  { return a }
func second[A, B any](_ A, b B) B { return b }
