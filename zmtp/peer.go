// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/rawio"
)

// role is what a Peer needs from the socket that owns it. Immutable.
type role struct {
	own       socketType
	identity  []byte
	limits    limits
	deliver   func(*Peer, Message)                        // gets each message, on the reading goroutine
	connected func(*Peer)                                 // called after the handshake, on the reading goroutine
	refused   func(p *Peer, socketType string)            // nil: not called
	subscribe func(p *Peer, prefix []byte, on bool) error // for a PUB: gets subscriptions, on the reading goroutine

	mechanism func() mechanism // makes the mechanism of one connection; nil: NULL

	received   *received // counts receive buffers; nil: only this connection's own limits apply
	large      func(*Peer) bool
	largeBytes int64
}

// limits are the limits of a connection that ROUTER and DEALER share.
type limits struct {
	maxFrame, maxMessage int64
	maxFrames            int
	maxFirst             int64
	queueBytes           int
	handshakeTimeout     time.Duration
	idleTimeout          time.Duration // 0 = none
	heartbeatInterval    time.Duration // 0 = none
	heartbeatTimeout     time.Duration
	writeTimeout         time.Duration
	receiveTimeout       time.Duration // 0 = none
}

// corkTime bounds how long queued replies wait while the reading goroutine
// handles more messages. After corkTime it flushes them between two messages.
const corkTime = 100 * time.Microsecond

type phase byte

const (
	wantGreeting phase = iota
	wantReady
	traffic
)

// Peer is one connection. Its methods are safe for concurrent use.
type Peer struct {
	id   uint64 // immutable, as are the next fields
	born time.Time
	role *role
	conn net.Conn
	host string          // Router.identify may change it once, under Router.mu, before the first read
	raw  syscall.RawConn // nil if conn has none: then the writer goroutine does all writes

	// Owned by the reading goroutine.
	in       decoder
	phase    phase
	readErr  error
	corkedAt time.Duration // time since born
	readFn   func(uintptr) bool
	who      any    // result of Identify; set before the first read
	client   string // name that the client's key or password has proved; set before ready
	fresh    bool   // the handshake has just ended
	whole    uint64 // number of messages received when the current unfinished message was first seen

	// Owned by the goroutine that set mu.writing.
	out      batch
	writeErr error
	writeFn  func(uintptr) bool
	vecs     [][]byte
	vec      rawio.Vec

	// Owned by the keeper.
	watch watch

	// Atomic.
	mustLook  atomic.Bool  // the reading goroutine must check mu.err and quiet
	quiet     atomic.Bool  // handle no further messages
	queued    atomic.Int64 // bytes queued or being written; changed under mu
	ready     atomic.Bool  // the handshake has ended; identity and minor are set before
	proved    atomic.Bool  // the peer has proved who it is; set before ready, and before the answer that tells the peer so
	ttl       atomic.Int64 // longest silence that the peer's PINGs allow, in ns; 0: any
	held      atomic.Int64 // bytes of the receive buffers, without the first 16 KiB (firstBuffer)
	begun     atomic.Int64 // unix ns when the unfinished message was first seen; 0: there is none
	lastHeard atomic.Int64 // unix ns when the keeper last saw that bytes had come or that a handler ran
	marked    atomic.Bool  // see Mark
	count     counters
	minor     byte
	routing   string

	done    chan struct{} // closed by fail
	drained chan struct{} // capacity 1; a value means that the queue fell to its bound
	stopped chan struct{} // closed after the last write has ended
	writers sync.WaitGroup

	mu struct {
		sync.Mutex
		q       queue
		corked  bool                     // the reading goroutine will flush
		writing bool                     // a goroutine owns out and will look at q again
		err     error                    // why the peer was closed; nil while it lives
		broken  error                    // why nothing more can be sent to a peer that is still read; nil: sending works
		idle    []chan struct{}          // closed when nothing is queued and no handler runs; see flushed
		pings   map[uint64]chan struct{} // by the context that Peer.ping sent; a PONG with this context closes the channel
		pinged  uint64                   // the last of these contexts
	}
}

func newPeer(id uint64, c net.Conn, r *role) *Peer {
	p := &Peer{
		id: id, role: r, conn: c, born: time.Now(), host: host(c),
		in:   decoder{maxFrame: r.limits.maxFrame, maxMessage: r.limits.maxMessage, maxFrames: r.limits.maxFrames, maxFirst: r.limits.maxFirst},
		done: make(chan struct{}), drained: make(chan struct{}, 1), stopped: make(chan struct{}),
	}
	p.lastHeard.Store(p.born.UnixNano())
	if r.large != nil {
		p.in.large, p.in.allow = r.largeBytes, func() bool { return r.large(p) }
	}
	p.readFn, p.writeFn = p.onReadable, p.onWritable
	if sc, ok := c.(syscall.Conn); ok && haveRaw {
		p.raw, _ = sc.SyscallConn()
	}
	if r.mechanism != nil {
		secure(p, r.mechanism())
	}
	return p
}

// ID returns the number of the connection. A socket numbers its connections from 1.
func (p *Peer) ID() uint64 { return p.id }

// RemoteAddr returns the peer's network address.
func (p *Peer) RemoteAddr() net.Addr { return p.conn.RemoteAddr() }

// identity returns the routing id that the peer announced; most peers announce none. It need not be unique. It is known once OnConnect
// or the handler has been called.
func (p *Peer) identity() string {
	if !p.ready.Load() {
		return ""
	}
	return p.routing
}

// Client returns the client's name, which its key (Curve) or password (Plain) has proved; "" if the socket asks for no proof. It is
// known once OnConnect or the handler has been called.
func (p *Peer) Client() string {
	if !p.ready.Load() {
		return ""
	}
	return p.client
}

// Identity returns the result of RouterOptions.Identify for the connection; nil without Identify. It is known once OnConnect or the
// handler has been called.
func (p *Peer) Identity() any {
	if !p.ready.Load() {
		return nil
	}
	return p.who
}

// Done returns a channel that is closed when the peer is closed.
func (p *Peer) Done() <-chan struct{} { return p.done }

// Err returns the reason why the peer was closed; nil while it lives.
func (p *Peer) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.err
}

// Close drops the connection and all queued messages. It does not wait: OnDisconnect is called when the peer is gone.
func (p *Peer) Close() { p.fail(ErrClosed) }

// Flush writes queued messages now, as far as the socket accepts them.
func (p *Peer) Flush() {
	p.mu.Lock()
	start := !p.mu.writing && !p.mu.q.empty() && p.mu.err == nil
	p.mu.writing = p.mu.writing || start
	p.mu.Unlock()
	if start {
		p.flush()
	}
}

// unlockAndFlush unlocks p.mu and writes the queue, unless another goroutine will do that.
func (p *Peer) unlockAndFlush() {
	start := !p.mu.corked && !p.mu.writing
	p.mu.writing = p.mu.writing || start
	p.mu.Unlock()
	if start {
		p.flush()
	}
}

// command queues the bytes that build appends, and flushes them.
func (p *Peer) command(build func([]byte) []byte) {
	p.enqueue(build)
	p.mu.Lock()
	if p.mu.err != nil || p.mu.q.empty() {
		p.mu.Unlock()
		return
	}
	p.unlockAndFlush()
}

// enqueue lets build append whole frames to the queue, however full the queue is. It returns false, without calling build, if the peer
// is closed or nothing can be sent to it.
func (p *Peer) enqueue(build func([]byte) []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.err != nil || p.mu.broken != nil {
		return false
	}
	before := len(p.mu.q.buf)
	p.mu.q.buf = build(p.mu.q.buf)
	p.queued.Add(int64(len(p.mu.q.buf) - before))
	return true
}

// flush writes until the queue is empty. When the socket is full, or after flushRounds rounds, a goroutine writes the rest. The caller
// must have set mu.writing; flush or that goroutine clears it.
func (p *Peer) flush() {
	for round := 0; p.takeOrStop(); round++ {
		if p.raw != nil && round < flushRounds {
			if err := p.raw.Write(p.writeFn); err != nil && p.writeErr == nil {
				p.writeErr = err
			}
			if p.writeErr != nil {
				p.writeFailed(p.writeErr)
				continue // takeOrStop ends the loop
			}
			if len(p.out.vec) == 0 {
				continue
			}
		}
		p.writers.Go(p.write)
		return
	}
}

// takeOrStop moves the queue to p.out. If the queue is empty or the peer is closed, it
// clears mu.writing and returns false.
func (p *Peer) takeOrStop() bool {
	if len(p.out.all) > 0 || p.out.buf != nil {
		p.out.reset()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.q.empty() || p.mu.err != nil {
		p.mu.writing = false
		if p.mu.err != nil {
			close(p.stopped)
		}
		p.idleLocked()
		return false
	}
	p.mu.q.take(&p.out)
	return true
}

// write is the writer goroutine. It ends when the queue is empty.
func (p *Peer) write() {
	for {
		for len(p.out.vec) > 0 {
			if err := p.writeChunk(); err != nil {
				p.writeFailed(err)
				break
			}
		}
		_ = p.conn.SetWriteDeadline(time.Time{}) // otherwise this deadline would affect a later flush by Send
		if !p.takeOrStop() {
			return
		}
	}
}

func (p *Peer) writeChunk() error {
	if err := p.conn.SetWriteDeadline(time.Now().Add(p.role.limits.writeTimeout)); err != nil {
		return err
	}
	if p.mustLook.Load() && p.Err() != nil { // fail may have set its deadline before we set ours
		return ErrClosed
	}
	p.vecs = p.out.chunk(p.vecs, stallBytes)
	bufs := net.Buffers(p.vecs)
	n, err := rawio.WriteBuffers(p.conn, &bufs)
	clear(p.vecs)
	p.count.writes.Add(1)
	p.out.consume(int(n))
	p.wrote(int(n))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%w: %d bytes wait, %d were taken in %v", errSlow, p.queued.Load(), n, p.role.limits.writeTimeout)
	}
	return err
}

// wrote counts n bytes that were written to the connection, so that they no longer count as queued.
func (p *Peer) wrote(n int) {
	p.count.bytesOut.Add(uint64(n))
	p.retain(-int64(n))
}

// retain counts n more bytes that wait to be sent; n may be negative. When the sum falls to the bound, it wakes the reading goroutine
// if that waits for room.
func (p *Peer) retain(n int64) {
	bound := int64(p.role.limits.queueBytes)
	if left := p.queued.Add(n); left <= bound && left-n > bound {
		select {
		case p.drained <- struct{}{}:
		default:
		}
	}
}

// fail closes the peer with err; only the first call does anything. It does no I/O: it sets deadlines in the past, which wake the
// goroutines that read and write. The reading goroutine then closes the connection.
func (p *Peer) fail(err error) {
	p.mu.Lock()
	first := p.mu.err == nil
	if first {
		p.mu.err = err
		if !p.mu.writing { // no goroutine begins to write after err is set
			close(p.stopped)
		}
	}
	p.mu.Unlock()
	if first {
		p.mustLook.Store(true)
		close(p.done)
		_ = p.conn.SetDeadline(longAgo) // fails only when closed already
	}
}

// writeFailed ends writing after err. If the other end has closed the connection, the peer still reads and handles what that end had
// sent, and ends when a read fails, as in libzmq: a client may send its last requests and close without waiting for the answers. Any
// other error closes the peer at once.
func (p *Peer) writeFailed(err error) {
	if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		p.fail(err)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.broken = err
	p.mu.q = queue{}
	p.retain(-p.queued.Load())
}

var longAgo = time.Unix(1, 0)

// interrupt wakes the reading goroutine, which then checks the peer's state.
func (p *Peer) interrupt() { _ = p.conn.SetReadDeadline(longAgo) }

// flushed waits until no message is queued and the handler does not run, or ctx ends.
func (p *Peer) flushed(ctx context.Context) error {
	idle := make(chan struct{})
	p.mu.Lock()
	if p.mu.err != nil || !p.mu.corked && !p.mu.writing {
		p.mu.Unlock()
		return nil
	}
	p.mu.idle = append(p.mu.idle, idle)
	p.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("flush %d bytes to %v: %w", p.queued.Load(), p.RemoteAddr(), ctx.Err())
	}
}

// idleLocked wakes the goroutines that wait in flushed.
func (p *Peer) idleLocked() {
	if len(p.mu.idle) == 0 || p.mu.corked || p.mu.writing {
		return
	}
	for _, c := range p.mu.idle {
		close(c)
	}
	p.mu.idle = nil
}

// run is the reading goroutine. It returns the reason why the peer ended, after the peer's last goroutine has returned.
//
// For a listening socket it also returns once after the handshake, with done false. The caller must then call run again on a new
// goroutine: otherwise an idle peer would keep the large stack that the handshake needed.
func (p *Peer) run() (done bool, err error) {
	if p.phase == wantGreeting {
		p.command(appendGreeting)
	}
	for {
		err := p.read()
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			p.fail(err)
		}
		if p.fresh {
			p.fresh = false
			return false, nil
		}
		if !p.pause() {
			break
		}
	}
	<-p.stopped
	p.writers.Wait()
	_ = p.conn.Close() // nothing is left to lose
	p.in.drop()
	if c, ok := p.conn.(*secureConn); ok {
		c.drop()
	}
	p.recordBuffer()
	p.trim()
	return true, p.Err()
}

// read reads and handles messages until an error or an interrupt occurs.
func (p *Peer) read() error {
	p.readErr = nil
	if p.raw != nil {
		if err := p.raw.Read(p.readFn); p.readErr == nil {
			return err
		}
		return p.readErr
	}
	for !p.mustLook.Load() && !p.fresh {
		n, err := p.conn.Read(p.in.space())
		if n > 0 {
			if err := p.received(n); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// pause handles an interrupt on the reading goroutine. It returns false if the peer is closed.
func (p *Peer) pause() bool {
	if p.quiet.Load() {
		<-p.done
		return false
	}
	// A fail after this reset wakes the next read. A fail before it has already closed done.
	_ = p.conn.SetReadDeadline(time.Time{})
	p.in.release()
	p.recordBuffer()
	p.trim()
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// trim releases the send buffers if no goroutine writes and nothing is queued, or if the peer is closed. So a reference to a closed
// Peer keeps no frames in memory.
func (p *Peer) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.mu.writing && (p.mu.q.empty() || p.mu.err != nil) {
		p.mu.q, p.out, p.vecs = queue{}, batch{}, nil
		if c, ok := p.conn.(*secureConn); ok {
			c.trim()
		}
	}
}

// received handles every whole message and command in the buffer, to which n bytes were just added. Then it flushes the replies.
func (p *Peer) received(n int) error {
	p.in.wrote(n)
	if _, secured := p.conn.(*secureConn); !secured { // a secureConn itself counts the bytes on the network
		p.count.bytesIn.Add(uint64(n))
		p.count.reads.Add(1)
	}
	p.mu.Lock()
	p.mu.corked = true
	p.mu.Unlock()
	p.recordBuffer()
	err := p.handle()
	p.recordUnfinished()
	p.uncork()
	return err
}

func (p *Peer) uncork() {
	p.mu.Lock()
	p.mu.corked = false
	if p.mu.q.empty() || p.mu.err != nil {
		p.idleLocked()
		p.mu.Unlock()
		return
	}
	p.unlockAndFlush()
}

func (p *Peer) handle() error {
	if p.phase == wantGreeting {
		minor, ok, err := p.in.greeting()
		if err != nil || !ok {
			return err
		}
		p.minor, p.phase = minor, wantReady
		p.command(func(b []byte) []byte { return appendReady(b, p.role.own, p.role.identity) })
	}
	for handled := 0; !p.mustLook.Load(); handled++ {
		ev, err := p.in.next()
		if err != nil || ev == evMore {
			return err
		}
		if ev == evCommand {
			if err := p.onCommand(p.in.cmd); err != nil {
				return err
			}
		} else {
			if p.phase != traffic {
				return fmt.Errorf("%w: message before READY", errProtocol)
			}
			p.count.messagesIn.Add(1)
			p.role.deliver(p, p.in.msg)
			p.in.done()
		}
		p.flushBetween(handled)
	}
	return nil
}

// flushBetween flushes between two messages if replies have waited for corkTime, or if the queue is above its bound. In the second case
// it also waits until the peer has read.
func (p *Peer) flushBetween(handled int) {
	full := p.queued.Load() > int64(p.role.limits.queueBytes)
	if !full {
		if p.in.pos == p.in.end {
			return // received flushes soon
		}
		now := time.Since(p.born)
		if handled == 0 {
			p.corkedAt = now
		}
		if now-p.corkedAt < corkTime {
			return
		}
		p.corkedAt = now
	}
	p.Flush()
	p.awaitRoom()
}

// awaitRoom waits until the queue is within its bound. While a handler runs, other senders leave flushing to the reading goroutine,
// which waits here. So it must flush each time it wakes; otherwise it would wait for bytes that no goroutine writes.
func (p *Peer) awaitRoom() {
	for p.queued.Load() > int64(p.role.limits.queueBytes) {
		p.Flush()
		select {
		case <-p.drained:
		case <-p.done:
			return
		}
	}
}
