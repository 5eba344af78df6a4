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
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// strays returns the names of values that nothing refers to and that never end.
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

// The stripes of a writer that came second end, also when it is killed before it removes them.
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
		case cmd[0] == "GETRANGE" && second.Load(): // and hears no more
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

// A reader that finds a part of an object missing because another one has just taken its place leaves
// that alone.
func TestReaderLeavesAReplacedObject(t *testing.T) {
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
	dst := make([]byte, len(former))
	if _, err := a.Read(t.Context(), k, dst); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("Read: %v", err)
	}
	f.misbehave(nil)
	if m, err := a.Read(t.Context(), k, dst); err != nil || m != nextMeta || !bytes.Equal(dst, next) {
		t.Errorf("what took its place: %+v, %v; there are %q", m, err, f.names())
	}
}

// Of two servers that replace one object with bytes that differ nothing stays but one of them.
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
