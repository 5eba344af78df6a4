// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// curve shakes hands as a DEALER with the key of ann. The mechanism seals and opens what follows.
func (c *client) curve(r keyring) *curve {
	c.t.Helper()
	m := &curve{to: &CurveClient{Secret: r.ann, Server: r.public}, own: properties(typeDealer, nil)}
	c.send(append(appendGreetingOf(nil, mechanismCurve, false), m.begin()...))
	if _, err := io.ReadFull(c.r, make([]byte, greetingBytes)); err != nil {
		c.t.Fatal(err)
	}
	for done := false; !done; {
		_, body, err := c.frame()
		if err != nil {
			c.t.Fatal(err)
		}
		name, data, err := splitCommand([]byte(body))
		if err != nil {
			c.t.Fatal(err)
		}
		var answer []byte
		if answer, done, err = m.handle(name, data); err != nil {
			c.t.Fatal(err)
		}
		if len(answer) > 0 {
			c.send(answer)
		}
	}
	return m
}

// wantSealed reads one sealed frame.
func (c *client) wantSealed(m *curve, want string) {
	c.t.Helper()
	_, body, err := c.frame()
	if err != nil {
		c.t.Fatal(err)
	}
	_, data, err := splitCommand([]byte(body))
	if err != nil {
		c.t.Fatal(err)
	}
	if got, err := m.open(nil, data); err != nil || string(got[1:]) != want {
		c.t.Fatalf("%d bytes, %v; want %d", len(got), err, len(want))
	}
}

// recorder is a connection that notes what is written.
type recorder struct {
	net.Conn
	sent bytes.Buffer
}

func (r *recorder) Write(b []byte) (int, error) { return r.sent.Write(b) }

// A socket sends its greeting before every command of the handshake, also if the peer's greeting comes before the writing goroutine has run.
func TestGreetingGoesBeforeTheHandshake(t *testing.T) {
	ring := newKeyring()
	f := func(m mechanism, in []byte, command string) {
		t.Helper()
		r := &recorder{}
		c := &secureConn{Conn: r, mech: m, peer: &Peer{role: &role{}}}
		c.in = in
		for more := true; more; {
			var err error
			if more, err = c.step(); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.Write(appendGreeting(nil)); err != nil { // of the Peer, late
			t.Fatal(err)
		}
		sent := r.sent.Bytes()
		if greeting := appendGreetingOf(nil, m.name(), m.server()); !bytes.HasPrefix(sent, greeting) || bytes.Count(sent, greeting) != 1 {
			t.Errorf("%s: %x begins the connection", m.name(), sent[:min(len(sent), 80)])
		} else if !bytes.Contains(sent[greetingBytes:], []byte(command)) {
			t.Errorf("%s: %q follows the greeting", m.name(), sent[greetingBytes:])
		}
	}
	client := CurveClient{Secret: ring.ann, Server: ring.public}
	f(&curve{to: &client}, appendGreetingOf(nil, mechanismCurve, true), "HELLO")
	f(&curve{from: &ring.server}, append(appendGreetingOf(nil, mechanismCurve, false), (&curve{to: &client}).begin()...), "WELCOME")
	f(&plain{account: &PlainClient{"a", "b"}}, appendGreetingOf(nil, mechanismPlain, true), "HELLO")
	f(&plain{check: func(string, string) bool { return true }}, append(appendGreetingOf(nil, mechanismPlain, false), (&plain{account: &PlainClient{"a", "b"}}).begin()...), "WELCOME")
}

// A peer that takes a large sealed frame slowly has WriteTimeout for each part of it, as for a frame that is not sealed.
func TestSlowReaderOfASealedFrame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ring := newKeyring()
		conn, r := pipePeer(RouterOptions{Authentication: Authentication{Curve: &ring.server}, WriteTimeout: 30 * time.Second})
		defer r.Close()
		c := &client{t, conn, bufio.NewReaderSize(conn, 1<<16)}
		m := c.curve(ring)
		body := strings.Repeat("x", 1<<20)
		c.send(m.seal(nil, 0, []byte(body)))
		var got bytes.Buffer
		part := make([]byte, 64<<10)
		for got.Len() < len(body) {
			time.Sleep(5 * time.Second)
			n, err := io.ReadFull(c.r, part)
			got.Write(part[:n])
			if err != nil {
				t.Fatalf("after %d bytes: %v; %v", got.Len(), err, r.Stats().Closed)
			}
		}
		c.r = bufio.NewReader(io.MultiReader(&got, c.r))
		c.wantSealed(m, body)
	})
}

// A sealed message that does not end in time is stalled although frames keep coming: parts and commands do not restart its ReceiveTimeout.
func TestStalledSealedMessage(t *testing.T) {
	for name, next := range map[string]func(m *curve) []byte{
		"parts":    func(m *curve) []byte { return m.seal(nil, flagMore, []byte("part")) },
		"commands": func(m *curve) []byte { return m.seal(nil, flagCommand, []byte("\x04PONG")) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ring := newKeyring()
				conn, r := pipePeer(RouterOptions{Authentication: Authentication{Curve: &ring.server}, ReceiveTimeout: 3 * time.Second})
				defer r.Close()
				c := &client{t, conn, bufio.NewReader(conn)}
				m := c.curve(ring)
				c.send(m.seal(nil, 0, []byte("whole")))
				c.wantSealed(m, "whole")
				c.send(m.seal(nil, flagMore, []byte("first")))
				for range 10 {
					time.Sleep(2 * time.Second)
					if _, err := c.Write(next(m)); err != nil {
						break
					}
				}
				synctest.Wait()
				if s := r.Stats(); s.Closed["stalled"] != 1 {
					t.Errorf("after 20 s: %v", s.Closed)
				}
			})
		})
	}
}

// A first frame above its limit is refused by its header, sealed or not.
func TestFirstSealedFrameIsBounded(t *testing.T) {
	c := &secureConn{mech: &curve{from: &CurveServer{}}, peer: &Peer{role: &role{}}, phase: traffic}
	c.peer.in.maxFrame, c.peer.in.maxFirst = 1<<20, 64
	c.in = append(c.space()[:0], appendHeader(nil, 0, 1<<20)...)
	if _, err := c.step(); !errors.Is(err, errTooLarge) {
		t.Errorf("%v", err)
	}
	c.in = append(c.in[:0], appendHeader(nil, 0, maxCommandBytes+sealedBytes)...) // it may be a command
	if _, err := c.step(); err != nil {
		t.Errorf("%v", err)
	}
	c.peer.in.spans = []span{{0, 1}}
	c.in = append(c.in[:0], appendHeader(nil, 0, 1<<20)...) // of the message's second frame
	if _, err := c.step(); err != nil {
		t.Errorf("%v", err)
	}
}

// A sealed frame that the peer does not read counts as queued bytes of the peer until it is sent, and so against SendQueueBytes.
func TestSealedFrameWaitsInTheQueue(t *testing.T) {
	ring := newKeyring()
	up := make(chan *Peer, 1)
	_, addr, _ := startRouter(t, echo, RouterOptions{Authentication: Authentication{Curve: &ring.server}, OnConnect: func(p *Peer) { up <- p }})
	c := dialRaw(t, addr)
	m := c.curve(ring)
	p := recv(t, up)
	const size = 32 << 20 // above SendQueueBytes
	body := make([]byte, size)
	if err := p.SendOwned(body); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the writer has the last part of the frame", func() bool { return p.count.writes.Load() >= size/stallBytes })
	if n := p.queued.Load(); n < size {
		t.Errorf("%d bytes wait of %d", n, size)
	}
	if err := p.Send([]byte("more")); !errors.Is(err, ErrQueueFull) {
		t.Errorf("%v", err)
	}
	c.wantSealed(m, string(body))
	testkit.Eventually(t, "nothing waits", func() bool { return p.queued.Load() == 0 })
	if err := p.Send([]byte("more")); err != nil {
		t.Error(err)
	}
	c.wantSealed(m, "more")
}

// A sealed connection that is idle holds none of the buffers of what it sent and received.
func TestIdleSealedConnectionHoldsNothing(t *testing.T) {
	ring := newKeyring()
	up := make(chan *Peer, 1)
	_, addr, _ := startRouter(t, echo, RouterOptions{Authentication: Authentication{Curve: &ring.server}, ReceiveTimeout: 2 * time.Second, OnConnect: func(p *Peer) { up <- p }})
	c := dialRaw(t, addr)
	m := c.curve(ring)
	p := recv(t, up)
	body := strings.Repeat("x", 700<<10)
	c.send(m.seal(nil, 0, []byte(body)))
	c.wantSealed(m, body)
	testkit.Eventually(t, "nothing is held", func() bool {
		s := p.conn.(*secureConn)
		s.write.Lock()
		defer s.write.Unlock()
		return p.held.Load() == 0 && cap(s.write.part)+cap(s.write.sealed)+cap(s.mech.(*curve).scratch) == 0
	})
	c.send(m.seal(nil, 0, []byte("again")))
	c.wantSealed(m, "again")
}

// If clients must prove their keys, connections that did not do so neither end a client's connection nor keep a client out.
func TestStrangersCloseNoClients(t *testing.T) {
	ring := newKeyring()
	r, addr, _ := startRouter(t, echo, RouterOptions{Authentication: Authentication{Curve: &ring.server}, MaxPeers: 8, GiveWay: true, HandshakeTimeout: testWait})
	ann := dialRaw(t, addr)
	m := ann.curve(ring)
	for range 30 {
		dialRaw(t, addr)
	}
	testkit.Eventually(t, "all are accepted", func() bool { return r.Stats().Accepted == 31 })
	ann.send(m.seal(nil, 0, []byte("still here")))
	ann.wantSealed(m, "still here")
	for range 10 { // clients of the same host take the strangers' places, then those of silent clients
		other := dialRaw(t, addr)
		of := other.curve(ring)
		other.send(of.seal(nil, 0, []byte("hello")))
		other.wantSealed(of, "hello")
	}
}

// A sealed connection that ends in the middle of frames keeps none of their bytes, and none is counted any more.
func TestClosedSealedConnectionHoldsNothing(t *testing.T) {
	ring := newKeyring()
	up := make(chan *Peer, 1)
	r, addr, ends := startRouter(t, echo, RouterOptions{Authentication: Authentication{Curve: &ring.server}, OnConnect: func(p *Peer) { up <- p }})
	c := dialRaw(t, addr)
	m := c.curve(ring)
	p := recv(t, up)
	if err := p.SendOwned(make([]byte, 32<<20)); err != nil { // the client reads none of it
		t.Fatal(err)
	}
	frame := m.seal(nil, 0, make([]byte, 4<<20))
	c.send(frame[:len(frame)/2])
	testkit.Eventually(t, "half of a frame is held", func() bool { return r.role.received.total.Load() > 1<<20 })
	_ = c.Close()
	recv(t, ends)
	if n := r.role.received.total.Load(); n != 0 || p.held.Load() != 0 {
		t.Errorf("%d bytes are counted", n)
	}
	s := p.conn.(*secureConn)
	s.write.Lock()
	defer s.write.Unlock()
	if n := s.held() + int64(cap(s.write.part)+cap(s.write.sealed)+cap(s.mech.(*curve).scratch)); n != 0 {
		t.Errorf("%d bytes are held", n)
	}
	for range 10 { // of connections that proved nothing
		stranger := dialRaw(t, addr)
		stranger.send(appendGreetingOf(nil, mechanismCurve, false))
		_ = stranger.Close()
	}
	testkit.Eventually(t, "they have gone", func() bool { s := r.Stats(); return s.Accepted == 11 && s.Peers == 0 })
	if n := r.role.received.total.Load(); n != 0 {
		t.Errorf("%d bytes of strangers are counted", n)
	}
}
