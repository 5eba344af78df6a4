// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"net"
	"sync"
	"testing"
)

// fake is a target that a test plays by hand: its handshake port answers
// properly, its data port is the test's.
type fake struct {
	t    testing.TB
	name string
	data *net.TCPListener
	wg   sync.WaitGroup

	mu   sync.Mutex
	desc *Descriptor
}

// fakeTarget starts a fake that publishes the protocol version (0: none) and
// the buffers.
func fakeTarget(t testing.TB, version int, buffers ...Range) *fake {
	t.Helper()
	data, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hs, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{t: t, name: hs.Addr().String(), data: data.(*net.TCPListener)}
	f.desc = &Descriptor{Name: f.name, Protocol: protocols{"tcp"}, DataPort: port(data), ProtoVersion: version, Buffers: []Buffer{}}
	for _, b := range buffers {
		f.desc.Buffers = append(f.desc.Buffers, Buffer{b.Addr, b.Len, f.name})
	}
	f.wg.Go(func() {
		for {
			c, err := hs.Accept()
			if err != nil {
				return
			}
			if kind, _, err := readFrame(c); err == nil {
				f.mu.Lock()
				frame, _ := appendFrame(nil, kind, f.desc)
				f.mu.Unlock()
				c.Write(frame)
			}
			c.Close()
		}
	})
	t.Cleanup(func() {
		hs.Close()
		data.Close()
		f.wg.Wait()
	})
	return f
}

// once serves one data connection with play and closes it.
func (f *fake) once(play func(*net.TCPConn)) {
	c, err := f.data.AcceptTCP()
	if err != nil {
		return
	}
	defer c.Close()
	play(c)
}

// each serves every data connection with play, one after the other.
func (f *fake) each(play func(n int, c *net.TCPConn)) {
	f.wg.Go(func() {
		for n := 0; ; n++ {
			c, err := f.data.AcceptTCP()
			if err != nil {
				return
			}
			play(n, c)
			c.Close()
		}
	})
}
