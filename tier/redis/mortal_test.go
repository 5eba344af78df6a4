// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"net"
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

// Each SET gives the lifetime of a value of an object: until the end of the object, or ttl_seconds if that is shorter.
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
		m, err := x.Read(t.Context(), tiertest.Key(1), b) // a caller that copies it to another tier needs its end
		if life := time.Until(time.Unix(int64(m.End), 0)); err != nil || life > time.Duration(most)*time.Second || life < time.Duration(least-10)*time.Second {
			t.Errorf("%v and %v left: a read says that it ends in %v, %v", ttl, left, life, err)
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

// An object without an end of its life is read without one, also by a user without the right to ask for the end.
func TestReadsWithoutAnEnd(t *testing.T) {
	for name, answer := range map[string]func(cmd []string, _ []byte, _ net.Conn) ([]byte, bool){
		"none": nil,
		"a user who may not ask": func(cmd []string, _ []byte, _ net.Conn) ([]byte, bool) {
			return []byte("-NOPERM this user has no permissions to run the 'pttl' command\r\n"), cmd[0] == "PTTL"
		},
	} {
		fake := newFake(t)
		x := open(t, redis.Options{Addrs: []string{fake.addr}, Stripe: 4096})
		b, meta := tiertest.Object(1, 9000)
		if err := x.Write(t.Context(), tiertest.Key(1), meta, b); err != nil {
			t.Fatal(err)
		}
		fake.misbehave(answer)
		for range 3 {
			if m, err := x.Read(t.Context(), tiertest.Key(1), b); err != nil || m != meta {
				t.Errorf("%s: %+v, %v, want %+v", name, m, err, meta)
			}
		}
		if n := fake.called("PTTL"); n != 3 {
			t.Errorf("%s: %d times asked for the end of a life, want 3", name, n)
		}
	}
}
