// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Notes checks the note of a tier that two servers share.
func Notes(t *testing.T, one, two tier.Notebook) {
	t.Helper()
	want := func(x tier.Notebook, text []byte) {
		t.Helper()
		for range 2 {
			if got, err := x.Note(t.Context()); err != nil || !bytes.Equal(got, text) || (got == nil) != (text == nil) {
				t.Errorf("the note is %d bytes, %v, want %d", len(got), err, len(text))
			}
		}
	}
	want(one, nil)
	for i, text := range [][]byte{[]byte("{}"), []byte(`{"version":1}`), bytes.Repeat([]byte("x"), 100_000), []byte("y")} {
		from, to := one, two
		if i%2 == 1 {
			from, to = two, one
		}
		if err := from.SetNote(t.Context(), text); err != nil {
			t.Fatal(err)
		}
		want(to, text)
		want(from, text)
	}
	var both sync.WaitGroup // at once: none fails, and one of the texts stays
	for i, x := range []tier.Notebook{one, two} {
		both.Go(func() {
			for range 10 {
				if err := x.SetNote(t.Context(), bytes.Repeat([]byte{'a' + byte(i)}, 1000)); err != nil {
					t.Errorf("server %d: %v", i, err)
				}
			}
		})
	}
	both.Wait()
	if text, err := one.Note(t.Context()); err != nil || len(text) != 1000 || bytes.Count(text, text[:1]) != 1000 {
		t.Errorf("the note of two servers is %.20q, %v", text, err)
	}
	if err := two.SetNote(t.Context(), []byte("y")); err != nil {
		t.Fatal(err)
	}
	want(one, []byte("y"))
	if l, ok := one.(tier.Lister); ok { // it is no object
		err := l.List(t.Context(), func(k kv.Key, _ tier.Meta) bool { t.Errorf("the note is listed as %v", k); return true })
		if err != nil && !errors.Is(err, tier.ErrNoList) {
			t.Error(err)
		}
	}
}
