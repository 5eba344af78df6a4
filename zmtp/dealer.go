// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

const (
	firstBackoff = 10 * time.Millisecond
	lastBackoff  = time.Second
	livedBackoff = 100 * time.Millisecond // a connection that lasted at least this long, and at least the next pause, resets the pause
)

// DealerOptions configures a Dealer. A zero field means its default. A field with the same name as one of RouterOptions has the same
// default.
type DealerOptions struct {
	// Handler is called on the reading goroutine, one message at a time. The
	// message and its frames are valid until it returns.
	Handler func(Message)
	// OnState is called with (true, nil) when a connection is ready, and with (false, why) when it ends or an attempt to connect fails;
	// it is not called because of Close. It runs on Handler's goroutine, between calls of Handler.
	OnState func(connected bool, err error)

	Identity        []byte // routing id that the Dealer announces, at most 255 bytes; default none
	MaxFrameBytes   int64
	MaxFrames       int
	MaxMessageBytes int64
	SendQueueBytes  int // bounds the queue of a connection, and also the messages that wait for a connection

	// NoWaiting makes Send refuse messages with ErrNotConnected while there is no connection. Otherwise a message could reach a
	// restarted peer after its sender has given the message up.
	NoWaiting bool

	ConnectTimeout    time.Duration // of one attempt; default 5 s
	HandshakeTimeout  time.Duration
	WriteTimeout      time.Duration
	IdleTimeout       time.Duration
	HeartbeatInterval time.Duration
	HeartbeatTimeout  time.Duration

	// At most one of these may be set; with neither the mechanism is NULL.
	Curve *CurveClient
	Plain *PlainClient

	Log *slog.Logger // nil: nothing is logged
}

// Dealer is a DEALER socket with one connection. When the connection is lost, it connects again after a pause of 10 ms, which doubles
// with each attempt up to 1 s and is shortened by a random part of up to half. After a connection that lasted for at least 100 ms and
// for at least the next pause, the pause is 10 ms again.
//
// Messages sent while there is no connection wait for the next one, unless NoWaiting is set. A Dealer does not send a message again
// that it gave to a lost connection, because that message may have arrived. Its methods are safe for concurrent use.
type Dealer struct {
	endpoint string // immutable
	o        DealerOptions
	role     role
	log      *slog.Logger
	dial     func(context.Context) (net.Conn, error)
	stop     chan struct{} // closed by Close
	wg       sync.WaitGroup

	mu struct {
		sync.Mutex
		started bool
		closed  bool
		peer    *Peer // the connection, or the attempt at one
		ready   bool  // peer accepts messages
		waiting queue // messages for the next connection
		bytes   int   // bytes of the messages in waiting
		past    Stats
	}
}

// NewDealer returns a Dealer that does not connect yet.
func NewDealer(endpoint string, o DealerOptions) *Dealer {
	return makeDealer(endpoint, typeDealer, o)
}

func makeDealer(endpoint string, own socketType, o DealerOptions) *Dealer {
	d := &Dealer{
		endpoint: endpoint,
		o:        o,
		log:      cmp.Or(o.Log, slog.New(slog.DiscardHandler)),
		stop:     make(chan struct{}),
		role: role{own: own, identity: o.Identity, limits: newLimits(RouterOptions{
			MaxFrameBytes: o.MaxFrameBytes, MaxFrames: o.MaxFrames, MaxMessageBytes: o.MaxMessageBytes,
			SendQueueBytes: o.SendQueueBytes, HandshakeTimeout: o.HandshakeTimeout, WriteTimeout: o.WriteTimeout,
			IdleTimeout: o.IdleTimeout, HeartbeatInterval: o.HeartbeatInterval, HeartbeatTimeout: o.HeartbeatTimeout,
		})},
	}
	d.dial = func(ctx context.Context) (net.Conn, error) { return dial(ctx, endpoint) }
	d.role.mechanism = clientMechanism(o.Curve, o.Plain, &d.role)
	d.role.connected = d.connected
	d.role.deliver = func(_ *Peer, m Message) {
		if o.Handler != nil {
			o.Handler(m)
		}
	}
	d.mu.past.Closed = make(map[string]uint64)
	return d
}

// Start begins to connect, in the background. It fails on a malformed endpoint, but not if nothing listens there. Close ends the
// background work.
func (d *Dealer) Start() error {
	if _, _, err := parseEndpoint(d.endpoint); err != nil {
		return err
	}
	if len(d.o.Identity) > maxIdentity {
		return fmt.Errorf("zmtp: identity of %d bytes, at most %d", len(d.o.Identity), maxIdentity)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return ErrClosed
	}
	if !d.mu.started {
		d.mu.started = true
		d.wg.Go(d.run)
	}
	return nil
}

// Send copies the frames of one message and queues it: on the connection, as Peer.Send does, or for the next connection. ErrQueueFull
// means that SendQueueBytes are queued already, ErrNotConnected that NoWaiting refuses the message, and ErrClosed that the Dealer was
// closed.
func (d *Dealer) Send(frames ...[]byte) error {
	if p := d.ready(); p != nil {
		if err := p.Send(frames...); !errors.Is(err, ErrClosed) {
			return err
		}
	}
	return d.wait(frames)
}

// SendOwned is like Send, for frames to which the caller never writes again; see Peer.SendOwned. While there is no connection, it
// copies them.
func (d *Dealer) SendOwned(frames ...[]byte) error {
	if p := d.ready(); p != nil {
		if err := p.SendOwned(frames...); !errors.Is(err, ErrClosed) {
			return err
		}
	}
	return d.wait(frames)
}

func (d *Dealer) ready() *Peer {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.mu.ready || d.mu.closed {
		return nil
	}
	return d.mu.peer
}

// wait queues a message for the next connection. If there is a connection by now, wait queues the message there.
func (d *Dealer) wait(frames [][]byte) error {
	if len(frames) == 0 {
		return errNoFrames
	}
	p, err := d.hold(frames)
	if p != nil {
		p.Flush()
	}
	return err
}

func (d *Dealer) hold(frames [][]byte) (flush *Peer, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.mu.closed:
		return nil, ErrClosed
	case d.o.NoWaiting:
		return nil, ErrNotConnected
	case d.mu.bytes > d.role.limits.queueBytes:
		d.mu.past.Refused++
		return nil, ErrQueueFull
	}
	d.mu.past.MessagesOut++
	d.mu.bytes += d.mu.waiting.copyFrames(frames)
	if !d.mu.ready {
		return nil, nil
	}
	d.giveLocked(d.mu.peer)
	return d.mu.peer, nil
}

// giveLocked moves the waiting messages to the queue of p; the caller must flush p. If p is closed already, the messages keep waiting.
func (d *Dealer) giveLocked(p *Peer) {
	if d.mu.bytes > 0 && p.enqueue(func(b []byte) []byte { return append(b, d.mu.waiting.buf...) }) {
		d.mu.waiting, d.mu.bytes = queue{}, 0
	}
}

// Ping returns nil when the peer has answered a PING on the connection that existed when Ping was called: then the same process held
// that connection all the time. ErrNotConnected means that there was no connection, or that it ended.
func (d *Dealer) Ping(ctx context.Context) error {
	p := d.ready()
	if p == nil {
		return ErrNotConnected
	}
	return p.ping(ctx)
}

// Stats returns the counts since NewDealer.
func (d *Dealer) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.mu.past.clone()
	if p := d.mu.peer; p != nil {
		s.Peers = 1
		s.add(&p.count)
	}
	return s
}

// Close drops the connection and all queued messages, and returns after the last goroutine has ended. Neither Handler nor OnState may
// call it.
func (d *Dealer) Close() error {
	d.mu.Lock()
	if !d.mu.closed {
		d.mu.closed = true
		close(d.stop)
	}
	p := d.mu.peer
	d.mu.Unlock()
	if p != nil {
		p.fail(ErrClosed)
	}
	d.wg.Wait()
	return nil
}

// run connects, again and again, until Close.
func (d *Dealer) run() {
	backoff := firstBackoff
	for {
		began := time.Now()
		ready, err := d.session()
		if d.isClosed() {
			return
		}
		d.state(false, err)
		if ready && time.Since(began) >= max(backoff, livedBackoff) { // a peer that ends each connection at once must not be dialled all the time
			backoff = firstBackoff
		}
		t := time.NewTimer(backoff - time.Duration(rand.Int64N(int64(backoff/2))))
		backoff = min(2*backoff, lastBackoff)
		select {
		case <-t.C:
		case <-d.stop:
			t.Stop()
			return
		}
	}
}

// session makes one connection and reads from it until it ends. ready reports whether the handshake finished.
func (d *Dealer) session() (ready bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(d.o.ConnectTimeout, 5*time.Second))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // Close ends an attempt to connect
		select {
		case <-d.stop:
			cancel()
		case <-stop:
		}
	})
	c, err := d.dial(ctx)
	close(stop)
	wg.Wait()
	cancel()
	if err != nil {
		return false, fmt.Errorf("connect to %s: %w", d.endpoint, err)
	}
	return d.converse(c)
}

func (d *Dealer) converse(c net.Conn) (ready bool, err error) {
	d.mu.Lock()
	p := newPeer(d.mu.past.Accepted+1, c, &d.role)
	if d.mu.closed {
		d.mu.Unlock()
		_ = c.Close() // unused
		return false, ErrClosed
	}
	d.mu.past.Accepted++
	d.mu.peer = p
	d.mu.Unlock()

	var keeper sync.WaitGroup
	keeper.Go(func() { d.runKeeper(p) })
	_, err = p.run()
	keeper.Wait()

	d.mu.Lock()
	d.mu.peer, d.mu.ready = nil, false
	d.mu.past.add(&p.count)
	d.mu.past.Closed[Reason(err)]++
	d.mu.Unlock()
	return p.ready.Load(), err
}

func (d *Dealer) runKeeper(p *Peer) {
	t := time.NewTicker(d.role.limits.tick())
	defer t.Stop()
	for {
		select {
		case now := <-t.C:
			p.check(now)
		case <-p.done:
			return
		}
	}
}

// connected gives the waiting messages to p. It runs on p's reading goroutine, which flushes them.
func (d *Dealer) connected(p *Peer) {
	d.mu.Lock()
	d.mu.past.Handshakes++
	d.giveLocked(p)
	d.mu.ready = true
	d.mu.Unlock()
	d.state(true, nil)
}

func (d *Dealer) state(connected bool, err error) {
	if connected || !errors.Is(err, ErrClosed) {
		d.log.Debug("zmtp: the connection of a dealer changed", "endpoint", d.endpoint, "connected", connected, "err", err)
	}
	if d.o.OnState != nil {
		d.o.OnState(connected, err)
	}
}

func (d *Dealer) isClosed() bool {
	select {
	case <-d.stop:
		return true
	default:
		return false
	}
}
