// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

const (
	// Limits of the replies that are gathered before they are sent. They leave earlier whenever the connection has to wait for input.
	maxReplies     = 64
	maxReplyBytes  = 512 << 10
	callbackChunk  = bigBuf
	lingerBytes    = 64 << 20        // most bytes discarded after a rejection, so that the status reaches the peer
	lingerDuration = 2 * time.Second // how long they are discarded; then the connection ends
)

// errRejected ends a connection after a request that was refused.
var errRejected = errors.New("request rejected")

// Reasons to end a connection whose peer gave no valid proof.
var (
	errUnproven   = errors.New("the peer sent a request before it proved that it has a secret")
	errLate       = errors.New("the peer sent no proof of a secret within the handshake timeout")
	errWrongProof = errors.New("the peer's proof is of another secret, or for another address than the published one")
	errRemoved    = errors.New("the secret of the peer's proof was removed")
)

// dataConn serves the requests of one data connection, in order.
type dataConn struct {
	*stream
	t      *Target
	in     *inbound
	claims *claims

	out      [][]byte // replies not yet sent; slices of regions and of statusOK
	outBytes int
	sending  [][]byte // scratch for stream.write, which consumes it
	ahead    bool     // the peer sends requests without waiting for replies
	held     bool     // replies in out hold read claims
	keep     bool     // the peer wants the connection to stay open when a request is refused
	large    bool     // the last request was a write with a large body

	demand bool // the peer must prove that it has a secret
	proven bool
	proof  auth.Proof
}

var okFrame, rejectedFrame = statusFrame(statusOK), statusFrame(statusRejected)

func (t *Target) serveData(c *net.TCPConn, in *inbound) {
	s, err := newStream(c, t.opt.ProgressTimeout)
	if err != nil {
		t.log.Debug("a data connection cannot be served", "peer", c.RemoteAddr(), "err", err)
		return
	}
	d := &dataConn{stream: s, t: t, in: in, demand: t.opt.Secrets.Demands(c.RemoteAddr())}
	d.claims = t.table.newClaims(func() { c.Close() })
	defer d.claims.drop()
	defer d.close()
	err = d.serve()
	switch {
	case errors.Is(err, errWrongProof):
		t.refuse(c, err)
		_, _ = d.write([][]byte{rejectedFrame[:]}) // the peer may be gone
	case errors.Is(err, errLate):
		t.refuse(c, err)
	case errors.Is(err, errUnproven), errors.Is(err, errRemoved):
		t.refuse(c, err)
		d.abort() // some peers would take a clean end for success
	case err == nil, errors.Is(err, net.ErrClosed):
	case errors.Is(err, errRejected):
		t.log.Debug("a data connection ended with a refused request", "peer", c.RemoteAddr(), "err", err)
	default:
		t.stats.torn.Add(1)
		t.log.Debug("a data connection broke", "peer", c.RemoteAddr(), "err", err)
	}
}

// serve serves requests until the connection ends. It returns nil when the peer ended it between two requests.
func (d *dataConn) serve() error {
	inTime := func() bool { return true }
	if d.demand { // closing the connection ends every wait; deadlines belong to the stream
		inTime = time.AfterFunc(d.t.opt.HandshakeTimeout, func() { d.conn.Close() }).Stop
		defer func() { inTime() }()
	}
	for {
		if err := d.awaitHeader(); err != nil {
			if d.demand && !d.proven && errors.Is(err, net.ErrClosed) && !inTime() {
				return errLate
			}
			if errors.Is(err, io.EOF) && d.buffered() == 0 {
				return nil
			}
			return err
		}
		h := parseHeader(d.next(headerBytes))
		if h.isHello() && d.t.opt.Secrets != nil && !d.proven {
			if err := d.serveHello(); err != nil {
				return err
			}
			inTime()
			continue
		}
		if err := d.demandProof(); err != nil {
			return err
		}
		if !d.in.asked.Load() {
			d.in.asked.Store(true)
		}
		d.large = h.isWrite() && h.size >= directBytes
		var err error
		switch {
		case h.isKeep():
			d.keep = true
		case h.isWrite():
			err = d.serveWrite(h)
		default:
			err = d.serveRead(h)
		}
		if err != nil {
			return err
		}
	}
}

// awaitHeader waits for the next request header: without a limit for its first byte, within the progress timeout for the rest.
func (d *dataConn) awaitHeader() error {
	if d.buffered() < headerBytes && len(d.out) > 0 && d.ahead {
		// More requests may have arrived: then their replies leave together.
		if err := d.try(); err != nil {
			d.flush()
			return err
		}
	}
	d.ahead = d.buffered() > 0
	for d.buffered() < headerBytes {
		if err := d.flush(); err != nil {
			return err
		}
		limit := bigBuf
		if d.large {
			limit = headerBytes // the body must go to its place, not through the buffer
		}
		if err := d.fillUpTo(limit, d.buffered() == 0); err != nil {
			return err
		}
	}
	return nil
}

// serveWrite reads the body into its region. A fence of that range waits for its claim.
func (d *dataConn) serveWrite(h header) error {
	if h.size == 0 && !h.acked() {
		return nil // engines up to 0.3.11 send a bare header for an entry without bytes
	}
	if d.held { // the reply of an earlier read must not contain bytes of this write
		if err := d.flush(); err != nil {
			return err
		}
	}
	r, why := d.claims.claimWrite(Range{h.addr, h.size})
	if why != granted {
		return d.reject(h, why)
	}
	r.began(h.acked())
	p := r.incoming.Load()
	p.begin()
	err := d.body(r, h)
	d.claims.releaseWrite()
	if err != nil {
		return err
	}
	p.add(h.size)
	r.wrote(Range{h.addr, h.size}, h.acked())
	d.t.stats.writes.Add(1)
	d.t.stats.in.Add(int64(h.size))
	if !h.acked() {
		return nil
	}
	return d.reply(okFrame[:])
}

func (d *dataConn) body(r *Region, h header) error {
	off := h.addr - r.at.Addr
	if r.mem != nil {
		return d.readFull(r.mem[off : off+h.size])
	}
	buf := bigBufs.Get().(*[]byte)
	defer bigBufs.Put(buf)
	for left := h.size; left > 0; {
		p := (*buf)[:min(left, callbackChunk)]
		if err := d.readFull(p); err != nil {
			return err
		}
		if _, err := r.dst.WriteAt(p, int64(off)); err != nil {
			d.claims.releaseWrite()
			d.keep = false // the rest of the body is not read
			return errors.Join(d.reject(h, refusedAddress), fmt.Errorf("write callback: %w", err))
		}
		off += uint64(len(p))
		left -= uint64(len(p))
	}
	return nil
}

// serveRead queues a reply: status and bytes. The bytes are sent from the region's memory without a copy, under a claim that lasts
// until the flush.
func (d *dataConn) serveRead(h header) error {
	if h.size == 0 && !h.acked() {
		return nil
	}
	r, why := d.claims.claimRead(Range{h.addr, h.size})
	d.held = true
	if why != granted {
		return d.reject(h, why)
	}
	off := h.addr - r.at.Addr
	var err error
	if r.mem != nil {
		if h.acked() {
			d.out = append(d.out, okFrame[:])
		}
		err = d.reply(r.mem[off : off+h.size])
	} else {
		err = d.readCallback(r, h)
	}
	if err != nil {
		return err
	}
	d.t.stats.reads.Add(1)
	d.t.stats.out.Add(int64(h.size))
	return nil
}

// readCallback sends, piece by piece, a range that a callback answers. If the callback fails after the first piece, the connection must
// be cut. The claim lasts over the flushes between the pieces.
func (d *dataConn) readCallback(r *Region, h header) error {
	buf := bigBufs.Get().(*[]byte)
	defer bigBufs.Put(buf)
	d.held = false
	defer d.claims.releaseReads()
	off := h.addr - r.at.Addr
	for left := h.size; left > 0; {
		p := (*buf)[:min(left, callbackChunk)]
		if n, err := r.src.ReadAt(p, int64(off)); n < len(p) {
			if left == h.size {
				d.claims.releaseReads()
				d.keep = false
				return errors.Join(d.reject(h, refusedAddress), fmt.Errorf("read callback: %w", err))
			}
			return fmt.Errorf("read callback: %w", err)
		}
		if left == h.size && h.acked() {
			d.out = append(d.out, okFrame[:])
		}
		d.out = append(d.out, p)
		if err := d.flush(); err != nil {
			return err
		}
		off += uint64(len(p))
		left -= uint64(len(p))
	}
	return nil
}

func (d *dataConn) reply(b []byte) error {
	d.out = append(d.out, b)
	d.outBytes += len(b)
	if len(d.out) >= maxReplies || d.outBytes >= maxReplyBytes {
		return d.flush()
	}
	return nil
}

// flush sends the gathered replies and releases their read claims.
func (d *dataConn) flush() error {
	if len(d.out) == 0 {
		return nil
	}
	d.sending = append(d.sending[:0], d.out...)
	_, err := d.write(d.sending)
	clear(d.out)
	d.out, d.outBytes = d.out[:0], 0
	if d.held {
		d.claims.releaseReads()
		d.held = false
	}
	return err
}

// reject refuses the request h. After opKeep it answers an acknowledged request with the status and keeps the connection, unless the
// body is too long to discard. Otherwise it ends the connection. If h asked for a status frame, the peer must get the code, so reject
// discards for a while what the peer still sends: a reset could destroy the status. If not, reject resets the connection: the peer
// would take a clean end for success.
func (d *dataConn) reject(h header, why refusal) error {
	if why == refusedFence {
		d.t.stats.rejectedFence.Add(1)
	} else {
		d.t.stats.rejectedAddr.Add(1)
	}
	err := fmt.Errorf("%w: %d bytes at %#x, op %#x, %s", errRejected, h.size, h.addr, h.op, why)
	if !h.acked() {
		d.flush()
		d.abort()
		return err
	}
	if d.keep && (!h.isWrite() || h.size <= lingerBytes) {
		if h.isWrite() {
			if e := d.discard(h.size); e != nil {
				return e
			}
		}
		d.t.log.Debug("a data request was refused", "peer", d.conn.RemoteAddr(), "err", err)
		return d.reply(rejectedFrame[:])
	}
	d.out = append(d.out, rejectedFrame[:])
	if ferr := d.flush(); ferr != nil {
		return err
	}
	d.conn.CloseWrite()
	d.conn.SetReadDeadline(time.Now().Add(lingerDuration))
	io.CopyN(io.Discard, d.conn, lingerBytes)
	return err
}

// discard reads and drops the n bytes of a body that was refused.
func (d *dataConn) discard(n uint64) error {
	buf := bigBufs.Get().(*[]byte)
	defer bigBufs.Put(buf)
	for n > 0 {
		p := (*buf)[:min(n, bigBuf)]
		if err := d.readFull(p); err != nil {
			return err
		}
		n -= uint64(len(p))
	}
	return nil
}

func (r refusal) String() string {
	if r == refusedFence {
		return "closed to writes"
	}
	return "not inside a region"
}
