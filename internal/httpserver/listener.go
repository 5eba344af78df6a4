// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"time"
)

// MaxConns is the connection limit of an interface for people and monitoring.
const MaxConns = 256

// Limits of one request. The server ends a connection that exceeds one of them.
const (
	headTimeout = 10 * time.Second // for the head of a request
	readTimeout = 30 * time.Second // for the whole request
	sendTimeout = 60 * time.Second // for the answer
	idleTimeout = 75 * time.Second // without a request
	maxHead     = 64 << 10         // bytes of a request's head
)

// NewServer returns an http.Server that limits the time and the header bytes of each request.
func NewServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: headTimeout, ReadTimeout: readTimeout, WriteTimeout: sendTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHead,
	}
}

// Limit returns l with at most conns connections at a time. A new connection beyond that closes the oldest connection of the host with
// the most connections, counting the new one.
func Limit(l net.Listener, conns int) net.Listener { return &listener{Listener: l, max: conns} }

// Unlimited returns the connection inside one that a listener of Limit has accepted.
func Unlimited(c net.Conn) net.Conn {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if n, ok := c.(*conn); ok {
		return n.Conn
	}
	return c
}

type listener struct {
	net.Listener
	max int
	mu  struct {
		sync.Mutex
		conns []*conn // oldest first
	}
}

type conn struct {
	net.Conn
	host string
	of   *listener
	once sync.Once
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		host = "unix"
	}
	n := &conn{Conn: c, host: host, of: l}
	if old := l.add(n); old != nil {
		_ = old.Close() // it is closed in any case
	}
	return n, nil
}

// add records the new connection n. If there are now too many, it returns the connection that must be closed, which may be n itself: the
// oldest one of the host with the most.
func (l *listener) add(n *conn) (old *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.conns = append(l.mu.conns, n)
	if len(l.mu.conns) <= l.max {
		return nil
	}
	hosts := map[string]int{}
	for _, c := range l.mu.conns {
		hosts[c.host]++
	}
	for _, c := range l.mu.conns {
		if old == nil || hosts[c.host] > hosts[old.host] {
			old = c
		}
	}
	return old
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.once.Do(func() {
		l := c.of
		l.mu.Lock()
		defer l.mu.Unlock()
		for i := range l.mu.conns {
			if l.mu.conns[i] == c {
				l.mu.conns = append(l.mu.conns[:i], l.mu.conns[i+1:]...)
				return
			}
		}
	})
	return c.Conn.Close()
}
