// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// Every address of this host counts as its own.
func TestOnThisHost(t *testing.T) {
	f := func(a netip.Addr, want bool) {
		t.Helper()
		if got := onThisHost(a); got != want {
			t.Errorf("%v: %v", a, got)
		}
	}
	f(netip.MustParseAddr("127.0.0.1"), true)
	f(netip.IPv6Loopback(), true)
	f(netip.MustParseAddr("192.0.2.1"), false) // TEST-NET
	f(netip.MustParseAddr("2001:db8::1"), false)
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok {
			ip, _ := netip.AddrFromSlice(n.IP)
			f(ip.Unmap(), true)
		}
	}
}

// Who may be told places in the pool, and whose files a peer may lend: its user
// decides, root may everything, a trusted address counts as this process' user, and
// where the user is not known nothing is allowed.
func TestRights(t *testing.T) {
	me := os.Geteuid()
	here, away := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.7")
	trust := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	f := func(what string, p peercred.Peer, trust []netip.Prefix, open, lendMine, lendOthers bool) {
		t.Helper()
		c := New(p, trust, 1)
		is := func(deed string, err, kind error, want bool) {
			t.Helper()
			if (err == nil) != want || err != nil && !errors.Is(err, kind) {
				t.Errorf("%s: %s: %v", what, deed, err)
			}
		}
		is("open", c.MayOpen(), ErrMayNotOpen, open)
		is("lend mine", c.MayLend(me), ErrLender, lendMine)
		is("lend another's", c.MayLend(me+1), ErrLender, lendOthers)
	}
	f("this user", peercred.Peer{UID: me, Addr: here}, nil, true, true, me == 0)
	f("another user", peercred.Peer{UID: me + 1, Addr: here}, nil, false, false, true)
	f("root", peercred.Peer{UID: 0, Addr: here}, nil, true, true, true)
	f("unseen", peercred.Peer{Addr: here, Err: peercred.ErrNotHere}, nil, false, false, false)
	f("another host", peercred.Peer{Addr: away, Err: peercred.ErrNotHere}, nil, false, false, false)
	f("another host, trusted", peercred.Peer{Addr: away, Err: peercred.ErrNotHere}, trust, true, true, me == 0)
	f("another address", peercred.Peer{Addr: here, Err: peercred.ErrNotHere}, trust, false, false, false)
}

// Callers are told apart by user where it is known, else by address; those of which
// nothing is known are one, and nobody else.
func TestPrincipals(t *testing.T) {
	a, b := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.7")
	of := func(p peercred.Peer) Principal { c := New(p, nil, 1); return c.By }
	unseen := func(a netip.Addr) peercred.Peer { return peercred.Peer{Addr: a, Err: peercred.ErrNotHere} }
	all := []Principal{
		of(peercred.Peer{UID: 7, Addr: a}), of(peercred.Peer{UID: 8, Addr: a}), of(unseen(a)), of(unseen(b)), of(unseen(netip.Addr{})), {},
	}
	for i, p := range all {
		for j, q := range all {
			if (p == q) != (i == j) {
				t.Errorf("%d and %d: %+v, %+v", i, j, p, q)
			}
		}
	}
	if of(peercred.Peer{UID: 7, Addr: a}) != of(peercred.Peer{UID: 7, Addr: b}) {
		t.Error("one user at two addresses is two")
	}
}

// The processes of connections that ask one right after another, or all at once, are all found: one look at /proc serves
// those who wait for it, and the next look is waited for.
func TestProcessesOfManyConnections(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dial := func() Caller {
		t.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		a, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close() })
		return New(peercred.Of(a), nil, 1)
	}
	var f Finder
	if c := dial(); f.Process(&c) != os.Getpid() {
		t.Skipf("the sockets of this process are not to be found here: %+v", c.Peer)
	}
	for i := range 3 { // each came after the look before it
		if c := dial(); f.Process(&c) != os.Getpid() {
			t.Errorf("connection %d: its process was not found", i)
		}
	}
	var wg sync.WaitGroup
	for i := range 16 {
		c := dial()
		wg.Go(func() {
			if f.Process(&c) != os.Getpid() {
				t.Errorf("connection %d of many: its process was not found", i)
			}
		})
	}
	wg.Wait()
}
