// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"
)

// errAuth means that the peer's key or password was refused, or that what the peer sent is not sealed with its key.
var errAuth = errors.New("zmtp: not authenticated")

// mechanism is the part in which security mechanisms differ: the handshake, and the sealing of frames. One value serves one connection.
// Only the reading goroutine calls its methods; seal, however, is called by any goroutine, under secureConn.write.
type mechanism interface {
	name() string
	server() bool
	begin() []byte                                                // command to send after the greetings; nil: the peer sends the first command
	handle(name, data []byte) (answer []byte, done bool, e error) // handles a command of the handshake; a non-empty answer is sent, even with an error
	peerReady() (metadata []byte)                                 // properties of the peer, once the handshake is done
	client() string                                               // name of the peer, once the handshake is done
	sealing() bool                                                // frames are sealed; otherwise they pass unchanged
	seal(dst []byte, flags byte, body []byte) []byte              // appends a sealed frame
	open(dst, data []byte) ([]byte, error)                        // appends the flags and the body that a sealed frame contains
}

// secureConn runs a mechanism between a Peer, which itself speaks NULL, and the network. It does not send the Peer's greeting and
// READY; it makes those of the remote peer for the Peer, from what the mechanism has learned. It seals the frames of the Peer and opens
// those of the remote peer.
//
//	Peer   NULL greeting, READY, frames   secureConn   greeting, handshake, sealed frames   network
type secureConn struct {
	net.Conn
	mech mechanism
	peer *Peer

	// Owned by the reading goroutine.
	in    []byte // bytes received from the network
	at    int    // bytes of in that are handled
	plain []byte // opened bytes for the Peer
	out   int    // bytes of plain that the Peer has read
	phase phase

	write struct {
		sync.Mutex
		part    []byte // beginning of a frame that the Peer has not written completely; counted in Peer.queued
		sealed  []byte // scratch
		greeted bool   // our greeting is written to the network
		taken   bool   // the Peer has written its greeting
		said    bool   // the Peer has written its READY
	}
}

// secure puts the mechanism m between a Peer and its connection.
func secure(p *Peer, m mechanism) {
	p.conn = &secureConn{Conn: p.conn, mech: m, peer: p}
	p.raw = nil
}

// NetConn returns the connection below, through which callers ask the kernel about the peer.
func (c *secureConn) NetConn() net.Conn { return c.Conn }

// SyscallConn fails, because the bytes on the socket are not the frames that the Peer reads and writes.
func (c *secureConn) SyscallConn() (syscall.RawConn, error) { return nil, errors.ErrUnsupported }

// Read returns the opened frames of the remote peer. After a temporary network error, such as a deadline, the next call goes on.
func (c *secureConn) Read(b []byte) (int, error) {
	for c.out == len(c.plain) {
		c.plain, c.out = c.plain[:0], 0
		more, err := c.step()
		if err != nil {
			return 0, err
		}
		if more {
			continue
		}
		space := c.space()
		c.peer.recordBuffer()
		if len(c.in) > c.at && c.peer.begun.Load() == 0 {
			c.peer.begun.Store(time.Now().UnixNano())
		}
		n, err := c.Conn.Read(space)
		if n > 0 {
			c.in = c.in[:len(c.in)+n]
			c.peer.count.bytesIn.Add(uint64(n))
			c.peer.count.reads.Add(1)
		} else if err != nil {
			if c.at == len(c.in) {
				c.in, c.plain, c.at, c.out = nil, nil, 0, 0 // an idle connection keeps no buffer
			}
			return 0, err
		}
	}
	n := copy(b, c.plain[c.out:])
	c.out += n
	if c.out == len(c.plain) && cap(c.plain) > keepBuffer {
		c.plain, c.out = nil, 0
	}
	return n, nil
}

// space returns the buffer to read into. The buffer grows as bytes come, so a length that the peer only claims takes no memory.
func (c *secureConn) space() []byte {
	if c.at == len(c.in) {
		c.in, c.at = c.in[:0], 0
		if cap(c.in) > keepBuffer {
			c.in = nil
		}
	}
	if cap(c.in)-len(c.in) < minRead {
		next := make([]byte, len(c.in)-c.at, max(2*(len(c.in)-c.at), firstBuffer))
		copy(next, c.in[c.at:])
		c.in, c.at = next, 0
	}
	return c.in[len(c.in):cap(c.in)]
}

// held returns how many bytes the receive buffers of the connection have.
func (c *secureConn) held() int64 { return int64(cap(c.in) + cap(c.plain)) }

// step handles the next greeting, command or frame in c.in. `more` is false if it has not come completely: then more bytes must be read.
func (c *secureConn) step() (more bool, err error) {
	b := c.in[c.at:]
	if c.phase == wantGreeting {
		return c.greeting(b)
	}
	if c.phase == traffic && !c.mech.sealing() {
		c.plain = append(c.plain, b...)
		c.at = len(c.in)
		return len(b) > 0, nil
	}
	flags, body, n, err := c.frame(b)
	if err != nil || n == 0 {
		return false, err
	}
	c.at += n
	if c.peer.in.end == c.peer.in.start { // otherwise this frame continues a message of the Peer that began earlier
		c.peer.begun.Store(0)
	}
	if c.phase == traffic {
		return true, c.message(flags, body)
	}
	if flags&flagCommand == 0 {
		return false, fmt.Errorf("%w: message before READY", errProtocol)
	}
	return true, c.command(body)
}

func (c *secureConn) greeting(b []byte) (more bool, err error) {
	minor, err := checkGreeting(b[:min(len(b), greetingBytes)], c.mech.name())
	if err != nil || len(b) < greetingBytes {
		return false, err
	}
	c.at += greetingBytes
	c.phase = wantReady
	c.plain = appendGreeting(c.plain)
	c.plain[len(c.plain)-greetingBytes+11] = minor
	return true, c.answer(c.mech.begin())
}

// frame returns the frame at the start of b, and its length n; n is 0 if the frame has not come completely.
func (c *secureConn) frame(b []byte) (flags byte, body []byte, n int, err error) {
	if len(b) < 2 {
		return 0, nil, 0, nil
	}
	flags = b[0]
	if badFlags(flags) {
		return 0, nil, 0, fmt.Errorf("%w: a frame has the impossible flags %#02x", errProtocol, flags)
	}
	size, header := frameSize(b)
	if header == 0 {
		return 0, nil, 0, nil
	}
	if err := c.limit(size); err != nil {
		return 0, nil, 0, err
	}
	if n = header + int(size); len(b) < n {
		return 0, nil, 0, nil
	}
	return flags, b[header:n], n, nil
}

// limit refuses a frame whose header claims too many bytes. The Peer's decoder later checks the content of the frame, too.
func (c *secureConn) limit(size uint64) error {
	if c.phase != traffic {
		if size > maxCommandBytes {
			return fmt.Errorf("%w: command of %d bytes, at most %d", errTooLarge, size, maxCommandBytes)
		}
		return nil
	}
	d := &c.peer.in
	switch {
	case d.allow != nil && size > uint64(d.large)+sealedBytes && !d.allow():
		return fmt.Errorf("%w: frame of %d bytes, at most %d from this peer", errTooLarge, size, d.large)
	case d.maxFirst > 0 && len(d.spans) == 0 && size > uint64(max(d.maxFirst, maxCommandBytes))+sealedBytes: // a first frame: the Peer has handled all before
		return fmt.Errorf("%w: first frame of %d bytes, at most %d", errTooLarge, size, d.maxFirst)
	case size > uint64(max(d.maxFrame, maxCommandBytes))+sealedBytes:
		return fmt.Errorf("%w: frame of %d bytes, at most %d", errTooLarge, size, d.maxFrame)
	}
	return nil
}

// command handles a command of the handshake.
func (c *secureConn) command(body []byte) error {
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	if string(name) == "ERROR" {
		return fmt.Errorf("%w: %w", errAuth, parseError(data))
	}
	answer, done, err := c.mech.handle(name, data)
	if done && err == nil { // set before the answer is sent: a client that has the answer must count as known
		c.peer.proved.Store(true)
	}
	if err := errors.Join(err, c.answer(answer)); err != nil {
		return err
	}
	if done {
		c.phase = traffic
		c.peer.client = c.mech.client()
		c.plain = appendCommand(c.plain, "READY", c.mech.peerReady())
	}
	return nil
}

// message opens a sealed frame and gives its content to the Peer.
func (c *secureConn) message(flags byte, body []byte) (err error) {
	if flags&flagMore != 0 {
		return fmt.Errorf("%w: a sealed frame is followed by another part", errProtocol)
	}
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	switch string(name) {
	case "MESSAGE":
	case "ERROR":
		return parseError(data)
	default:
		return fmt.Errorf("%w: command %q among sealed frames", errProtocol, name)
	}
	from := len(c.plain)
	c.plain = append(c.plain, make([]byte, maxHeader-1)...) // room for the header, whose last byte holds the flags until the header is written
	if c.plain, err = c.mech.open(c.plain, data); err != nil {
		return err
	}
	inner := c.plain[from+maxHeader-1]
	if inner&^(sealedMore|sealedCommand) != 0 {
		return fmt.Errorf("%w: a sealed frame has the impossible flags %#02x", errProtocol, inner)
	}
	size := len(c.plain) - from - maxHeader
	head := [maxHeader]byte{0: flagLong | inner&sealedMore}
	if inner&sealedCommand != 0 {
		head[0] |= flagCommand
	}
	binary.BigEndian.PutUint64(head[1:], uint64(size))
	copy(c.plain[from:], head[:])
	return nil
}

// answer sends a command of the handshake. If the goroutine that writes for the Peer has not sent our greeting yet, answer sends it
// first.
func (c *secureConn) answer(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	c.write.Lock()
	defer c.write.Unlock()
	if err := c.greetLocked(); err != nil {
		return err
	}
	_, err := c.Conn.Write(b)
	return err
}

// greetLocked sends our greeting, once.
func (c *secureConn) greetLocked() error {
	if c.write.greeted {
		return nil
	}
	c.write.greeted = true
	_, err := c.Conn.Write(appendGreetingOf(nil, c.mech.name(), c.mech.server()))
	return err
}

// Write receives what the Peer writes: its greeting, its READY, then frames.
func (c *secureConn) Write(b []byte) (int, error) {
	c.write.Lock()
	defer c.write.Unlock()
	w := &c.write
	if w.said && !c.mech.sealing() {
		return c.Conn.Write(b)
	}
	before := len(w.part)
	w.part = append(w.part, b...)
	rest := w.part
	if !w.taken && len(rest) >= greetingBytes {
		rest, w.taken = rest[greetingBytes:], true
		if err := c.greetLocked(); err != nil {
			return 0, err
		}
	}
	w.sealed = w.sealed[:0]
	for w.taken {
		flags, body, n := ownFrame(rest)
		if n == 0 || w.said && !c.mech.sealing() {
			break
		}
		rest = rest[n:]
		if !w.said {
			w.said = true // the mechanism itself sends the content of READY
			continue
		}
		w.sealed = c.mech.seal(w.sealed, flags, body)
	}
	if w.said && !c.mech.sealing() { // frames pass unchanged
		w.sealed, rest = append(w.sealed, rest...), nil
	}
	if err := c.send(w.sealed); err != nil {
		return 0, err
	}
	if len(rest) < len(w.part) {
		w.part = append(w.part[:0], rest...)
	}
	if cap(w.part) > keepBuffer && len(w.part) == 0 {
		w.part = nil
	}
	if cap(w.sealed) > keepBuffer {
		w.sealed = nil
	}
	c.peer.retain(int64(len(w.part) - before))
	return len(b), nil
}

// send writes sealed frames in pieces of stallBytes. The peer has WriteTimeout for each piece, as for frames that are not sealed. The
// caller must have set the deadline of the first piece.
func (c *secureConn) send(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), stallBytes)
		if _, err := c.Conn.Write(b[:n]); err != nil {
			return err
		}
		if b = b[n:]; len(b) == 0 {
			return nil
		}
		if err := c.Conn.SetWriteDeadline(time.Now().Add(c.peer.role.limits.writeTimeout)); err != nil {
			return err
		}
		if c.peer.mustLook.Load() && c.peer.Err() != nil { // fail may have set its deadline before we set ours
			return ErrClosed
		}
	}
	return nil
}

// drop releases the receive buffers, and the beginning of an unsent frame, of a closed connection.
func (c *secureConn) drop() {
	c.in, c.plain, c.at, c.out = nil, nil, 0, 0
	c.write.Lock()
	defer c.write.Unlock()
	c.write.part = nil
}

// trim releases the buffers of an idle connection that sends nothing.
func (c *secureConn) trim() {
	if !c.write.TryLock() {
		return
	}
	defer c.write.Unlock()
	if len(c.write.part) > 0 {
		return
	}
	c.write.part, c.write.sealed = nil, nil
	if m, ok := c.mech.(*curve); ok {
		m.scratch = nil
	}
}

// ownFrame returns the Peer's frame at the start of b, and its length n; n is 0 if the frame is incomplete.
func ownFrame(b []byte) (flags byte, body []byte, n int) {
	size, header := frameSize(b)
	if header == 0 || size > uint64(len(b)-header) {
		return 0, nil, 0
	}
	return b[0], b[header : header+int(size)], header + int(size)
}

// frameSize returns the lengths of body and header of the frame at the start of b. header is 0 if the header is incomplete.
func frameSize(b []byte) (size uint64, header int) {
	switch {
	case len(b) < 2, b[0]&flagLong != 0 && len(b) < maxHeader:
		return 0, 0
	case b[0]&flagLong != 0:
		return binary.BigEndian.Uint64(b[1:]), maxHeader
	}
	return uint64(b[1]), 2
}

// Flags of a sealed frame (RFC 26, MESSAGE).
const (
	sealedMore    = 0x01
	sealedCommand = 0x02
)

// appendCommand appends a command with a name and data.
func appendCommand(b []byte, name string, data []byte) []byte {
	b = appendHeader(b, flagCommand, 1+len(name)+len(data))
	return append(append(append(b, byte(len(name))), name...), data...)
}

// The names of mechanisms in greetings.
const (
	mechanismNull  = "NULL"
	mechanismPlain = "PLAIN"
	mechanismCurve = "CURVE"
)

// Authentication says how the clients of a listening socket prove who they are. At most one of Curve and Plain may be set; then every
// client must use it. The zero value asks for no proof (NULL).
type Authentication struct {
	Curve *CurveServer
	Plain func(user, password string) bool // reports whether a client may connect; must be safe for concurrent use
	// Refused is called, on the reading goroutine, for each connection that ended because its peer did not prove who it is; nil: not
	// called.
	Refused func(from net.Addr, err error)
}

// refused calls Refused if err means that the peer did not prove who it is.
func (a Authentication) refused(p *Peer, err error) {
	asks := a.Curve != nil || a.Plain != nil
	if asks && a.Refused != nil && !p.ready.Load() && (errors.Is(err, errAuth) || errors.Is(err, errMechanism)) {
		a.Refused(p.RemoteAddr(), err)
	}
}

// mechanism returns a function that creates the mechanism of an accepted connection; nil: NULL.
func (a Authentication) mechanism(r *role) func() mechanism {
	switch {
	case a.Curve != nil:
		return func() mechanism { return &curve{from: a.Curve, own: properties(r.own, r.identity)} }
	case a.Plain != nil:
		return func() mechanism { return &plain{check: a.Plain, own: properties(r.own, r.identity)} }
	}
	return nil
}

// clientMechanism returns a function that creates the mechanism of an outgoing connection; nil: NULL.
func clientMechanism(c *CurveClient, p *PlainClient, r *role) func() mechanism {
	switch {
	case c != nil:
		return func() mechanism { return &curve{to: c, own: properties(r.own, r.identity)} }
	case p != nil:
		return func() mechanism { return &plain{account: p, own: properties(r.own, r.identity)} }
	}
	return nil
}
