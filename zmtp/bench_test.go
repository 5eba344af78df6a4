// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"testing"
	"time"
)

// 64 B is the order of a lookup request, 160 KiB that of a message with data.
var benchShapes = []struct{ size, inFlight int }{{64, 1}, {64, 64}, {160 << 10, 1}, {160 << 10, 8}}

// benchEcho sends one batch of inFlight messages per iteration to the echo server at
// c and reads the answers. Both ends are in this process: its time includes the client's.
func benchEcho(b *testing.B, c net.Conn, size, inFlight int) {
	batch := bytes.Repeat(frames("uid-1234", string(make([]byte, size))), inFlight)
	back := make([]byte, len(batch))
	write, failed := make(chan struct{}), make(chan error, 1)
	go func() { // so that large batches do not wait for their own echo
		var err error
		for range write {
			if err == nil {
				_, err = c.Write(batch)
			}
		}
		failed <- err
	}()
	b.SetBytes(int64(size * inFlight))
	b.ReportAllocs()
	for b.Loop() {
		if inFlight == 1 && size < minRead {
			if _, err := c.Write(batch); err != nil {
				b.Fatal(err)
			}
		} else {
			write <- struct{}{}
		}
		if _, err := io.ReadFull(c, back); err != nil {
			b.Fatal(err)
		}
	}
	close(write)
	if err := <-failed; err != nil {
		b.Fatal(err)
	}
	if !bytes.Equal(back, batch) {
		b.Fatal("the echo differs")
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*inFlight), "ns/msg")
}

// BenchmarkRouter answers small requests by their copy, large ones by reference.
func BenchmarkRouter(b *testing.B) {
	for _, s := range benchShapes {
		b.Run(fmt.Sprintf("size=%d/inflight=%d", s.size, s.inFlight), func(b *testing.B) {
			h := echo
			if s.size >= refBytes { // a chunk that lies in memory, as a store has it
				chunk := make([]byte, s.size)
				h = func(p *Peer, m Message) { _ = p.SendOwned(m[0], chunk) }
			}
			_, addr, _ := startRouter(b, h, RouterOptions{})
			c := dialReady(b, addr)
			_ = c.SetDeadline(time.Time{})
			benchEcho(b, c.Conn, s.size, s.inFlight)
		})
	}
}

// BenchmarkBareSocket is the floor: a goroutine that writes back what it reads.
func BenchmarkBareSocket(b *testing.B) {
	for _, s := range benchShapes {
		b.Run(fmt.Sprintf("size=%d/inflight=%d", s.size, s.inFlight), func(b *testing.B) {
			l := listenRaw(b)
			c := dialRaw(b, l.Addr())
			server := l.accept()
			_ = c.SetDeadline(time.Time{})
			_ = server.SetDeadline(time.Time{})
			done := make(chan struct{})
			go func() {
				defer close(done)
				buf := make([]byte, max(64<<10, s.size+1024))
				for {
					n, err := server.Read(buf)
					if err == nil {
						_, err = server.Write(buf[:n])
					}
					if err != nil {
						return
					}
				}
			}()
			benchEcho(b, c.Conn, s.size, s.inFlight)
			_ = c.Close()
			<-done
		})
	}
}

// A small request and its reply allocate nothing.
func TestNoAllocs(t *testing.T) {
	_, addr, _ := startRouter(t, echo, RouterOptions{})
	c := dialReady(t, addr)
	request := frames("uid-1234", "lookup")
	back := make([]byte, len(request))
	allocs := testing.AllocsPerRun(2000, func() {
		if _, err := c.Write(request); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, back); err != nil {
			t.Fatal(err)
		}
	})
	if allocs >= 1 {
		t.Fatalf("%v allocations per request", allocs)
	}
}
