// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// socket is one DEALER connection to a P worker. It carries one pull at a time, because replies do not name the pull that they answer.
// Between pulls it waits in the pool.
type socket struct {
	addr   string // tcp://host:port
	dealer *zmtp.Dealer
	events chan socketEvent
	once   sync.Once
	gone   chan struct{} // closed before the dealer is closed

	flooded   chan struct{} // closed when an event was dropped: the socket is unusable
	floodOnce sync.Once
}

// socketEvent is an event of the connection to which pullConn.exchange reacts: a reply, a new connection (up), or an error.
type socketEvent struct {
	reply *wire.Reply
	up    bool
	err   error // the connection broke, or a reply could not be decoded
}

// Sockets is a pool of connections to the side channels of P workers, by address. Its
// methods are safe for concurrent use.
type Sockets struct {
	maxIdle int // per address; immutable
	wg      sync.WaitGroup

	mu struct { // a leaf: no other lock is taken under it
		sync.Mutex
		closed bool
		idle   map[string][]*socket
		all    map[*socket]struct{}
		broken map[string]time.Time // when a connection to an address last ended or could not be made
	}
}

// NewSockets returns an empty pool that keeps at most maxIdle connections per address.
func NewSockets(maxIdle int) *Sockets {
	p := &Sockets{maxIdle: maxIdle}
	p.mu.idle = make(map[string][]*socket)
	p.mu.all = make(map[*socket]struct{})
	p.mu.broken = make(map[string]time.Time)
	return p
}

var errReceiverClosed = errors.New("mooncake: receiver closed")

// take returns a socket to addr, an idle one from the pool if there is one; pooled reports that. It does not wait until the socket is
// connected.
func (p *Sockets) take(addr string) (s *socket, pooled bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return nil, false, errReceiverClosed
	}
	if l := p.mu.idle[addr]; len(l) > 0 {
		s := l[len(l)-1]
		p.mu.idle[addr] = l[:len(l)-1]
		return s, true, nil
	}
	s = &socket{addr: addr, events: make(chan socketEvent, 256), flooded: make(chan struct{}), gone: make(chan struct{})}
	s.dealer = zmtp.NewDealer(addr, zmtp.DealerOptions{
		Handler: func(m zmtp.Message) { s.event(decodeReplyMessage(m)) },
		OnState: func(up bool, err error) {
			if !up {
				p.noteBroken(addr)
			}
			s.event(socketEvent{up: up, err: err})
			if !up {
				p.forget(s)
			}
		},
		MaxFrameBytes: MaxPullBytes, MaxMessageBytes: MaxPullBytes,
	})
	if err := s.dealer.Start(); err != nil {
		return nil, false, err
	}
	p.mu.all[s] = struct{}{}
	return s, false, nil
}

func (p *Sockets) noteBroken(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.mu.broken) >= maxRemembered {
		clear(p.mu.broken)
	}
	p.mu.broken[addr] = time.Now()
}

// brokeSince reports whether a connection to addr has ended since t. If so, another process may have that address now.
func (p *Sockets) brokeSince(addr string, t time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.broken[addr].After(t)
}

// anyBroke reports whether a connection to a worker of the engine e has ended since the registry was asked about e.
func (p *Sockets) anyBroke(e *knownEngine) bool {
	for _, stages := range e.Workers {
		for _, addr := range stages {
			if p.brokeSince(addr, e.asked) {
				return true
			}
		}
	}
	return false
}

func decodeReplyMessage(m zmtp.Message) socketEvent {
	if len(m) != 1 {
		return socketEvent{err: fmt.Errorf("%w: %d frames instead of one", wire.ErrMessage, len(m))}
	}
	y, err := wire.DecodeReply(m[0], 0)
	return socketEvent{reply: y, err: err}
}

// eventPatience is how long an event may wait until its pullConn reads it. Normally that takes microseconds. After eventPatience the event
// is dropped, and the socket is not used any more.
const eventPatience = time.Second

// event hands e to the socket's pullConn. It runs on the dealer's goroutine.
func (s *socket) event(e socketEvent) {
	select {
	case s.events <- e:
		return
	case <-s.flooded:
		return
	default:
	}
	patience := time.NewTimer(eventPatience) // meanwhile P's messages wait in the connection
	defer patience.Stop()
	select {
	case s.events <- e:
	case <-s.gone:
	case <-patience.C: // P floods an idle socket
		s.floodOnce.Do(func() { close(s.flooded) })
	}
}

// close closes the dealer. It waits until an event that is being handed over is done.
func (s *socket) close() {
	s.once.Do(func() {
		close(s.gone)
		_ = s.dealer.Close()
	})
}

// lost reports whether the connection of an idle socket broke, or P sent it more than it can hold.
func (s *socket) lost() bool {
	select {
	case <-s.flooded:
		return true
	default:
	}
	for len(s.events) > 0 {
		if e := <-s.events; e.err != nil {
			return true
		}
	}
	return false
}

// put gives a socket back to the pool after a pull that ended without an error.
func (p *Sockets) put(s *socket) {
	p.mu.Lock()
	if _, ok := p.mu.all[s]; ok && !p.mu.closed && len(p.mu.idle[s.addr]) < p.maxIdle && len(s.events) == 0 {
		p.mu.idle[s.addr] = append(p.mu.idle[s.addr], s)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	p.drop(s)
}

// forget closes an idle socket whose connection broke. Otherwise its dealer would dial a dead P for ever.
func (p *Sockets) forget(s *socket) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, e := range p.mu.idle[s.addr] {
		if e != s {
			continue
		}
		l := p.mu.idle[s.addr]
		p.mu.idle[s.addr] = append(l[:i:i], l[i+1:]...)
		if len(p.mu.idle[s.addr]) == 0 {
			delete(p.mu.idle, s.addr)
		}
		delete(p.mu.all, s)
		if !p.mu.closed {
			p.wg.Go(s.close) // not on the dealer's own goroutine
		}
		return
	}
}

// drop closes a socket. P sees the connection end and gives up the pull.
func (p *Sockets) drop(s *socket) {
	p.mu.Lock()
	delete(p.mu.all, s)
	p.mu.Unlock()
	s.close()
}

// Close closes all sockets. Pulls in progress end with an error.
func (p *Sockets) Close() {
	p.mu.Lock()
	p.mu.closed = true
	all := p.mu.all
	p.mu.all = make(map[*socket]struct{})
	p.mu.Unlock()
	for s := range all {
		s.close()
	}
	p.wg.Wait()
}
