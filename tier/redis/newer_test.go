// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// A value of a later release is a miss and stays as it is. The tier replaces a value that no release writes.
func TestValuesOfALaterReleaseStay(t *testing.T) {
	f := newFake(t)
	x := open(t, redis.Options{Addrs: []string{f.addr}})
	name := "kvasir:{" + tiertest.Key(1).String() + "}"
	b, m := tiertest.Object(1, 100)
	try := func(value string, stays bool) {
		t.Helper()
		f.set(name, []byte(value))
		var metas [1]tier.Meta
		if err := x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, metas[:]); err != nil || metas[0].Len != 0 {
			t.Errorf("%q: %+v, %v", value, metas, err)
		}
		if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, 100)); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("%q: a read answers %v", value, err)
		}
		err := x.Write(t.Context(), tiertest.Key(1), m, b)
		if newer := errors.Is(err, tier.ErrNewer) && errors.Is(err, tier.ErrNotKept); newer != stays || !stays && err != nil {
			t.Errorf("%q: a write answers %v", value, err)
		}
		if same := bytes.Equal(f.value(name), []byte(value)); same != stays {
			t.Errorf("%q: stays: %v", value, same)
		}
	}
	try("KVASIR4\n", true)
	try("KVASIR9\n and more than any header of today has, of which nothing is known at all", true)
	try("KVASIR3\n of today, damaged, with more bytes than the header of an object has", false)
	try("KVASIRX\n", false)
	try("short", false)
}
