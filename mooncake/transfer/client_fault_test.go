// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"sync"
	"testing"
	"time"
)

var ackFrame = okFrame[:]

// status returns a frame with this magic and code.
func status(magic, code uint32) []byte {
	return binary.LittleEndian.AppendUint64(nil, uint64(magic)<<32|uint64(code))
}

// The peer goes away at each step of a write of three blocks, or talks
// nonsense. The entries it had confirmed stay done.
func TestWriteFaults(t *testing.T) {
	const n = 10000
	frame := headerBytes + n
	reset := func(c *net.TCPConn) { c.SetLinger(0) }
	f := func(play func(*net.TCPConn), want ...error) {
		t.Helper()
		peer := fakeTarget(t, 2)
		peer.each(func(_ int, c *net.TCPConn) { play(c) })
		c := client(t, Options{ProgressTimeout: 5 * time.Second})
		check(t, c.Write(timeout(t, 60*time.Second), peer.name, blocks(n)), want...)
	}
	take := func(c *net.TCPConn, n int) { io.CopyN(io.Discard, c, int64(n)) }
	for _, end := range []func(*net.TCPConn){func(*net.TCPConn) {}, reset} {
		for _, n := range []int{0, 1, 23, 24, 25, frame - 1, frame, frame + 5, 3 * frame} { // read, then cut
			f(func(c *net.TCPConn) { take(c, n); end(c) }, ErrLost, ErrLost, ErrLost)
		}
		for i := range statusBytes { // cut within an acknowledgement
			f(func(c *net.TCPConn) { take(c, 3*frame); c.Write(ackFrame[:i]); end(c) }, ErrLost, ErrLost, ErrLost)
		}
	}
	all := func(reply ...[]byte) func(*net.TCPConn) {
		return func(c *net.TCPConn) { take(c, 3*frame); c.Write(bytes.Join(reply, nil)) }
	}
	f(all(ackFrame), nil, ErrLost, ErrLost)
	f(all(ackFrame, ackFrame), nil, nil, ErrLost)
	f(all(ackFrame, ackFrame, ackFrame), nil, nil, nil)
	f(all(ackFrame, status(0, 0)), nil, ErrProtocol, ErrProtocol)
	f(all(ackFrame, status(statusMagic+1, 0)), nil, ErrProtocol, ErrProtocol)
	f(all(status(statusMagic, 2)), ErrProtocol, ErrProtocol, ErrProtocol)
	f(all(ackFrame, status(statusMagic, math.MaxUint32)), nil, ErrProtocol, ErrProtocol)
	f(all(bytes.Repeat([]byte{0xff}, 24)), ErrProtocol, ErrProtocol, ErrProtocol)
}

// An acknowledgement that comes before the client has sent the body is a protocol error.
func TestEarlyAck(t *testing.T) {
	peer := fakeTarget(t, 2)
	peer.each(func(_ int, c *net.TCPConn) {
		c.Write(ackFrame)
		io.Copy(io.Discard, c)
	})
	c := client(t, Options{})
	check(t, c.Write(timeout(t, 60*time.Second), peer.name, []Entry{{make([]byte, 15<<20), testBase}}), ErrProtocol)
}

// blocks are three entries that do not adjoin.
func blocks(n int) []Entry {
	var list []Entry
	for i := range 3 {
		list = append(list, Entry{pattern(n, byte(i)), testBase + uint64(2*i*n)})
	}
	return list
}

// check compares the results of the entries.
func check(t *testing.T, err error, want ...error) {
	t.Helper()
	var be *BatchError
	if !errors.As(err, &be) {
		if err != nil || errors.Join(want...) != nil {
			t.Errorf("%v, want %v", err, want)
		}
		return
	}
	for i := range want {
		if !errors.Is(be.Errs[i], want[i]) || want[i] == nil && be.Errs[i] != nil {
			t.Errorf("entry %d: %v, want %v", i, be.Errs[i], want[i])
		}
	}
}

func TestReadFaults(t *testing.T) {
	const n = 10000
	f := func(play func(*net.TCPConn), want ...error) {
		t.Helper()
		peer := fakeTarget(t, 2)
		peer.each(func(_ int, c *net.TCPConn) { play(c) })
		c := client(t, Options{ProgressTimeout: 5 * time.Second})
		list := blocks(n)
		check(t, c.Read(timeout(t, 60*time.Second), peer.name, list), want...)
		for i, err := range want {
			if err == nil && !bytes.Equal(list[i].Local, make([]byte, n)) {
				t.Errorf("entry %d holds other bytes", i)
			}
		}
	}
	whole := append(bytes.Clone(ackFrame), make([]byte, n)...)
	for _, cut := range []int{0, 1, 7, 8, 9, n, n + 7} {
		f(func(c *net.TCPConn) { io.CopyN(io.Discard, c, 72); c.Write(whole[:cut]) }, ErrLost, ErrLost, ErrLost)
		f(func(c *net.TCPConn) {
			io.CopyN(io.Discard, c, 72)
			c.Write(bytes.Join([][]byte{whole, whole[:cut]}, nil))
		}, nil, ErrLost, ErrLost)
	}
	for _, sent := range []int{0, 1, 24, 71} {
		f(func(c *net.TCPConn) { io.CopyN(io.Discard, c, int64(sent)) }, ErrLost, ErrLost, ErrLost)
	}
	all := func(reply ...[]byte) func(*net.TCPConn) {
		return func(c *net.TCPConn) { io.CopyN(io.Discard, c, 72); c.Write(bytes.Join(reply, nil)) }
	}
	f(all(whole, whole, whole), nil, nil, nil)
	f(all(whole, status(0, 0)), nil, ErrProtocol, ErrProtocol)
	f(all(whole, status(statusMagic, 7)), nil, ErrProtocol, ErrProtocol)
}

// A refused entry fails alone; the others arrive, on a new connection.
func TestRejectedEntries(t *testing.T) {
	target, mem := listen(t, 1<<20, TargetOptions{})
	table := target.Table()
	c := client(t, Options{})
	const size, n = 4096, 64
	for _, packed := range []bool{true, false} {
		for _, bad := range []int{0, 1, 31, n - 1} {
			clear(mem)
			table.Observe()
			var list, back []Entry
			src, dst := pattern(size*n, byte(bad)), make([]byte, size*n)
			for i := range n {
				at := testBase + uint64(i*size)
				if !packed {
					at += uint64(i * 100)
				}
				list = append(list, Entry{src[i*size:][:size], at})
				back = append(back, Entry{dst[i*size:][:size], at})
			}
			closed := Range{list[bad].Remote + 5, 1}
			table.Fence(t.Context(), closed)
			want := make([]error, n)
			want[bad] = ErrRejected
			check(t, c.Write(timeout(t, 60*time.Second), target.Name(), list), want...)
			table.Reopen(closed)
			if err := c.Read(timeout(t, 60*time.Second), target.Name(), back); err != nil {
				t.Fatal(err)
			}
			clear(src[bad*size:][:size])
			if !bytes.Equal(src, dst) {
				t.Errorf("packed %v, entry %d refused: the others did not arrive", packed, bad)
			}
		}
	}
	far := Entry{make([]byte, 8), testBase + 1<<30}
	check(t, c.Read(timeout(t, 60*time.Second), target.Name(), []Entry{{make([]byte, 8), testBase}, far}), nil, ErrRejected)
}

// A peer that stops is given up in time, and the result says whether it may
// still apply the write.
func TestStalls(t *testing.T) {
	o := Options{ProgressTimeout: 200 * time.Millisecond, SettleTimeout: 100 * time.Millisecond}
	big := []Entry{{make([]byte, 32<<20), testBase}}
	f := func(op string, play func(c *net.TCPConn, end <-chan struct{}), after time.Duration, want, not error) {
		t.Helper()
		peer := fakeTarget(t, 2)
		end := make(chan struct{})
		defer close(end)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		peer.each(func(_ int, c *net.TCPConn) {
			io.CopyN(io.Discard, c, 1) // the call has begun
			if after > 0 {
				defer time.AfterFunc(after, cancel).Stop()
			}
			play(c, end)
		})
		if after < 0 {
			cancel()
		}
		o := o
		if not != nil { // the peer will end in time
			o.SettleTimeout = time.Minute
		}
		if after != 0 { // it is not given up before it is cancelled, however busy the machine is
			o.ProgressTimeout = time.Minute
		}
		c, start := client(t, o), time.Now()
		call := c.Write
		if op == "read" {
			call = c.Read
		}
		err := call(ctx, peer.name, big)
		if !errors.Is(err, want) || not != nil && errors.Is(err, not) {
			t.Errorf("%s: %v, want %v and not %v", op, err, want, not)
		}
		if took := time.Since(start); took > 50*time.Second {
			t.Errorf("%s: gave up after %v", op, took)
		}
	}
	deaf := func(_ *net.TCPConn, end <-chan struct{}) { <-end }
	mute := func(c *net.TCPConn, end <-chan struct{}) { io.CopyN(io.Discard, c, 23+32<<20); <-end }
	polite := func(c *net.TCPConn, _ <-chan struct{}) { io.Copy(io.Discard, c) } // ends when we end
	f("write", deaf, 0, ErrStalled, nil)
	f("write", deaf, 0, ErrUnsettled, nil)
	f("write", mute, 0, ErrStalled, nil)
	f("write", mute, 0, ErrUnsettled, nil)
	f("write", polite, 0, ErrStalled, ErrUnsettled)
	f("read", deaf, 0, ErrStalled, ErrUnsettled)
	f("read", func(c *net.TCPConn, end <-chan struct{}) { c.Write(append(bytes.Clone(ackFrame), 1, 2, 3)); <-end }, 0, ErrStalled, nil)
	const cancelled = 50 * time.Millisecond
	f("write", deaf, cancelled, context.Canceled, nil)
	f("write", deaf, cancelled, ErrUnsettled, nil)
	f("write", polite, cancelled, context.Canceled, ErrUnsettled)
	f("read", deaf, cancelled, context.Canceled, nil)
	f("write", deaf, -1, context.Canceled, ErrUnsettled)
}

// A slow peer is not a stalled one: the whole takes longer than the timeout.
// What the kernel's buffers hold, which shows no progress, takes less.
func TestSlowPeer(t *testing.T) {
	peer := fakeTarget(t, 2)
	peer.each(func(_ int, c *net.TCPConn) {
		for range 40 {
			time.Sleep(100 * time.Millisecond)
			io.CopyN(io.Discard, c, 1<<20)
		}
		io.CopyN(io.Discard, c, 3*headerBytes)
		c.Write(ackFrame)
		c.Write(ackFrame)
		c.Write(ackFrame)
	})
	c := client(t, Options{ProgressTimeout: 3 * time.Second, Conns: 1})
	if err := c.Write(timeout(t, 60*time.Second), peer.name, []Entry{{make([]byte, 40<<20), testBase}}); err != nil {
		t.Error(err)
	}
}

// What the handshake of a peer may do wrong.
func TestDescribeFaults(t *testing.T) {
	f := func(reply string, want error) {
		t.Helper()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		defer wg.Wait()
		defer l.Close()
		wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				readFrame(conn)
				if reply == "silence" {
					conn.SetReadDeadline(time.Now().Add(2 * time.Second))
					conn.Read(make([]byte, 1))
				}
				io.WriteString(conn, reply)
				conn.Close()
			}
		})
		var o Options
		if reply == "silence" {
			o.HandshakeTimeout = 200 * time.Millisecond
		}
		c := client(t, o)
		_, err = c.Describe(t.Context(), l.Addr().String())
		if !errors.Is(err, want) {
			t.Errorf("%.40q: %v, want %v", reply, err, want)
		}
		if err := c.Write(t.Context(), l.Addr().String(), blocks(8)); !errors.Is(err, want) {
			t.Errorf("%.40q: write: %v, want %v", reply, err, want)
		}
	}
	frame := func(kind byte, text string) string {
		return string(binary.LittleEndian.AppendUint64(nil, uint64(len(text)+1))) + string(kind) + text
	}
	f("", io.ErrUnexpectedEOF)
	f("silence", context.DeadlineExceeded)
	f("\x00\x00\x00\x00\x00\x00\x00\x00", ErrProtocol)
	f("\xff\xff\xff\xff\xff\xff\xff\xff", ErrProtocol)
	f("\x08\x00", io.ErrUnexpectedEOF)
	f(frame(1, "{"), ErrProtocol)
	f(frame(3, "{}"), ErrProtocol)
	f(frame(1, "{}"), ErrProtocol)
	f(frame(1, `{"protocol":"rdma","tcp_data_port":5}`), ErrProtocol)
	f(frame(1, `{"protocol":"tcp","tcp_data_port":0}`), ErrProtocol)
	f(frame(1, `{"protocol":"tcp","tcp_data_port":65536}`), ErrProtocol)
	f(frame(1, `{"protocol":"tcp","tcp_data_port":-1}`), ErrProtocol)
	f(frame(1, `{"protocol":"tcp","tcp_data_port":5,"buffers":[{"name":"","addr":1,"length":1}]}`), ErrProtocol)
	f(frame(1, `{"protocol":"tcp","tcp_data_port":5,"buffers":[{"name":"x","addr":0,"length":1}]}`), ErrProtocol)
	f(frame(1, `{"protocol":"tcp","tcp_data_port":5,"buffers":[{"name":"x","addr":1e30,"length":1}]}`), ErrProtocol)
	f(frame(1, `[]`), ErrProtocol)
}
