// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
)

// Frames of coro_rpc; all numbers are little-endian.
const (
	magic          = 21
	requestHeader  = 20 // magic, version, serialization, kind, sequence u32, function u32, body u32, attachment u32
	responseHeader = 16 // magic, version, error, kind, sequence u32, body u32, attachment u32

	// maxResponse bounds the body of an answer, in bytes; a longer one is an error. The descriptor of a replica takes about 100 bytes.
	maxResponse = 64 << 20

	badArguments = 4  // error: the hash of the arguments' type differs, or the body ends early
	noFunction   = 11 // error: there is no such function
)

var (
	// ErrVersion means that a master has a release of Mooncake that this package does not know.
	ErrVersion = errors.New("mooncake store: the master's release is not known")

	errProtocol = errors.New("mooncake store: the master does not speak coro_rpc")
)

// conn is a connection to a master, used by one call at a time.
type conn struct {
	c     net.Conn
	quick *quick    // quick calls on c; nil: not possible
	until time.Time // the deadline that is set on c
	seq   uint32
	w     sp.Writer
	body  []byte
	old   bool // it was idle, so the master may have closed it

	breaks int // Master.breaks when the connection was made
}

// begin starts a request to the method m and returns the Writer for its arguments, whose type is form. largest is the largest size of a
// string or vector in them.
func (c *conn) begin(m method, form sp.Form, largest int) *sp.Writer {
	c.seq++
	w := &c.w
	w.B = append(w.B[:0], magic, 0, 0, 0)
	w.B = binary.LittleEndian.AppendUint32(w.B, c.seq)
	w.B = binary.LittleEndian.AppendUint32(w.B, functionIDs[m])
	w.B = append(w.B, 0, 0, 0, 0, 0, 0, 0, 0)
	if form.Literal() != "" {
		w.Begin(form, largest)
	}
	return w
}

// rpcError is an error of coro_rpc itself, not of the method called.
type rpcError struct {
	method method
	code   uint8
}

func (e *rpcError) Error() string {
	switch e.code {
	case badArguments:
		return fmt.Sprintf("mooncake store: the master refuses the arguments of %s: it is of another release", methodNames[e.method])
	case noFunction:
		return fmt.Sprintf("mooncake store: the master has no %s", methodNames[e.method])
	}
	return fmt.Sprintf("mooncake store: %s: error %d of the RPC", methodNames[e.method], e.code)
}

// Unwrap returns ErrVersion if the code is one by which a release refuses the calls of another release.
func (e *rpcError) Unwrap() error {
	if e.code == badArguments || e.code == noFunction {
		return ErrVersion
	}
	return nil
}

// call sends the request that begin started and reads the answer. After an error that is no *rpcError, the connection cannot be used
// any more.
func (c *conn) call(ctx context.Context, m method, timeout time.Duration) ([]byte, error) {
	// Setting a deadline costs two timers. So the deadline of an earlier call stays if it lies in the last eighth of this call's time.
	limit := time.Now().Add(timeout)
	if c.until.After(limit) || c.until.Before(limit.Add(-timeout/8)) {
		if err := c.c.SetDeadline(limit); err != nil {
			return nil, err
		}
		c.until = limit
	}
	if ctx.Done() != nil {
		cut := make(chan struct{})
		stop := context.AfterFunc(ctx, func() {
			defer close(cut)
			_ = c.c.SetDeadline(time.Unix(1, 0))
		})
		defer func() {
			if !stop() {
				<-cut // otherwise the AfterFunc could cut the next call on this connection
				c.until = time.Time{}
			}
		}()
	}
	b, err := c.exchange(m)
	var rpc *rpcError
	if err != nil && !errors.As(err, &rpc) && ctx.Err() != nil {
		err = ctx.Err()
	}
	return b, err
}

// exchange writes the request and reads the answer.
func (c *conn) exchange(m method) ([]byte, error) {
	binary.LittleEndian.PutUint32(c.w.B[12:], uint32(len(c.w.B)-requestHeader))
	var come []byte // bytes of the answer that came with the first read
	written := 0
	if c.quick != nil {
		var err error
		if written, come, err = c.quick.exchange(c.w.B); err != nil {
			return nil, err
		}
	}
	if written < len(c.w.B) {
		if _, err := c.c.Write(c.w.B[written:]); err != nil {
			return nil, err
		}
	}
	var h [responseHeader]byte
	n := copy(h[:], come)
	come = come[n:]
	if _, err := io.ReadFull(c.c, h[n:]); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	bytes, attached := le.Uint32(h[8:]), le.Uint32(h[12:])
	if h[0] != magic || le.Uint32(h[4:]) != c.seq || attached > maxResponse {
		return nil, errProtocol
	}
	if bytes > maxResponse {
		return nil, fmt.Errorf("%w: an answer of %d bytes, at most %d", errProtocol, bytes, maxResponse)
	}
	if len(come) > int(bytes+attached) {
		return nil, fmt.Errorf("%w: more bytes came than the answer has", errProtocol)
	}
	n = min(len(come), int(bytes))
	c.body = append(c.body[:0], come[:n]...)
	if err := c.read(int(bytes)); err != nil {
		return nil, err
	}
	if left := int64(attached) - int64(len(come)-n); left > 0 {
		if _, err := io.CopyN(io.Discard, c.c, left); err != nil {
			return nil, err
		}
	}
	if h[2] != 0 {
		return nil, &rpcError{m, h[2]}
	}
	return c.body, nil
}

// read reads the rest of a body of n bytes. It allocates memory as bytes come, not as the header announces them.
func (c *conn) read(n int) error {
	const step = 1 << 20
	for len(c.body) < n {
		at := len(c.body)
		more := min(step, n-at)
		if cap(c.body) < at+more {
			c.body = append(make([]byte, 0, max(2*cap(c.body), at+more)), c.body...)
		}
		c.body = c.body[:at+more]
		if _, err := io.ReadFull(c.c, c.body[at:]); err != nil {
			return err
		}
	}
	return nil
}
