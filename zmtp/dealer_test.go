package zmtp

import (
	"bufio"
	"net"
	"testing"
	"time"
)

// rawRouter listens as a ROUTER at the level of bytes.
type rawRouter struct {
	t testing.TB
	net.Listener
}

func listenRaw(t testing.TB) rawRouter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return rawRouter{t, l}
}

func (l rawRouter) accept() *client {
	l.t.Helper()
	_ = l.Listener.(*net.TCPListener).SetDeadline(time.Now().Add(testWait))
	c, err := l.Accept()
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(testWait))
	return &client{l.t, c, bufio.NewReaderSize(c, 1<<16)}
}
