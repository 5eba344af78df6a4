// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// gate is a TCP proxy that cuts, or stalls, each connection after so many bytes in
// one direction.
type gate struct {
	l      net.Listener
	to     string
	wg     sync.WaitGroup
	budget atomic.Int64 // bytes until the cut; -1: none
	up     bool         // of bytes towards to
	cuts   atomic.Int64
	conns  sync.Map // accepted ones
}

func newGate(t *testing.T, to string, up bool) *gate {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{l: l, to: to, up: up}
	g.budget.Store(-1)
	g.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			g.wg.Go(func() { g.serve(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		g.conns.Range(func(c, _ any) bool { c.(net.Conn).Close(); return true })
		g.wg.Wait()
	})
	return g
}

func (g *gate) serve(c net.Conn) {
	defer c.Close()
	g.conns.Store(c, nil)
	s, err := net.Dial("tcp", g.to)
	if err != nil {
		return
	}
	defer s.Close()
	var both sync.WaitGroup
	both.Go(func() { g.copy(s, c, g.up); s.Close(); c.Close() })
	both.Go(func() { g.copy(c, s, !g.up); s.Close(); c.Close() })
	both.Wait()
}

func (g *gate) copy(dst io.Writer, src io.Reader, counted bool) {
	var b [512]byte
	for {
		n, err := src.Read(b[:])
		if left := g.budget.Load(); counted && left >= 0 {
			if int64(n) >= left {
				_, _ = dst.Write(b[:left])
				g.budget.Store(-1) // one cut
				g.cuts.Add(1)
				return
			}
			g.budget.Add(int64(-n))
		}
		if _, werr := dst.Write(b[:n]); err != nil || werr != nil {
			return
		}
	}
}

// The side channel is cut after each number of bytes, in both directions: the pull
// is sent again, or fails, and nothing is left behind.
func TestSideChannelCut(t *testing.T) {
	for _, up := range []bool{true, false} {
		x := small(t, SenderOptions{RetryTimeout: 20 * time.Millisecond},
			ReceiverOptions{UnknownTimeout: 200 * time.Millisecond, MaxIdle: 1})
		g := newGate(t, strings.TrimPrefix(x.sender.Addr(), "tcp://"), up)
		x.dir.show(x.sender.EngineID(), "tcp://"+g.l.Addr().String())
		ok, failed := 0, 0
		for i := int64(0); i < 400; i += 7 {
			x.receiver.sockets.mu.Lock()
			idle := slices.Concat(x.receiver.sockets.mu.idle["tcp://"+g.l.Addr().String()])
			x.receiver.sockets.mu.Unlock()
			for _, s := range idle { // a fresh connection each time: the cut falls into its handshake, too
				x.receiver.sockets.forget(s)
			}
			g.budget.Store(i)
			id := fmt.Sprint("x", i)
			x.sender.Offer("p"+id, id, [][]int{{3, 4}})
			err := x.pull(t, "d"+id, id, []int{int(i) % 8, 9})

			switch {
			case err == nil:
				ok++
				if !bytes.Equal(block(x.d, 0, 9), block(x.p, 0, 4)) {
					t.Fatal("wrong bytes")
				}
			case errors.Is(err, ErrLost), errors.Is(err, ErrUnknownTransfer), errors.Is(err, ErrUnreachable):
				failed++ // P had sent all, but its reply was cut off: at P the transfer is done
			default:
				t.Fatal(err)
			}
			g.budget.Store(-1)
		}
		if g.cuts.Load() < 20 || ok < 20 {
			t.Errorf("up %v: %d cuts, %d pulls arrived, %d failed", up, g.cuts.Load(), ok, failed)
		}
		t.Logf("up %v: %d cuts, %d pulls arrived, %d failed, %d sent again", up, g.cuts.Load(), ok, failed, x.receiver.Stats().Resent)
		x.idle(t)
	}
}
