// SPDX-License-Identifier: Apache-2.0

package peercred

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"testing"
)

func remote(addr string) Origin { return OriginOfAddr(netip.MustParseAddr(addr)) }

// Two addresses of one user count separately within that user's share. Addresses of one
// IPv6 network, of which a host has any number, count as one user's.
func TestLargest(t *testing.T) {
	f := func(want Origin, held map[Origin]int, from Origin) {
		t.Helper()
		for range 50 { // maps have no order
			if got := LargestOrigin(held, from, 1); got != want {
				t.Fatalf("largest of %v for %v: %v, want %v", held, from, got, want)
			}
		}
	}
	a, b := Origin{User: "uid 1", Addr: "127.0.0.2"}, Origin{User: "uid 1", Addr: "127.0.0.3"}
	x, y := remote("10.0.0.1"), remote("10.0.0.2")
	f(a, map[Origin]int{a: 9}, b)
	f(a, map[Origin]int{a: 5, b: 4, x: 8}, y)
	f(x, map[Origin]int{a: 3, b: 4, x: 8}, y)
	f(x, map[Origin]int{a: 3, x: 8}, x)
	f(y, map[Origin]int{}, y)
	n1, n2 := remote("2001:db8::1"), remote("2001:db8::2")
	f(n1, map[Origin]int{n1: 3, n2: 2, x: 4}, y)
	if n1.User != n2.User || n1 == n2 || remote("2001:db8:0:1::1").User == n1.User {
		t.Fatal(n1, n2)
	}
}

// When all shares are taken, the oldest share of the origin with most shares ends, with the cause. A
// new share of that origin itself is refused.
func TestShares(t *testing.T) {
	s := OriginShares{Max: 3}
	a, b := remote("10.0.0.1"), remote("10.0.0.2")
	why := errors.New("made room")
	var ctxs []context.Context
	for range 3 {
		ctx, leave, ok := s.Enter(t.Context(), a, why)
		if !ok {
			t.Fatal("refused")
		}
		defer leave()
		ctxs = append(ctxs, ctx)
	}
	if _, _, ok := s.Enter(t.Context(), a, why); ok {
		t.Fatal("let in beyond the limit")
	}
	ctx, leave, ok := s.Enter(t.Context(), b, why)
	if !ok || !errors.Is(context.Cause(ctxs[0]), why) || ctxs[1].Err() != nil || s.Taken() != 3 {
		t.Fatal(ok, ctxs[0].Err(), ctxs[1].Err(), s.Taken())
	}
	leave()
	leave() // a second call does no harm
	if ctx.Err() == nil || s.Taken() != 2 {
		t.Fatal(ctx.Err(), s.Taken())
	}
}

// A process of this host is identified by its user, whatever address it comes from.
func TestOfConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var users []Origin
	for _, from := range []string{"127.0.0.1", "127.0.0.2"} {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		in, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		users = append(users, OriginOf(in))
	}
	if users[0].User != "uid "+strconv.Itoa(os.Geteuid()) || users[0].User != users[1].User || users[0] == users[1] || !users[0].Here {
		t.Fatal(users)
	}
}
