package server

import (
	"net"
	"testing"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// Peers on this host are offered the pool, whatever address of it they use.
func TestOnThisHost(t *testing.T) {
	f := func(a net.Addr, want bool) {
		t.Helper()
		if got := onThisHost(a); got != want {
			t.Errorf("%v: %v", a, got)
		}
	}
	f(&net.UnixAddr{Name: "@x"}, true)
	f(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}, true)
	f(&net.TCPAddr{IP: net.IPv6loopback, Port: 1}, true)
	f(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1}, false) // TEST-NET
	f(&net.TCPAddr{IP: net.ParseIP("2001:db8::1"), Port: 1}, false)
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		if n, ok := a.(*net.IPNet); ok {
			f(&net.TCPAddr{IP: n.IP, Port: 1}, true)
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
