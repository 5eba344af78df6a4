// SPDX-License-Identifier: Apache-2.0

// Package zmtp speaks ZMTP 3.0 and 3.1, the wire protocol of ZeroMQ, with the
// mechanisms NULL, PLAIN and CURVE: a ROUTER and a PUB that listen, a DEALER, a REQ and a SUB
// that connect, over TCP and Unix sockets. It follows RFC 23/ZMTP and RFC 37/ZMTP; where these
// allow several ways, it does what libzmq 4.3.5 does.
//
// The sockets are made for short requests. A handler runs on the goroutine that has read its message. The handler's replies collect in
// the peer's buffer, and one write sends them when every message received so far has been handled. So a request and its reply never
// pass from one goroutine to another.
//
// # Ownership
//
// The frames that a handler gets lie in the receive buffer: they are valid until the handler returns. With the build tag invariants
// they are overwritten then. Send copies its frames. SendOwned keeps long frames without a copy: the caller must never write to them
// again.
//
// # Slow peers
//
// No caller of Send and no other peer ever waits for a slow peer. A flush writes what the socket accepts at once; a goroutine, which
// lives until the queue is empty, writes the rest. While more than SendQueueBytes are queued, Send returns ErrQueueFull and queues
// nothing, and the reading goroutine reads nothing more from that peer. A peer that accepts less than 256 KiB (or, if that is less, all
// that is queued) within WriteTimeout is closed and counted.
//
// # Memory
//
// A receive buffer has 16 KiB, or up to four times the received part of a longer
// message; a length that a peer only claims takes no memory. A peer that was
// silent for 1 to 2 s has no buffers, only its goroutine. A busy peer loses a buffer of more
// than 1 MiB after 64 reads in a row that need no more than a quarter of it.
package zmtp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"syscall"
)

// Message is the frames of one message. It has no identity frame: a ROUTER names the sender by its Peer.
type Message [][]byte

// Errors of sends, and reasons of closed connections. Reason maps the reasons to short names, which Stats counts.
var (
	// ErrClosed means that this side closed the socket or the peer.
	ErrClosed = errors.New("zmtp: closed")
	// ErrQueueFull means that the peer is slow and SendQueueBytes are already queued for it. The message was not queued.
	ErrQueueFull = errors.New("zmtp: send queue full")
	// ErrNotConnected means that a Dealer with NoWaiting has no connection.
	ErrNotConnected = errors.New("zmtp: not connected")
	// errNotZMTP means that the peer's first bytes are not a signature of ZMTP 2 or 3.
	errNotZMTP = errors.New("zmtp: not a ZMTP peer")
	// errVersion means that the peer speaks a ZMTP older than 3.0.
	errVersion = errors.New("zmtp: ZMTP version older than 3.0")
	// errMechanism means that the peer asks for another mechanism than this socket uses.
	errMechanism = errors.New("zmtp: the two ends use different security mechanisms")
	// errSocketType means that the peer's socket type cannot talk to ours.
	errSocketType = errors.New("zmtp: incompatible socket type")
	// errProtocol means that the peer broke the grammar of ZMTP.
	errProtocol = errors.New("zmtp: protocol error")
	// errTooLarge means that a frame, a message or a command exceeds its limit.
	errTooLarge = errors.New("zmtp: over the limit")
	// errTooManyPeers means that MaxPeers are connected already.
	errTooManyPeers = errors.New("zmtp: too many peers are connected")
	// errHandshakeTimeout means that the peer did not finish its handshake within HandshakeTimeout.
	errHandshakeTimeout = errors.New("zmtp: handshake timed out")
	// errIdle means that nothing came from the peer for IdleTimeout.
	// errHeartbeat means that the peer did not answer a PING, or was silent for longer than the TTL that it had announced.
	errIdle      = errors.New("zmtp: no message came")
	errHeartbeat = errors.New("zmtp: heartbeat timed out")
	// errSlow means that the peer did not read enough within WriteTimeout.
	errSlow = errors.New("zmtp: peer does not read")
)

// peerError is an ERROR command with which a peer refused us.
type peerError struct{ Text string }

func (e *peerError) Error() string { return fmt.Sprintf("zmtp: refused by the peer: %q", e.Text) }

var reasons = []struct {
	err  error
	name string
}{
	{ErrClosed, "closed"},
	{errNotZMTP, "not_zmtp"},
	{errVersion, "version"},
	{errMechanism, "mechanism"},
	{errAuth, "auth"},
	{errSocketType, "socket_type"},
	{errProtocol, "protocol"},
	{errTooLarge, "too_large"},
	{errTooManyPeers, "too_many_peers"},
	{errHandshakeTimeout, "handshake_timeout"},
	{errIdle, "idle"},
	{errHeartbeat, "heartbeat"},
	{errSlow, "slow"},
	{errStalled, "stalled"},
	{errShare, "share"},
}

// Reason returns the reason why a connection ended as one word, fit for a metric label: "eof" when the peer went away, "refused" when
// it sent ERROR, "io" for a network error, else a short name of the error.
func Reason(err error) string {
	if isEOF(err) {
		return "eof"
	}
	for _, r := range reasons {
		if errors.Is(err, r.err) {
			return r.name
		}
	}
	if _, ok := errors.AsType[*peerError](err); ok {
		return "refused"
	}
	return "io"
}

func isEOF(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// notZMTP returns an error that explains the first bytes of a peer that does not speak ZMTP.
func notZMTP(b []byte) error {
	hint := ""
	for _, m := range []string{"GET ", "POST ", "PUT ", "HEAD ", "DELETE ", "OPTIONS ", "PATCH ", "CONNECT ", "PRI * HTTP"} {
		if bytes.HasPrefix(b, []byte(m)) {
			hint = "this looks like HTTP; "
		}
	}
	switch {
	case len(b) > 1 && b[0] == 0x16 && b[1] == 0x03:
		hint = "this looks like TLS; "
	case len(b) > 1 && b[0] >= 1 && b[1] == 0:
		hint = "this may be ZMTP 1.0; "
	}
	return fmt.Errorf("%w: %sfirst bytes %q", errNotZMTP, hint, b[:min(len(b), 16)])
}
