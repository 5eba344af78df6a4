// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// Messages that other goroutines queue while the reading goroutine waits for room are written too, also
// if the writer has finished before: these goroutines leave the flush to the reading one.
func TestRefillWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		r := NewRouter(echo, RouterOptions{SendQueueBytes: 1000, Log: quietLog})
		p := newPeer(1, ours, &r.role)
		defer func() {
			p.fail(ErrClosed)
			p.writers.Wait()
			_ = theirs.Close()
		}()
		p.mu.corked = true // as while a handler runs
		if err := p.Send(make([]byte, 2000)); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			p.awaitRoom()
			close(done)
		}()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		synctest.Wait()
		select {
		case <-done:
		default:
			t.Fatal("it waits, and nobody writes")
		}
	})
}

// A peer that said nothing for a while holds neither receive nor send buffers,
// and waits without one. Here the test is the reading goroutine.
func TestIdleHoldsNothing(t *testing.T) {
	if !haveRaw {
		t.Skip("net.Conn needs a buffer to wait")
	}
	l := listenRaw(t)
	c := dialRaw(t, l.Addr())
	r := NewRouter(echo, RouterOptions{Log: quietLog})
	defer r.Close()
	p := newPeer(1, l.accept().Conn, &r.role)
	defer func() {
		p.fail(ErrClosed)
		p.writers.Wait()
	}()
	read := func() {
		if err := p.raw.Control(func(fd uintptr) { p.onReadable(fd) }); err != nil || p.readErr != nil {
			t.Fatal(err, p.readErr)
		}
	}
	p.command(appendGreeting)
	sent := slices.Concat(dealerHello, frames(strings.Repeat("b", 1<<20)), frames("a"), frames("b"))
	go func() { _, _ = c.Write(sent) }()
	go func() { _, _ = io.Copy(io.Discard, c) }()
	testkit.Eventually(t, "three messages arrive", func() bool { read(); return p.count.messagesIn.Load() == 3 })
	if err := p.flushed(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(p.in.buf) < 1<<20 || cap(p.out.buf)+cap(p.mu.q.buf) == 0 {
		t.Fatal("nothing was held before either", len(p.in.buf))
	}
	if !p.pause() { // as after a kick
		t.Fatal("closed")
	}
	read()
	if p.in.buf != nil || p.mu.q.buf != nil || p.out.buf != nil || p.vecs != nil {
		t.Fatal(len(p.in.buf), cap(p.mu.q.buf), cap(p.out.buf), cap(p.vecs))
	}
	for _, f := range p.in.msg[:cap(p.in.msg)] {
		if f != nil {
			t.Fatal("the last message holds the buffer")
		}
	}
}

// A closed Peer that somebody still refers to keeps none of the frames that it got.
func TestClosedHoldsNothing(t *testing.T) {
	up := make(chan *Peer, 1)
	_, addr, ends := startRouter(t, echo, RouterOptions{OnConnect: func(p *Peer) { up <- p }})
	c := dialReady(t, addr)
	p := recv(t, up)
	for range 3 {
		_ = p.SendOwned(make([]byte, 48<<20)) // the others are refused or wait
	}
	_ = c.Close()
	recv(t, ends)
	if p.in.buf != nil || p.mu.q.buf != nil || p.mu.q.vec != nil || p.out.all != nil || p.vecs != nil {
		t.Fatal(len(p.in.buf), cap(p.mu.q.buf), len(p.mu.q.vec), len(p.out.all), cap(p.vecs))
	}
}

// A buffer that grew for one large message is released when small messages follow, and
// stays when large ones follow.
func TestDecodeShrinks(t *testing.T) {
	d := testDecoder()
	feed := func(size int) {
		t.Helper()
		stream := frames(strings.Repeat("x", size))
		for len(stream) > 0 {
			n := copy(d.space(), stream)
			d.wrote(n)
			stream = stream[n:]
			ev, err := d.next()
			if err != nil || (ev == evMessage) != (len(stream) == 0) {
				t.Fatal(ev, err, len(stream))
			}
		}
		d.done()
	}
	for range 10 {
		feed(1 << 20)
		for range keepReads - 1 {
			feed(10)
		}
	}
	if len(d.buf) < 1<<20 {
		t.Fatalf("%d bytes left while large messages come", len(d.buf))
	}
	feed(10)
	feed(10)
	if len(d.buf) != firstBuffer {
		t.Fatalf("%d bytes held for small messages", len(d.buf))
	}
	feed(1 << 20)
}
