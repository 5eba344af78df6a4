// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Sub is a SUB socket with one connection. It connects again when the connection is lost, as a Dealer does, and repeats its
// subscriptions on each new connection. Messages that are published while there is no connection are lost. A caller that must not miss
// messages must check sequence numbers and ask for missing messages in OnState. Its methods are safe for concurrent use.
type Sub struct {
	d *Dealer

	mu struct { // taken before Dealer.mu
		sync.Mutex
		prefixes []string
		peer     *Peer // the connection that was ready last
	}
}

// maxPrefix is the largest prefix of a subscription, in bytes, because a prefix must fit into a command. Subscribe refuses a longer one.
const maxPrefix = 4 << 10

// NewSub returns a Sub that does not connect yet. It does not use Identity, NoWaiting and SendQueueBytes of o. Handler gets only
// messages whose first frame begins with a prefix to which the Sub is subscribed at that moment.
func NewSub(endpoint string, o DealerOptions) *Sub {
	s := &Sub{}
	handler := o.Handler
	o.Handler = func(m Message) {
		if handler != nil && s.wants(m[0]) { // a message may come after Unsubscribe, before the publisher knows of it
			handler(m)
		}
	}
	o.Identity = nil
	s.d = makeDealer(endpoint, typeSub, o)
	s.d.role.connected = s.connected
	return s
}

// Start begins to connect, as Dealer.Start does.
func (s *Sub) Start() error { return s.d.Start() }

// Subscribe asks for messages whose first frame begins with prefix; an empty prefix asks for all messages. It does not wait: messages
// published before the subscription reaches the publisher do not come.
func (s *Sub) Subscribe(prefix string) error {
	if len(prefix) > maxPrefix {
		return fmt.Errorf("zmtp: a subscription of %d bytes, at most %d", len(prefix), maxPrefix)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Contains(s.mu.prefixes, prefix) {
		return nil
	}
	s.mu.prefixes = append(s.mu.prefixes, prefix)
	s.tellLocked(prefix, true)
	return nil
}

// Unsubscribe ends the subscription to prefix. It does nothing if there is none.
func (s *Sub) Unsubscribe(prefix string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.mu.prefixes, prefix)
	if i < 0 {
		return
	}
	s.mu.prefixes = slices.Delete(s.mu.prefixes, i, i+1)
	s.tellLocked(prefix, false)
}

func (s *Sub) tellLocked(prefix string, on bool) {
	if p := s.mu.peer; p != nil {
		p.command(func(b []byte) []byte { return appendSubscription(b, p.minor, prefix, on) })
	}
}

// connected subscribes on a new connection. It runs on the reading goroutine of p, which flushes what it queues.
func (s *Sub) connected(p *Peer) {
	s.mu.Lock()
	s.mu.peer = p
	for _, prefix := range s.mu.prefixes {
		p.enqueue(func(b []byte) []byte { return appendSubscription(b, p.minor, prefix, true) })
	}
	s.mu.Unlock()
	s.d.connected(p)
}

func (s *Sub) wants(topic []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.mu.prefixes, func(prefix string) bool { return strings.HasPrefix(string(topic), prefix) })
}

// Stats returns the counts since NewSub.
func (s *Sub) Stats() Stats { return s.d.Stats() }

// Close drops the connection and returns after the last goroutine has ended. Neither Handler nor OnState may call it.
func (s *Sub) Close() error { return s.d.Close() }

// appendSubscription appends the frame that begins (on) or ends a subscription: a command for a peer of ZMTP 3.1, a message for a peer
// of 3.0, as libzmq 4.3.5 sends it.
func appendSubscription(b []byte, minor byte, prefix string, on bool) []byte {
	name, first := "\x06CANCEL", byte(0)
	if on {
		name, first = "\x09SUBSCRIBE", 1
	}
	if minor >= 1 {
		b = appendHeader(b, flagCommand, len(name)+len(prefix))
		return append(append(b, name...), prefix...)
	}
	b = appendHeader(b, 0, 1+len(prefix))
	return append(append(b, first), prefix...)
}
