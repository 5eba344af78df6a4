// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"encoding/binary"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// If the values of two names are exchanged, also with their headers, they are misses.
func TestExchangedValuesAreMisses(t *testing.T) {
	f := newFake(t)
	x := open(t, redis.Options{Addrs: []string{f.addr}})
	name := func(k kv.Key) string { return "kvasir:{" + k.String() + "}" }
	b, m := tiertest.Object(7, 10)
	if err := x.Write(t.Context(), tiertest.Key(7), m, b); err != nil || f.value(name(tiertest.Key(7))) == nil {
		t.Fatal(err, f.names())
	}
	move := func(from, to kv.Key) {
		f.set(name(to), f.value(name(from)))
		f.drop(name(from))
	}
	unbind := func(k kv.Key) {
		b := append([]byte(nil), f.value(name(k))...)
		copy(b, "KVASIR1\n")
		binary.LittleEndian.PutUint64(b[32:], xxh3.Hash(b[:32]))
		f.set(name(k), b)
	}
	tiertest.Exchanged(t, x, move, unbind)
}

// The note is shared by all servers of the tier, in every layout.
func TestNote(t *testing.T) {
	for _, o := range []redis.Options{{}, {Layout: redis.RESP, MayDelete: true}, {Layout: redis.Valkey, Prefix: "site"}} {
		o.Addrs = []string{newFake(t).addr}
		tiertest.Notes(t, open(t, o), open(t, o))
	}
}
