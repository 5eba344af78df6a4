package loopback

import (
	"net"
	"testing"
)

// pair connects to a listener on host, an address of this one, and returns both
// ends.
func pair(t *testing.T, host string) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

func TestSameHost(t *testing.T) {
	hosts := []string{"127.0.0.1"}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok || n.IP.IsLinkLocalUnicast() {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort(n.IP.String(), "0"))
		if err != nil { // an address that is not ready, or going away
			t.Log(err)
			continue
		}
		l.Close()
		hosts = append(hosts, n.IP.String())
	}
	for _, host := range hosts {
		a, b := pair(t, host)
		if !Prepare(a) || !Prepare(b) {
			t.Errorf("%s: not taken for this host", host)
		}
	}
	t.Log(hosts)
}

func TestOtherHost(t *testing.T) {
	ip := func(s string) *net.TCPAddr { return &net.TCPAddr{IP: net.ParseIP(s), Port: 1} }
	for _, c := range []struct {
		local, remote string
		want          bool
	}{
		{"10.0.0.1", "10.0.0.2", false},
		{"10.0.0.1", "10.0.0.1", true},
		{"127.0.0.1", "127.0.0.2", true},
		{"::1", "::1", true},
		{"10.0.0.1", "::ffff:10.0.0.1", true},
		{"fd00::1", "fd00::2", false},
	} {
		if got := sameHost(ip(c.local), ip(c.remote)); got != c.want {
			t.Errorf("%s to %s: %t", c.local, c.remote, got)
		}
	}
	if sameHost(nil, ip("10.0.0.1")) {
		t.Error("no address is this host's")
	}
}
