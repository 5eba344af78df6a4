// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// If two objects are exchanged with their metadata, they are misses.
func TestExchangedObjectsAreMisses(t *testing.T) {
	for _, layout := range []s3.Layout{s3.Native, s3.LMCache} {
		f := newFake(t)
		names := tiertest.Names()
		x := open(t, s3.Options{URL: f.url, Layout: layout, Names: names})
		name := func(k kv.Key) string {
			if layout == s3.Native {
				return k.Chunk.String()[:2] + "/" + k.String()
			}
			n, ok := names.Of(k.Namespace)
			if !ok {
				n, _ = names.Of(tiertest.Key(0).Namespace)
				n.Salt = "other"
				names.Add(k.Namespace, n.Model, []byte(n.Salt))
			}
			out, ok := n.LMCache(k)
			if !ok {
				t.Fatal("no name")
			}
			return out
		}
		b, m := tiertest.Object(7, 10)
		if err := x.Write(t.Context(), tiertest.Key(7), m, b); err != nil {
			t.Fatal(err)
		}
		prefix, ok := strings.CutSuffix(f.names()[0], name(tiertest.Key(7)))
		if !ok {
			t.Fatal(f.names(), name(tiertest.Key(7)))
		}
		change := func(f *fake, how func(map[string]stored)) {
			f.mu.Lock()
			defer f.mu.Unlock()
			how(f.objects)
		}
		move := func(from, to kv.Key) {
			a, b := prefix+name(from), prefix+name(to)
			change(f, func(all map[string]stored) { all[b] = all[a]; delete(all, a) })
		}
		unbind := func(k kv.Key) {
			change(f, func(all map[string]stored) {
				o := all[prefix+name(k)]
				at := strings.LastIndex(o.meta, ".")
				o.meta = "1" + o.meta[1:at]
				all[prefix+name(k)] = o
			})
		}
		tiertest.Exchanged(t, x, move, unbind)
	}
}

// All servers of the bucket share the note. If it did not change, the store does not send it again.
func TestNote(t *testing.T) {
	for _, layout := range []s3.Layout{s3.Native, s3.LMCache} {
		f := newFake(t)
		o := s3.Options{URL: f.url, Layout: layout, Prefix: "p/"}
		one := open(t, o)
		tiertest.Notes(t, one, open(t, o))
		f.mu.Lock()
		before := f.unchanged
		f.mu.Unlock()
		for range 3 {
			if text, err := one.Note(t.Context()); err != nil || string(text) != "y" {
				t.Errorf("%q, %v", text, err)
			}
		}
		f.mu.Lock()
		if got := f.unchanged - before; got < 2 {
			t.Errorf("%d of 3 answers say that the note did not change", got)
		}
		f.mu.Unlock()
	}
}
