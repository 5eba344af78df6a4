// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"time"
)

// serveHandshake answers one request and then waits until the client closes, as Mooncake's engine does, so that no reset can destroy
// the reply.
func (t *Target) serveHandshake(c *net.TCPConn, silent *silentConn) {
	t.stats.handshakes.Add(1)
	c.SetDeadline(time.Now().Add(t.opt.HandshakeTimeout))
	kind, text, err := readFrame(c)
	if err == nil && t.opt.Secrets != nil {
		if err = t.demand(c, kind, text); err != nil {
			t.refuse(c, err)
		}
	}
	t.removeSilent(silent)
	if err != nil {
		t.log.Debug("a handshake cannot be read", "peer", c.RemoteAddr(), "err", err)
		return
	}
	reply, err := t.handshakeReply(kind, text)
	if err != nil {
		t.log.Debug("a handshake is malformed", "peer", c.RemoteAddr(), "type", kind, "err", err)
		return
	}
	c.SetDeadline(time.Now().Add(t.opt.HandshakeTimeout))
	if _, err := c.Write(reply); err != nil {
		t.log.Debug("a handshake cannot be answered", "peer", c.RemoteAddr(), "err", err)
		return
	}
	c.CloseWrite()
	io.CopyN(io.Discard, c, maxHandshakeBytes) // until the client ends the connection
}

// demand returns nil if the request may be answered: its peer proved that it has a secret, or needs no proof.
func (t *Target) demand(c *net.TCPConn, kind byte, text []byte) error {
	var q proving
	if kind == frameMetadata && json.Unmarshal(text, &q) == nil && q.Hello != "" {
		return t.challenge(c, q.Hello)
	}
	if t.opt.Secrets.Demands(c.RemoteAddr()) {
		return errUnproven
	}
	return nil
}

// handshakeReply returns the reply frame to a request. A malformed request is an error, and the caller closes the connection: the
// protocol has no error frame.
func (t *Target) handshakeReply(kind byte, text []byte) ([]byte, error) {
	if !json.Valid(text) { // the engine checks no more than that in most requests
		return nil, fmt.Errorf("%w: the handshake's request is not JSON", ErrProtocol)
	}
	switch kind {
	case frameMetadata:
		return appendFrame(nil, kind, t.Descriptor())
	case frameNotify:
		var n notice // only checked: vLLM connectors send none
		if err := json.Unmarshal(text, &n); err != nil {
			return nil, fmt.Errorf("%w: decode the notice: %w", ErrProtocol, err)
		}
		return appendFrame(nil, kind, notice{Message: "success"})
	case frameProbe:
		return appendFrame(nil, kind, probeReply{"success"})
	default: // frameConnection, frameTypeless
		return appendFrame(nil, kind, connectionReply{QPNum: []uint32{}})
	}
}
