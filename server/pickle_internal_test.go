package server

import (
	"net"
	"net/netip"
	"testing"

	"github.com/kvasir-kv/kvasir/zmtp"
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

// Only a server that takes pickled tensors takes larger messages.
func TestRouterLimits(t *testing.T) {
	f := func(o Options, want int64) {
		t.Helper()
		var r zmtp.RouterOptions
		o.routerLimits(&r)
		if r.MaxFrameBytes != want || want > 0 && r.MaxMessageBytes <= want {
			t.Errorf("%+v: %+v, want %d", o, r, want)
		}
	}
	f(Options{PickleBytes: MaxPickleBytes}, 0)
	f(Options{Pickle: PickleOn, PickleBytes: MaxPickleBytes}, MaxPickleBytes+5)
	f(Options{Pickle: PickleOnly, PickleBytes: 1000}, 64<<20)
}
