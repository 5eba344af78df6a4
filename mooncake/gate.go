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
	// MaxPendingBytes bounds the messages of all pulls in progress at one worker.
	MaxPendingBytes = 256 << 20
)

// errEvicted is why a pull ended that had to make room for another peer's.
var errEvicted = errors.New("mooncake: too many pulls at once: this one made room for another")

// Gate bounds the pulls in progress at one side channel: their number, and the bytes
// of their messages, MaxPendingBytes. When it is full a pull that waits for a transfer
// nobody has heard of gives way, then one of the peer that has most; a peer that has
// most itself is refused. Its methods are safe for concurrent use.
type Gate struct {
	max int // immutable

	mu struct { // a leaf
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

// NewGate returns a Gate for so many pulls.
func NewGate(pulls int) *Gate {
	g := &Gate{max: pulls}
	g.mu.in = make(map[*Ticket]struct{})
	g.mu.byPeer = make(map[string]int)
	return g
}

// Enter lets a pull of peer in, whose message has size bytes, or says why not. It
// never waits. The caller calls Leave once, when the pull has ended; evict shall end
// it, and may be called once, from any goroutine.
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
	for len(g.mu.in) >= g.max || g.mu.bytes+t.size > MaxPendingBytes {
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

// victimLocked returns the pull that makes room for one of peer, or nil: the oldest
// idle one of the peer that has most; else the newest one of the peer that has most,
// and at least two more than peer.
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
		return // evicted
	}
	delete(g.mu.in, t)
	g.mu.bytes -= t.size
	if g.mu.byPeer[t.peer]--; g.mu.byPeer[t.peer] == 0 {
		delete(g.mu.byPeer, t.peer)
	}
}

// Idle says whether the pull waits only for transfers that nobody has heard of.
func (t *Ticket) Idle(idle bool) {
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	t.idle = idle
}

// Leave ends the pull's stay.
func (t *Ticket) Leave() {
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	t.g.removeLocked(t)
}

// Len returns how many pulls are in.
func (g *Gate) Len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.mu.in)
}

// Conns bounds the connections of a side channel without letting those that say
// nothing keep others out: when there are too many, the one that has been idle for
// longest is closed. Its methods are safe for concurrent use.
type Conns struct {
	max int // immutable

	mu struct { // a leaf
		sync.Mutex
		clock int64
		all   map[*zmtp.Peer]*connUse
	}
}

type connUse struct {
	pulls int
	last  int64
}

// NewConns returns a bound of max connections.
func NewConns(max int) *Conns {
	c := &Conns{max: max}
	c.mu.all = make(map[*zmtp.Peer]*connUse)
	return c
}

// Options adds the bound to a router's options.
func (c *Conns) Options(o zmtp.RouterOptions) zmtp.RouterOptions {
	o.MaxPeers = 2 * c.max // those that are in their handshake count there
	o.OnConnect = c.connected
	o.OnDisconnect = func(p *zmtp.Peer, _ error) { c.gone(p) }
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

func (c *Conns) gone(p *zmtp.Peer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.all, p)
}

// Begin notes that a pull of p begins; the function it returns, that it has ended.
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
