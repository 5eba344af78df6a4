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

// body is the body of a request, in memory that is reused once its last hold ends.
type body struct {
	b     []byte
	holds atomic.Int32
}

// sizes are those of the memory that is kept for later requests, bytes.
var sizes = [...]int{16 << 10, 256 << 10, 2 << 20}

var pools [len(sizes)]sync.Pool

// newBody returns an empty body, held once, that will have about n bytes.
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

// bodyMemory bounds the memory of bodies that are being read, over all clients. One address or key may take half of the memory
// that the others leave. A buffer that is being copied into a larger one does not count.
type bodyMemory struct {
	limit int64 // bytes of buffers

	mu struct {
		sync.Mutex
		shares fair.Shares
	}
}

// take reserves n bytes for a body of the client who, and reports whether there was room.
func (m *bodyMemory) take(who string, n int64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.mu.shares.MaySize(who, n, m.limit) {
		return false
	}
	m.mu.shares.Add(who, fair.Amount{Size: n})
	return true
}

// give gives n bytes back.
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

// errNoBodyMemory returns the refusal for a body when unfinished bodies take all memory of bodyMemory.
func errNoBodyMemory(e *exchange) error {
	e.w.Header().Set("Connection", "close") // the rest of the body is not read
	r := busy("too much memory is taken by unfinished requests")
	r.always = true
	return r
}

// read reads the request.
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
			more := int(min(2*int64(cap(b)), max(int64(cap(b)), e.p.o.MaxBody)+1)) // one byte more than is taken, to see the end
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
	// The limit on reading ends with the body. Left on, its end would look like a client that leaves.
	_ = e.rc.SetReadDeadline(time.Time{}) // not every ResponseWriter has deadlines
	return e.scanned()
}

// brokenBody returns the refusal for a body that is cut, or whose chunks are malformed. The client may have gone, or may have closed
// only its side and wait for an answer; a balancer in between must not take an empty answer for success.
func brokenBody(e *exchange, err error) error {
	e.w.Header().Set("Connection", "close")
	r := &refusal{status: http.StatusBadRequest, kind: "BadRequestError", outcome: "bad_request", text: "the body is malformed", always: true}
	if _, network := errors.AsType[*net.OpError](err); network || errors.Is(err, io.ErrUnexpectedEOF) {
		r.text, r.outcome = "the body ends early", "client_left"
	}
	return r
}

// releaseBody ends the exchange's own hold of the body, and drops what was scanned from it.
func (e *exchange) releaseBody() {
	if e.body != nil {
		e.body.release()
		e.body, e.q, e.want.marks = nil, nil, nil
	}
}
