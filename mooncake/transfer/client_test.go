// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// relisten stops a target and starts another on the handshake port.
func relisten(t *testing.T, old *Target, sameData bool) (*Target, []byte) {
	t.Helper()
	o := TargetOptions{HandshakePort: port(old.hs)}
	if sameData {
		o.DataPort = port(old.data)
	}
	old.Close()
	return listen(t, 1<<20, o)
}

// After a restart of the peer the client finds its data port again, also a new one, without a
// failed call.
func TestPeerRestarts(t *testing.T) {
	for _, sameData := range []bool{true, false} {
		for _, wait := range []time.Duration{0, 2 * staleAfter} {
			target, _ := listen(t, 1<<20, TargetOptions{HandshakePort: testkit.FreePort(t), DataPort: testkit.FreePort(t)})
			c := client(t, Options{})
			src := pattern(100_000, 1)
			for range 3 {
				if err := c.Write(timeout(t, 60*time.Second), target.Name(), []Entry{{src, testBase}}); err != nil {
					t.Fatal(err)
				}
				var mem []byte
				target, mem = relisten(t, target, sameData)
				time.Sleep(wait)
				if err := c.Write(timeout(t, 60*time.Second), target.Name(), []Entry{{src, testBase + 7}}); err != nil {
					t.Fatalf("same data port %v, after %v: %v", sameData, wait, err)
				}
				target.Table().Observe()
				if !bytes.Equal(mem[7:][:len(src)], src) {
					t.Fatal("bytes differ")
				}
				target.Table().Observe()
			}
		}
	}
}

// A write is sent again only when an idle connection broke under it.
func TestRetry(t *testing.T) {
	f := func(first int, want error, wantRetries int64) {
		t.Helper()
		peer := fakeTarget(t, 2)
		peer.each(func(n int, c *net.TCPConn) {
			rounds := first // on the first connection; any number later
			if n > 0 {
				rounds = 100
			}
			for range rounds {
				if _, err := io.CopyN(io.Discard, c, headerBytes+8); err != nil {
					return
				}
				c.Write(ackFrame)
			}
			io.CopyN(io.Discard, c, headerBytes+8) // and no answer
		})
		c := client(t, Options{Conns: 1})
		var err error
		for range first + 1 {
			if err == nil {
				err = c.Write(timeout(t, 60*time.Second), peer.name, []Entry{{make([]byte, 8), testBase}})
			}
		}
		if s := c.Stats(); !errors.Is(err, want) || s.Retries != wantRetries {
			t.Errorf("%d answers: %v, %+v", first, err, s)
		}
	}
	f(0, ErrLost, 0) // a new connection
	f(1, nil, 1)
	f(5, nil, 1)
}

// Limits refuse, they do not hang.
func TestClientLimits(t *testing.T) {
	peer := fakeTarget(t, 2)
	entered := make(chan struct{}, 4)
	let := make(chan struct{})
	peer.each(func(_ int, c *net.TCPConn) {
		io.CopyN(io.Discard, c, headerBytes+8)
		entered <- struct{}{}
		<-let
		c.Write(ackFrame)
	})
	c := client(t, Options{Conns: 1, MaxWaiting: 1, MaxPeers: 1})
	one := []Entry{{make([]byte, 8), testBase}}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if err := c.Write(timeout(t, 60*time.Second), peer.name, one); err != nil {
				t.Error(err)
			}
		})
	}
	<-entered
	c.mu.Lock()
	p := c.mu.peers[peer.name]
	c.mu.Unlock()
	for p.waiting.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	if err := c.Write(timeout(t, 60*time.Second), peer.name, one); !errors.Is(err, ErrBusy) {
		t.Errorf("%v, want ErrBusy", err)
	}
	if err := c.Write(timeout(t, 60*time.Second), "127.0.0.1:1", one); !errors.Is(err, ErrPeers) {
		t.Errorf("%v, want ErrPeers", err)
	}
	close(let)
	wg.Wait()
	target, _ := listen(t, 4096, TargetOptions{}) // takes the idle peer's place
	if err := c.Write(timeout(t, 60*time.Second), target.Name(), one); err != nil {
		t.Error(err)
	}
	c.Close()
	if err := c.Write(timeout(t, 60*time.Second), target.Name(), one); !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}

// Close ends the calls in progress.
func TestClientClose(t *testing.T) {
	peer := fakeTarget(t, 2)
	entered := make(chan struct{}, 4)
	peer.each(func(_ int, c *net.TCPConn) {
		io.CopyN(io.Discard, c, headerBytes+8)
		entered <- struct{}{}
		io.Copy(io.Discard, c)
	})
	c := New(Options{})
	result := make(chan error, 1)
	go func() { result <- c.Write(t.Context(), peer.name, []Entry{{make([]byte, 8), testBase}}) }()
	<-entered
	c.Close()
	if err := <-result; !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}

// Many callers share the connections to a peer.
func TestConcurrentCallers(t *testing.T) {
	target, _ := listen(t, 8<<20, TargetOptions{})
	c := client(t, Options{Conns: 3, SplitBytes: 1 << 18})
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			base := uint64(testBase + w<<19)
			for i := range 8 {
				src, dst := pattern(1<<19, byte(w*8+i)), make([]byte, 1<<19)
				if err := c.Write(timeout(t, 60*time.Second), target.Name(), []Entry{{src, base}}); err != nil {
					t.Error(err)
				}
				if err := c.Read(timeout(t, 60*time.Second), target.Name(), []Entry{{dst, base}}); err != nil || !bytes.Equal(src, dst) {
					t.Errorf("caller %d: read differs, %v", w, err)
				}
			}
		})
	}
	wg.Wait()
	if s := target.Stats(); s.DataConns > 3 {
		t.Errorf("%d connections", s.DataConns)
	}
}

// Peers without acknowledgements: one connection per request, the peer's clean
// end confirms, a reset does not, and no address is sent that they do not
// publish.
func TestUnacknowledgedPeer(t *testing.T) {
	const n = 10000
	span := Range{testBase, 6 * n}
	patience := time.Minute
	f := func(at Range, play func(i int, c *net.TCPConn), want ...error) {
		t.Helper()
		peer := fakeTarget(t, 0, at)
		peer.each(play)
		c := client(t, Options{Conns: 1, ProgressTimeout: patience, SettleTimeout: 50 * time.Millisecond})
		check(t, c.Write(timeout(t, 60*time.Second), peer.name, blocks(n)), want...)
	}
	good := func(_ int, c *net.TCPConn) { io.Copy(io.Discard, c) }
	bad := func(_ int, c *net.TCPConn) { io.CopyN(io.Discard, c, 24); c.SetLinger(0) }
	f(span, good, nil, nil, nil)
	f(span, bad, ErrLost, ErrLost, ErrLost)
	f(span, func(i int, c *net.TCPConn) { []func(int, *net.TCPConn){good, bad}[i%2](i, c) }, nil, ErrLost, ErrLost)
	f(Range{testBase, 3*n - 1}, good, nil, ErrRejected, ErrRejected)
	f(Range{testBase + 1, n}, good, ErrRejected, ErrRejected, ErrRejected)
	f(span, func(_ int, c *net.TCPConn) { io.Copy(io.Discard, c); c.Write([]byte{1}) }, ErrProtocol, ErrProtocol, ErrProtocol)
	patience = 300 * time.Millisecond
	f(span, func(_ int, c *net.TCPConn) { c.Read(make([]byte, 1)); <-t.Context().Done() }, ErrStalled, ErrStalled, ErrStalled)

	peer := fakeTarget(t, 0, span)
	peer.each(func(i int, c *net.TCPConn) {
		io.CopyN(io.Discard, c, 24)
		c.Write(make([]byte, []int{n, n - 1}[i%2]))
	})
	c := client(t, Options{Conns: 1})
	check(t, c.Read(timeout(t, 60*time.Second), peer.name, blocks(n)), nil, ErrLost, ErrLost)
}
