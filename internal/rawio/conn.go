// SPDX-License-Identifier: Apache-2.0

//go:build unix

package rawio

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
)

// most is how many bytes one system call moves at most, because the scheduler cannot run other goroutines on this processor meanwhile. More
// bytes take several calls.
const most = 256 << 10

// Conn is a TCP connection that does not announce its reads and writes to the Go scheduler. Its methods are safe for concurrent use.
type Conn struct {
	*net.TCPConn
	raw     syscall.RawConn
	in, out transfer
}

// transfer is the state of one direction of a Conn. Its function is created once, so that a call allocates nothing.
type transfer struct {
	sync.Mutex
	b    []byte
	bufs [][]byte
	vec  Vec
	n    int
	err  error
	try  func(fd uintptr) (ready bool)
}

// Wrap returns a Conn for a TCP connection. It returns any other connection unchanged.
func Wrap(c net.Conn) net.Conn {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return c
	}
	n := &Conn{TCPConn: t, raw: raw}
	n.in.try, n.out.try = n.in.read, n.out.write
	return n
}

func (t *transfer) read(fd uintptr) bool {
	for {
		t.n, t.err = Read(fd, t.b)
		switch {
		case errors.Is(t.err, syscall.EINTR):
		case errors.Is(t.err, syscall.EAGAIN):
			return false
		default:
			return true
		}
	}
}

func (t *transfer) write(fd uintptr) bool {
	for {
		var n int
		if len(t.bufs) > 0 {
			n, t.err = Writev(fd, t.bufs, &t.vec)
		} else {
			n, t.err = Write(fd, t.b)
		}
		switch {
		case errors.Is(t.err, syscall.EINTR):
		case errors.Is(t.err, syscall.EAGAIN):
			return false
		default:
			t.n = max(0, n)
			return true
		}
	}
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	t := &c.in
	t.Lock()
	defer t.Unlock()
	t.b = b[:min(len(b), most)]
	t.n, t.err = 0, nil
	err := c.raw.Read(t.try)
	t.b = nil
	switch {
	case err != nil:
		return 0, err
	case t.err != nil:
		return 0, c.fault("read", t.err)
	case t.n == 0:
		return 0, io.EOF
	}
	return t.n, nil
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (written int, err error) {
	t := &c.out
	t.Lock()
	defer t.Unlock()
	for len(b) > 0 && err == nil {
		t.b = b[:min(len(b), most)]
		err = c.writeOnce(t)
		b, written = b[t.n:], written+t.n
	}
	t.b = nil
	return written, err
}

// WriteAll writes all of bufs, with as many calls as needed. It does not change bufs.
func (c *Conn) WriteAll(bufs [][]byte) (err error) {
	t := &c.out
	t.Lock()
	defer t.Unlock()
	part := make([][]byte, 0, len(bufs))
	for at := 0; len(bufs) > 0 && err == nil; { // at: bytes of the first buffer that are written
		part = part[:0]
		room := most
		for i, b := range bufs {
			if i == 0 {
				b = b[at:]
			}
			if b = b[:min(len(b), room)]; len(b) > 0 {
				part, room = append(part, b), room-len(b)
			}
			if room == 0 || len(part) == maxVec {
				break
			}
		}
		if len(part) == 0 { // all are empty
			break
		}
		t.bufs = part
		err = c.writeOnce(t)
		for at += t.n; len(bufs) > 0 && at >= len(bufs[0]); bufs = bufs[1:] {
			at -= len(bufs[0])
		}
	}
	t.bufs = nil
	return err
}

// writeOnce waits until the socket accepts bytes, and writes as many as it accepts.
func (c *Conn) writeOnce(t *transfer) error {
	t.n, t.err = 0, nil
	if err := c.raw.Write(t.try); err != nil {
		return err
	}
	if t.err != nil {
		return c.fault("write", t.err)
	}
	return nil
}

// fault returns err, the error of the system call `call`, in the form of package net, with the addresses of both ends.
func (c *Conn) fault(call string, err error) error {
	return &net.OpError{Op: call, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(call, err)}
}

// Listener is a net.Listener whose connections are Conns.
type Listener struct{ net.Listener }

// Accept implements net.Listener.
func (l Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return Wrap(c), nil
}
