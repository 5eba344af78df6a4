// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// An object of a later release is a miss and stays as it is. The tier replaces an object whose metadata no release writes.
func TestObjectsOfALaterReleaseStay(t *testing.T) {
	for _, layout := range []s3.Layout{s3.Native, s3.LMCache} {
		f := newFake(t)
		x := open(t, s3.Options{URL: f.url, Layout: layout, Names: tiertest.Names()})
		b, m := tiertest.Object(1, 100)
		if err := x.Write(t.Context(), tiertest.Key(1), m, b); err != nil {
			t.Fatal(err)
		}
		name := f.names()[0]
		was := f.get(name)
		try := func(meta string, stays bool) {
			t.Helper()
			now := was
			now.meta = meta
			f.set(name, now)
			if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, 100)); !errors.Is(err, tier.ErrMissing) {
				t.Errorf("%q: a read answers %v", meta, err)
			}
			err := x.Write(t.Context(), tiertest.Key(1), m, b)
			if newer := errors.Is(err, tier.ErrNewer) && errors.Is(err, tier.ErrNotKept); newer != stays || !stays && err != nil {
				t.Errorf("%q: a write answers %v", meta, err)
			}
			if same := f.get(name).meta == meta; same != stays {
				t.Errorf("%q: stays: %v", meta, same)
			}
		}
		try("5.all.of.it.is.new", true)
		try("17.x", true)
		try("4.damaged", false)
		try("x.y", false)
	}
}
