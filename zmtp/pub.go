// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// PubOptions configures a Pub. A zero field means its default. Unless the comment names one, the default is that of the field with the
// same name in RouterOptions.
type PubOptions struct {
	MaxPeers         int   // default 1024
	SendQueueBytes   int   // per subscriber; further messages are dropped for that subscriber and counted
	MaxUnsentBytes   int64 // sum over the queues of all subscribers; default 1 GiB
	MaxSubscriptions int   // per subscriber; a subscriber with more is closed; default 1024
	MaxPrefixBytes   int   // of one subscription's prefix; default 4 KiB

	HandshakeTimeout  time.Duration
	WriteTimeout      time.Duration
	HeartbeatInterval time.Duration
	HeartbeatTimeout  time.Duration

	Identify func(net.Conn) any
	Share    func(who any) string

	// OnSubscribe is called on p's reading goroutine when p begins a subscription that it did not have (on is true), or ends one that
	// it had. prefix is valid until OnSubscribe returns.
	OnSubscribe func(p *Peer, prefix []byte, on bool)

	// Hold makes the Pub keep back messages for a peer from the moment when the peer begins a subscription until Release. OnSubscribe
	// sends the peer earlier messages with SendWaiting, and then must call Release.
	Hold bool

	GiveWay bool // at MaxPeers, a new subscriber replaces another one: of the host with the most connections, the one that has been silent for longest

	Networks *auth.Networks // closes connections from other networks at once; nil closes none

	Authentication // how subscribers prove who they are

	Log *slog.Logger // nil: nothing is logged
}

// Pub is a PUB socket. It listens as a Router does, and sends each message to the peers that have subscribed to a prefix of the
// message's first frame. Its methods are safe for concurrent use.
//
// Publish never waits. A subscriber that does not keep up loses whole messages; a subscriber that reads less than 256 KiB (or, if that is
// less, all that is queued for it) within WriteTimeout is closed. Both are counted.
type Pub struct {
	r       *Router
	o       PubOptions
	dropped atomic.Uint64

	order sync.Mutex // held while one message is sent, so that all subscribers see the same order
	mu    struct {   // a leaf: no other lock is taken under it
		sync.Mutex
		of   map[*Peer][][]byte // sorted prefixes of each peer's subscriptions
		held map[*Peer]*heldBack
	}
}

// heldBack holds the messages that are kept back for a peer until Release.
type heldBack struct {
	messages [][][]byte
	bytes    int
	lost     bool // one message found no room, so all were dropped
}

// NewPub returns a Pub that does not listen yet.
func NewPub(o PubOptions) *Pub {
	o.MaxPeers = cmp.Or(o.MaxPeers, 1024)
	o.MaxUnsentBytes = cmp.Or(o.MaxUnsentBytes, 1<<30)
	o.MaxSubscriptions = cmp.Or(o.MaxSubscriptions, 1024)
	o.MaxPrefixBytes = cmp.Or(o.MaxPrefixBytes, 4<<10)
	p := &Pub{o: o}
	p.mu.of, p.mu.held = make(map[*Peer][][]byte), make(map[*Peer]*heldBack)
	p.r = NewRouter(p.deliver, RouterOptions{
		MaxFrameBytes: 64 << 10, MaxMessageBytes: 64 << 10, // only subscriptions are read
		MaxPeers: o.MaxPeers, SendQueueBytes: o.SendQueueBytes, MaxUnsentBytes: o.MaxUnsentBytes, MaxReceiveBytes: 64 << 20, GiveWay: o.GiveWay,
		HandshakeTimeout: o.HandshakeTimeout, WriteTimeout: o.WriteTimeout,
		HeartbeatInterval: o.HeartbeatInterval, HeartbeatTimeout: o.HeartbeatTimeout,
		Identify: o.Identify, Share: o.Share, OnDisconnect: p.departed, Networks: o.Networks, Authentication: o.Authentication, Log: o.Log,
	})
	p.r.role.own, p.r.role.subscribe = typePub, p.subscribe
	return p
}

// Listen binds endpoint, as Router.Listen does.
func (p *Pub) Listen(ctx context.Context, endpoint string) (net.Addr, error) {
	return p.r.Listen(ctx, endpoint)
}

// deliver handles a subscription in the form of ZMTP 3.0: a message whose first byte is 1, or 0 to end the subscription. It ignores all
// other messages.
func (p *Pub) deliver(peer *Peer, m Message) {
	if len(m) != 1 || len(m[0]) == 0 || m[0][0] > 1 {
		return
	}
	if err := p.subscribe(peer, m[0][1:], m[0][0] == 1); err != nil {
		peer.fail(err)
	}
}

// subscribe begins (on) or ends a subscription. To begin one that exists, or to end one that does not, changes nothing.
func (p *Pub) subscribe(peer *Peer, prefix []byte, on bool) error {
	changed, err := p.change(peer, prefix, on)
	if changed && p.o.OnSubscribe != nil {
		p.o.OnSubscribe(peer, prefix, on)
	}
	return err
}

func (p *Pub) change(peer *Peer, prefix []byte, on bool) (changed bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.mu.of[peer]
	i, there := slices.BinarySearchFunc(list, prefix, bytes.Compare)
	switch {
	case there == on:
		return false, nil
	case !on:
		p.mu.of[peer] = slices.Delete(list, i, i+1)
		return true, nil
	case len(prefix) > p.o.MaxPrefixBytes:
		return false, fmt.Errorf("%w: the prefix of a subscription has %d bytes", errTooLarge, len(prefix))
	case len(list) >= p.o.MaxSubscriptions:
		return false, fmt.Errorf("%w: more than %d subscriptions", errTooLarge, len(list))
	}
	p.mu.of[peer] = slices.Insert(list, i, bytes.Clone(prefix))
	if p.o.Hold && p.mu.held[peer] == nil {
		p.mu.held[peer] = new(heldBack)
	}
	return true, nil
}

// Covered reports whether the peer has, besides its subscription to prefix, another subscription that covers topic.
func (p *Pub) Covered(peer *Peer, topic, prefix []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.mu.of[peer], func(other []byte) bool { return !bytes.Equal(other, prefix) && bytes.HasPrefix(topic, other) })
}

// DropHeld drops the messages kept back for a peer so far. Later messages are still kept back.
func (p *Pub) DropHeld(peer *Peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.held[peer] != nil {
		p.mu.held[peer] = new(heldBack)
	}
}

// Release sends the peer the messages that were kept back for it, and stops keeping messages back. It returns false if the messages kept
// back found no room and were dropped; then messages are still kept back. Only OnSubscribe may call it.
func (p *Pub) Release(peer *Peer) bool {
	for {
		batch, lost, ended := p.takeHeld(peer)
		if lost || ended {
			return !lost
		}
		for _, m := range batch {
			if peer.SendWaiting(m...) != nil {
				return true // the peer is closed
			}
		}
	}
}

// takeHeld returns the messages kept back for a peer since the last call. If there are none, later messages go to the peer at once, and
// `ended` is true. `lost` means that a message found no room, so that all were dropped.
func (p *Pub) takeHeld(peer *Peer) (batch [][][]byte, lost, ended bool) {
	p.order.Lock()
	defer p.order.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.mu.held[peer]
	switch {
	case h == nil:
		return nil, false, true
	case h.lost:
		return nil, true, false
	case len(h.messages) == 0:
		delete(p.mu.held, peer)
		return nil, false, true
	}
	p.mu.held[peer] = new(heldBack)
	return h.messages, false, false
}

// maxHeld bounds the number of messages that are kept back for a peer; SendQueueBytes bounds their bytes. With more, all of them are
// dropped, and Release returns false.
const maxHeld = 1 << 14

func (p *Pub) holdLocked(h *heldBack, frames [][]byte) {
	n := 0
	for _, f := range frames {
		n += len(f)
	}
	if h.lost || len(h.messages) >= maxHeld || h.bytes+n > p.r.role.limits.queueBytes {
		*h = heldBack{lost: true}
		return
	}
	h.messages = append(h.messages, frames)
	h.bytes += n
}

func (p *Pub) departed(peer *Peer, _ error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.mu.of, peer)
	delete(p.mu.held, peer)
}

// Publish sends one message to all peers that have subscribed to a prefix of its first frame. It returns the number of peers for which
// it queued the message. The caller must never write to the frames again.
func (p *Pub) Publish(frames ...[]byte) (sent int) {
	return p.PublishTo(nil, frames, nil)
}

// PublishTo publishes like Publish, but only those subscribers get frames for which `may` returns true; if `may` is nil, all get them. The
// others get the message `instead`, if any, which must have the same first frame.
func (p *Pub) PublishTo(may func(*Peer) bool, frames, instead [][]byte) (sent int) {
	if len(frames) == 0 {
		return 0
	}
	p.order.Lock()
	defer p.order.Unlock()
	choose := func(peer *Peer) [][]byte {
		if may == nil || may(peer) {
			return frames
		}
		return instead
	}
	for _, peer := range p.interested(frames[0], choose) {
		switch err := peer.SendOwned(choose(peer)...); {
		case err == nil:
			sent++
		case errors.Is(err, ErrQueueFull):
			p.dropped.Add(1)
		}
	}
	return sent
}

// interested returns the subscribers of topic for which messages are not kept back. For each other subscriber, choose returns the message
// to keep back.
func (p *Pub) interested(topic []byte, choose func(*Peer) [][]byte) (peers []*Peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for peer, list := range p.mu.of {
		if !slices.ContainsFunc(list, func(prefix []byte) bool { return bytes.HasPrefix(topic, prefix) }) {
			continue
		}
		if h := p.mu.held[peer]; h != nil {
			p.holdLocked(h, choose(peer))
			continue
		}
		peers = append(peers, peer)
	}
	return peers
}

// Subscribers returns how many connections have at least one subscription.
func (p *Pub) Subscribers() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, list := range p.mu.of {
		if len(list) > 0 {
			n++
		}
	}
	return n
}

// Dropped returns how many times a message was dropped for a subscriber that did not keep up.
func (p *Pub) Dropped() uint64 { return p.dropped.Load() }

// Stats returns the counts since NewPub.
func (p *Pub) Stats() Stats { return p.r.Stats() }

// Shutdown sends what is queued, then closes the socket, as Router.Shutdown does.
func (p *Pub) Shutdown(ctx context.Context) error { return p.r.Shutdown(ctx) }

// Close drops the subscribers and returns after the last goroutine has ended. OnSubscribe must not call it.
func (p *Pub) Close() error { return p.r.Close() }
