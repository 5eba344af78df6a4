// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// startDealer connects to endpoint. in is what its handler gets, frames joined
// by |, and states what OnState says, nil meaning connected.
func startDealer(t testing.TB, endpoint string, o DealerOptions) (d *Dealer, in chan string, states chan error) {
	t.Helper()
	d, in, states = newDealer(endpoint, o)
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d, in, states
}

func newDealer(endpoint string, o DealerOptions) (d *Dealer, in chan string, states chan error) {
	in, states = make(chan string, 4096), make(chan error, 4096) // more than any test causes
	o.Log = quietLog
	if o.Handler == nil {
		o.Handler = func(m Message) { in <- string(bytes.Join(m, []byte("|"))) }
	}
	o.OnState = func(up bool, err error) {
		if up != (err == nil) {
			panic("OnState: connected with an error, or neither")
		}
		states <- err
	}
	return NewDealer(endpoint, o), in, states
}

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

func (l rawRouter) endpoint() string { return "tcp://" + l.Addr().String() }

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

// routerHello greets a DEALER without identity.
func (c *client) routerHello() *client {
	c.t.Helper()
	got := make([]byte, len(dealerHello))
	c.send(appendReady(appendGreeting(nil), typeRouter, nil))
	if _, err := io.ReadFull(c.r, got); err != nil || !bytes.Equal(got, dealerHello) {
		c.t.Fatalf("hello of the DEALER: %v, %x", err, got)
	}
	return c
}

// A DEALER may start before its ROUTER. The messages that it sent meanwhile arrive in order.
func TestDealerStartsFirst(t *testing.T) {
	endpoint := "ipc://" + filepath.Join(t.TempDir(), "s")
	d, in, states := startDealer(t, endpoint, DealerOptions{Identity: []byte("me")})
	if err := recv(t, states); !errors.Is(err, syscall.ENOENT) {
		t.Fatal(err)
	}
	for _, m := range []string{"a", "b", "c"} {
		if err := d.Send([]byte(m), nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.SendOwned([]byte("owned")); err != nil {
		t.Fatal(err)
	}
	r := NewRouter(func(p *Peer, m Message) { _ = p.Send(m[0], []byte(p.identity())) }, RouterOptions{Log: quietLog})
	defer r.Close()
	if _, err := r.Listen(t.Context(), endpoint); err != nil {
		t.Fatal(err)
	}
	for err := recv(t, states); err != nil; err = recv(t, states) { // attempts before Listen
		if Reason(err) != "io" {
			t.Fatal(err)
		}
	}
	for _, want := range []string{"a|me", "b|me", "c|me", "owned|me"} {
		if got := recv(t, in); got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	if s := d.Stats(); s.MessagesOut != 4 || s.MessagesIn != 4 || s.Peers != 1 || s.Handshakes != 1 || s.Accepted != 1 {
		t.Fatalf("%+v", s)
	}
}

// A Dealer does not send the messages of a dead connection again, written or not. Messages that
// are sent afterwards arrive.
func TestDealerReconnects(t *testing.T) {
	l := listenRaw(t)
	d, _, states := startDealer(t, l.endpoint(), DealerOptions{SendQueueBytes: 64 << 20})
	c := l.accept().routerHello()
	if err := recv(t, states); err != nil {
		t.Fatal(err)
	}
	_ = d.Send([]byte("read"))
	c.want("read")
	_ = d.SendOwned(make([]byte, 48<<20)) // more than the socket takes
	_ = d.Send([]byte("queued"))
	_ = c.Close()
	if err := recv(t, states); Reason(err) != "eof" {
		t.Fatal(err)
	}
	_ = d.Send([]byte("two"))
	c = l.accept().routerHello()
	c.want("two")
	if err := recv(t, states); err != nil {
		t.Fatal(err)
	}
	if s := d.Stats(); s.Accepted != 2 || s.Handshakes != 2 || s.Closed["eof"] != 1 || s.MessagesOut != 4 {
		t.Fatalf("%+v", s)
	}
}

// A peer that ends each connection right after its greeting is dialled with growing pauses.
func TestDealerPausesForAPeerThatEndsEachConnection(t *testing.T) {
	f := func() (took, longest time.Duration) { // of all, and of one connection, with the pause before it
		l := listenRaw(t)
		began := time.Now()
		d, _, states := startDealer(t, l.endpoint(), DealerOptions{})
		defer d.Close()
		ended := began
		for range 8 {
			c := l.accept()
			accepted := time.Now()
			c.routerHello()
			if err := recv(t, states); err != nil {
				t.Fatal(err)
			}
			_ = c.Close()
			if err := recv(t, states); err == nil {
				t.Fatal("the connection goes on")
			}
			longest, ended = max(longest, time.Since(accepted)), time.Now()
		}
		return ended.Sub(began), longest
	}
	for try := 1; ; try++ {
		// At least half of 10+20+40+80+160+320+640 ms have passed between eight connections.
		took, longest := f()
		if took >= 635*time.Millisecond {
			return
		}
		if longest < livedBackoff/2 || try == 5 { // after a connection that lasted the next pause is short
			t.Fatalf("eight connections within %v, the longest %v", took, longest)
		}
	}
}

// If a connection dies before it gets the waiting messages, these stay for the
// next connection.
func TestDealerKeepsWaiting(t *testing.T) {
	d, _, _ := newDealer("ipc://@unused", DealerOptions{})
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	p := newPeer(1, ours, &d.role)
	p.fail(errHandshakeTimeout)
	_ = d.Send([]byte("kept"))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.giveLocked(p)
	if !bytes.Equal(d.mu.waiting.buf, frames("kept")) || d.mu.bytes != len(frames("kept")) {
		t.Fatalf("waiting: %q", d.mu.waiting.buf)
	}
}

func TestDealerQueueFull(t *testing.T) {
	endpoint := "ipc://" + filepath.Join(t.TempDir(), "s")
	d, in, states := startDealer(t, endpoint, DealerOptions{SendQueueBytes: 1000})
	recv(t, states)
	msg := bytes.Repeat([]byte("m"), 600)
	for i, want := range []error{nil, nil, ErrQueueFull, ErrQueueFull} {
		if err := d.Send(msg); !errors.Is(err, want) {
			t.Fatalf("Send %d: %v", i, err)
		}
	}
	if s := d.Stats(); s.Refused != 2 || s.MessagesOut != 2 {
		t.Fatalf("%+v", s)
	}
	if err := d.Send(); err == nil {
		t.Fatal("a message without frames was queued")
	}
	r := NewRouter(echo, RouterOptions{Log: quietLog})
	defer r.Close()
	if _, err := r.Listen(t.Context(), endpoint); err != nil {
		t.Fatal(err)
	}
	recv(t, in)
	recv(t, in)
	if err := d.Send(msg); err != nil {
		t.Fatal(err)
	}
	recv(t, in)
}

// Close ends a Dealer in each of its states and leaves no goroutine.
func TestDealerClose(t *testing.T) {
	l := listenRaw(t)
	f := func(name, endpoint string, prepare func(d *Dealer, states chan error)) {
		t.Helper()
		before := goleak.IgnoreCurrent()
		d, _, states := newDealer(endpoint, DealerOptions{ConnectTimeout: time.Hour, HandshakeTimeout: time.Hour})
		prepare(d, states)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { _ = d.Close() })
		}
		wg.Wait()
		if err := d.Send([]byte("x")); !errors.Is(err, ErrClosed) {
			t.Fatalf("%s: Send: %v", name, err)
		}
		if err := d.SendOwned([]byte("x")); !errors.Is(err, ErrClosed) {
			t.Fatalf("%s: SendOwned: %v", name, err)
		}
		if err := d.Start(); !errors.Is(err, ErrClosed) {
			t.Fatalf("%s: Start: %v", name, err)
		}
		if len(states) > 0 {
			t.Fatalf("%s: OnState after or because of Close: %v", name, <-states)
		}
		if s := d.Stats(); s.Peers != 0 {
			t.Fatalf("%s: %+v", name, s)
		}
		if err := goleak.Find(before); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	start := func(d *Dealer) { _ = d.Start() } // its success shows in what follows
	f("not started", l.endpoint(), func(d *Dealer, _ chan error) { _ = d.Send([]byte("never")) })
	f("just started", l.endpoint(), func(d *Dealer, _ chan error) { start(d) })
	f("waiting to try again", "ipc://"+filepath.Join(t.TempDir(), "none"), func(d *Dealer, states chan error) {
		start(d)
		for range 8 { // the pause has 500 ms or more now
			recv(t, states)
		}
	})
	f("dialing", l.endpoint(), func(d *Dealer, _ chan error) {
		dialing := make(chan struct{})
		d.dial = func(ctx context.Context) (net.Conn, error) {
			close(dialing)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		start(d)
		recv(t, dialing)
	})
	l = listenRaw(t) // the old one has a connection that nobody accepted
	f("in the handshake", l.endpoint(), func(d *Dealer, _ chan error) {
		start(d)
		l.accept()
	})
	f("connected", l.endpoint(), func(d *Dealer, states chan error) {
		start(d)
		l.accept().routerHello()
		recv(t, states)
	})
	f("writing", l.endpoint(), func(d *Dealer, states chan error) {
		start(d)
		l.accept().routerHello()
		recv(t, states)
		_ = d.SendOwned(make([]byte, 48<<20))
	})
}

func TestDealerStartErrors(t *testing.T) {
	f := func(endpoint string, o DealerOptions) {
		t.Helper()
		d := NewDealer(endpoint, o)
		if err := d.Start(); err == nil {
			t.Fatal("it started")
		}
		_ = d.Close()
	}
	f("inproc://x", DealerOptions{})
	f("tcp://127.0.0.1", DealerOptions{})
	f("tcp://127.0.0.1:1", DealerOptions{Identity: make([]byte, 256)})
}

// pipeDealer is a Dealer whose connections are pipes; the other ends come from
// the channel. For use in a bubble.
func pipeDealer(o DealerOptions) (d *Dealer, ends chan net.Conn, states chan error) {
	d, _, states = newDealer("tcp://unused:1", o)
	ends = make(chan net.Conn, 100)
	d.dial = func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		ends <- theirs
		return ours, nil
	}
	return d, ends, states
}

// speak writes hello to c, then answers the first pongs PINGs.
func speak(c net.Conn, hello []byte, pongs int) {
	go func() { _, _ = c.Write(hello) }()
	b := make([]byte, 4096)
	for {
		n, err := c.Read(b)
		if err != nil {
			return
		}
		if bytes.Contains(b[:n], []byte("\x04PING")) && pongs > 0 {
			pongs--
			_, _ = c.Write(appendPong(nil, nil))
		}
	}
}

func TestDealerTimeouts(t *testing.T) {
	hello := appendReady(appendGreeting(nil), typeRouter, nil)
	f := func(o DealerOptions, hello []byte, pongs int, from, to time.Duration, want error) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			d, ends, states := pipeDealer(o)
			defer d.Close()
			if err := d.Start(); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			go speak(<-ends, hello, pongs)
			err := <-states
			if err == nil { // connected
				err = <-states
			}
			if after := time.Since(begin); !errors.Is(err, want) || after < from || after > to {
				t.Fatalf("%v after %v, want %v after %v to %v", err, after, want, from, to)
			}
			go speak(<-ends, hello, pongs) // it tries again
		})
	}
	s := time.Second
	f(DealerOptions{}, nil, 0, 5*s, 7*s, errHandshakeTimeout)
	f(DealerOptions{HandshakeTimeout: s}, hello[:70], 0, s, 2*s, errHandshakeTimeout)
	f(DealerOptions{IdleTimeout: 3 * s}, hello, 0, 3*s, 5*s, errIdle)
	f(DealerOptions{HeartbeatInterval: s}, hello, 0, 2*s, 4*s, errHeartbeat)
	f(DealerOptions{HeartbeatInterval: s}, hello, 5, 7*s, 10*s, errHeartbeat)
	f(DealerOptions{HeartbeatInterval: s, HeartbeatTimeout: 3 * s}, hello, 0, 4*s, 6*s, errHeartbeat)
	f(DealerOptions{}, appendPing(bytes.Clone(hello), 25, nil), 0, 2500*time.Millisecond, 5*s, errHeartbeat)
	f(DealerOptions{}, []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), 0, 0, s, errNotZMTP)
	f(DealerOptions{}, appendReady(appendGreeting(nil), typePub, nil), 0, 0, s, errSocketType)
	f(DealerOptions{MaxFrameBytes: 9}, append(bytes.Clone(hello), frames("0123456789")...), 0, 0, s, errTooLarge)
}

// A peer of ZMTP 3.0 knows no PING: it is sent none, and lives.
func TestDealerNoPingTo30(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, ends, states := pipeDealer(DealerOptions{HeartbeatInterval: time.Second})
		defer d.Close()
		_ = d.Start()
		hello := appendReady(appendGreeting(nil), typeRouter, nil)
		hello[11] = 0
		go speak(<-ends, hello, 0)
		if err := <-states; err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if len(states) > 0 {
			t.Fatal(<-states)
		}
	})
}

// Attempts come 10 ms apart at first, and about once a second in the end; one
// that hangs ends with ConnectTimeout.
func TestDealerBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, _, states := newDealer("tcp://unused:1", DealerOptions{ConnectTimeout: 2 * time.Second})
		defer d.Close()
		d.dial = func(context.Context) (net.Conn, error) { return nil, syscall.ECONNREFUSED }
		_ = d.Start()
		time.Sleep(100 * time.Second)
		if n := len(states); n < 100 || n > 220 {
			t.Fatalf("%d attempts in 100 s", n)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		d, _, states := newDealer("tcp://unused:1", DealerOptions{ConnectTimeout: 2 * time.Second})
		defer d.Close()
		d.dial = func(ctx context.Context) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		begin := time.Now()
		_ = d.Start()
		if err := <-states; !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != 2*time.Second {
			t.Fatal(err, time.Since(begin))
		}
	})
}

func TestDealerRefused(t *testing.T) {
	l := listenRaw(t)
	_, _, states := startDealer(t, l.endpoint(), DealerOptions{})
	l.accept().send(appendError(appendGreeting(nil), "go away"))
	if e, ok := errors.AsType[*peerError](recv(t, states)); !ok || e.Text != "go away" {
		t.Fatal(e, ok)
	}
	c := l.accept()
	c.send(appendReady(appendGreeting(nil), typePub, nil))
	if got := c.wantEnd(); !strings.HasSuffix(got, "\x05ERROR\x13Invalid socket type") {
		t.Fatalf("%q", got)
	}
	if err := recv(t, states); !errors.Is(err, errSocketType) {
		t.Fatal(err)
	}
}

// Large messages, given away or copied, pass both ways over each transport.
func TestLarge(t *testing.T) {
	f := func(endpoint string, size int, owned bool) {
		t.Helper()
		r := NewRouter(func(p *Peer, m Message) {
			if !owned {
				_ = p.Send(m...)
				return
			}
			_ = p.SendOwned(bytes.Clone(m[0]), nil, bytes.Clone(m[2]))
		}, RouterOptions{Log: quietLog})
		defer r.Close()
		addr, err := r.Listen(t.Context(), endpoint)
		if err != nil {
			t.Fatal(err)
		}
		if addr.Network() == "tcp" {
			endpoint = "tcp://" + addr.String()
		}
		big := make([]byte, size)
		for i := range size / 8 {
			binary.NativeEndian.PutUint64(big[8*i:], uint64(i)*0x9E3779B97F4A7C15)
		}
		back := make(chan bool, 1)
		d, _, _ := startDealer(t, endpoint, DealerOptions{Handler: func(m Message) {
			back <- len(m) == 3 && string(m[0]) == "uid" && len(m[1]) == 0 && bytes.Equal(m[2], big)
		}})
		send := map[bool]func(...[]byte) error{true: d.SendOwned, false: d.Send}[owned]
		for range 3 {
			if err := send([]byte("uid"), nil, big); err != nil {
				t.Fatal(err)
			}
			if !recv(t, back) {
				t.Fatalf("%s: %d bytes changed on the way", endpoint, size)
			}
		}
		_ = d.Close()
	}
	path := filepath.Join(t.TempDir(), "s")
	for _, e := range []string{"tcp://127.0.0.1:*", "ipc://" + path, "ipc://@kvasir-zmtp-" + path} {
		f(e, 1<<20, false)
		f(e, 1<<20, true)
	}
	f("tcp://127.0.0.1:*", 32<<20, false)
	f("ipc://"+path, 32<<20, true)
}

// Through many reconnections with senders in several goroutines, each message
// arrives at most once and in its sender's order.
func TestDealerAtMostOnce(t *testing.T) {
	const senders, each = 4, 2000
	var mu sync.Mutex
	last := make([]int, senders)
	seen, bad := 0, 0
	r, addr, ends := startRouter(t, func(p *Peer, m Message) {
		mu.Lock()
		defer mu.Unlock()
		from, n := int(m[0][0]), int(binary.BigEndian.Uint32(m[1]))
		if n <= last[from] {
			bad++
		}
		last[from] = n
		if seen++; seen%400 == 0 {
			p.Close()
		}
	}, RouterOptions{})
	d, _, _ := startDealer(t, "tcp://"+addr.String(), DealerOptions{})
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			for i := range each {
				if err := d.Send([]byte{byte(s)}, binary.BigEndian.AppendUint32(nil, uint32(i+1))); err != nil {
					t.Error(err)
				}
				if i%20 == 0 {
					time.Sleep(100 * time.Microsecond) // spread over several connections
				}
			}
		})
	}
	wg.Wait()
	recv(t, ends)
	_ = d.Close()
	_ = r.Close()
	if bad > 0 || seen == 0 || slices.Max(last) > each {
		t.Fatalf("%d of %d came twice or out of order", bad, seen)
	}
}

// A PONG counts only on the connection over which its PING was sent: not after the peer
// has gone, nor when a new peer has its address.
func TestDealerPing(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	l := listenRaw(t)
	d, _, states := startDealer(t, l.endpoint(), DealerOptions{})
	if err := d.Ping(ctx); !errors.Is(err, ErrNotConnected) {
		t.Fatalf("without a connection: %v", err)
	}
	first := l.accept().routerHello()
	<-states
	done := make(chan error, 1)
	go func() { done <- d.Ping(ctx) }()
	first.Close() // without a PONG
	if err := <-done; !errors.Is(err, ErrNotConnected) {
		t.Fatalf("the peer has gone: %v", err)
	}
	l.Close()

	r := NewRouter(func(*Peer, Message) {}, RouterOptions{Log: quietLog})
	defer r.Close()
	if _, err := r.Listen(ctx, l.endpoint()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the next peer answers", func() bool { return d.Ping(ctx) == nil })
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if err := d.Ping(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	short, end := context.WithTimeout(ctx, time.Nanosecond)
	defer end()
	<-short.Done()
	if err := d.Ping(short); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}
