// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"time"
)

// serveHandshake answers one request and waits for the client to close, as the
// engine does: then the reply cannot be lost to a reset.
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
		t.log.Debug("handshake", "peer", c.RemoteAddr(), "err", err)
		return
	}
	reply, err := t.handshakeReply(kind, text)
	if err != nil {
		t.log.Debug("handshake", "peer", c.RemoteAddr(), "type", kind, "err", err)
		return
	}
	c.SetDeadline(time.Now().Add(t.opt.HandshakeTimeout))
	if _, err := c.Write(reply); err != nil {
		t.log.Debug("a handshake cannot be answered", "peer", c.RemoteAddr(), "err", err)
		return
	}
	c.CloseWrite()
	io.CopyN(io.Discard, c, maxHandshakeBytes) // until the client's end
}

// demand returns nil for a request that may be answered: its peer proved that it has a
// secret, or need not.
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

// handshakeReply returns the reply frame. Any malformed request is an error:
// the protocol has no error frame, the connection closes.
func (t *Target) handshakeReply(kind byte, text []byte) ([]byte, error) {
	if !json.Valid(text) { // all that the engine asks of most requests
		return nil, fmt.Errorf("%w: request is not JSON", ErrProtocol)
	}
	switch kind {
	case frameMetadata:
		return appendFrame(nil, kind, t.Descriptor())
	case frameNotify:
		var n notice // only checked: vLLM connectors send none
		if err := json.Unmarshal(text, &n); err != nil {
			return nil, fmt.Errorf("%w: notice: %w", ErrProtocol, err)
		}
		return appendFrame(nil, kind, notice{Message: "success"})
	case frameProbe:
		return appendFrame(nil, kind, probeReply{"success"})
	default: // frameConnection, frameTypeless
		return appendFrame(nil, kind, connectionReply{QPNum: []uint32{}})
	}
}
