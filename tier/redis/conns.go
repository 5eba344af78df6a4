// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/resp"
	"github.com/kvasir-kv/kvasir/tier"
)

// slowest is the rate, in bytes per second, at which a value must move at least.
const slowest = 4 << 20

// conns are the connections to one server for one purpose: for values, or for everything else.
type conns struct {
	dial  func(context.Context) (*resp.Conn, error)
	slots chan struct{} // one place for each connection in use

	mu struct {
		sync.Mutex
		idle   []*resp.Conn
		closed bool
	}
}

func newConns(most int, dial func(context.Context) (*resp.Conn, error)) *conns {
	return &conns{dial: dial, slots: make(chan struct{}, most)}
}

// take returns a connection: an idle one (reused), or a new one if fresh is set or none is idle. It may wait until another call puts its
// connection back. Afterwards it calls ready, because the server may have failed meanwhile; an error of ready is take's error.
func (p *conns) take(ctx context.Context, fresh bool, ready func() error) (c *resp.Conn, reused bool, err error) {
	select {
	case p.slots <- struct{}{}:
	default:
		select {
		case p.slots <- struct{}{}:
		case <-ctx.Done():
			return nil, false, ctx.Err()
		}
	}
	if err := ready(); err != nil {
		<-p.slots
		return nil, false, err
	}
	if c := p.pop(); c != nil && !fresh {
		return c, true, nil
	} else if c != nil {
		_ = c.Close()
	}
	if c, err = p.dial(ctx); err != nil {
		<-p.slots
	}
	return c, false, err
}

func (p *conns) pop() *resp.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.mu.idle)
	if n == 0 {
		return nil
	}
	c := p.mu.idle[n-1]
	p.mu.idle = p.mu.idle[:n-1]
	return c
}

// putBack takes a connection back. It closes the connection unless it is reusable.
func (p *conns) putBack(c *resp.Conn, reusable bool) {
	if reusable {
		p.mu.Lock()
		if reusable = !p.mu.closed; reusable {
			p.mu.idle = append(p.mu.idle, c)
		}
		p.mu.Unlock()
	}
	if !reusable {
		_ = c.Close()
	}
	<-p.slots
}

// close closes the idle connections, and those in use when they are given back.
func (p *conns) close() {
	p.mu.Lock()
	idle := p.mu.idle
	p.mu.idle, p.mu.closed = nil, true
	p.mu.Unlock()
	for _, c := range idle {
		_ = c.Close()
	}
}

// maxFailures is the number of failures in a row after which a server rests for Options.Pause. Then one call tries whether it works again.
const maxFailures = 3

// server is one Redis or Valkey server.
type server struct {
	o       *Options
	addr    string
	lookups *conns
	bulk    *conns

	mu struct {
		sync.Mutex
		failures int
		until    time.Time
		trying   bool
	}
}

func newServer(o *Options, addr string) *server {
	s := &server{o: o, addr: addr}
	dial := func(ctx context.Context) (*resp.Conn, error) {
		return dial(ctx, o, addr, login{o.Username, o.Password, o.Database})
	}
	s.lookups, s.bulk = newConns(o.Lookups, dial), newConns(o.Workers, dial)
	return s
}

func (s *server) close() {
	s.lookups.close()
	s.bulk.close()
}

// do calls f with a connection, within the time that moving `bytes` bytes may take.
// If an idle connection turns out to be closed, it calls f again with a new one.
func (s *server) do(ctx context.Context, p *conns, bytes int64, f func(*resp.Conn) error) error {
	trial, err := s.admit()
	if err != nil {
		return err
	}
	result := unknown // if f panics
	defer func() { s.settle(trial, result) }()
	reused, err := s.tryOnce(ctx, p, bytes, false, trial, f)
	if reused && isGone(err) && ctx.Err() == nil {
		_, err = s.tryOnce(ctx, p, bytes, true, trial, f)
	}
	result = judge(ctx, err)
	return err
}

// isGone reports whether the peer ended a connection.
func isGone(err error) bool {
	if err == nil || errors.Is(err, resp.ErrProtocol) || errors.Is(err, resp.ErrNil) {
		return false
	}
	_, refused := errors.AsType[*resp.Error](err)
	timeout, ok := errors.AsType[net.Error](err)
	return !refused && !(ok && timeout.Timeout()) && !isOurs(err) && !errors.Is(err, syscall.EFAULT)
}

// tryOnce calls f with one connection, `fresh` asks for a new one, and reports whether the connection was an idle one. f has the time that
// so many bytes may take. A trial also tries a server that rests after failures.
func (s *server) tryOnce(ctx context.Context, p *conns, bytes int64, fresh, trial bool, f func(*resp.Conn) error) (reused bool, err error) {
	c, reused, err := p.take(ctx, fresh, func() error {
		if trial {
			return nil
		}
		return s.rests()
	})
	if errors.Is(err, tier.ErrResting) {
		return false, err
	}
	if err != nil {
		return false, fmt.Errorf("redis: connect to %s: %w", s.addr, err)
	}
	again := false
	deadline := time.Now().Add(s.o.Timeout + time.Duration(bytes/slowest)*time.Second)
	_ = c.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer func() { p.putBack(c, stop() && again) }()
	err = f(c)
	again = c.Reusable()
	switch {
	case err == nil:
		return reused, nil
	case ctx.Err() != nil:
		return reused, fmt.Errorf("redis: %s: %w", s.addr, ctx.Err())
	}
	return reused, fmt.Errorf("redis: %s: %w", s.addr, err)
}

// outcome is what a call says about its server.
type outcome uint8

const (
	works outcome = iota
	fails
	unknown // the call says nothing about the server
)

func judge(ctx context.Context, err error) outcome {
	switch {
	case err == nil, isOurs(err), errors.Is(err, resp.ErrNil):
		return works
	case errors.Is(ctx.Err(), context.Canceled), errors.Is(err, syscall.EFAULT), errors.Is(err, tier.ErrResting): // the fault is not the server's
		return unknown
	}
	if e, ok := errors.AsType[*resp.Error](err); ok {
		switch e.Code() {
		case "LOADING", "CLUSTERDOWN", "MASTERDOWN", "BUSY", "NOAUTH", "WRONGPASS":
		default:
			return works
		}
	}
	return fails
}

func (s *server) admit() (trial bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.failures < maxFailures:
		return false, nil
	case s.mu.trying || time.Now().Before(s.mu.until):
		return false, s.resting()
	}
	s.mu.trying = true
	return true, nil
}

func (s *server) resting() error { return fmt.Errorf("redis: %s: %w", s.addr, tier.ErrResting) }

// rests returns an error while the server rests.
func (s *server) rests() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.failures < maxFailures {
		return nil
	}
	return s.resting()
}

func (s *server) settle(trial bool, o outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if trial {
		s.mu.trying = false
	}
	switch {
	case o == works && (trial || s.mu.failures < maxFailures): // a call from before the rest does not end it
		s.mu.failures = 0
	case o == fails:
		if s.mu.failures++; s.mu.failures >= maxFailures {
			s.mu.failures, s.mu.until = maxFailures, time.Now().Add(s.o.Pause)
		}
	}
}

// login is how this client authenticates to a server.
type login struct {
	user, password string
	database       int
}

// dial opens a connection to host:port, or to a UNIX socket at unix:PATH.
func dial(ctx context.Context, o *Options, addr string, who login) (_ *resp.Conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.DialTimeout)
	defer cancel()
	network := "tcp"
	path, local := strings.CutPrefix(addr, unixScheme)
	if local {
		network, addr = "unix", path
	}
	nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = nc.Close()
		}
	}()
	if o.TLS != nil && !local {
		config := o.TLS.Clone()
		if config.ServerName == "" {
			if config.ServerName, _, err = net.SplitHostPort(addr); err != nil {
				return nil, err
			}
		}
		t := tls.Client(nc, config)
		if err := t.HandshakeContext(ctx); err != nil {
			return nil, fmt.Errorf("TLS: %w", err)
		}
		nc = t
	}
	c := resp.New(nc)
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	err = who.enter(c)
	if !stop() {
		err = errors.Join(ctx.Err(), err)
	}
	return c, err
}

// enter logs in.
func (l login) enter(c *resp.Conn) error {
	if l.password != "" || l.user != "" {
		args := []string{"AUTH", l.password}
		if l.user != "" {
			args = []string{"AUTH", l.user, l.password}
		}
		c.Command(args...)
		if err := c.OK(); err != nil {
			return fmt.Errorf("log in: %w", err)
		}
	}
	if l.database > 0 {
		c.Command("SELECT", fmt.Sprint(l.database))
		if err := c.OK(); err != nil {
			return fmt.Errorf("select database %d: %w", l.database, err)
		}
	}
	return nil
}
