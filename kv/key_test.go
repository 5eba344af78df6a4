// SPDX-License-Identifier: Apache-2.0

package kv_test

import (
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
)

// Two keys never have the same name, and ParseKey returns the key of a name.
func TestKeyNames(t *testing.T) {
	rank, _ := kv.NewRank(4, 2)
	base := kv.Key{Namespace: kv.Namespace{1}, Chunk: kv.Hash{2}, Rank: rank, Group: 3}
	keys := []kv.Key{base, {}, base, base, base, base}
	keys[2].Namespace[15]++
	keys[3].Chunk[31]++
	keys[4].Rank++
	keys[5].Group++
	seen := map[string]bool{}
	for _, k := range keys {
		s := k.String()
		if seen[s] {
			t.Errorf("%s names two objects", s)
		}
		seen[s] = true
		if got, err := kv.ParseKey(s); err != nil || got != k {
			t.Errorf("ParseKey(%s) = %+v, %v", s, got, err)
		}
	}
	const want = "kv1/01000000000000000000000000000000/04020402.00000003/0200000000000000000000000000000000000000000000000000000000000000"
	if got := base.String(); got != want {
		t.Errorf("String = %s, want %s", got, want)
	}
}

func TestParseKeyRefuses(t *testing.T) {
	good := kv.Key{Group: 10}.String()
	f := func(s string) {
		t.Helper()
		if k, err := kv.ParseKey(s); !errors.Is(err, kv.ErrKey) || k != (kv.Key{}) {
			t.Errorf("ParseKey(%q) = %+v, %v", s, k, err)
		}
	}
	for i := range good { // cut, or another byte, anywhere
		f(good[:i])
		f(good[:i] + "g" + good[i+1:])
	}
	f(good + "0")
	f(good + "/")
	f("/" + good)
	f("kv1/../../../../etc/passwd")
	f(good[:4+32+1+16] + "A" + good[4+32+1+17:]) // group 10 is 0000000a
}

// ParseKey accepts only one spelling of a key.
func FuzzParseKey(f *testing.F) {
	f.Add(kv.Key{Group: 1, Rank: 2}.String())
	f.Add("kv1///")
	f.Add("kv1/+1000000000000000000000000000000/+1000000.+0000000/")
	f.Fuzz(func(t *testing.T, s string) {
		k, err := kv.ParseKey(s)
		if err == nil && k.String() != s {
			t.Fatalf("%q is read as %s", s, k)
		}
	})
}
