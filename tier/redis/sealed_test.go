// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/seal"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestSealed(t *testing.T) {
	for name, o := range map[string]redis.Options{"one value": {}, "stripes": {Stripe: 64 << 10}} {
		t.Run(name, func(t *testing.T) {
			tiertest.Sealed(t, func(t *testing.T) (tier.Tier, func([]byte) bool) {
				f := newFake(t)
				o := o
				o.Addrs = []string{f.addr}
				x, err := redis.Open(o)
				if err != nil {
					t.Fatal(err)
				}
				return x, func(b []byte) bool {
					f.mu.Lock()
					defer f.mu.Unlock()
					for name, v := range f.values {
						if strings.Contains(name, string(b)) || bytes.Contains(v, b) {
							return true
						}
					}
					return false
				}
			})
		})
	}
}

// Two servers that write one object at once encrypt it differently. A read returns one whole version, and no stripe of the other is left.
func TestSealedWritersDoNotMixStripes(t *testing.T) {
	f := newFake(t)
	keys := tiertest.Keys(t, 1)
	const size = 300_000
	b, m := tiertest.Object(1, size)
	var all []tier.Tier
	for range 2 {
		all = append(all, seal.New(open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 64 << 10}), keys, seal.Options{}))
	}
	for range 30 {
		var wg sync.WaitGroup
		for _, x := range all {
			wg.Go(func() {
				if err := x.Write(t.Context(), tiertest.Key(1), m, b); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for _, x := range all {
			dst := make([]byte, size)
			if _, err := x.Read(t.Context(), tiertest.Key(1), dst); err != nil || xxh3.Hash(dst) != m.Sum {
				t.Fatalf("after two writers: %v", err)
			}
		}
		if n := len(f.names()); n != 5 {
			t.Fatalf("%d values: %q", n, f.names())
		}
		if err := all[0].Delete(t.Context(), []kv.Key{tiertest.Key(1)}); err != nil {
			t.Fatal(err)
		}
		if n := len(f.names()); n != 0 {
			t.Fatalf("%d values after a delete: %q", n, f.names())
		}
	}
}

// An older build does not take an encrypted object for its own, and leaves it until it stores the same object.
func TestSealedHeaderIsNoneOfOlderBuilds(t *testing.T) {
	f := newFake(t)
	x := seal.New(open(t, redis.Options{Addrs: []string{f.addr}}), tiertest.Keys(t, 1), seal.Options{})
	b, m := tiertest.Object(1, 500)
	if err := x.Write(t.Context(), tiertest.Key(1), m, b); err != nil {
		t.Fatal(err)
	}
	v := f.value(f.names()[0])
	if string(v[:8]) != "KVASIR3\n" {
		t.Errorf("the header begins with %q, which older builds know", v[:8])
	}
	f.set(f.names()[0], v[:45]) // cut in its header
	if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, 500)); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("a header that is cut: %v", err)
	}
}
