// SPDX-License-Identifier: Apache-2.0

// Package http1 is an HTTP/1.1 client for one server, for a proxy: a request is written from
// pieces with one system call, and its answer is read by the goroutine that asked, in place.
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

// ErrStale means that a connection that was used before broke before any byte of the answer
// came: the server may have closed it while it was idle.
var ErrStale = errors.New("http1: the connection had been closed")

// ErrCut means that the context ended before the whole request was sent.
var ErrCut = errors.New("http1: the server has not all of the request")

// ErrAnswer means that the server sent no HTTP/1.1 answer, or one beyond the limits.
var ErrAnswer = errors.New("http1: not an HTTP answer")

// Limits of an answer.
const (
	maxHead      = 64 << 10 // bytes
	maxChunkLine = 4 << 10  // bytes, as in net/http
	maxTrailer   = 4 << 10  // bytes, as in net/http
	maxExcess    = 16 << 10 // bytes of chunk sizes beyond 16 of each chunk and twice its data, as in net/http
	maxFields    = 256
	bufBytes     = 8 << 10 // of a connection
)

// Options configures a Client. A zero field means its default.
type Options struct {
	DialTimeout time.Duration // default 3 s
	IdleTimeout time.Duration // of a connection without a request; default 4 s: uvicorn closes after 5 s
	MaxIdle     int           // connections; default 1024
	TLS         *tls.Config   // for https; nil: the system's authorities
}

// Client keeps connections to one server. Its methods are safe for concurrent use.
type Client struct {
	o    Options
	addr string
	host string // for the Host header
	path string // before every request's path
	tls  *tls.Config

	mu struct {
		sync.Mutex
		idle   []*Conn // the last one was used last
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

// Host is the server's name and port, for the Host header.
func (c *Client) Host() string { return c.host }

// Close closes idle connections; those in use close when their answer ends.
func (c *Client) Close() {
	c.mu.Lock()
	idle := c.mu.idle
	c.mu.idle, c.mu.closed = nil, true
	c.mu.Unlock()
	for _, n := range idle {
		n.close()
	}
}

// Idle returns how many connections have no request.
func (c *Client) Idle() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.mu.idle)
}

// Conn is a connection with at most one request at a time. One goroutine owns it; only the end of the context
// given to Do acts on it from another.
type Conn struct {
	c     *Client
	nc    net.Conn
	br    *bufio.Reader
	used  bool // an earlier request used it
	since time.Time
	stop  func() bool  // stops the context's AfterFunc of the running request
	ended func() error // Err of that context
	cut   bool         // not all of the request was sent
}

// Fresh reports whether the connection was made for this request.
func (n *Conn) Fresh() bool { return !n.used }

func (n *Conn) close() {
	if n.stop != nil {
		n.stop()
	}
	_ = n.nc.Close() // it is over either way
}

// Close closes a connection without an answer in progress.
func (n *Conn) Close() { n.close() }

// Conn returns a connection: one that is idle and still open, or a new one.
func (c *Client) Conn(ctx context.Context) (*Conn, error) {
	if n := c.reuse(); n != nil {
		return n, nil
	}
	return c.Dial(ctx)
}

// reuse takes the connection that was used last, if the server has not closed it. It closes connections that
// are idle for too long.
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

// Sweep closes connections that are idle for longer than IdleTimeout. Call it now and then.
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

// keep makes a connection idle after its answer has ended.
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

// Request is a request to send. Fields has all header fields but Host and
// Content-Length, each line with its CR LF.
type Request struct {
	Method string
	Target string // path and query
	Fields []byte
	Body   [][]byte
	Ready  func(part int) error // waits until a part of Body may be read; called for one part after the other; nil: all are ready

	// Whole says that the whole request must be sent, within WholeTime, even if ctx ends while it is sent.
	Whole bool
}

// WholeTime is how long a Request with Whole may still be sent after its context ended.
const WholeTime = 5 * time.Second

var past = time.Unix(1, 0)

// Do sends a request and returns its answer when the head has come. until bounds that; the zero
// time sets no bound. When ctx ends, then or later, the connection is closed. An error closes it, too.
// If the context ended while the request was sent, the error is also ErrCut.
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

// heads are buffers for the head of a request, or for the whole of a small request.
var heads = sync.Pool{New: func() any { b := make([]byte, 0, small+2<<10); return &b }}

// maxPooledHead bounds the bytes of a buffer that goes back to heads.
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
	if werr != nil && n.ended() == nil { // the server may have answered before it had everything
		_ = n.nc.SetReadDeadline(time.Now().Add(time.Second)) // if not, reading fails at once
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

// small is the largest body that is copied behind the head, so that the request is one TLS record and
// one write.
const small = 4 << 10

// write sends head and body, and returns the buffer of head, to which it may have appended the body.
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
	_, err := pieces.WriteTo(n.nc)
	return err
}

// Field is a line of an answer's head, its name in canonical form.
type Field struct{ Name, Value string }

// line reads a line without its end; it is valid until the next read.
func (n *Conn) line(left *int) ([]byte, error) {
	b, err := n.rawLine(left)
	return bytes.TrimSuffix(bytes.TrimSuffix(b, []byte("\n")), []byte("\r")), err
}

// rawLine is line with the line's end.
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
