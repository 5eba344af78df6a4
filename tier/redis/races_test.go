// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/seal"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// strays returns the names of values to which no object refers and which have no end of life.
func (f *fake) strays(k kv.Key, m tier.Meta) (all []string) {
	sum := sumText(m)
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.values {
		if strings.Contains(name, k.String()) && !strings.HasSuffix(name, "}") && !strings.Contains(name, sum) && !f.ends[name] {
			all = append(all, name)
		}
	}
	return all
}

// The stripes of a writer that came second get an end of life, also if the writer is killed before it removes them.
func TestStripesOfTheSecondWriterEnd(t *testing.T) {
	f := newFake(t)
	k := tiertest.Key(1)
	first, firstMeta := tiertest.Object(1, 15<<10)
	other, otherMeta := tiertest.Object(2, 15<<10)
	a := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	z := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	var begun, second atomic.Bool
	ctx, kill := context.WithCancel(t.Context())
	f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		switch {
		case cmd[0] == "SET" && !strings.HasSuffix(cmd[1], "}") && begun.CompareAndSwap(false, true): // in the middle of a's
			write(t, z, k, otherMeta, other)
		case cmd[0] == "SET" && bytes.Equal(normal, []byte("$-1\r\n")): // a came second
			second.Store(true)
		case cmd[0] == "GETRANGE" && second.Load(): // and gets no more answers
			kill()
			return nil, true
		}
		return nil, false
	})
	if err := a.Write(ctx, k, firstMeta, first); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	f.misbehave(nil)
	if left := f.strays(k, otherMeta); len(left) > 0 {
		t.Errorf("%q stay for ever", left)
	}
}

// If a part of an object is missing because another version has just replaced it, a reader reads that version.
func TestReaderReadsWhatReplacedAnObject(t *testing.T) {
	f := newFake(t)
	k := tiertest.Key(1)
	former, formerMeta := tiertest.Object(1, 15<<10)
	next, nextMeta := tiertest.Object(2, 15<<10)
	a := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	z := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	write(t, a, k, formerMeta, former)
	var begun atomic.Bool
	f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		if cmd[0] == "GET" && strings.HasSuffix(cmd[1], "}") && begun.CompareAndSwap(false, true) { // the reader gets the former first value
			write(t, z, k, nextMeta, next)
		}
		return nil, false
	})
	for range 2 {
		dst := make([]byte, len(former))
		if m, sum, err := tier.ReadSummed(t.Context(), a, k, dst); err != nil || m != nextMeta || sum != nextMeta.Sum || !bytes.Equal(dst, next) {
			t.Errorf("what took its place: %+v, %v; there are %q", m, err, f.names())
		}
		f.misbehave(nil)
	}
}

// While a server encrypts an object anew, other servers still find it: at each moment their lookups and reads find the former version or the
// new one.
func TestObjectsThatAreEncryptedAnewAreFound(t *testing.T) {
	for _, command := range []string{"GETRANGE", "GET"} { // of the lookup, and of the read
		f := newFake(t)
		o := redis.Options{Addrs: []string{f.addr}, Stripe: 64 << 10}
		former, both := tiertest.Keys(t, 1), tiertest.Keys(t, 2, 1)
		b, m := tiertest.Object(1, 300_000)
		k := tiertest.Key(1)
		if err := seal.New(open(t, o), former, seal.Options{}).Write(t.Context(), k, m, b); err != nil {
			t.Fatal(err)
		}
		rekeys, reads := seal.New(open(t, o), both, seal.Options{}).Sealed(), seal.New(open(t, o), both, seal.Options{}).Sealed()
		var begun atomic.Bool
		f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
			if cmd[0] == command && strings.HasSuffix(cmd[1], "}") && begun.CompareAndSwap(false, true) { // the answer is the former header
				n, err := rekeys.Rekey(t.Context(), func(context.Context, int64) error { return nil }, func(seal.RekeyStats) {})
				if err != nil || n.Rewritten != 1 {
					t.Errorf("rekey: %+v, %v", n, err)
				}
			}
			return nil, false
		})
		if command == "GETRANGE" {
			metas := make([]tier.Meta, 1)
			if err := reads.Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0] != m {
				t.Errorf("a lookup found %+v, %v", metas[0], err)
			}
		}
		dst := make([]byte, len(b))
		if got, err := reads.Read(t.Context(), k, dst); err != nil || got != m || !bytes.Equal(dst, b) {
			t.Errorf("%s: a read found %+v, %v", command, got, err)
		}
		if !begun.Load() {
			t.Error("nothing was encrypted anew")
		}
	}
}

// If two servers replace one object with different bytes, exactly one of the two versions stays, and nothing else.
func TestTwoReplacers(t *testing.T) {
	f := newFake(t)
	k := tiertest.Key(1)
	a := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	z := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	former, formerMeta := tiertest.Object(0, 15<<10)
	write(t, a, k, formerMeta, former)
	first, firstMeta := tiertest.Object(1, 15<<10)
	second, secondMeta := tiertest.Object(2, 15<<10)
	var begun atomic.Bool
	f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		if cmd[0] == "SET" && !strings.HasSuffix(cmd[1], "}") && begun.CompareAndSwap(false, true) { // in the middle of a's
			write(t, z, k, secondMeta, second)
		}
		return nil, false
	})
	write(t, a, k, firstMeta, first)
	f.misbehave(nil)
	dst := make([]byte, len(first))
	m, err := a.Read(t.Context(), k, dst)
	if err != nil {
		t.Fatal(err)
	}
	if left := f.strays(k, m); len(left) > 0 || len(f.names()) != 4 {
		t.Errorf("%q stay for ever, of %q", left, f.names())
	}
}

// sumText is a checksum as it stands in names of stripes.
func sumText(m tier.Meta) string { return fmt.Sprintf("%016x", m.Sum) }
