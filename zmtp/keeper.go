// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"fmt"
	"time"
)

// quietAfter is how long a peer must be silent before the keeper wakes its reading goroutine, once. That goroutine then releases its
// buffer, and finds an end of stream that came together with the last bytes (see onReadable).
const quietAfter = time.Second

// watch is what the keeper knows about one peer. The keeper is one goroutine per socket. It compares counters at each tick, because a
// deadline per read would cost a timer operation per request. So a timeout is noticed up to one tick late.
type watch struct {
	reads       uint64    // count.reads at the keeper's last look
	at          time.Time // when the keeper last saw that reads had changed, or that the peer was busy
	pinged      time.Time // when it last sent a PING, if after at; zero: none
	interrupted bool      // the reading goroutine was interrupted since at

	begun      int64     // Peer.begun at the last look
	progress   uint64    // count.bytesIn at progressAt
	progressAt time.Time // when the ReceiveTimeout that stalled measures began
}

// tick returns the interval of the keeper's looks.
func (l limits) tick() time.Duration {
	t := time.Second
	for _, d := range []time.Duration{l.handshakeTimeout, l.idleTimeout, l.heartbeatInterval, l.heartbeatTimeout, l.receiveTimeout} {
		if d > 0 {
			t = min(t, d/4)
		}
	}
	return max(t, 5*time.Millisecond)
}

// check closes p if one of its deadlines has passed. The keeper calls it.
func (p *Peer) check(now time.Time) {
	l, w := &p.role.limits, &p.watch
	if !p.ready.Load() {
		if now.Sub(p.born) > l.handshakeTimeout {
			p.fail(fmt.Errorf("%w after %v", errHandshakeTimeout, l.handshakeTimeout))
		}
		return
	}
	p.mu.Lock()
	busy := p.mu.corked // a handler that runs, or waits for room, counts as activity
	p.mu.Unlock()
	if reads := p.count.reads.Load(); busy || reads != w.reads || w.at.IsZero() {
		w.reads, w.at, w.pinged, w.interrupted = reads, now, time.Time{}, false
		p.lastHeard.Store(now.UnixNano())
	}
	if busy { // meanwhile the reading goroutine does not read, so no progress is expected
		w.begun = 0
	} else if p.stalled(now) {
		p.fail(fmt.Errorf("%w: %d bytes in %v", errStalled, p.count.bytesIn.Load()-w.progress, l.receiveTimeout))
		return
	}
	silent := now.Sub(w.at)
	if ttl := time.Duration(p.ttl.Load()); ttl > 0 && silent > ttl {
		p.fail(fmt.Errorf("%w: silent for %v, its TTL is %v", errHeartbeat, silent, ttl))
		return
	}
	if l.idleTimeout > 0 && silent > l.idleTimeout {
		p.fail(fmt.Errorf("%w for %v", errIdle, l.idleTimeout))
		return
	}
	if l.heartbeatInterval > 0 && p.minor >= 1 {
		switch {
		case w.pinged.IsZero() && silent >= l.heartbeatInterval:
			w.pinged = now
			p.command(func(b []byte) []byte { return appendPing(b, 0, nil) })
		case !w.pinged.IsZero() && now.Sub(w.pinged) > l.heartbeatTimeout:
			p.fail(fmt.Errorf("%w: no answer to a PING in %v", errHeartbeat, l.heartbeatTimeout))
			return
		}
	}
	if !w.interrupted && silent >= quietAfter && !p.quiet.Load() {
		w.interrupted = true
		p.interrupt()
	}
}
