// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/fair"
)

// body is the body of a request. Its memory is reused after its last hold has ended.
type body struct {
	b     []byte
	holds atomic.Int32
}

// sizes are the sizes of the buffers that are kept for later requests, in bytes; pools has one pool for each.
var sizes = [...]int{16 << 10, 256 << 10, 2 << 20}

var pools [len(sizes)]sync.Pool

// newBody returns an empty body with one hold, for about n bytes.
func newBody(n int64) *body {
	for i, size := range sizes {
		if n <= int64(size) {
			if b, ok := pools[i].Get().(*body); ok {
				b.holds.Store(1)
				return b
			}
			break
		}
	}
	// A Content-Length alone never makes the proxy take much memory.
	b := &body{b: make([]byte, 0, min(max(n, 4<<10), 64<<10)+1)}
	b.holds.Store(1)
	return b
}

func (b *body) hold() { b.holds.Add(1) }

func (b *body) release() {
	if b.holds.Add(-1) > 0 {
		return
	}
	for i, size := range sizes {
		if cap(b.b) <= size+1 {
			b.b = b.b[:0]
			pools[i].Put(b)
			return
		}
	}
}

// bodyMemory bounds the memory of the bodies that are being read, over all clients. One address or key may take half of the memory that
// the others leave. A buffer that is being copied into a larger one does not count.
type bodyMemory struct {
	limit int64 // bytes of buffers

	mu struct {
		sync.Mutex
		shares fair.Shares
	}
}

// take reserves n bytes for a body of the client `who`, which is an address or the name of a key. It returns false, and reserves
// nothing, if there is no room.
func (m *bodyMemory) take(who string, n int64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.mu.shares.MaySize(who, n, m.limit) {
		return false
	}
	m.mu.shares.Add(who, fair.Amount{Size: n})
	return true
}

// give gives back n bytes that `who` had taken.
func (m *bodyMemory) give(who string, n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.shares.Add(who, fair.Amount{Size: -n})
}

func (m *bodyMemory) bytes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.shares.All().Size
}

// errNoBodyMemory returns the refusal of a request for whose body bodyMemory has no room.
func errNoBodyMemory(e *exchange) error {
	e.w.Header().Set("Connection", "close") // the rest of the body is not read
	r := busy("too much memory is taken by unfinished requests")
	r.always = true
	return r
}

// read reads the body of the request and scans it.
func (e *exchange) read() error {
	e.body = newBody(e.r.ContentLength)
	memory, who := &e.p.bodies, e.want.who
	if !memory.take(who, int64(cap(e.body.b))) {
		return errNoBodyMemory(e)
	}
	defer func() { memory.give(who, int64(cap(e.body.b))) }()
	_ = e.rc.SetReadDeadline(time.Now().Add(e.p.o.BodyTimeout)) // not every ResponseWriter has deadlines
	from := http.MaxBytesReader(e.w, e.r.Body, e.p.o.MaxBody)
	b := e.body.b
	for {
		if len(b) == cap(b) {
			more := int(min(2*int64(cap(b)), max(int64(cap(b)), e.p.o.MaxBody)+1)) // one byte more than allowed, to see whether the body ends
			if n := e.r.ContentLength; n > int64(cap(b)) {
				more = int(min(n+1, 4*int64(cap(b))))
			}
			if !memory.take(who, int64(more-cap(b))) {
				return errNoBodyMemory(e)
			}
			b = append(make([]byte, 0, more), b...)
			e.body.b = b
		}
		n, err := from.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		e.body.b = b
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			continue
		}
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return &refusal{
				status: http.StatusRequestEntityTooLarge, kind: "BadRequestError", outcome: "bad_request",
				text: fmt.Sprintf("the request is longer than %d bytes", e.p.o.MaxBody),
			}
		}
		if isTimeout(err) {
			e.w.Header().Set("Connection", "close")
			return &refusal{
				status: http.StatusRequestTimeout, kind: "BadRequestError", outcome: "bad_request", always: true,
				text: fmt.Sprintf("the request did not come within %v", e.p.o.BodyTimeout),
			}
		}
		return brokenBody(e, err)
	}
	// The read deadline ends with the body. If it stayed, its passing would look as if the client had left.
	_ = e.rc.SetReadDeadline(time.Time{}) // not every ResponseWriter has deadlines
	return e.scanned()
}

// brokenBody returns the refusal of a request whose body is cut, or has malformed chunks. The client may have gone; or it has closed
// only its sending side and waits for an answer. A balancer in between must not take an empty answer for success.
func brokenBody(e *exchange, err error) error {
	e.w.Header().Set("Connection", "close")
	r := &refusal{status: http.StatusBadRequest, kind: "BadRequestError", outcome: "bad_request", text: "the body is malformed", always: true}
	if _, network := errors.AsType[*net.OpError](err); network || errors.Is(err, io.ErrUnexpectedEOF) {
		r.text, r.outcome = "the body ends early", "client_left"
	}
	return r
}

// releaseBody ends the exchange's own hold of the body, and drops all that was scanned from the body.
func (e *exchange) releaseBody() {
	if e.body != nil {
		e.body.release()
		e.body, e.q, e.want.marks = nil, nil, nil
	}
}
