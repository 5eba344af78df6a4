package evict_test

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/evict"
)

// Random operations against a slice kept in order of last use.
func TestLRUAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := evict.NewLRU()
		var model []uint32 // oldest first
		drop := func(s uint32) {
			model = slices.DeleteFunc(model, func(x uint32) bool { return x == s })
		}
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			s := rapid.Uint32Range(0, 9).Draw(t, "slot")
			switch rapid.IntRange(0, 2).Draw(t, "op") {
			case 0:
				l.Touch(s)
				drop(s)
				model = append(model, s)
			case 1:
				l.Remove(s)
				drop(s)
			case 2:
				got, ok := l.Oldest()
				if ok != (len(model) > 0) || ok && got != model[0] {
					t.Fatalf("Oldest = %d, %v, want the first of %v", got, ok, model)
				}
				if ok {
					l.Remove(got)
					drop(got)
				}
			}
			if l.Len() != len(model) {
				t.Fatalf("Len = %d, want %d", l.Len(), len(model))
			}
			for s := range uint32(12) {
				if l.Has(s) != slices.Contains(model, s) {
					t.Fatalf("Has(%d) = %v with %v", s, l.Has(s), model)
				}
			}
		}
	})
}
