// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// A Router bounds the memory that all its connections hold together. When the total is above the limit, it closes the connection that
// holds the most, of the host that holds the most. A host is a remote address, or the name that RouterOptions.Share returns; without
// that, all connections over UNIX sockets count as one host.

// errShare means that all connections together held too much memory, and this connection held the most of the host that held the most.
var errShare = errors.New("zmtp: the peer's host takes more than its share of memory")

// errStalled means that too little of an unfinished message came within ReceiveTimeout.
var errStalled = errors.New("zmtp: a message stopped coming")

// stallProgress is how many bytes of an unfinished message must come in each ReceiveTimeout.
const stallProgress = 64 << 10

// received counts the bytes of all receive buffers, without the first 16 KiB (firstBuffer) of each.
type received struct {
	total atomic.Int64
	limit int64
	over  func() // called when total passes limit
}

// recordBuffer counts the current size of p's receive buffer. The reading goroutine calls it.
func (p *Peer) recordBuffer() {
	if p.role.received == nil {
		return
	}
	now := max(0, int64(len(p.in.buf))-firstBuffer)
	if c, ok := p.conn.(*secureConn); ok {
		now += max(0, c.held()-firstBuffer)
	}
	if now == p.held.Load() {
		return
	}
	total := p.role.received.total.Add(now - p.held.Swap(now))
	if total > p.role.received.limit {
		p.role.received.over()
	}
}

// recordUnfinished records whether the buffer ends with an unfinished message.
func (p *Peer) recordUnfinished() {
	if p.in.end == p.in.start {
		if p.begun.Load() != 0 {
			p.begun.Store(0)
		}
		return
	}
	if n := p.count.messagesIn.Load(); p.begun.Load() == 0 || n != p.whole {
		p.whole = n
		p.begun.Store(time.Now().UnixNano())
	}
}

// stalled reports whether less than stallProgress bytes of an unfinished message have come in the last ReceiveTimeout. The keeper calls it,
// and then closes the peer.
func (p *Peer) stalled(now time.Time) bool {
	limit := p.role.limits.receiveTimeout
	w := &p.watch
	begun := p.begun.Load()
	if limit == 0 || begun == 0 || begun != w.begun {
		w.begun, w.progressAt, w.progress = begun, now, p.count.bytesIn.Load()
		return false
	}
	if now.Sub(w.progressAt) < limit {
		return false
	}
	in := p.count.bytesIn.Load()
	if in-w.progress < stallProgress {
		return true
	}
	w.progressAt, w.progress = now, in
	return false
}

// host returns the name of the host from which a peer connects.
func host(c net.Conn) string {
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap().WithZone("").String()
	}
	return "unix"
}

// heaviest finds the connection to close when memory is short. `what` returns how many bytes a peer holds. `most` is the peer that holds the
// most, of the host that holds the most; nil if no peer holds any. total is the sum over all peers.
func (r *Router) heaviest(what func(*Peer) int64) (most *Peer, total int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	hosts := map[string]int64{}
	for p := range r.mu.peers {
		if n := what(p); n > 0 && !p.ended() {
			hosts[p.host] += n
			total += n
		}
	}
	for p := range r.mu.peers {
		n := what(p)
		if n <= 0 || p.ended() {
			continue
		}
		if most == nil || hosts[p.host] > hosts[most.host] || p.host == most.host && n > what(most) {
			most = p
		}
	}
	return most, total
}

// ended reports whether the peer is closed. The Router may still list it.
func (p *Peer) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// closeHeaviest closes the connection that heaviest finds, again and again, until the total of `what` over all peers is within limit. The
// text `of` says for the log what the bytes are.
func (r *Router) closeHeaviest(what func(*Peer) int64, limit int64, of string) {
	for {
		most, total := r.heaviest(what)
		if most == nil || total <= limit {
			return
		}
		most.fail(fmt.Errorf("%w: %d of %d bytes %s", errShare, what(most), total, of))
	}
}

func (p *Peer) heldBytes() int64   { return p.held.Load() }
func (p *Peer) queuedBytes() int64 { return p.queued.Load() }

// HasRoom reports whether n more bytes may be queued for p. When all queues together would hold too much, it closes connections of the
// host that holds the most until n bytes fit; if that is p's own host, it returns false. Call it before you build a large message.
func (r *Router) HasRoom(p *Peer, n int64) bool {
	limit := r.o.MaxUnsentBytes
	for {
		most, total := r.heaviest((*Peer).queuedBytes)
		if total+n <= limit || most == nil {
			return n <= limit
		}
		if most.host == p.host {
			return false
		}
		most.fail(fmt.Errorf("%w: %d of %d bytes not read", errShare, most.queued.Load(), total))
	}
}

// makeRoomLocked returns the connection to close for a new one of the host newcomer, or nil if the new one must be refused. It chooses
// the host with the most connections, counting the new one, and of that host the unmarked connection that has been silent for longest.
// If clients must prove who they are, it first looks only at connections that have not done so: strangers then push out each other's
// connections, not those of clients.
func (r *Router) makeRoomLocked(newcomer string) (silent *Peer) {
	if stranger := r.strangerLocked(newcomer); stranger != nil {
		return stranger
	}
	hosts := r.hostsLocked(newcomer, true)
	for p := range r.mu.peers {
		if p.marked.Load() || p.ended() || hosts[p.host] == 1 {
			continue
		}
		if silent == nil || hosts[p.host] > hosts[silent.host] || p.host == silent.host && p.lastHeard.Load() < silent.lastHeard.Load() {
			silent = p
		}
	}
	if silent != nil && hosts[newcomer] > hosts[silent.host] {
		return nil // the newcomer's own host has the most connections, and all of them are marked
	}
	if silent != nil {
		return silent
	}
	// All connections of that host are marked. A host with more than half of MaxPeers loses the one silent for longest.
	for p := range r.mu.peers {
		if p.host == newcomer || p.ended() || hosts[p.host] <= r.o.MaxPeers/2 {
			continue
		}
		if silent == nil || p.lastHeard.Load() < silent.lastHeard.Load() {
			silent = p
		}
	}
	return silent
}

// strangerLocked returns the connection to close among those that have not proved who they are: the oldest one of the host with the
// most of them. It returns nil if clients need not prove who they are, or if no host has two such connections.
func (r *Router) strangerLocked(newcomer string) (oldest *Peer) {
	if r.role.mechanism == nil {
		return nil
	}
	hosts := r.hostsLocked(newcomer, false)
	for p := range r.mu.peers {
		if p.known() || p.ended() || hosts[p.host] == 1 {
			continue
		}
		if oldest == nil || hosts[p.host] > hosts[oldest.host] || p.host == oldest.host && p.born.Before(oldest.born) {
			oldest = p
		}
	}
	return oldest
}

// known reports whether the peer has proved who it is.
func (p *Peer) known() bool { return p.proved.Load() || p.ready.Load() }

// hostsLocked returns the number of connections of each host, including a new one of the host newcomer. If `all` is false, it counts only
// connections that have not proved who they are.
func (r *Router) hostsLocked(newcomer string, all bool) map[string]int {
	hosts := map[string]int{newcomer: 1}
	for p := range r.mu.peers {
		if !p.ended() && (all || !p.known()) {
			hosts[p.host]++
		}
	}
	return hosts
}

// Mark protects the connection from being closed to make room for a new one. It is meant for connections that stay in use for long.
func (p *Peer) Mark() { p.marked.Store(true) }
