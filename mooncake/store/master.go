// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
)

// MasterOptions configures a Master. A zero field means its default.
type MasterOptions struct {
	// Addresses are the addresses of the cluster's masters, host:port. One of them leads; the others refuse connections.
	Addresses []string
	Tenant    string // default "default"; releases before 0.3.12 have none

	// DialTimeout bounds the dial of one address. Unless it is the last address, it also bounds the wait for the first answer from
	// there. Default 2 s.
	DialTimeout time.Duration
	// CallTimeout bounds one call, including the probe of the master's release; default 10 s. Waiting for a connection, and dialing,
	// may take DialTimeout for each address in addition.
	CallTimeout time.Duration
	MaxConns    int // most connections to the master, each for one call at a time; default 8
	MaxKeys     int // most keys in one call; a longer list takes several calls; default 4096
}

// Validate reports every field that cannot be used, as options.Errors.
func (o MasterOptions) Validate() error {
	var c options.Checks
	for _, a := range o.Addresses {
		host, port, err := net.SplitHostPort(a)
		n, notNumber := strconv.Atoi(port)
		c.That(err == nil && host != "" && notNumber == nil && n > 0 && n < 1<<16, "Addresses", "%q is not HOST:PORT", a)
	}
	options.Within(&c, "DialTimeout", o.DialTimeout, 0, time.Hour)
	options.Within(&c, "CallTimeout", o.CallTimeout, 0, time.Hour)
	options.Within(&c, "MaxConns", o.MaxConns, 0, 1024)
	options.Within(&c, "MaxKeys", o.MaxKeys, 0, 1<<16)
	return c.Err()
}

// Master calls the leading one of a cluster's masters. Its methods are safe for concurrent use. The error of a single key is a Code.
// The error of a whole call means that nothing is known about any of its keys.
type Master struct {
	o    MasterOptions
	free chan struct{} // one token for each connection that may exist

	mu struct {
		sync.Mutex
		closed bool
		idle   []*conn // the last one was used last
		codec  *codec  // for the master to which all connections lead; nil: its release is not known yet
		breaks int     // how often a connection broke; connections made before that may lead to a former master
	}
}

// NewMaster checks the options. The Master connects at its first call.
func NewMaster(o MasterOptions) (*Master, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Tenant = cmp.Or(o.Tenant, "default")
	o.DialTimeout = cmp.Or(o.DialTimeout, 2*time.Second)
	o.CallTimeout = cmp.Or(o.CallTimeout, 10*time.Second)
	o.MaxConns = cmp.Or(o.MaxConns, 8)
	o.MaxKeys = cmp.Or(o.MaxKeys, 4096)
	m := &Master{o: o, free: make(chan struct{}, o.MaxConns)}
	for range o.MaxConns {
		m.free <- struct{}{}
	}
	return m, nil
}

// unsentError means that the master did not get the call.
type unsentError struct{ error }

func (e *unsentError) Unwrap() error { return e.error }

// ErrClosed means that a Master or Client was closed.
var ErrClosed = errors.New("mooncake store: closed")

// Close closes the idle connections. The others close when their calls end.
func (m *Master) Close() error {
	m.mu.Lock()
	idle := m.mu.idle
	m.mu.idle, m.mu.closed = nil, true
	m.mu.Unlock()
	for _, c := range idle {
		c.c.Close()
	}
	return nil
}

// Version returns the release of the master. If it is unknown, Version finds it out by a call.
func (m *Master) Version(ctx context.Context) (Version, error) {
	v := Unknown
	err := m.do(ctx, serviceReady, true, func(_ *conn, k *codec) { v = k.version }, nil)
	return v, err
}

// acquire returns a connection and the codec for its master. It returns an error at `limit`; if all connections are in use, it gives up
// MasterOptions.CallTimeout earlier, so that the call itself has its time.
func (m *Master) acquire(caller context.Context, limit time.Time) (*conn, *codec, error) {
	if err := caller.Err(); err != nil { // otherwise the call would be sent, and ending it would cost the connection
		return nil, nil, err
	}
	ctx := caller
	bound := func() context.CancelFunc { // makes a context with a limit, only if acquire has to wait
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(caller, limit)
		return cancel
	}
	select {
	case <-m.free:
	default:
		// A caller that waits longer gets no connection: too little time would be left for its call, and when that time ends, the
		// connection would be lost.
		ctx, cancel := context.WithDeadline(caller, limit.Add(-m.o.CallTimeout))
		defer cancel()
		select {
		case <-m.free:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
	m.mu.Lock()
	closed, codec, breaks := m.mu.closed, m.mu.codec, m.mu.breaks
	var c *conn
	if n := len(m.mu.idle); n > 0 && !closed {
		c, m.mu.idle = m.mu.idle[n-1], m.mu.idle[:n-1]
		c.old = true
	}
	m.mu.Unlock()
	if closed {
		m.free <- struct{}{}
		return nil, nil, ErrClosed
	}
	var err error
	if c == nil || codec == nil {
		defer bound()()
	}
	if c == nil {
		if c, err = m.dial(ctx); err == nil {
			c.breaks = breaks
		}
	}
	if err == nil && codec == nil {
		if codec, err = m.probe(ctx, c); err != nil {
			c.c.Close()
		} else {
			m.mu.Lock()
			if m.mu.breaks == breaks {
				m.mu.codec = codec
			}
			m.mu.Unlock()
		}
	}
	if err != nil {
		m.free <- struct{}{}
		return nil, nil, err
	}
	return c, codec, nil
}

// disposition says what to do with a connection after a call.
type disposition int

const (
	keep   disposition = iota // another call may use it
	drop                      // close it: its caller gave up, so the answer may still come
	broken                    // close it and all connections that are as old: a restarted master may have another release
)

// maxHeld is how many bytes of a buffer for requests, and of one for answers, an idle connection may keep. If one is larger, both are
// dropped.
const maxHeld = 1 << 20

// release gives a connection back.
func (m *Master) release(c *conn, f disposition) {
	if cap(c.body) > maxHeld || cap(c.w.B) > maxHeld {
		c.body, c.w.B = nil, nil
	}
	m.mu.Lock()
	var gone []*conn
	switch {
	case f == drop || m.mu.closed || c.breaks != m.mu.breaks:
		gone = []*conn{c}
	case f == broken:
		m.mu.breaks++
		gone = append(m.mu.idle, c)
		m.mu.idle, m.mu.codec = nil, nil
	default:
		m.mu.idle = append(m.mu.idle, c)
	}
	m.mu.Unlock()
	for _, c := range gone {
		c.c.Close()
	}
	m.free <- struct{}{}
}

func (m *Master) dial(ctx context.Context) (*conn, error) {
	var errs []error
	for i, addr := range m.o.Addresses {
		limit := m.o.DialTimeout
		if i == len(m.o.Addresses)-1 { // no other address is left
			limit = m.o.CallTimeout
		}
		c, err := m.greet(ctx, addr, limit)
		if err == nil {
			return c, nil
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	if len(errs) == 0 {
		return nil, errors.New("mooncake store: no master is named")
	}
	return nil, fmt.Errorf("mooncake store: no master answers: %w", errors.Join(errs...))
}

// greet connects to a master and waits, at most for limit, for the master's first answer: a master may accept a connection and send
// nothing.
func (m *Master) greet(ctx context.Context, addr string, limit time.Duration) (*conn, error) {
	end := time.Now().Add(limit)
	d := net.Dialer{Timeout: m.o.DialTimeout}
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &conn{c: nc, quick: newQuick(nc)}
	c.begin(serviceReady, sp.Form{}, 0)
	if _, err := c.call(ctx, serviceReady, time.Until(end)); err != nil {
		nc.Close()
		return nil, fmt.Errorf("%s: %w", addr, err)
	}
	return c, nil
}

// probe finds out the master's release. In the form of each release it asks to put an object without a name, which changes nothing. The
// master refuses the form of its own release because of the bad name, and the other forms as bad calls. The requests of 0.3.13 and
// 0.3.14 are equal, but the answers of 0.3.14 name their length.
func (m *Master) probe(ctx context.Context, c *conn) (*codec, error) {
	for _, v := range Versions {
		if v == V0_3_13 {
			continue
		}
		k := codecs[v]
		w := c.begin(putStart, k.forms[putStart], len(m.o.Tenant))
		if !k.pieces() {
			uuid(w, UUID{1, 1})
		}
		w.String("")
		if k.pieces() {
			w.Size(1)
		}
		w.U64(1)
		k.config(w, &PutOptions{})
		m.tenant(k, w)
		b, err := c.call(ctx, putStart, m.o.CallTimeout)
		var refused *rpcError
		switch {
		case errors.As(err, &refused) && refused.code == badArguments:
			continue
		case err != nil:
			return nil, fmt.Errorf("mooncake store: %s: %w", c.c.RemoteAddr(), err)
		}
		r, t, err := sp.Open(b)
		if err == nil {
			err = shape(t.Kind == sp.KindExpected && !r.Bool())
		}
		code := Code(0)
		if err == nil {
			code, err = Code(r.I32()), r.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %s takes the requests of %v, but its answer to PutStart cannot be read: %w", ErrVersion, c.c.RemoteAddr(), v, err)
		}
		// A master that is not ready may refuse for another reason than the name.
		if code != BadArgument {
			return nil, fmt.Errorf("mooncake store: %s refuses to tell its release: %v", c.c.RemoteAddr(), code)
		}
		if v == V0_3_14 && !r.HasLater() {
			return codecs[V0_3_13], nil
		}
		return k, nil
	}
	return nil, fmt.Errorf("%w: %s refuses the requests of 0.3.7, 0.3.11, 0.3.12, 0.3.13 and 0.3.14 (error %d)", ErrVersion, c.c.RemoteAddr(), badArguments)
}

func (m *Master) tenant(k *codec, w *sp.Writer) {
	if k.tenants() {
		w.String(m.o.Tenant)
	}
}

// do makes one call. write appends the request to a connection; read decodes the answer. If `again` is true, the call may be made twice: do
// then repeats it if a connection that had been idle breaks.
func (m *Master) do(ctx context.Context, f method, again bool, write func(*conn, *codec), read func(*sp.Reader, *sp.Type) error) error {
	limit := time.Now().Add(m.o.CallTimeout + time.Duration(len(m.o.Addresses))*m.o.DialTimeout)
	for {
		c, k, err := m.acquire(ctx, limit)
		if err != nil {
			return &unsentError{err}
		}
		if !k.has[f] {
			m.release(c, keep)
			return &unsentError{fmt.Errorf("mooncake store: a master of %v has no %s", k.version, methodNames[f])}
		}
		write(c, k)
		if read == nil {
			m.release(c, keep)
			return nil
		}
		b, err := c.call(ctx, f, min(m.o.CallTimeout, time.Until(limit)))
		if err == nil {
			var r *sp.Reader
			var t *sp.Type
			if r, t, err = sp.Open(b); err == nil {
				err = read(r, t)
			}
			if err == nil {
				m.release(c, keep)
			} else {
				m.release(c, broken)
				err = fmt.Errorf("mooncake store: the answer to %s of a master of %v cannot be read: %w", methodNames[f], k.version, err)
			}
			return err
		}
		var rpc *rpcError
		refused := errors.As(err, &rpc)
		if ended(ctx) {
			m.release(c, drop)
		} else {
			m.release(c, broken) // also after a refusal: the master may be another one by now
		}
		if again && c.old && !refused && ctx.Err() == nil && time.Now().Before(limit) {
			continue // the other connections were idle for as long and are closed, so this loop ends
		}
		return fmt.Errorf("mooncake store: %s: %w", methodNames[f], err)
	}
}

// ended reports whether ctx has ended, or its deadline has passed.
func ended(ctx context.Context) bool {
	end, ok := ctx.Deadline()
	return ctx.Err() != nil || ok && !time.Now().Before(end)
}

// UUID names a client or a segment.
type UUID struct{ High, Low uint64 }

// NewUUID returns a random UUID.
func NewUUID() UUID {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return UUID{binary.BigEndian.Uint64(b[:]), binary.BigEndian.Uint64(b[8:])}
}

func (u UUID) String() string {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:], u.High)
	binary.BigEndian.PutUint64(b[8:], u.Low)
	return hex.EncodeToString(b[:])
}

func uuid(w *sp.Writer, u UUID) {
	w.U64(u.High)
	w.U64(u.Low)
}
