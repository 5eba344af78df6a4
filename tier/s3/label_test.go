// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// FuzzLabel reads marks that another program may have put on an object: a mark that is accepted is written
// as the same text.
func FuzzLabel(f *testing.F) {
	f.Add(label{namespace: kv.Namespace{1, 2}, sum: 3, length: 4}.String())
	f.Add("1.00000000000000000000000000000000.0000000000000000.-1")
	f.Add("1.00000000000000000000000000000000.0000000000000000.01")
	f.Add("2....")
	f.Add(labelOf(kv.Key{}, tier.Meta{Len: 1}).String())
	f.Add(labelOf(kv.Key{}, tier.Meta{Len: 81, Seal: 7}).String())
	f.Fuzz(func(t *testing.T, text string) {
		if l, ok := parseLabel(text); ok && (l.String() != text || l.length < 1) {
			t.Errorf("%q is %+v", text, l)
		}
	})
}

func TestLabel(t *testing.T) {
	for _, want := range []label{
		{namespace: kv.Namespace{1, 15: 0xff}, sum: 0xfedcba9876543210, length: 1 << 40},
		{kv.Namespace{1, 15: 0xff}, 0xfedcba9876543210, 1 << 40, 3, true, 0, 0},
		{kv.Namespace{1, 15: 0xff}, 0xfedcba9876543210, 1 << 40, 3, true, 1<<32 - 1, 0},
		{kv.Namespace{1, 15: 0xff}, 0xfedcba9876543210, 1 << 40, 3, true, 0, 1},
		{kv.Namespace{1, 15: 0xff}, 0xfedcba9876543210, 1 << 40, 3, true, 1<<32 - 1, 0xffff},
	} {
		if l, ok := parseLabel(want.String()); !ok || l != want {
			t.Errorf("%q: %+v", want, l)
		}
	}
	if l, ok := parseLabel("1.00000000000000000000000000000000.0000000000000000.0"); ok {
		t.Errorf("no bytes: %+v", l)
	}
}

// Names that the tier writes are read back, and it accepts no other names.
func TestNamesAreReadBack(t *testing.T) {
	one, two := &Tier{o: Options{Prefix: "kvasir/"}}, &Tier{o: Options{Prefix: "other/"}}
	k := kv.Key{Namespace: kv.Namespace{1}, Chunk: kv.Hash{2}, Rank: 3, Group: 4}
	if got, ok := one.keyOf(one.nativeName(k)); !ok || got != k {
		t.Errorf("%+v", got)
	}
	for _, name := range []string{two.nativeName(k), "kvasir/03" + one.nativeName(k)[len("kvasir/02"):], "kvasir/", "kvasir/02", one.nativeName(k) + "x"} {
		if got, ok := one.keyOf(name); ok {
			t.Errorf("%q: %+v", name, got)
		}
	}
}

// An object with metadata of a later version is a miss in both layouts. In LMCache's layout an object without metadata is of another
// server, and its length is trusted.
func TestLabelsOfALaterVersionAreMisses(t *testing.T) {
	f := func(layout Layout, meta string, want tier.Meta) {
		t.Helper()
		s := &Tier{o: Options{Layout: layout}}
		if got := s.labelled(kv.Key{}, 10, meta); got != want {
			t.Errorf("%q: %+v, want %+v", meta, got, want)
		}
	}
	later := "4." + labelOf(kv.Key{}, tier.Meta{Len: 10}).String()[2:] + ".zstd"
	f(LMCache, later, tier.Meta{})
	f(Native, later, tier.Meta{})
	f(LMCache, "", tier.Meta{Len: 10, NoSum: true})
	f(Native, "", tier.Meta{})
}
