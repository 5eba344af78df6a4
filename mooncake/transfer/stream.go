// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/rawio"
)

const (
	smallBuf = 8 << 10   // per connection, always
	bigBuf   = 256 << 10 // used while a connection streams small frames; pooled

	// directBytes is how many bytes of a body must be left for the rest to be read straight into its place. A shorter rest goes through
	// the buffer: one system call for many bodies is worth the copy.
	directBytes = 24 << 10

	// lowWater is how much of a large body must be there before the kernel wakes its
	// reader. A wake-up costs as much as copying some 10 KiB.
	lowWater = 256 << 10

	// writeStep bounds the bytes given to the kernel in one call. It thereby bounds how late a sender notices an answer.
	writeStep = 1 << 20
)

var bigBufs = sync.Pool{New: func() any { b := make([]byte, bigBuf); return &b }}

// stream is a TCP connection with progress timeouts in both directions, vectored writes, and a read buffer that is large only while the
// peer streams. It belongs to one goroutine; other goroutines may only close its connection.
//
// It moves a deadline only when an eighth of the timeout has passed since the last move, to save timer operations. So it notices a
// stall after 7/8 to 8/8 of the timeout.
type stream struct {
	conn    *net.TCPConn
	raw     syscall.RawConn
	timeout time.Duration
	ctx     context.Context // of the call in progress; nil: none
	watched func() bool     // ends the watch of ctx; nil: not watched

	buf   []byte // small or *big
	small []byte
	big   *[]byte
	r, w  int  // buf[r:w] is not consumed
	hot   bool // the last read filled its space, so more bytes are waiting

	readArmed  time.Time // when the deadlines were set; zero: no deadline
	writeArmed time.Time
	out        net.Buffers // buffers of the write in progress
	one        [1][]byte   // the array behind out for a short write, whose bytes are in short
	short      [maxReplies * statusBytes]byte
	low        int // number of bytes that wake a reader; 0: one

	look func(fd uintptr) bool // one read that does not wait; its outcome:
	n    int
	err  error
}

func newStream(conn *net.TCPConn, timeout time.Duration) (*stream, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &stream{conn: conn, raw: raw, timeout: timeout, small: make([]byte, smallBuf)}
	s.buf = s.small
	s.look = func(fd uintptr) bool {
		s.n, s.err = syscall.Read(int(fd), s.buf[s.w:])
		return true
	}
	return s, nil
}

// close closes the connection and gives the large buffer back.
func (s *stream) close() {
	s.conn.Close()
	s.r, s.w = 0, 0
	s.resize(false)
}

// abort closes the connection with a reset, which the peer cannot take for a clean end.
func (s *stream) abort() {
	s.conn.SetLinger(0)
	s.close()
}

func (s *stream) buffered() int { return s.w - s.r }

// next returns the next n buffered bytes and consumes them.
func (s *stream) next(n int) []byte {
	b := s.buf[s.r : s.r+n]
	s.r += n
	return b
}

// makeRoom makes space in the buffer. It takes the large buffer while the peer streams.
func (s *stream) makeRoom() {
	s.resize(s.hot)
	if s.r > 0 {
		s.w = copy(s.buf, s.buf[s.r:s.w])
		s.r = 0
	}
}

func (s *stream) resize(large bool) {
	switch {
	case large && s.big == nil:
		s.big = bigBufs.Get().(*[]byte)
		s.w = copy(*s.big, s.buf[s.r:s.w])
		s.r, s.buf = 0, *s.big
	case !large && s.big != nil && s.w-s.r <= smallBuf/2:
		s.w = copy(s.small, s.buf[s.r:s.w])
		s.r, s.buf = 0, s.small
		bigBufs.Put(s.big)
		s.big = nil
	}
}

// fill reads once from the connection into the buffer.
func (s *stream) fill() error { return s.fillUpTo(bigBuf, false) }

// fillUpTo reads once from the connection into the buffer, at most limit bytes. If `idle` is true, it waits for them without a timeout.
func (s *stream) fillUpTo(limit int, idle bool) error {
	s.makeRoom()
	for {
		if !idle {
			if err := s.armRead(); err != nil {
				return err
			}
		}
		n, err := s.conn.Read(s.buf[s.w:min(s.w+limit, len(s.buf))])
		s.w += n
		s.hot = s.w == len(s.buf)
		switch {
		case n > 0:
			return nil
		case idle && errors.Is(err, os.ErrDeadlineExceeded):
			// This deadline was left over from the last body; the peer has not stalled.
			if err := s.conn.SetReadDeadline(time.Time{}); err != nil {
				return err
			}
			s.readArmed = time.Time{}
		case err != nil:
			return s.cause(err)
		}
	}
}

// try reads into the buffer what has arrived, without waiting.
func (s *stream) try() error {
	s.makeRoom()
	if err := s.raw.Read(s.look); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) && !s.cancelled() {
			return nil // a deadline left over from an earlier wait; the next wait moves it
		}
		return s.cause(err)
	}
	switch {
	case s.err == syscall.EAGAIN || s.err == syscall.EINTR:
		s.hot = false
		return nil
	case s.err != nil:
		return s.err
	case s.n == 0:
		return io.EOF
	}
	s.hot = s.n == len(s.buf)-s.w
	s.w += s.n
	return nil
}

// need waits until n bytes are buffered. n must be at most smallBuf/2.
func (s *stream) need(n int) error {
	for s.buffered() < n {
		if err := s.fill(); err != nil {
			return err
		}
	}
	return nil
}

// readFull fills dst, first from the buffer, then from the connection.
func (s *stream) readFull(dst []byte) error {
	for {
		n := copy(dst, s.buf[s.r:s.w])
		s.r += n
		dst = dst[n:]
		s.wakeAt(len(dst))
		if len(dst) == 0 {
			return nil
		}
		if len(dst) < directBytes && (s.hot || s.big != nil) || len(dst) <= smallBuf/2 {
			if err := s.fill(); err != nil {
				return unexpected(err)
			}
			continue
		}
		if err := s.armRead(); err != nil {
			return err
		}
		n, err := s.conn.Read(dst)
		if n == 0 && s.low > 0 && errors.Is(err, os.ErrDeadlineExceeded) && !s.cancelled() {
			// Fewer bytes than the low water mark may have come; that is progress, too.
			s.raw.Control(func(fd uintptr) { n, _ = syscall.Read(int(fd), dst) })
			n, s.readArmed = max(n, 0), time.Time{}
		}
		dst, s.hot = dst[n:], false
		if n == 0 && err != nil {
			return unexpected(s.cause(err))
		}
	}
}

// wakeAt sets the socket's low water mark for a body of which `left` bytes are missing, so that the kernel does not wake the reader for
// each segment. The peer's end of the connection wakes the reader in any case.
func (s *stream) wakeAt(left int) {
	low := min(left, lowWater)
	if low < lowWater/4 {
		low = 0
	}
	if low == s.low || low != 0 && s.low != 0 && low > s.low {
		return
	}
	s.raw.Control(func(fd uintptr) {
		if syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, max(low, 1)) == nil {
			s.low = low
		}
	})
}

// write sends all bytes of bufs and returns how many it has sent, also after an error. It keeps no reference to bufs.
func (s *stream) write(bufs [][]byte) (sent int64, err error) {
	s.out = s.gather(bufs)
	for len(s.out) > 0 {
		if err := s.armWrite(); err != nil {
			return sent, err
		}
		var n int64
		if len(s.out) == 1 {
			var k int
			k, err = s.conn.Write(s.out[0])
			if s.out[0] = s.out[0][k:]; len(s.out[0]) == 0 {
				s.out = nil
			}
			n = int64(k)
		} else {
			n, err = rawio.WriteBuffers(s.conn, &s.out)
		}
		sent += n
		switch {
		case n > 0 && errors.Is(err, os.ErrDeadlineExceeded) && !s.cancelled():
			s.writeArmed = time.Time{} // a slow peer is not a stalled one
		case err != nil:
			return sent, s.cause(err)
		}
	}
	return sent, nil
}

// gather copies a small total of bytes in many pieces, for example answers, into one piece.
func (s *stream) gather(bufs [][]byte) [][]byte {
	n := 0
	for _, b := range bufs {
		if n += len(b); n > len(s.short) {
			return bufs
		}
	}
	s.one[0] = s.short[:0]
	for _, b := range bufs {
		s.one[0] = append(s.one[0], b...)
	}
	return s.one[:]
}

// watch makes the end of ctx interrupt reads and writes of the connection, until unwatch.
func (s *stream) watch(ctx context.Context) {
	s.ctx = ctx
	s.watched = context.AfterFunc(ctx, func() { s.conn.SetDeadline(time.Unix(1, 0)) })
}

// unwatch ends the watch. It returns true if the connection was not interrupted.
func (s *stream) unwatch() bool {
	s.ctx = nil
	return s.watched()
}

func (s *stream) cancelled() bool { return s.ctx != nil && s.ctx.Err() != nil }

// armRead and armWrite move the deadline when an eighth of the timeout has passed since the last move. They check the context only
// after that: when the context ends, its watcher moves the deadline into the past, and if armRead has just overwritten that deadline,
// its check finds that the context has ended.
func (s *stream) armRead() error {
	if now := time.Now(); now.Sub(s.readArmed) > s.timeout/8 {
		if err := s.conn.SetReadDeadline(now.Add(s.timeout)); err != nil {
			return s.cause(err)
		}
		s.readArmed = now
	}
	if s.cancelled() {
		return s.ctx.Err()
	}
	return nil
}

func (s *stream) armWrite() error {
	if now := time.Now(); now.Sub(s.writeArmed) > s.timeout/8 {
		if err := s.conn.SetWriteDeadline(now.Add(s.timeout)); err != nil {
			return s.cause(err)
		}
		s.writeArmed = now
	}
	if s.cancelled() {
		return s.ctx.Err()
	}
	return nil
}

// cause translates an error of the connection into the error that callers see.
func (s *stream) cause(err error) error {
	switch {
	case s.cancelled():
		return s.ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrStalled
	}
	return err
}

// unexpected turns the end of the stream (io.EOF), inside a frame, into io.ErrUnexpectedEOF.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
