// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"net"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// If clients may be limited to some tenants, each message is about one salt only. A client that may not see that salt gets instead a
// message of the same number without events. So no client misses a number.

// subscriber is the client behind a connection.
type subscriber struct {
	user  auth.Subject
	limit atomic.Pointer[auth.Limit] // nil until it is needed first
}

// identify returns the function that finds out the client behind a connection; nil if no client is limited.
func (p *Publisher) identify() func(net.Conn) any {
	if p.o.Tenants == nil {
		return nil
	}
	return func(c net.Conn) any {
		of := peercred.Of(c)
		return &subscriber{user: auth.UserSubject(of.UID, of.Known())}
	}
}

// limitOf returns the tenants whose events a client may get.
func (p *Publisher) limitOf(peer *zmtp.Peer) *auth.Limit {
	if p.o.Tenants == nil {
		return nil
	}
	s, ok := peer.Identity().(*subscriber)
	if !ok {
		panic("BUG: events: a subscriber that was not identified")
	}
	if l := s.limit.Load(); l != nil {
		return l
	}
	of := []auth.Subject{{Kind: auth.KindListener, Name: "events"}, s.user}
	if name := peer.Client(); name != "" {
		kind := auth.KindToken
		if p.o.Clients.Curve != nil {
			kind = auth.KindKey
		}
		of = append(of, auth.Subject{Kind: kind, Name: name})
	}
	l := p.o.Tenants.For(of...)
	s.limit.Store(l)
	return l
}

// sortBySalt sorts the chunks of each model by salt.
func sortBySalt(chunks []Placed) {
	slices.SortStableFunc(chunks, func(a, c Placed) int {
		return cmp.Or(strings.Compare(a.Model, c.Model), strings.Compare(a.Salt, c.Salt))
	})
}

// allows reports whether a client with a limit may see a message. A message without a salt has no events of chunks.
func (m *message) allows(l *auth.Limit) bool { return m.salt == nil || l.Allows(*m.salt) }

// withoutEvents returns m without its events, for a client that may not see them.
func (p *Publisher) withoutEvents(m message) message {
	m.payload, m.salt = p.payload(nil), nil
	return m
}

// visible returns the drafts that a client with limit l may see.
func visible(whole []draft, l *auth.Limit) []draft {
	if !l.Limited() {
		return whole
	}
	return slices.DeleteFunc(whole, func(d draft) bool {
		salt := d.salt()
		return salt != nil && !l.Allows(*salt)
	})
}
