// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"cmp"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// Options configures a Client. A zero field means its default.
type Options struct {
	Conns      int // most connections to one peer; default 4. A batch to a C++ engine uses at most 2 of them
	Window     int // most requests without an answer on a connection; default 256
	MaxPeers   int // most peers remembered; the idle peer unused for longest makes room; default 1024
	MaxWaiting int // most callers that wait for a connection to one peer; further callers get ErrBusy; default 1024

	// SplitBytes is how many bytes of a batch justify one more connection: a batch uses one connection more for each full SplitBytes.
	// Default 8 MiB.
	SplitBytes int

	DialTimeout      time.Duration // default 5 s
	HandshakeTimeout time.Duration // for the whole exchange; default 5 s
	ProgressTimeout  time.Duration // without a byte sent, received or confirmed; default 30 s

	// SettleTimeout is how long a failed write waits until the peer stops reading it; default 1 s.
	SettleTimeout time.Duration

	// With Secrets, this client and each target must prove to each other that they have a secret in common; targets in the stock
	// networks need no proof. nil: nothing is proved or demanded.
	Secrets *auth.PeerSecrets
}

func (o Options) withDefaults() Options {
	o.Conns = cmp.Or(o.Conns, 4)
	o.Window = cmp.Or(o.Window, 256)
	o.MaxPeers = cmp.Or(o.MaxPeers, 1024)
	o.MaxWaiting = cmp.Or(o.MaxWaiting, 1024)
	o.SplitBytes = cmp.Or(o.SplitBytes, 8<<20)
	o.DialTimeout = cmp.Or(o.DialTimeout, 5*time.Second)
	o.HandshakeTimeout = cmp.Or(o.HandshakeTimeout, 5*time.Second)
	o.ProgressTimeout = cmp.Or(o.ProgressTimeout, 30*time.Second)
	o.SettleTimeout = cmp.Or(o.SettleTimeout, time.Second)
	return o
}

// Client writes to targets and reads from them. Its methods are safe for concurrent use. A handshake may go on after the call that
// began it has returned, because other calls wait for it; a check of idle connections may go on, too. Close waits for both.
type Client struct {
	opt  Options         // immutable
	base context.Context // done when closed

	stop context.CancelFunc
	wg   sync.WaitGroup // of calls in progress
	jobs sync.Pool

	mu struct {
		sync.Mutex
		closed bool
		swept  time.Time
		peers  map[string]*peer
		conns  map[net.Conn]struct{}
	}
	stats clientStats
}

// ClientStats are counters since New.
type ClientStats struct {
	Handshakes int64
	Dials      int64 // data connections
	Requests   int64 // headers sent
	Retries    int64 // runs of requests that were sent again after an idle connection broke
	Rejected   int64 // requests that the peer refused
}

type clientStats struct{ handshakes, dials, requests, retries, rejected atomic.Int64 }

// peer is what the client knows about one peer, by its segment name.
type peer struct {
	name    string        // immutable
	free    chan struct{} // one token for each connection slot in idle; its capacity is the number of slots
	waiting atomic.Int64
	desc    atomic.Pointer[Descriptor]

	mu struct { // a leaf: no other lock is taken under it
		sync.Mutex
		idle  []*lane // free slots; the last element was used last, so its connection is warm
		fetch *fetch  // handshake for the descriptor, in progress or failed a moment ago
	}

	users int       // guarded by Client.mu
	used  time.Time // guarded by Client.mu
}

// New returns a client without peers.
func New(o Options) *Client {
	c := &Client{opt: o.withDefaults()}
	c.base, c.stop = context.WithCancel(context.Background())
	c.jobs.New = func() any { return new(job) }
	c.mu.peers = make(map[string]*peer)
	c.mu.conns = make(map[net.Conn]struct{})
	return c
}

// Close cuts all connections, waits for the calls in progress, which fail with
// ErrClosed, and returns.
func (c *Client) Close() {
	c.mu.Lock()
	c.mu.closed = true
	conns := make([]net.Conn, 0, len(c.mu.conns))
	for conn := range c.mu.conns {
		conns = append(conns, conn)
	}
	c.mu.Unlock()
	c.stop()
	for _, conn := range conns {
		conn.Close()
	}
	c.wg.Wait()
}

// Stats returns the counters.
func (c *Client) Stats() ClientStats {
	return ClientStats{
		Handshakes: c.stats.handshakes.Load(), Dials: c.stats.dials.Load(), Requests: c.stats.requests.Load(),
		Retries: c.stats.retries.Load(), Rejected: c.stats.rejected.Load(),
	}
}

// Write copies each entry's Local to Remote at the peer. peer is a segment name ("host:port", "[v6]:port"). Write returns when every
// entry is confirmed or given up. It reads no Local after that.
//
// The error is a *BatchError with one result per entry, or another error when nothing at all was sent. Entries have no order: entries
// that overlap race. An entry without bytes succeeds. The peer may have applied a part of an entry that fails; with ErrUnsettled it may
// even apply more of the entry later. When ctx ends, Write waits up to Options.SettleTimeout to rule that out.
//
// To a peer without acknowledgements (before 0.3.12), Write opens one connection per request and closes it for writing after the body.
// The clean end of the connection confirms the entry.
func (c *Client) Write(ctx context.Context, peer string, entries []Entry) error {
	return c.call(ctx, peer, entries, true, nil)
}

// WriteCounting does what Write does. Meanwhile p counts the bytes that the peer has confirmed.
func (c *Client) WriteCounting(ctx context.Context, peer string, entries []Entry, p *Progress) error {
	return c.call(ctx, peer, entries, true, p)
}

// Read copies Remote at the peer to each entry's Local. The error is that of Write. The Local of a failed entry may hold any bytes.
// Read touches no Local after it has returned.
func (c *Client) Read(ctx context.Context, peer string, entries []Entry) error {
	return c.call(ctx, peer, entries, false, nil)
}

// Describe asks the peer for its descriptor: what it publishes now.
func (c *Client) Describe(ctx context.Context, peer string) (*Descriptor, error) {
	p, err := c.enter(peer)
	if err != nil {
		return nil, err
	}
	defer c.leave(p)
	return c.refresh(ctx, p, p.desc.Load())
}

// handshakeContext returns a context that ends with ctx, after HandshakeTimeout, or when the client closes.
func (c *Client) handshakeContext(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, c.opt.HandshakeTimeout)
	stop := context.AfterFunc(c.base, cancel)
	return ctx, func() { stop(); cancel() }
}

// enter registers a call to the peer of that name. The call must end with leave.
func (c *Client) enter(name string) (*peer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return nil, ErrClosed
	}
	p := c.mu.peers[name]
	if p == nil {
		if len(c.mu.peers) >= c.opt.MaxPeers && !c.evictLocked() {
			return nil, ErrPeers
		}
		p = &peer{name: name, free: make(chan struct{}, c.opt.Conns)}
		for range c.opt.Conns {
			p.put(&lane{client: c, peer: p})
		}
		c.mu.peers[name] = p
	}
	p.users++
	c.wg.Add(1)
	if time.Since(c.mu.swept) > sweepEvery {
		c.mu.swept = time.Now()
		c.wg.Go(c.sweep)
	}
	return p, nil
}

// sweepEvery is the interval between two sweeps of idle connections.
const sweepEvery = 10 * time.Second

// sweep closes idle connections that their peers have ended. Otherwise each would hold a file descriptor until the next call to the
// peer, or until the peer is forgotten.
func (c *Client) sweep() {
	c.mu.Lock()
	var idle []*peer
	for _, p := range c.mu.peers {
		if p.users == 0 {
			p.users++
			idle = append(idle, p)
		}
	}
	c.mu.Unlock()
	for _, p := range idle {
		var lanes []*lane
		for l := p.try(); l != nil; l = p.try() {
			lanes = append(lanes, l)
		}
		for _, l := range lanes {
			if l.s != nil && !l.idle() {
				l.drop()
			}
			p.put(l)
		}
		c.mu.Lock()
		p.users--
		c.mu.Unlock()
	}
}

func (c *Client) leave(p *peer) {
	c.mu.Lock()
	p.users--
	p.used = time.Now()
	c.mu.Unlock()
	c.wg.Done()
}

// evictLocked forgets the idle peer that was used longest ago. It returns false if no peer is idle.
func (c *Client) evictLocked() bool {
	var oldest *peer
	for _, p := range c.mu.peers {
		if p.users == 0 && (oldest == nil || p.used.Before(oldest.used)) {
			oldest = p
		}
	}
	if oldest == nil {
		return false
	}
	delete(c.mu.peers, oldest.name)
	for range c.opt.Conns {
		if l := oldest.try(); l.s != nil { // no users: all lanes are there
			delete(c.mu.conns, l.s.conn)
			l.s.close()
		}
	}
	return true
}

// put gives a lane back to its peer.
func (p *peer) put(l *lane) {
	p.mu.Lock()
	p.mu.idle = append(p.mu.idle, l)
	p.mu.Unlock()
	p.free <- struct{}{} // has room
}

// try returns a free lane of the peer, or nil.
func (p *peer) try() *lane {
	select {
	case <-p.free:
		return p.pop()
	default:
		return nil
	}
}

// pop takes the lane that was used last. The caller must hold a token of free.
func (p *peer) pop() *lane {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := len(p.mu.idle) - 1
	l := p.mu.idle[last]
	p.mu.idle = p.mu.idle[:last]
	return l
}

// lane returns a lane of p, and waits until one is free. It returns ErrBusy if MaxWaiting callers wait already.
func (c *Client) lane(ctx context.Context, p *peer) (*lane, error) {
	if l := p.try(); l != nil {
		return l, nil
	}
	if p.waiting.Add(1) > int64(c.opt.MaxWaiting) {
		p.waiting.Add(-1)
		return nil, ErrBusy
	}
	defer p.waiting.Add(-1)
	select {
	case <-p.free:
		return p.pop(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.base.Done():
		return nil, ErrClosed
	}
}
