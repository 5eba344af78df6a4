// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
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
	default: // PONG: the bytes themselves prove life; others are for other sockets
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
		return fmt.Errorf("%w: a %s cannot talk to a %q", errSocketType, p.role.own, r.socketType)
	}
	p.routing, p.phase = r.identity, traffic
	p.ready.Store(true)
	p.fresh = p.role.own == typeRouter || p.role.own == typePub
	p.role.connected(p)
	return nil
}
