// Package zmtp speaks ZMTP 3.0 and 3.1, the wire protocol of ZeroMQ, with the
// NULL mechanism: a ROUTER that serves, a DEALER and a REQ that connect, over TCP and
// Unix sockets. Facts are from RFC 23/ZMTP and RFC 37/ZMTP; where they leave
// room it does what libzmq 4.3.5 does.
//
// The sockets are made for short requests. A handler runs on the goroutine that
// read its message, its replies collect in the peer's buffer, and one write
// sends them when every message already received has been handled: no hand-off
// between goroutines lies between a request and its reply.
//
// # Ownership
//
// The frames a handler gets alias the receive buffer: they are valid until the
// handler returns. With the build tag invariants they are overwritten then.
// Send copies what it is given. SendOwned keeps long frames by reference: the
// caller must never write to them again.
//
// # Slow peers
//
// No caller of Send and no other peer waits for a slow peer. A flush writes what
// the socket takes at once; the rest belongs to a goroutine that lives until the
// queue is empty. While more than SendQueueBytes are queued, Send returns
// ErrQueueFull and queues nothing, and the peer's reading goroutine reads
// nothing more from it. A peer that takes less than 256 KiB (or, if that is
// less, all that is queued) within WriteTimeout is closed and counted.
//
// # Memory
//
// A receive buffer has 16 KiB, or up to four times what has come of a longer
// message: a length that a peer only claims takes nothing. A peer that was
// silent for 1 to 2 s holds no buffers, only its goroutine; a busy one that no
// longer needs more than a quarter of its 1 MiB or more loses it after 64 reads.
package zmtp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"syscall"
)

// Message is the frames of one message. It has no identity frame: a ROUTER
// names the sender by its Peer.
type Message [][]byte

// Sentinels. Reason maps each to a short name, as Stats counts them.
var (
	// ErrClosed means that the socket or the peer was closed by this side.
	ErrClosed = errors.New("zmtp: closed")
	// ErrQueueFull means that the peer is slow and SendQueueBytes are waiting
	// for it; the message was not queued.
	ErrQueueFull = errors.New("zmtp: send queue full")
	// ErrNotZMTP means that the first bytes are not a ZMTP 2 or 3 signature.
	ErrNotZMTP = errors.New("zmtp: not a ZMTP peer")
	// ErrVersion means that the peer speaks a ZMTP older than 3.0.
	ErrVersion = errors.New("zmtp: ZMTP version older than 3.0")
	// ErrMechanism means that the peer asks for a mechanism other than NULL.
	ErrMechanism = errors.New("zmtp: mechanism is not NULL")
	// ErrSocketType means that the peer's socket type cannot talk to ours.
	ErrSocketType = errors.New("zmtp: incompatible socket type")
	// ErrProtocol means that the peer broke the grammar of ZMTP.
	ErrProtocol = errors.New("zmtp: protocol error")
	// ErrTooLarge means that a frame, a message or a command is past its limit.
	ErrTooLarge = errors.New("zmtp: over the limit")
	// ErrTooManyPeers means that MaxPeers are connected.
	ErrTooManyPeers = errors.New("zmtp: too many peers")
	// ErrHandshakeTimeout means that the peer did not finish its handshake.
	ErrHandshakeTimeout = errors.New("zmtp: handshake timed out")
	// ErrIdle means that nothing came from the peer for IdleTimeout.
	ErrIdle = errors.New("zmtp: idle")
	// ErrHeartbeat means that the peer did not answer a PING, or was silent for
	// longer than the TTL it announced.
	ErrHeartbeat = errors.New("zmtp: heartbeat timed out")
	// ErrSlow means that the peer did not read within WriteTimeout.
	ErrSlow = errors.New("zmtp: peer does not read")
)

// A PeerError is the ERROR command of a peer that refused us.
type PeerError struct{ Text string }

func (e *PeerError) Error() string { return fmt.Sprintf("zmtp: refused by the peer: %q", e.Text) }

var reasons = []struct {
	err  error
	name string
}{
	{ErrClosed, "closed"},
	{ErrNotZMTP, "not_zmtp"},
	{ErrVersion, "version"},
	{ErrMechanism, "mechanism"},
	{ErrSocketType, "socket_type"},
	{ErrProtocol, "protocol"},
	{ErrTooLarge, "too_large"},
	{ErrTooManyPeers, "too_many_peers"},
	{ErrHandshakeTimeout, "handshake_timeout"},
	{ErrIdle, "idle"},
	{ErrHeartbeat, "heartbeat"},
	{ErrSlow, "slow"},
	{ErrStalled, "stalled"},
	{ErrShare, "share"},
}

// Reason names why a connection ended in one word, fit for a metric label:
// "eof" when the peer went away, "io" for an error of the network, else the
// sentinel's name.
func Reason(err error) string {
	if isEOF(err) {
		return "eof"
	}
	for _, r := range reasons {
		if errors.Is(err, r.err) {
			return r.name
		}
	}
	if _, ok := errors.AsType[*PeerError](err); ok {
		return "refused"
	}
	return "io"
}

func isEOF(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// notZMTP explains the first bytes of a peer that does not speak ZMTP.
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
	return fmt.Errorf("%w: %sfirst bytes %q", ErrNotZMTP, hint, b[:min(len(b), 16)])
}
