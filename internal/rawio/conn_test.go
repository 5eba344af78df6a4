// SPDX-License-Identifier: Apache-2.0

//go:build unix

package rawio

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// pair returns both ends of a connection.
func pair(t *testing.T) (a, b *Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l = Listener{l}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	a, b = Wrap(c).(*Conn), s.(*Conn)
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func filled(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i>>8) ^ byte(i)*7 ^ seed
	}
	return b
}

// The bytes that are written arrive whole and in order, whatever the pieces are and however slowly the peer reads. The pieces stay
// unchanged.
func TestConn(t *testing.T) {
	f := func(name string, write func(c *Conn) error, want []byte) {
		t.Helper()
		a, b := pair(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := write(a); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			a.Close()
		})
		got, buf := []byte(nil), make([]byte, 300<<10)
		for i := 0; ; i++ {
			if i == 3 { // the writer has to wait meanwhile
				time.Sleep(5 * time.Millisecond)
			}
			n, err := b.Read(buf[:1+i*1000%len(buf)])
			if got = append(got, buf[:n]...); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		wg.Wait()
		if !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes came, of %d", name, len(got), len(want))
		}
	}
	for _, n := range []int{0, 1, most - 1, most, most + 1, 20 * most} {
		b := filled(n, 1)
		f("one", func(c *Conn) error {
			k, err := c.Write(b)
			if k != len(b) {
				t.Errorf("%d bytes were written, of %d", k, len(b))
			}
			return err
		}, b)
	}
	var many [][]byte
	for i := range 3*maxVec + 5 {
		many = append(many, filled(i%7, byte(i)))
	}
	for _, pieces := range [][][]byte{
		{}, {nil, {}}, {filled(10, 1), nil, filled(most, 2), filled(3, 3)}, {filled(most-1, 1), filled(5*most+3, 2), {}, filled(1, 3), nil}, many,
	} {
		before := bytes.Join(pieces, nil)
		f("pieces", func(c *Conn) error { return c.WriteAll(pieces) }, before)
		if !bytes.Equal(bytes.Join(pieces, nil), before) {
			t.Error("the pieces were changed")
		}
	}
}

// Deadlines, and ends of either side, give the same errors as package net.
func TestConnErrors(t *testing.T) {
	a, b := pair(t)
	buf := make([]byte, 10)
	_ = b.SetReadDeadline(time.Now().Add(5 * time.Millisecond)) // an open connection has deadlines
	_, err := b.Read(buf)
	if ne, ok := errors.AsType[net.Error](err); !errors.Is(err, os.ErrDeadlineExceeded) || !ok || !ne.Timeout() {
		t.Errorf("past the deadline: %v", err)
	}
	_ = b.SetReadDeadline(time.Time{})
	if n, err := b.Read(nil); n != 0 || err != nil {
		t.Errorf("into nothing: %d, %v", n, err)
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		n, err := a.Write(make([]byte, 64<<20))
		if !errors.Is(err, os.ErrDeadlineExceeded) || n == 0 || n >= 64<<20 {
			t.Errorf("a peer that reads next to nothing: %d, %v", n, err)
		}
	}()
	if _, err := b.Read(buf[:1]); err != nil {
		t.Fatal(err)
	}
	_ = a.SetWriteDeadline(time.Now())
	<-written
	_ = a.SetWriteDeadline(time.Time{})

	done := make(chan error)
	a2, b2 := pair(t)
	go func() {
		_, err := b2.Read(buf)
		done <- err
	}()
	b2.Close()
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed by the reader: %v", err)
	}
	for end := time.Now().Add(60 * time.Second); ; {
		if err = a2.WriteAll([][]byte{buf}); err != nil { // the peer is gone
			if _, ok := errors.AsType[*net.OpError](err); !ok || errors.Is(err, net.ErrClosed) {
				t.Errorf("to a peer that is gone: %v", err)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal("writes to a peer that is gone succeed")
		}
	}
	a2.Close()
	if _, err := a2.Write(buf); !errors.Is(err, net.ErrClosed) {
		t.Errorf("to a closed one: %v", err)
	}
	if c := Wrap(struct{ net.Conn }{a}); c == nil {
		t.Error("another connection is lost")
	} else if _, ok := c.(*Conn); ok {
		t.Error("another connection is taken for TCP")
	}
}
