// SPDX-License-Identifier: Apache-2.0

// Package http1 is an HTTP/1.1 client for one server, made for a proxy: it writes a request from pieces with one system call, and the
// goroutine that asked reads the answer directly from the receive buffer.
//
// It starts no goroutines and follows no redirects. Source: RFC 9112.
package http1

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/rawio"
)

// ErrStale means that a connection broke before any byte of the answer came, and that it had been used before: the server may have
// closed it while it was idle.
var ErrStale = errors.New("http1: the server had closed the connection")

// ErrCut means that the context ended before the whole request was sent.
var ErrCut = errors.New("http1: the context ended before the whole request was sent")

// ErrAnswer means that the server's answer is not HTTP/1.1, or exceeds a limit.
var ErrAnswer = errors.New("http1: not an HTTP answer")

// Limits of an answer. An answer beyond one of them is an ErrAnswer.
const (
	maxHead      = 64 << 10 // bytes
	maxChunkLine = 4 << 10  // bytes, as in net/http
	maxTrailer   = 4 << 10  // bytes, as in net/http
	maxExcess    = 16 << 10 // bytes of chunk-size lines beyond 16 per chunk and twice the data, as in net/http
	maxFields    = 256
	bufBytes     = 8 << 10 // buffer of a connection
)

// Options configures a Client. A zero field means its default.
type Options struct {
	DialTimeout time.Duration // default 3 s
	IdleTimeout time.Duration // after which a connection without a request is closed; default 4 s: uvicorn closes after 5 s
	MaxIdle     int           // most idle connections; a connection that would be one more is closed; default 1024
	TLS         *tls.Config   // for https; nil: the system's authorities
}

// Client keeps connections to one server open. Its methods are safe for concurrent use.
type Client struct {
	o    Options
	addr string
	host string // for the Host header
	path string // put before every request's path
	tls  *tls.Config

	mu struct {
		sync.Mutex
		idle   []*Conn // the last element was used last
		closed bool
	}
}

// New returns a Client of the server at base, http://host:port or https://host:port.
func New(base string, o Options) (*Client, error) {
	u, err := url.Parse(base)
	if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("http1: address %.200q is not http://host:port", base)
	}
	c := &Client{o: o, host: u.Host, path: u.EscapedPath()}
	c.o.DialTimeout = cmp.Or(o.DialTimeout, 3*time.Second)
	c.o.IdleTimeout = cmp.Or(o.IdleTimeout, 4*time.Second)
	c.o.MaxIdle = cmp.Or(o.MaxIdle, 1024)
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	c.addr = net.JoinHostPort(u.Hostname(), port)
	if u.Scheme == "https" {
		c.tls = o.TLS.Clone()
		if c.tls == nil {
			c.tls = &tls.Config{}
		}
		c.tls.ServerName = cmp.Or(c.tls.ServerName, u.Hostname())
		c.tls.NextProtos = nil
	}
	return c, nil
}

// Host returns the server's name and port, as in the Host header.
func (c *Client) Host() string { return c.host }

// Close closes the idle connections. Those in use close when their answer ends.
func (c *Client) Close() {
	c.mu.Lock()
	idle := c.mu.idle
	c.mu.idle, c.mu.closed = nil, true
	c.mu.Unlock()
	for _, n := range idle {
		n.close()
	}
}

// Idle returns how many connections have no request now.
func (c *Client) Idle() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.mu.idle)
}

// Conn is a connection that carries at most one request at a time. One goroutine owns it. Only the end of the context given to Do acts
// on it from another goroutine.
type Conn struct {
	c     *Client
	nc    net.Conn
	br    *bufio.Reader
	used  bool // an earlier request used it
	since time.Time
	stop  func() bool  // stops the AfterFunc on the context of the running request
	ended func() error // Err of that context
	cut   bool         // not all of the request has been sent
}

// Fresh reports whether the connection has carried no request before this one.
func (n *Conn) Fresh() bool { return !n.used }

func (n *Conn) close() {
	if n.stop != nil {
		n.stop()
	}
	_ = n.nc.Close() // the connection is of no use in any case
}

// Close closes the connection. No answer may be in progress.
func (n *Conn) Close() { n.close() }

// Conn returns an idle connection that is still open, or else a new one.
func (c *Client) Conn(ctx context.Context) (*Conn, error) {
	if n := c.reuse(); n != nil {
		return n, nil
	}
	return c.Dial(ctx)
}

// reuse returns the connection that was used last and that the server has not closed; nil: there is none. It closes connections that
// have been idle for too long.
func (c *Client) reuse() *Conn {
	for {
		c.mu.Lock()
		k := len(c.mu.idle)
		if k == 0 {
			c.mu.Unlock()
			return nil
		}
		n := c.mu.idle[k-1]
		c.mu.idle[k-1] = nil
		c.mu.idle = c.mu.idle[:k-1]
		var old []*Conn
		now := time.Now()
		for len(c.mu.idle) > 0 && now.Sub(c.mu.idle[0].since) > c.o.IdleTimeout {
			old = append(old, c.mu.idle[0])
			c.mu.idle = c.mu.idle[1:]
		}
		c.mu.Unlock()
		for _, o := range old {
			o.close()
		}
		if now.Sub(n.since) <= c.o.IdleTimeout && n.br.Buffered() == 0 && open(n.nc) {
			return n
		}
		n.close()
	}
}

// Sweep closes the connections that have been idle for longer than IdleTimeout. Call it regularly.
func (c *Client) Sweep() {
	c.mu.Lock()
	var old []*Conn
	for len(c.mu.idle) > 0 && time.Since(c.mu.idle[0].since) > c.o.IdleTimeout {
		old = append(old, c.mu.idle[0])
		c.mu.idle = c.mu.idle[1:]
	}
	c.mu.Unlock()
	for _, o := range old {
		o.close()
	}
}

// Dial makes a new connection.
func (c *Client) Dial(ctx context.Context) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, c.o.DialTimeout)
	defer cancel()
	nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", c.addr)
	if err != nil {
		return nil, err
	}
	nc = rawio.Wrap(nc)
	if c.tls != nil {
		t := tls.Client(nc, c.tls)
		if err := t.HandshakeContext(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("http1: TLS with %s: %w", c.addr, err), nc.Close())
		}
		nc = t
	}
	return &Conn{c: c, nc: nc, br: bufio.NewReaderSize(nc, bufBytes)}, nil
}

// keep puts the connection among the idle ones after its answer has ended.
func (n *Conn) keep() {
	if n.stop != nil && !n.stop() {
		n.close() // the context ended, and its AfterFunc may still change the deadline
		return
	}
	n.stop = nil
	if err := n.nc.SetDeadline(time.Time{}); err != nil {
		n.close()
		return
	}
	n.used, n.since = true, time.Now()
	c := n.c
	c.mu.Lock()
	if c.mu.closed || len(c.mu.idle) >= c.o.MaxIdle {
		c.mu.Unlock()
		n.close()
		return
	}
	c.mu.idle = append(c.mu.idle, n)
	c.mu.Unlock()
}

// Request is a request to send. Fields has all header lines except Host and Content-Length, each with its CR LF.
type Request struct {
	Method string
	Target string // path and query
	Fields []byte
	Body   [][]byte
	Ready  func(part int) error // waits until a part of Body may be read; called for one part after the other; nil: all parts are ready

	// Whole says that, even if ctx ends during sending, the rest of the request must be sent, within WholeTime.
	Whole bool
}

// WholeTime is how long a Request with Whole may still be sent after its context ended.
const WholeTime = 5 * time.Second

var past = time.Unix(1, 0)

// Do sends a request and returns its answer when the head of the answer has come, at the latest at `until`; the zero time sets no
// limit. When ctx ends, then or later, the connection is closed. An error closes it, too. If ctx ended before all of the request was
// sent, the error also wraps ErrCut.
func (n *Conn) Do(ctx context.Context, r *Request, until time.Time) (*Response, error) {
	if err := n.nc.SetDeadline(until); err != nil {
		n.close()
		return nil, err
	}
	n.ended = ctx.Err
	n.stop = context.AfterFunc(ctx, func() { // a closed connection needs no deadline
		if r.Whole {
			_ = n.nc.SetReadDeadline(past)
			_ = n.nc.SetWriteDeadline(time.Now().Add(WholeTime))
			return
		}
		_ = n.nc.SetDeadline(past)
	})
	a, err := n.do(r)
	if err == nil {
		return a, nil
	}
	n.close()
	if ctx.Err() == nil {
		return nil, err
	}
	if n.cut {
		return nil, fmt.Errorf("%w: %w", ErrCut, context.Cause(ctx))
	}
	return nil, context.Cause(ctx)
}

// heads holds buffers for the head of a request, or for a whole small request.
var heads = sync.Pool{New: func() any { b := make([]byte, 0, small+2<<10); return &b }}

// maxPooledHead is the largest buffer that goes back to heads, in bytes; larger ones are dropped.
const maxPooledHead = 32 << 10

func (n *Conn) do(r *Request) (*Response, error) {
	length := 0
	for _, p := range r.Body {
		length += len(p)
	}
	pooled := heads.Get().(*[]byte)
	head := append((*pooled)[:0], r.Method...)
	head = append(append(append(append(head, ' '), n.c.path...), r.Target...), " HTTP/1.1\r\nHost: "...)
	head = append(append(append(head, n.c.host...), "\r\n"...), r.Fields...)
	if length > 0 || r.Method == "POST" {
		head = append(strconv.AppendInt(append(head, "Content-Length: "...), int64(length), 10), "\r\n"...)
	}
	head = append(head, "\r\n"...)
	head, werr := n.write(head, length, r.Body, r.Ready)
	if cap(head) <= maxPooledHead {
		*pooled = head
		heads.Put(pooled)
	}
	n.cut = werr != nil
	if werr != nil && n.ended() == nil { // the server may have answered before it had all of the request
		_ = n.nc.SetReadDeadline(time.Now().Add(time.Second)) // if it has not, reading fails at once
	}
	if _, err := n.br.Peek(1); err != nil {
		err = cmp.Or(werr, err)
		if n.used && !isTimeout(err) {
			return nil, fmt.Errorf("%w: %w", ErrStale, err)
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	a, err := n.head(r.Method)
	if err == nil && werr != nil {
		a.close = true
	}
	return a, err
}

func isTimeout(err error) bool {
	e, ok := errors.AsType[net.Error](err)
	return ok && e.Timeout()
}

// small is the largest body that is copied after the head, so that the request is one TLS record and one write.
const small = 4 << 10

// write writes head and then body, which has length bytes. It calls ready, unless that is nil, with the number of each piece of body before
// it reads the piece. It returns the buffer of head, to which it may have appended the body.
func (n *Conn) write(head []byte, length int, body [][]byte, ready func(int) error) ([]byte, error) {
	if length <= small {
		for i, p := range body {
			if ready != nil {
				if err := ready(i); err != nil {
					return head, err
				}
			}
			head = append(head, p...)
		}
		_, err := n.nc.Write(head)
		return head, err
	}
	pieces := make(net.Buffers, 0, 1+len(body))
	if pieces = append(pieces, head); ready == nil {
		return head, n.writeAll(append(pieces, body...))
	}
	for i, p := range body {
		if err := ready(i); err != nil {
			return head, err
		}
		if err := n.writeAll(append(pieces, p)); err != nil {
			return head, err
		}
		pieces = pieces[:0]
	}
	return head, nil
}

func (n *Conn) writeAll(pieces net.Buffers) error {
	if raw, ok := n.nc.(*rawio.Conn); ok {
		return raw.WriteAll(pieces)
	}
	_, err := rawio.WriteBuffers(n.nc, &pieces)
	return err
}

// Field is one header line of an answer, its name in canonical form.
type Field struct{ Name, Value string }

// line reads a line and returns it without its end; the result is valid until the next read. *left is how many bytes may still be read; line
// subtracts the bytes of this line, and returns an ErrAnswer if they are more.
func (n *Conn) line(left *int) ([]byte, error) {
	b, err := n.rawLine(left)
	return bytes.TrimSuffix(bytes.TrimSuffix(b, []byte("\n")), []byte("\r")), err
}

// rawLine is like line, but returns the line with its end.
func (n *Conn) rawLine(left *int) ([]byte, error) {
	b, err := n.br.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		long := bytes.Clone(b)
		for errors.Is(err, bufio.ErrBufferFull) && len(long) <= *left {
			b, err = n.br.ReadSlice('\n')
			long = append(long, b...)
		}
		b = long
	}
	if *left -= len(b); *left < 0 {
		return nil, fmt.Errorf("%w: a head or trailer is too long", ErrAnswer)
	}
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return b, nil
}
