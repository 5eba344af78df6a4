// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"errors"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// A connection that is cut at any byte of its handshake or of a message counts as one
// end, and the handler gets no part of a message.
func TestCutAnywhere(t *testing.T) {
	var handled atomic.Int64
	r, addr, _ := startRouter(t, func(p *Peer, m Message) { handled.Add(1) }, RouterOptions{})
	stream := slices.Concat(dealerHello, frames("uid", strings.Repeat("x", 300)))
	for n := range stream {
		c := dialRaw(t, addr)
		c.send(stream[:n])
		_ = c.Close()
	}
	testkit.Eventually(t, "the peers are gone and all were accepted", func() bool { s := r.Stats(); return s.Peers == 0 && s.Accepted == uint64(len(stream)) })
	if s := r.Stats(); s.Closed["eof"] != uint64(len(stream)) || handled.Load() != 0 {
		t.Fatalf("%d handled, %+v", handled.Load(), s)
	}
}

func TestRefused(t *testing.T) {
	r, addr, _ := startRouter(t, echo, RouterOptions{MaxFrameBytes: 1000, MaxFrames: 3})
	f := func(reason, last string, stream ...[]byte) {
		t.Helper()
		before := r.Stats().Closed[reason]
		c := dialRaw(t, addr)
		c.send(slices.Concat(stream...))
		if got := c.wantEnd(); !strings.HasSuffix(got, last) {
			t.Fatalf("last bytes %q, want %q", got, last)
		}
		testkit.Eventually(t, "the connection is closed for its reason", func() bool { return r.Stats().Closed[reason] == before+1 })
	}
	change := func(i int, v byte) []byte {
		b := appendGreeting(nil)
		b[i] = v
		return b
	}
	greeting := appendGreeting(nil)
	f("not_zmtp", "", []byte("GET / HTTP/1.1\r\n\r\n"))
	f("not_zmtp", "", []byte{0})
	f("version", "", change(10, 1))
	f("mechanism", "", change(12, 'X'))
	f("protocol", "", greeting, frames("early"))
	f("protocol", "", greeting, []byte("\x04\x05\x04PING"))
	f("protocol", "", dealerHello, dealerHello[greetingBytes:])
	f("protocol", "", dealerHello, []byte{0x80, 0})
	f("socket_type", "\x05ERROR\x13Invalid socket type", greeting, appendReady(nil, typePub, nil))
	f("socket_type", "\x05ERROR\x13Invalid socket type", greeting, []byte("\x04\x06\x05READY"))
	f("refused", "", greeting, appendError(nil, "go away"))
	f("too_large", "", dealerHello, frames(strings.Repeat("x", 1001)))
	f("too_large", "", dealerHello, frames("1", "2", "3", "4"))
}

func TestTooManyPeers(t *testing.T) {
	r, addr, ends := startRouter(t, echo, RouterOptions{MaxPeers: 2})
	a := dialReady(t, addr)
	dialReady(t, addr)
	dialRaw(t, addr).wantEnd()
	if s := r.Stats(); s.Closed["too_many_peers"] != 1 || s.Peers != 2 {
		t.Fatalf("%+v", s)
	}
	_ = a.Close()
	recv(t, ends)
	dialReady(t, addr)
}

// A Router stops reading from a peer that never reads, and closes it. Other peers do not wait meanwhile.
func TestPeerNeverReads(t *testing.T) {
	var handled atomic.Int64
	reply := make([]byte, 1<<20)
	r, addr, ends := startRouter(t, func(p *Peer, m Message) {
		if string(m[0]) == "flood" {
			handled.Add(1)
			if err := p.Send(reply); err != nil && !errors.Is(err, ErrClosed) { // it may be closed by now
				t.Error(err)
			}
			return
		}
		_ = p.Send(m...)
	}, RouterOptions{SendQueueBytes: 2 << 20, WriteTimeout: 300 * time.Millisecond})
	slow, good := dialReady(t, addr), dialReady(t, addr)
	slow.send(bytes.Repeat(frames("flood"), 1000))
	for range 100 {
		good.send(frames("x"))
		good.want("x")
	}
	if err := recv(t, ends); !errors.Is(err, errSlow) {
		t.Fatal(err)
	}
	if s := r.Stats(); s.Closed["slow"] != 1 || handled.Load() > 100 {
		t.Fatalf("%d handled, %+v", handled.Load(), s)
	}
}

// A peer that sends PINGs and never reads the answers fills its queue to the
// bound, then is read no more, and closed.
func TestPingFlood(t *testing.T) {
	up := make(chan *Peer, 1)
	_, addr, ends := startRouter(t, echo, RouterOptions{
		SendQueueBytes: 100_000, WriteTimeout: 300 * time.Millisecond, OnConnect: func(p *Peer) { up <- p },
	})
	c := dialReady(t, addr)
	p := recv(t, up)
	flood := bytes.Repeat(append(appendHeader(nil, flagCommand, 5+2+16), "\x04PING\x00\x000123456789abcdef"...), 1000)
	most, rest := int64(0), flood
	for {
		_ = c.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		n, err := c.Write(rest)
		if rest = rest[n:]; len(rest) == 0 { // else the next bytes go on in the middle of a frame
			rest = flood
		}
		most = max(most, p.queued.Load())
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
	}
	if err := recv(t, ends); !errors.Is(err, errSlow) {
		t.Fatal(err)
	}
	if most > 100_000+64 {
		t.Fatalf("%d bytes were queued", most)
	}
}

// Send from elsewhere to a peer that never reads returns ErrQueueFull, and the
// queue's messages arrive once it reads.
func TestQueueFull(t *testing.T) {
	up := make(chan *Peer, 1)
	r, addr, _ := startRouter(t, echo, RouterOptions{SendQueueBytes: 1 << 20, OnConnect: func(p *Peer) { up <- p }})
	c := dialReady(t, addr)
	p := recv(t, up)
	// OnConnect ran inside the first batch; wait until its cork is off.
	c.send(frames("sync"))
	c.want("sync")
	testkit.Eventually(t, "the peer is uncorked", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return !p.mu.corked })
	msg := bytes.Repeat([]byte("m"), 256<<10)
	n := 0
	for ; n < 1000; n++ {
		if err := p.SendOwned(msg); errors.Is(err, ErrQueueFull) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if n == 1000 || r.Stats().Refused != 1 || p.queued.Load() > 2<<20 {
		t.Fatal(n, r.Stats().Refused, p.queued.Load())
	}
	for range n {
		c.want(string(msg))
	}
	testkit.Eventually(t, "the peer takes messages again", func() bool { return p.Send([]byte("again")) == nil })
	c.want("again")
}

// pipePeer is a ROUTER's peer on a net.Pipe, with a keeper, inside a bubble.
func pipePeer(o RouterOptions) (c net.Conn, r *Router) {
	o.Log = quietLog
	r = NewRouter(echo, o)
	client, server := net.Pipe()
	r.mu.Lock()
	r.keepLocked()
	r.mu.Unlock()
	r.add(server)
	return client, r
}

func TestTimeouts(t *testing.T) {
	hello := appendReady(appendGreeting(nil), typeDealer, nil)
	f := func(o RouterOptions, send []byte, answer bool, from, to time.Duration, reason string) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			c, r := pipePeer(o)
			defer r.Close()
			start := time.Now()
			var got bytes.Buffer
			end := make(chan time.Duration, 1)
			go func() {
				b := make([]byte, 1000)
				for {
					n, err := c.Read(b)
					if err != nil {
						end <- time.Since(start)
						return
					}
					got.Write(b[:n])
					if answer && bytes.Contains(b[:n], []byte("PING")) && time.Since(start) < 5*time.Second {
						_, _ = c.Write(appendPong(nil, nil))
					}
				}
			}()
			_, _ = c.Write(send)
			if after := <-end; after < from || after > to {
				t.Fatalf("%s: ended after %v, want %v to %v", reason, after, from, to)
			}
			synctest.Wait()
			if s := r.Stats(); s.Closed[reason] != 1 {
				t.Fatalf("%+v", s)
			}
		})
	}
	s := time.Second
	f(RouterOptions{}, nil, false, 5*s, 7*s, "handshake_timeout")
	f(RouterOptions{HandshakeTimeout: s}, hello[:70], false, s, 2*s, "handshake_timeout")
	f(RouterOptions{IdleTimeout: 3 * s}, hello, false, 3*s, 5*s, "idle")
	f(RouterOptions{HeartbeatInterval: s}, hello, false, 2*s, 4*s, "heartbeat")
	f(RouterOptions{HeartbeatInterval: s}, hello, true, 6*s, 9*s, "heartbeat")
	f(RouterOptions{}, appendPing(bytes.Clone(hello), 25, nil), false, 2500*time.Millisecond, 5*s, "heartbeat")
}

// The end of a stream that comes with the last bytes is found.
func TestEndWithLastBytes(t *testing.T) {
	_, addr, ends := startRouter(t, echo, RouterOptions{})
	const n = 20
	for range n {
		c := dialReady(t, addr)
		c.send(frames("bye"))
		_ = c.Conn.(*net.TCPConn).CloseWrite()
		c.want("bye")
	}
	for range n {
		if err := recv(t, ends); Reason(err) != "eof" {
			t.Fatal(err)
		}
	}
}

// A client sends its last requests and closes without reading the answers: writing those fails, and all its requests are handled.
// It closes in an orderly way (the first answer is then reset), or with answers that it has not read (which resets at once).
func TestLastRequestsOfAClosedClientAreHandled(t *testing.T) {
	const count = 500
	f := func(name string, unread bool) {
		t.Run(name, func(t *testing.T) {
			var handled atomic.Int64
			closed, gone := make(chan struct{}), make(chan error, 1)
			_, addr, _ := startRouter(t, func(p *Peer, m Message) {
				switch handled.Add(1) {
				case 1:
					if unread {
						_ = p.Send([]byte("an answer that nobody reads"))
						p.Flush()
					}
					<-closed
				case 2:
					testkit.Eventually(t, "answers cannot be sent", func() bool {
						p.Flush()
						return p.Send([]byte("answer")) != nil
					})
				}
			}, RouterOptions{OnDisconnect: func(_ *Peer, err error) { gone <- err }})
			c := dialReady(t, addr)
			var all []byte
			for range count {
				all = append(all, frames(strings.Repeat("request ", 12))...)
			}
			c.send(all)
			if unread {
				if _, err := c.r.Peek(1); err != nil {
					t.Fatal(err)
				}
				_ = c.Conn.(*net.TCPConn).SetLinger(-1)
			}
			_ = c.Close()
			close(closed)
			select {
			case err := <-gone:
				if n := handled.Load(); n != count {
					t.Errorf("%d requests of %d were handled; the peer ended with %v", n, count, err)
				}
			case <-time.After(testWait):
				t.Fatal("the peer does not end")
			}
		})
	}
	f("orderly", false)
	f("with unread answers", true)
}
