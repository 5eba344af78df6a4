package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/loopback"
	"github.com/kvasir-kv/kvasir/internal/rawio"
)

const (
	smallBuf = 8 << 10   // per connection, always
	bigBuf   = 256 << 10 // while a connection streams small frames; pooled

	// directBytes is the rest of a body from which it is read straight into
	// place. Below, one system call for many bodies is worth the copy.
	directBytes = 24 << 10

	soonTries = 4
	soonBytes = 192 << 10 // bodies of smallBuf and less, or of this and more, are worth soonTries

	// writeStep bounds the bytes given to the kernel in one call, and with it
	// how late a sender notices an answer.
	writeStep = 1 << 20
)

var bigBufs = sync.Pool{New: func() any { b := make([]byte, bigBuf); return &b }}

// stream is a TCP connection with progress timeouts in both directions, a read
// buffer that is large only while it pays, and vectored writes. It belongs to
// one goroutine; only Close of its connection may come from others.
//
// A timeout is checked against the clock of the last armed deadline, so that
// moving it costs one timer operation per eighth of the timeout and not per
// call: a stall is noticed after 7/8 to 8/8 of it.
type stream struct {
	conn    *net.TCPConn
	local   bool // the peer is on this host
	raw     syscall.RawConn
	timeout time.Duration
	ctx     context.Context // of the call in progress; nil: none
	watched func() bool     // ends the watch of ctx; nil: not watched

	buf   []byte // small or *big
	small []byte
	big   *[]byte
	r, w  int  // buf[r:w] is not consumed
	hot   bool // the last read filled its space: more is waiting

	readArmed  time.Time // when the deadlines were set; zero: no deadline
	writeArmed time.Time
	tryRead    func(fd uintptr) bool // one read that does not wait

	// One call of raw: its buffers in, its outcome out.
	in      []byte
	out     [][]byte
	vec     rawio.Vec
	spin    spinner
	soon    int // times to look again, giving way in between, before waiting
	n       int
	err     error
	readFn  func(fd uintptr) bool
	writeFn func(fd uintptr) bool
}

func newStream(conn *net.TCPConn, timeout time.Duration) (*stream, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("raw connection: %w", err)
	}
	s := &stream{conn: conn, local: loopback.Prepare(conn), raw: raw, timeout: timeout, small: make([]byte, smallBuf)}
	s.buf = s.small
	s.tryRead = func(fd uintptr) bool {
		s.n, s.err = rawio.Read(fd, s.buf[s.w:])
		return true
	}
	s.readFn, s.writeFn = s.onReadable, s.onWritable
	return s, nil
}

// onReadable reads once, or returns false to wait until it can.
func (s *stream) onReadable(fd uintptr) bool {
	for {
		s.n, s.err = rawio.Read(fd, s.in[:min(len(s.in), rawio.MaxCall)])
		switch s.err {
		case syscall.EINTR:
		case syscall.EAGAIN:
			if s.soon > 0 {
				s.soon--
				rawio.Yield()
			} else if !s.spin.again() {
				s.watch()
				return false
			}
		default:
			s.soon = 0
			return true
		}
	}
}

// onWritable writes s.out, or returns false to wait until it can write more.
func (s *stream) onWritable(fd uintptr) bool {
	for len(s.out) > 0 {
		n, err := rawio.Writev(fd, s.out, &s.vec)
		switch err {
		case nil:
			s.n += n
			s.out = consume(s.out, n)
		case syscall.EINTR:
		case syscall.EAGAIN:
			s.watch()
			return false
		default:
			s.err = err
			return true
		}
	}
	return true
}

// consume drops the first n bytes of bufs, and empty buffers before the rest.
func consume(bufs [][]byte, n int) [][]byte {
	for len(bufs) > 0 && n >= len(bufs[0]) {
		n -= len(bufs[0])
		bufs[0] = nil
		bufs = bufs[1:]
	}
	if len(bufs) > 0 {
		bufs[0] = bufs[0][n:]
	}
	return bufs
}

// read is the connection's Read without the scheduler's notice; see rawio.
func (s *stream) read(b []byte) (int, error) {
	s.in = b
	err := s.raw.Read(s.readFn)
	s.in = nil
	s.spin.done()
	switch {
	case err != nil:
		return 0, err
	case s.err != nil:
		return 0, s.err
	case s.n == 0:
		return 0, io.EOF
	}
	return s.n, nil
}

// writev sends bufs and returns what is left of them.
func (s *stream) writev(bufs [][]byte) (left [][]byte, n int, err error) {
	s.out, s.n, s.err = bufs, 0, nil
	err = s.raw.Write(s.writeFn)
	left, s.out = s.out, nil
	if err == nil {
		err = s.err
	}
	return left, s.n, err
}

// close closes the connection and gives the large buffer back.
func (s *stream) close() {
	s.conn.Close()
	s.r, s.w = 0, 0
	s.resize(false)
}

// abort is close with a reset: the peer cannot take it for a clean end.
func (s *stream) abort() {
	s.conn.SetLinger(0)
	s.close()
}

func (s *stream) buffered() int { return s.w - s.r }

// next consumes n buffered bytes.
func (s *stream) next(n int) []byte {
	b := s.buf[s.r : s.r+n]
	s.r += n
	return b
}

// room makes space in the buffer: the large one while the peer streams.
func (s *stream) room() {
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

// fill reads once into the buffer.
func (s *stream) fill() error { return s.fillUpTo(bigBuf, false) }

// fillUpTo reads once into the buffer, at most limit bytes. An idle one waits
// without a timeout.
func (s *stream) fillUpTo(limit int, idle bool) error {
	s.room()
	for {
		if !idle {
			if err := s.armRead(); err != nil {
				return err
			}
		}
		n, err := s.read(s.buf[s.w:min(s.w+limit, len(s.buf))])
		s.w += n
		s.hot = s.w == len(s.buf)
		switch {
		case n > 0:
			return nil
		case idle && errors.Is(err, os.ErrDeadlineExceeded):
			// A deadline left over from the last body, not an end.
			if err := s.conn.SetReadDeadline(time.Time{}); err != nil {
				return err
			}
			s.readArmed = time.Time{}
		case err != nil:
			return s.cause(err)
		}
	}
}

// try reads what is there without waiting.
func (s *stream) try() error {
	s.room()
	if err := s.raw.Read(s.tryRead); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) && !s.cancelled() {
			return nil // a deadline left over from earlier; the next wait moves it
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

// need waits until n bytes, at most smallBuf/2, are buffered.
func (s *stream) need(n int) error {
	for s.buffered() < n {
		if err := s.fill(); err != nil {
			return err
		}
	}
	return nil
}

// readFull fills dst, from the buffer first.
func (s *stream) readFull(dst []byte) error {
	for {
		n := copy(dst, s.buf[s.r:s.w])
		s.r += n
		dst = dst[n:]
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
		n, err := s.read(dst)
		dst, s.hot = dst[n:], false
		if n == 0 && err != nil {
			return unexpected(s.cause(err))
		}
	}
}

// write sends bufs completely; it keeps nothing of them.
func (s *stream) write(bufs [][]byte) (sent int64, err error) {
	for len(bufs) > 0 {
		if err := s.armWrite(); err != nil {
			return sent, err
		}
		var n int
		bufs, n, err = s.writev(bufs)
		sent += int64(n)
		if err == nil {
			continue
		}
		if n > 0 && errors.Is(err, os.ErrDeadlineExceeded) && !s.cancelled() {
			s.writeArmed = time.Time{} // slow is not stalled
			continue
		}
		return sent, s.cause(err)
	}
	return sent, nil
}

// watch makes the end of the context wake the call that is about to sleep.
// Calls that never sleep go without: a watch is an allocation.
func (s *stream) watch() {
	if s.ctx != nil && s.watched == nil {
		s.watched = context.AfterFunc(s.ctx, func() { s.conn.SetDeadline(time.Unix(1, 0)) })
	}
}

// unwatch says whether the connection was not interrupted.
func (s *stream) unwatch() bool {
	if s.watched == nil {
		return true
	}
	ok := s.watched()
	s.watched = nil
	return ok
}

func (s *stream) cancelled() bool { return s.ctx != nil && s.ctx.Err() != nil }

// armRead and armWrite move the deadline when an eighth of it has passed. The
// context is asked afterwards: its watcher moves the deadline into the past,
// and one of the two sees the other.
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

// cause translates an error of the connection.
func (s *stream) cause(err error) error {
	switch {
	case s.cancelled():
		return s.ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrStalled
	}
	return err
}

// unexpected turns an end inside a frame into an error that says so.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
