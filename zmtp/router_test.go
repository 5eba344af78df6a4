// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const testWait = 60 * time.Second // for events that come soon; never measured

var quietLog = slog.New(slog.DiscardHandler)

// client is a DEALER at the level of bytes.
type client struct {
	t testing.TB
	net.Conn
	r *bufio.Reader
}

var dealerHello = appendReady(appendGreeting(nil), typeDealer, nil)

func dialRaw(t testing.TB, addr net.Addr) *client {
	t.Helper()
	c, err := net.Dial(addr.Network(), addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(testWait))
	return &client{t, c, bufio.NewReaderSize(c, 1<<16)}
}

func dialReady(t testing.TB, addr net.Addr) *client {
	t.Helper()
	c := dialRaw(t, addr)
	c.hello()
	return c
}

// hello is the handshake of a DEALER.
func (c *client) hello() {
	c.t.Helper()
	c.send(dealerHello)
	want := appendReady(appendGreeting(nil), typeRouter, nil)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c.r, got); err != nil || !bytes.Equal(got, want) {
		c.t.Fatalf("hello of the ROUTER: %v, %x", err, got)
	}
}

func (c *client) send(b []byte) {
	c.t.Helper()
	if _, err := c.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

func frames(fs ...string) []byte {
	var q queue
	var m [][]byte
	for _, f := range fs {
		m = append(m, []byte(f))
	}
	q.copyFrames(m)
	return q.buf
}

// frame reads one frame.
func (c *client) frame() (flags byte, body string, err error) {
	flags, err = c.r.ReadByte()
	if err != nil {
		return 0, "", err
	}
	size := uint64(0)
	if flags&flagLong != 0 {
		var b [8]byte
		_, err = io.ReadFull(c.r, b[:])
		size = binary.BigEndian.Uint64(b[:])
	} else {
		var one byte
		one, err = c.r.ReadByte()
		size = uint64(one)
	}
	if err != nil {
		return 0, "", err
	}
	b := make([]byte, size)
	_, err = io.ReadFull(c.r, b)
	return flags, string(b), err
}

func (c *client) want(fs ...string) {
	c.t.Helper()
	for i, f := range fs {
		flags, body, err := c.frame()
		if err != nil || body != f || flags&flagMore != 0 != (i < len(fs)-1) {
			c.t.Fatalf("frame %d: flags %x, %.60q, %v; want %.60q", i, flags, body, err, f)
		}
	}
}

// wantEnd reads until the connection ends and returns the bytes before that.
func (c *client) wantEnd() string {
	c.t.Helper()
	b, err := io.ReadAll(c.r)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatal("the connection is still open")
	}
	return string(b)
}

func echo(p *Peer, m Message) { _ = p.Send(m...) }

// startRouter serves on a free port; ends is what OnDisconnect says.
func startRouter(t testing.TB, h Handler, o RouterOptions) (r *Router, addr net.Addr, ends chan error) {
	t.Helper()
	ends = make(chan error, 4096) // more than any test connects
	o.Log = quietLog
	if o.OnDisconnect == nil {
		o.OnDisconnect = func(_ *Peer, err error) { ends <- err }
	}
	r = NewRouter(h, o)
	addr, err := r.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r, addr, ends
}

func recv[T any](t testing.TB, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(testWait):
		t.Fatal("nothing came")
		panic("unreachable")
	}
}

func TestEcho(t *testing.T) {
	r, addr, _ := startRouter(t, echo, RouterOptions{})
	c := dialReady(t, addr)
	big := strings.Repeat("z", 300_000)
	c.send(slices.Concat(frames("a", "", "c"), frames(""), frames(big, "end"), frames("after")))
	c.want("a", "", "c")
	c.want("")
	c.want(big, "end")
	c.want("after")
	if s := r.Stats(); s.MessagesIn != 4 || s.MessagesOut != 4 || s.Peers != 1 || s.Handshakes != 1 {
		t.Fatalf("%+v", s)
	}
}

// Requests that came in one packet are answered by one write.
func TestPipelined(t *testing.T) {
	r, addr, _ := startRouter(t, echo, RouterOptions{})
	c := dialReady(t, addr)
	before := r.Stats().Writes
	const n = 64
	c.send(bytes.Repeat(frames("uid", "op"), n))
	for range n {
		c.want("uid", "op")
	}
	if got := r.Stats().Writes - before; got > n/4 {
		t.Fatalf("%d writes for %d replies", got, n)
	}
}

// A handler may reply later from another goroutine, and frames given away go
// out unchanged.
func TestSendFromElsewhere(t *testing.T) {
	reply := bytes.Repeat([]byte("o"), 1<<20)
	var wg sync.WaitGroup
	_, addr, _ := startRouter(t, func(p *Peer, m Message) {
		uid := bytes.Clone(m[0])
		wg.Go(func() { _ = p.SendOwned(uid, reply, []byte("tail")) })
	}, RouterOptions{})
	c := dialReady(t, addr)
	for _, uid := range []string{"1", "2", "3"} {
		c.send(frames(uid, "go"))
		c.want(uid, string(reply), "tail")
	}
	wg.Wait()
}

// Flush sends while the handler still runs.
func TestFlushInHandler(t *testing.T) {
	release := make(chan struct{})
	_, addr, _ := startRouter(t, func(p *Peer, m Message) {
		_ = p.Send([]byte("early"))
		p.Flush()
		<-release
	}, RouterOptions{})
	c := dialReady(t, addr)
	c.send(frames("x"))
	c.want("early")
	close(release)
}

func TestConnectDisconnect(t *testing.T) {
	up := make(chan *Peer, 4)
	_, addr, ends := startRouter(t, echo, RouterOptions{OnConnect: func(p *Peer) { up <- p }})
	hello := appendReady(appendGreeting(nil), typeReq, []byte("same"))
	a, b := dialRaw(t, addr), dialRaw(t, addr)
	a.send(hello)
	b.send(hello)
	p, q := recv(t, up), recv(t, up)
	if p.identity() != "same" || q.identity() != "same" || p.ID() == q.ID() {
		t.Fatal(p.identity(), q.identity(), p.ID(), q.ID())
	}
	_ = a.Close()
	if err := recv(t, ends); Reason(err) != "eof" {
		t.Fatal(err)
	}
	if q.Err() != nil {
		p, q = q, p
	}
	q.Close()
	if err := recv(t, ends); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if err := q.Send([]byte("x")); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	b.wantEnd()
}

func TestPing(t *testing.T) {
	_, addr, _ := startRouter(t, echo, RouterOptions{})
	c := dialReady(t, addr)
	c.send(append(frames("more")[:0], "\x04\x09\x04PING\x00\x64ab"...))
	c.want("\x04PONGab")
	c.send([]byte("\x04\x05\x04WHAT")) // unknown: ignored
	c.send([]byte("\x01\x01x\x04\x05\x04PONG\x00\x01y"))
	c.want("x", "y")
}

func TestEndpoints(t *testing.T) {
	r := NewRouter(echo, RouterOptions{Log: quietLog})
	defer r.Close()
	path := filepath.Join(t.TempDir(), "s")
	stale, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	stale.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = stale.Close() // a killed server leaves its file
	for _, e := range []string{"ipc://" + path, "ipc://@zmtp-test-" + filepath.Base(t.TempDir()) + t.Name(), "tcp://127.0.0.1:0"} {
		addr, err := r.Listen(context.Background(), e)
		if err != nil {
			t.Fatal(err)
		}
		c := dialReady(t, addr)
		c.send(frames("x"))
		c.want("x")
		if _, err := r.Listen(context.Background(), e); err == nil && !strings.HasSuffix(e, ":0") {
			t.Fatalf("%s was bound twice", e)
		}
	}
	_ = r.Close()
	if _, err := r.Listen(context.Background(), "tcp://127.0.0.1:0"); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Fatal("the socket file is still there")
	}
}

// Replies queued before Shutdown arrive; requests that come during it are not
// handled.
func TestShutdown(t *testing.T) {
	reply := strings.Repeat("r", 8<<20)
	in := make(chan struct{}, 1)
	r, addr, ends := startRouter(t, func(p *Peer, m Message) {
		_ = p.Send([]byte(reply))
		in <- struct{}{}
	}, RouterOptions{})
	c := dialReady(t, addr)
	c.send(frames("x"))
	recv(t, in)
	done := make(chan error, 1)
	go func() { done <- r.Shutdown(t.Context()) }()
	c.want(reply)
	if err := recv(t, done); err != nil {
		t.Fatal(err)
	}
	c.wantEnd()
	if err := recv(t, ends); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if s := r.Stats(); s.Peers != 0 || s.Closed["closed"] != 1 {
		t.Fatalf("%+v", s)
	}
}

// A Shutdown whose peer does not read ends with its context.
func TestShutdownGivesUp(t *testing.T) {
	in := make(chan struct{}, 1)
	r, addr, _ := startRouter(t, func(p *Peer, m Message) {
		_ = p.Send(make([]byte, 32<<20))
		in <- struct{}{}
	}, RouterOptions{})
	dialReady(t, addr).send(frames("x"))
	recv(t, in)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := r.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

// Many peers, senders in other goroutines, and closing, for the race detector.
func TestConcurrent(t *testing.T) {
	var sent atomic.Int64
	r, addr, _ := startRouter(t, func(p *Peer, m Message) {
		sent.Add(1)
		_ = p.Send(m...)
	}, RouterOptions{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			c := dialReady(t, addr)
			for range 50 {
				c.send(bytes.Repeat(frames("uid", "payload"), 4))
				for range 4 {
					c.want("uid", "payload")
				}
			}
		})
	}
	stop := make(chan struct{})
	var stats sync.WaitGroup
	stats.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				for _, p := range r.peers(nil) {
					p.Flush()
				}
				r.Stats()
			}
		}
	})
	wg.Wait()
	close(stop)
	stats.Wait()
	if sent.Load() != 1600 {
		t.Fatal(sent.Load())
	}
}
