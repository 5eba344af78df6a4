// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// Handler handles one message of p. It is called on p's reading goroutine, one message at a time per peer. The next message waits, so
// long work must run elsewhere. m and its frames are valid until Handler returns.
type Handler func(p *Peer, m Message)

// RouterOptions configures a Router. A zero field means its default.
type RouterOptions struct {
	MaxFrameBytes   int64 // default 64 MiB
	MaxFrames       int   // per message; default 64
	MaxFirstBytes   int64 // limit of the first frame of a message, checked at its header; default MaxFrameBytes
	MaxMessageBytes int64 // sum of a message's frames; default 128 MiB
	MaxPeers        int   // further connections are closed at once; default 4096
	GiveWay         bool  // at MaxPeers, close a silent connection of the host with the most connections instead; see Peer.Mark
	SendQueueBytes  int   // per peer, see the package comment; default 16 MiB
	MaxUnsentBytes  int64 // sum over the queues of all peers; default 4 GiB
	MaxReceiveBytes int64 // sum of the receive buffers of all peers, without the first 16 KiB of each; default 1 GiB

	HandshakeTimeout  time.Duration // limit from accept to READY; default 5 s
	WriteTimeout      time.Duration // for a slow peer; see the package comment; default 30 s
	ReceiveTimeout    time.Duration // an unfinished message must end in this time, or 64 KiB of it must come; default 30 s
	IdleTimeout       time.Duration // a peer that sends nothing for so long is closed; 0: never
	HeartbeatInterval time.Duration // silence after which a 3.1 peer gets a PING; 0: no PINGs
	HeartbeatTimeout  time.Duration // limit for the answer to a PING; default HeartbeatInterval

	// Identify is called once for each connection, before the first read. Peer.Identity returns its result.
	Identify func(net.Conn) any

	// Share returns, from the result of Identify, the name of the host to whose share a connection counts in the limits for all
	// connections (see shares.go). If Share is nil or returns "", that is the remote host.
	Share func(who any) string

	// Large reports whether p may send a frame of more than LargeBytes. It is called on the reading goroutine. If it is nil, all peers
	// may.
	Large      func(p *Peer) bool
	LargeBytes int64

	// OnConnect is called after a peer's handshake, on its reading goroutine, before its first message. OnDisconnect is called once for
	// each peer for which OnConnect was called, after its last handler call, with the reason of its end.
	OnConnect    func(*Peer)
	OnDisconnect func(*Peer, error)

	// OnRefused is called, on the reading goroutine, for a connection whose socket type cannot talk to a ROUTER.
	OnRefused func(p *Peer, socketType string)

	Networks *auth.Networks // closes connections from other networks at once; nil closes none

	Authentication // how clients prove who they are

	Log *slog.Logger // connections are logged at debug level; nil discards
}

// Router is a ROUTER socket that serves: it listens, and gives the messages of its peers to a Handler. Its methods are safe for
// concurrent use.
type Router struct {
	role     role // immutable
	o        RouterOptions
	log      *slog.Logger
	lastID   atomic.Uint64
	closing  chan struct{}  // closed by the first Close or Shutdown
	stopKeep chan struct{}  // closed when the last peer is gone
	wg       sync.WaitGroup // peers and accept loops
	keepWG   sync.WaitGroup

	mu struct {
		sync.Mutex
		listeners map[net.Listener]struct{}
		peers     map[*Peer]struct{}
		keeping   bool
		closed    bool  // no listener and no peer may be added any more
		stopped   bool  // Close has finished
		past      Stats // counts of peers that are gone
	}
}

// NewRouter returns a Router that does not listen yet.
func NewRouter(h Handler, o RouterOptions) *Router {
	r := &Router{
		o:   o,
		log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)),
		role: role{
			own:     typeRouter,
			limits:  newLimits(o),
			deliver: h,
		},
		closing:  make(chan struct{}),
		stopKeep: make(chan struct{}),
	}
	r.o.MaxPeers = cmp.Or(o.MaxPeers, 4096)
	r.o.MaxUnsentBytes = cmp.Or(o.MaxUnsentBytes, 4<<30)
	r.role.large, r.role.largeBytes = o.Large, o.LargeBytes
	r.role.received = &received{limit: cmp.Or(o.MaxReceiveBytes, 1<<30)}
	r.role.received.over = func() {
		r.closeHeaviest((*Peer).heldBytes, r.role.received.limit, "of unfinished messages")
	}
	r.role.mechanism = o.mechanism(&r.role)
	r.role.connected = r.connected
	r.role.refused = o.OnRefused
	r.mu.listeners = make(map[net.Listener]struct{})
	r.mu.peers = make(map[*Peer]struct{})
	r.mu.past.Closed = make(map[string]uint64)
	return r
}

func newLimits(o RouterOptions) limits {
	return limits{
		maxFrame:          cmp.Or(o.MaxFrameBytes, 64<<20),
		maxMessage:        cmp.Or(o.MaxMessageBytes, 128<<20),
		maxFrames:         cmp.Or(o.MaxFrames, 64),
		maxFirst:          o.MaxFirstBytes,
		queueBytes:        cmp.Or(o.SendQueueBytes, 16<<20),
		handshakeTimeout:  cmp.Or(o.HandshakeTimeout, 5*time.Second),
		idleTimeout:       o.IdleTimeout,
		heartbeatInterval: o.HeartbeatInterval,
		heartbeatTimeout:  cmp.Or(o.HeartbeatTimeout, o.HeartbeatInterval),
		writeTimeout:      cmp.Or(o.WriteTimeout, 30*time.Second),
		receiveTimeout:    cmp.Or(o.ReceiveTimeout, 30*time.Second),
	}
}

// Listen binds endpoint and starts to serve it; ctx limits only the binding. It may be called more than once. Endpoints are
// tcp://host:port, tcp://*:port, ipc:///path and ipc://@name (see parseEndpoint); port 0 or * takes a free port.
func (r *Router) Listen(ctx context.Context, endpoint string) (net.Addr, error) {
	l, err := listen(ctx, endpoint)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", endpoint, err)
	}
	l = r.o.Networks.Listener(l)
	if !r.serve(l) {
		_ = l.Close() // the Router is closed
		return nil, ErrClosed
	}
	return l.Addr(), nil
}

// serve starts the accept loop of l and, with the first listener, the keeper. It returns false if the Router is closed.
func (r *Router) serve(l net.Listener) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		return false
	}
	r.keepLocked()
	r.mu.listeners[l] = struct{}{}
	r.wg.Go(func() { r.accept(l) })
	return true
}

func (r *Router) keepLocked() {
	if !r.mu.keeping {
		r.mu.keeping = true
		r.keepWG.Go(r.runKeeper)
	}
}

func (r *Router) accept(l net.Listener) {
	wait := time.Duration(0)
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			wait = 0
			r.add(c)
			continue
		case errors.Is(err, net.ErrClosed):
			return
		case wait == 0:
			r.log.Warn("zmtp: no connection can be accepted", "listener", l.Addr(), "err", err)
		}
		// Most often the process has no file descriptors left. The connection waits in the backlog.
		wait = min(max(2*wait, 5*time.Millisecond), time.Second)
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-r.closing:
			t.Stop()
			return
		}
	}
}

// maxLeaving is the largest number of connections that gave way to new ones and are not closed yet. At the limit, new connections are
// refused.
const maxLeaving = 64

// add makes the connection c a peer with its own reading goroutine. At MaxPeers it closes c instead or, with GiveWay, another connection.
func (r *Router) add(c net.Conn) {
	p := newPeer(r.lastID.Add(1), c, &r.role)
	r.mu.Lock()
	r.mu.past.Accepted++
	err := ErrClosed
	var silent *Peer
	full := len(r.mu.peers) >= r.o.MaxPeers
	if full && !r.mu.closed && r.o.GiveWay {
		silent = r.makeRoomLocked(p.host)
	}
	if !r.mu.closed && (!full || silent != nil && len(r.mu.peers) < r.o.MaxPeers+maxLeaving) {
		r.mu.peers[p] = struct{}{}
		r.wg.Go(func() { r.run(p) })
		r.mu.Unlock()
		if silent != nil {
			silent.fail(errTooManyPeers)
		}
		return
	} else if full {
		err = errTooManyPeers
	}
	r.mu.past.Closed[Reason(err)]++
	r.mu.Unlock()
	r.log.Debug("zmtp: connection refused", "remote", c.RemoteAddr(), "err", err)
	_ = c.Close() // c never became a peer
}

func (r *Router) run(p *Peer) {
	if r.o.Identify != nil {
		r.identify(p)
	}
	r.proceed(p)
}

func (r *Router) proceed(p *Peer) {
	done, err := p.run()
	if !done {
		r.wg.Go(func() { r.proceed(p) })
		return
	}
	r.mu.Lock()
	delete(r.mu.peers, p)
	r.mu.past.add(&p.count)
	r.mu.past.Closed[Reason(err)]++
	if p.ready.Load() {
		r.mu.past.Handshakes++
	}
	r.mu.Unlock()
	r.o.refused(p, err)
	r.log.Debug("zmtp: peer gone", "peer", p.id, "remote", p.RemoteAddr(), "err", err)
	if p.ready.Load() && r.o.OnDisconnect != nil {
		r.o.OnDisconnect(p, err)
	}
}

// identify calls Identify on a goroutine of its own. On the reading goroutine, a deep call would enlarge the stack, which that
// goroutine would keep while the peer is idle.
func (r *Router) identify(p *Peer) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		c := p.conn
		if s, ok := c.(*secureConn); ok {
			c = s.NetConn()
		}
		p.who = r.o.Identify(c)
	}()
	<-done
	if r.o.Share == nil {
		return
	}
	if of := r.o.Share(p.who); of != "" {
		r.mu.Lock()
		defer r.mu.Unlock()
		p.host = of
	}
}

func (r *Router) connected(p *Peer) {
	r.log.Debug("zmtp: peer connected", "peer", p.id, "remote", p.RemoteAddr())
	if r.o.OnConnect != nil {
		r.o.OnConnect(p)
	}
}

// runKeeper checks the peers' deadlines until the last peer is closed.
func (r *Router) runKeeper() {
	t := time.NewTicker(r.role.limits.tick())
	defer t.Stop()
	var peers []*Peer
	for {
		select {
		case now := <-t.C:
			peers = r.peers(peers[:0])
			for _, p := range peers {
				p.check(now)
			}
			r.closeHeaviest((*Peer).queuedBytes, r.o.MaxUnsentBytes, "not read")
			clear(peers)
		case <-r.stopKeep:
			return
		}
	}
}

func (r *Router) peers(dst []*Peer) []*Peer {
	r.mu.Lock()
	defer r.mu.Unlock()
	for p := range r.mu.peers {
		dst = append(dst, p)
	}
	return dst
}

// Stats returns the counts since NewRouter.
func (r *Router) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.mu.past.clone()
	s.Peers = len(r.mu.peers)
	for p := range r.mu.peers {
		s.add(&p.count)
		if p.ready.Load() {
			s.Handshakes++
		}
	}
	return s
}

// stopAccepting closes the listeners. Only the first call does anything.
func (r *Router) stopAccepting() {
	r.mu.Lock()
	first := !r.mu.closed
	r.mu.closed = true
	listeners := r.mu.listeners
	r.mu.Unlock()
	if first {
		close(r.closing)
		for l := range listeners {
			_ = l.Close() // ends its accept loop; a second error has no reader
		}
	}
}

// quiesce stops accepting and reading. Handlers that are running may still send replies; Shutdown flushes them.
func (r *Router) quiesce() {
	r.stopAccepting()
	for _, p := range r.peers(nil) {
		p.quiet.Store(true)
		p.mustLook.Store(true)
		p.interrupt()
	}
}

// Shutdown stops accepting and reading, waits until all queued messages have been written, then closes the socket. When ctx ends first,
// it drops the rest and returns ctx's error.
func (r *Router) Shutdown(ctx context.Context) error {
	r.quiesce()
	var err error
	for _, p := range r.peers(nil) {
		if e := p.flushed(ctx); e != nil {
			err = e
			break
		}
	}
	return errors.Join(err, r.Close())
}

// Close stops the listeners, drops the peers and all that is queued for them, and returns after the last goroutine has ended. A handler
// must not call it.
func (r *Router) Close() error {
	r.stopAccepting()
	for _, p := range r.peers(nil) {
		p.fail(ErrClosed)
	}
	r.wg.Wait()
	r.mu.Lock()
	if !r.mu.stopped {
		r.mu.stopped = true
		close(r.stopKeep)
	}
	r.mu.Unlock()
	r.keepWG.Wait()
	return nil
}
