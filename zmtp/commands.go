// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"
)

func (p *Peer) onCommand(body []byte) error {
	name, data, err := splitCommand(body)
	if err != nil {
		return err
	}
	switch string(name) {
	case "READY":
		return p.onReady(data)
	case "ERROR":
		return parseError(data)
	}
	if p.phase != traffic {
		return fmt.Errorf("%w: command %q before READY", errProtocol, name)
	}
	switch string(name) {
	case "PING":
		ttl, context, err := parsePing(data)
		if err != nil {
			return err
		}
		p.ttl.Store(int64(ttl) * int64(100*time.Millisecond))
		p.command(func(b []byte) []byte { return appendPong(b, context) })
	case "SUBSCRIBE", "CANCEL":
		if p.role.subscribe != nil {
			return p.role.subscribe(p, data, string(name) == "SUBSCRIBE")
		}
	case "PONG": // any bytes prove to the heartbeat that the peer lives; ponged is for Ping
		p.ponged(data)
	default: // other commands are for other socket types
	}
	return nil
}

func (p *Peer) onReady(data []byte) error {
	if p.phase == traffic {
		return fmt.Errorf("%w: second READY", errProtocol)
	}
	r, err := parseReady(data)
	if err != nil {
		return err
	}
	if !accepts(p.role.own, r.socketType) {
		p.command(func(b []byte) []byte { return appendError(b, "Invalid socket type") })
		if p.role.refused != nil {
			p.role.refused(p, r.socketType)
		}
		return fmt.Errorf("%w: a %s cannot talk to a %q", errSocketType, p.role.own, r.socketType)
	}
	p.routing, p.phase = r.identity, traffic
	p.ready.Store(true)
	p.fresh = p.role.own == typeRouter || p.role.own == typePub
	p.role.connected(p)
	return nil
}

// ping sends a PING and waits until the peer has echoed its context over this connection. It fails at once with a peer before ZMTP 3.1,
// which has no PING.
func (p *Peer) ping(ctx context.Context) error {
	if p.minor < 1 {
		return fmt.Errorf("zmtp: the peer speaks ZMTP 3.0, which has no PING")
	}
	answered := make(chan struct{})
	p.mu.Lock()
	p.mu.pinged++
	id := p.mu.pinged
	if p.mu.pings == nil {
		p.mu.pings = make(map[uint64]chan struct{})
	}
	p.mu.pings[id] = answered
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.mu.pings, id)
		p.mu.Unlock()
	}()
	p.command(func(b []byte) []byte { return appendPing(b, 0, binary.BigEndian.AppendUint64(nil, id)) })
	select {
	case <-answered:
		return nil
	case <-p.done:
		return ErrNotConnected
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ponged ends the ping whose context the PONG repeats. A PONG without a context, or with an unknown one, changes nothing.
func (p *Peer) ponged(data []byte) {
	if len(data) != 8 {
		return
	}
	id := binary.BigEndian.Uint64(data)
	p.mu.Lock()
	defer p.mu.Unlock()
	if answered := p.mu.pings[id]; answered != nil {
		delete(p.mu.pings, id)
		close(answered)
	}
}
