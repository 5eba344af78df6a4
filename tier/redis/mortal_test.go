// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// The native layout keeps the ends of lives, also of objects of several stripes.
func TestEndsOfLives(t *testing.T) {
	for name, o := range map[string]redis.Options{"one value": {}, "stripes": {Stripe: 4096}, "with a TTL": {Stripe: 4096, TTL: 2 * time.Hour}} {
		t.Run(name, func(t *testing.T) {
			o.Addrs = []string{newFake(t).addr}
			tiertest.Mortal(t, open(t, o))
		})
	}
}

// Redis is told how long each value of an object lives: until its end, or for ttl_seconds where that is shorter.
func TestValuesEndWithTheObject(t *testing.T) {
	f := func(ttl, left time.Duration, least, most int) {
		t.Helper()
		fake := newFake(t)
		x := open(t, redis.Options{Addrs: []string{fake.addr}, Stripe: 4096, TTL: ttl})
		b, meta := tiertest.Object(1, 9000)
		if left > 0 {
			meta.End = uint32(time.Now().Add(left).Unix())
		}
		if err := x.Write(t.Context(), tiertest.Key(1), meta, b); err != nil {
			t.Fatal(err)
		}
		fake.mu.Lock()
		defer fake.mu.Unlock()
		if len(fake.lives) != 3 {
			t.Errorf("%v: 3 values were to end", fake.lives)
		}
		for _, seconds := range fake.lives {
			if seconds < least || seconds > most {
				t.Errorf("%v and %v left: %d s, want %d to %d", ttl, left, seconds, least, most)
			}
		}
	}
	f(0, time.Hour, 3500, 3600)
	f(time.Minute, time.Hour, 60, 60)
	f(time.Hour, time.Minute, 50, 60)
	f(time.Hour, 0, 3600, 3600)
}
