// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvasir-kv/kvasir/zmtp"
)

const (
	// MaxPullBytes bounds a message of the side channel: some 100 requests of a
	// million tokens fit.
	MaxPullBytes = 8 << 20
	// maxPendingBytes bounds the messages of all pulls in progress at one worker. A pull beyond it evicts others or is refused; see Gate.
	maxPendingBytes = 256 << 20
)

// errEvicted ends a pull to make room for another peer's.
var errEvicted = errors.New("mooncake: too many pulls at once: this one made room for another")

// Gate bounds the pulls in progress at one side channel: their number, and the bytes of their messages (maxPendingBytes). A full Gate
// evicts a pull that waits only for unknown transfers; if there is none, it evicts a pull of the peer with the most pulls. If that is
// the new pull's own peer, the Gate refuses the new pull. Its methods are safe for concurrent use.
type Gate struct {
	max int // immutable

	mu struct { // a leaf: no other lock is taken under it
		sync.Mutex
		in     map[*Ticket]struct{}
		byPeer map[string]int
		bytes  int64
		last   int64 // ticket
	}
}

// Ticket is one pull in a Gate.
type Ticket struct {
	g     *Gate
	peer  string
	size  int64
	order int64
	evict func(error) // ends the pull

	idle bool // guarded by Gate.mu
}

// NewGate returns a Gate that admits at most `pulls` pulls at a time.
func NewGate(pulls int) *Gate {
	g := &Gate{max: pulls}
	g.mu.in = make(map[*Ticket]struct{})
	g.mu.byPeer = make(map[string]int)
	return g
}

// Enter admits a pull of peer whose message has size bytes, or returns an error that says why not. It never waits. The caller must call
// Leave once, when the pull has ended. The Gate may call evict once, from any goroutine; evict must end the pull.
func (g *Gate) Enter(peer string, size int, evict func(error)) (*Ticket, error) {
	t := &Ticket{g: g, peer: peer, size: int64(size), evict: evict}
	var out []*Ticket
	defer func() {
		for _, o := range out {
			o.evict(errEvicted)
		}
	}()
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.mu.in) >= g.max || g.mu.bytes+t.size > maxPendingBytes {
		o := g.victimLocked(peer)
		if o == nil {
			return nil, fmt.Errorf("mooncake: %d pulls and %d bytes of pulls at once, %d of this peer: no more are taken",
				len(g.mu.in), g.mu.bytes, g.mu.byPeer[peer])
		}
		g.removeLocked(o)
		out = append(out, o)
	}
	g.mu.last++
	t.order = g.mu.last
	g.mu.in[t] = struct{}{}
	g.mu.byPeer[peer]++
	g.mu.bytes += t.size
	return t, nil
}

// victimLocked returns the pull to evict to make room for a pull of peer, or nil. Among idle pulls it chooses the oldest pull of the
// peer with the most pulls. If no pull is idle, it chooses the newest pull of the peer with the most pulls, if that peer has at least
// two more than peer.
func (g *Gate) victimLocked(peer string) *Ticket {
	var idle, other *Ticket
	for t := range g.mu.in {
		n := g.mu.byPeer[t.peer]
		switch {
		case t.idle:
			if idle == nil || n > g.mu.byPeer[idle.peer] || n == g.mu.byPeer[idle.peer] && t.order < idle.order {
				idle = t
			}
		case n > g.mu.byPeer[peer]+1:
			if other == nil || n > g.mu.byPeer[other.peer] || n == g.mu.byPeer[other.peer] && t.order > other.order {
				other = t
			}
		}
	}
	if idle != nil {
		return idle
	}
	return other
}

func (g *Gate) removeLocked(t *Ticket) {
	if _, ok := g.mu.in[t]; !ok {
		return // the gate has evicted the pull already
	}
	delete(g.mu.in, t)
	g.mu.bytes -= t.size
	if g.mu.byPeer[t.peer]--; g.mu.byPeer[t.peer] == 0 {
		delete(g.mu.byPeer, t.peer)
	}
}

// Idle records whether the pull waits only for transfers that P does not know. The Gate evicts such pulls first.
func (t *Ticket) Idle(idle bool) {
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	t.idle = idle
}

// Leave takes the pull out of the Gate.
func (t *Ticket) Leave() {
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	t.g.removeLocked(t)
}

// Len returns how many pulls are in the Gate.
func (g *Gate) Len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.mu.in)
}

// Conns bounds the connections of a side channel. At the limit it closes the connection
// that has been idle for longest, so that silent peers cannot keep others out. Its
// methods are safe for concurrent use.
type Conns struct {
	max int // immutable

	mu struct { // a leaf: no other lock is taken under it
		sync.Mutex
		clock int64
		all   map[*zmtp.Peer]*connUse
	}
}

type connUse struct {
	pulls int
	last  int64
}

// NewConns returns a Conns that allows at most max connections.
func NewConns(max int) *Conns {
	c := &Conns{max: max}
	c.mu.all = make(map[*zmtp.Peer]*connUse)
	return c
}

// Options returns the router's options o with the bound added.
func (c *Conns) Options(o zmtp.RouterOptions) zmtp.RouterOptions {
	o.MaxPeers = 2 * c.max // the router also counts connections in their handshake
	o.OnConnect = c.connected
	o.OnDisconnect = func(p *zmtp.Peer, _ error) { c.disconnected(p) }
	return o
}

func (c *Conns) connected(p *zmtp.Peer) {
	c.mu.Lock()
	var oldest *zmtp.Peer
	if len(c.mu.all) >= c.max {
		for q, u := range c.mu.all {
			if u.pulls == 0 && (oldest == nil || u.last < c.mu.all[oldest].last) {
				oldest = q
			}
		}
		delete(c.mu.all, oldest)
	}
	c.mu.clock++
	c.mu.all[p] = &connUse{last: c.mu.clock}
	c.mu.Unlock()
	if oldest != nil {
		oldest.Close()
	}
}

func (c *Conns) disconnected(p *zmtp.Peer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.all, p)
}

// Begin records that a pull begins on the connection p. The caller must call end when the pull has ended.
func (c *Conns) Begin(p *zmtp.Peer) (end func()) {
	c.add(p, 1)
	return func() { c.add(p, -1) }
}

func (c *Conns) add(p *zmtp.Peer, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if u := c.mu.all[p]; u != nil {
		c.mu.clock++
		u.pulls, u.last = u.pulls+n, c.mu.clock
	}
}
