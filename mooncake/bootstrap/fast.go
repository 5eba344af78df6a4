package bootstrap

import (
	"bytes"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/rawio"
)

// Plain GET /query over HTTP/1.1 is nearly all that a registry is asked, so it is
// answered without net/http: one read, a comparison, one write of an answer that
// is encoded already. Every connection begins that way. With the first request
// that is anything else, a body, a header that changes the meaning, a question
// after the ?, the connection goes to net/http with what was read, for good.

// front reads connections until they have something for net/http.
type front struct {
	r    *Registry
	slow *handover
	wg   sync.WaitGroup

	mu struct {
		sync.Mutex
		conns    map[*fastConn]struct{}
		draining bool
	}
}

func newFront(r *Registry, addr net.Addr) *front {
	f := &front{r: r, slow: &handover{addr: addr, conns: make(chan net.Conn), closed: make(chan struct{})}}
	f.mu.conns = map[*fastConn]struct{}{}
	return f
}

// accept takes connections until l is closed.
func (f *front) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // no more descriptors, for example
			time.Sleep(10 * time.Millisecond)
		default:
			f.wg.Go(func() { f.serve(c) })
		}
	}
}

func (f *front) serve(c net.Conn) {
	raw := syscallConn(c)
	if raw == nil || (f.r.o.Token != "" && f.r.o.Guard >= GuardAll) {
		f.slow.give(c, nil)
		return
	}
	fc := &fastConn{r: f.r, c: c, raw: raw, buf: make([]byte, 0, 2048)}
	f.mu.Lock()
	ok := !f.mu.draining
	if ok {
		f.mu.conns[fc] = struct{}{}
	}
	f.mu.Unlock()
	rest := ok && fc.run()
	f.mu.Lock()
	delete(f.mu.conns, fc)
	f.mu.Unlock()
	if !rest {
		c.Close()
		return
	}
	_ = c.SetDeadline(time.Time{})
	f.slow.give(c, fc.buf)
}

// drain ends connections that wait for a request; those that write may finish.
func (f *front) drain() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.draining = true
	for c := range f.mu.conns {
		_ = c.c.SetReadDeadline(time.Unix(1, 0))
	}
}

// cut closes what is left.
func (f *front) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.mu.conns {
		c.c.Close()
	}
}

func syscallConn(c net.Conn) syscall.RawConn {
	if l, ok := c.(*limitConn); ok {
		c = l.Conn
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}

// fastConn is one connection, owned by its goroutine.
type fastConn struct {
	r        *Registry
	c        net.Conn
	raw      syscall.RawConn
	buf      []byte // read and not yet answered
	deadline time.Time
	since    time.Time // when the first byte of buf came; zero without one

	n   int // of one read
	err error
	out []byte
}

// run answers queries. It returns true with a request for net/http in buf, false
// when the connection is over.
func (c *fastConn) run() bool {
	read := func(fd uintptr) bool {
		c.n, c.err = rawio.Read(fd, c.buf[len(c.buf):cap(c.buf)])
		return c.err != syscall.EAGAIN && c.err != syscall.EINTR
	}
	write := func(fd uintptr) bool {
		for len(c.out) > 0 {
			n, err := rawio.Write(fd, c.out[:min(len(c.out), rawio.MaxCall)])
			switch err {
			case nil:
				c.out = c.out[n:]
			case syscall.EINTR:
			case syscall.EAGAIN:
				return false
			default:
				c.err = err
				return true
			}
		}
		return true
	}
	for {
		c.arm()
		if err := c.raw.Read(read); err != nil || c.err != nil || c.n == 0 {
			return false
		}
		c.buf = c.buf[:len(c.buf)+c.n]
		for len(c.buf) > 0 {
			size, plain := plainQuery(c.buf)
			if !plain || (size == 0 && len(c.buf) == cap(c.buf)) {
				return true
			}
			if size == 0 {
				break // more of it is to come
			}
			c.buf = c.buf[:copy(c.buf, c.buf[size:])]
			c.r.n.queries.Add(1)
			c.out = c.r.response()
			if err := c.raw.Write(write); err != nil || c.err != nil {
				return false
			}
		}
	}
}

// arm sets the deadline of the next read, seldom: while idle, a few seconds more
// or less do not matter.
func (c *fastConn) arm() {
	slack := c.r.idleTimeout / 16
	now := time.Now()
	if len(c.buf) == 0 {
		c.since = time.Time{}
		if next := now.Add(c.r.idleTimeout); next.Sub(c.deadline) > slack {
			c.deadline = next
			_ = c.c.SetDeadline(next)
		}
		return
	}
	if c.since.IsZero() { // the head of a request must come whole in time
		c.since = now
		c.deadline = now.Add(c.r.readTimeout)
		_ = c.c.SetReadDeadline(c.deadline)
	}
}

// plainQuery looks at the start of a connection's bytes. plain is false when they
// are no GET /query that can be answered without another look; size is its
// length, 0 while it is not whole.
func plainQuery(b []byte) (size int, plain bool) {
	const line = "GET /query HTTP/1.1\r\n"
	if len(b) < len(line) {
		return 0, string(b) == line[:len(b)]
	}
	if string(b[:len(line)]) != line {
		return 0, false
	}
	hosts := 0
	for at := len(line); ; {
		end := bytes.IndexByte(b[at:], '\n')
		if end < 0 {
			return 0, true
		}
		field := b[at : at+end]
		at += end + 1
		if len(field) == 0 || field[len(field)-1] != '\r' {
			return 0, false
		}
		field = field[:len(field)-1]
		if len(field) == 0 {
			return at, hosts == 1
		}
		colon := bytes.IndexByte(field, ':')
		if colon < 1 || !harmless(field[:colon], field[colon+1:]) {
			return 0, false
		}
		if colon == 4 && foldEqual(field[:4], "host") {
			hosts++
		}
	}
}

// harmless reports whether a header leaves the answer as it is. Names with odd
// bytes, such as blanks, are for net/http to judge.
func harmless(name, v []byte) bool {
	for _, c := range name {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
			return false
		}
	}
	for _, c := range v {
		if c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	switch len(name) {
	case 10:
		return !foldEqual(name, "connection") || foldEqual(bytes.TrimSpace(v), "keep-alive")
	case 14:
		return !foldEqual(name, "content-length")
	case 17:
		return !foldEqual(name, "transfer-encoding")
	case 6:
		return !foldEqual(name, "expect")
	case 7:
		return !foldEqual(name, "upgrade") && !foldEqual(name, "trailer")
	}
	return true
}

// foldEqual compares with a lower-case word.
func foldEqual(b []byte, word string) bool {
	if len(b) != len(word) {
		return false
	}
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != word[i] {
			return false
		}
	}
	return true
}

// response is a whole answer to GET /query, for one second.
type response struct {
	d      *directory
	second int64
	bytes  []byte
}

// response returns the answer of this moment; nobody writes to it.
func (r *Registry) response() []byte {
	d, now := r.current(), time.Now()
	if old := r.ready.Load(); old != nil && old.d == d && old.second == now.Unix() {
		return old.bytes
	}
	b := d.answer(append(make([]byte, headRoom, len(d.room)), d.body...), now)
	r.ready.Store(&response{d, now.Unix(), b})
	return b
}

// headRoom is enough for the head of any answer to GET /query.
const headRoom = 256

// answer puts the head of this second before the body in room, which nobody else
// reads yet, and returns both.
func (d *directory) answer(room []byte, now time.Time) []byte {
	b := make([]byte, 0, headRoom)
	b = append(b, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"+GenerationHeader+": "...)
	b = strconv.AppendUint(b, d.gen, 10)
	b = append(b, "\r\nDate: "...)
	b = now.UTC().AppendFormat(b, http.TimeFormat)
	b = append(b, "\r\nContent-Length: "...)
	b = strconv.AppendInt(b, int64(len(d.body)), 10)
	b = append(b, "\r\n\r\n"...)
	return room[headRoom-copy(room[headRoom-len(b):], b):]
}

// handover is the listener through which net/http gets connections.
type handover struct {
	addr   net.Addr
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (h *handover) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

func (h *handover) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

func (h *handover) Addr() net.Addr { return h.addr }

// give passes a connection on, with bytes that were read from it.
func (h *handover) give(c net.Conn, read []byte) {
	select {
	case h.conns <- &resumedConn{Conn: c, read: read}:
	case <-h.closed:
		c.Close()
	}
}

type resumedConn struct {
	net.Conn
	read []byte
}

func (c *resumedConn) Read(b []byte) (int, error) {
	if len(c.read) == 0 {
		return c.Conn.Read(b)
	}
	n := copy(b, c.read)
	c.read = c.read[n:]
	return n, nil
}

// limitListener closes connections over a limit at once: a refusal is a clearer
// answer than a connection that nobody reads.
type limitListener struct {
	net.Listener
	max     int64
	open    atomic.Int64
	refused *atomic.Uint64
}

func (l *limitListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= l.max {
			return &limitConn{Conn: c, l: l}, nil
		}
		l.open.Add(-1)
		l.refused.Add(1)
		c.Close()
	}
}

type limitConn struct {
	net.Conn
	l    *limitListener
	once sync.Once
}

func (c *limitConn) Close() error {
	c.once.Do(func() { c.l.open.Add(-1) })
	return c.Conn.Close()
}
