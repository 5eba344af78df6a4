// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// TargetOptions configures a Target. A zero field means its default.
type TargetOptions struct {
	Host          string // address of both ports that peers get; default 127.0.0.1
	Bind          string // address of the listeners; default Host
	HandshakePort int    // default: a free one
	DataPort      int    // default: a free one

	// Boot names this life of the target to Kvasir peers; default random. Two lives must have different names.
	Boot string

	ProgressTimeout  time.Duration // after which a body or a reply that does not move ends; default 30 s
	HandshakeTimeout time.Duration // for each read and write of a handshake; default 5 s
	MaxConns         int           // most data connections; further ones are closed at once; default 16384
	MaxHandshakes    int           // most handshakes at a time; others wait in the kernel's backlog, or replace one whose peer is silent; default 256

	Networks *auth.Networks // connections from elsewhere are closed at once; nil: all are accepted

	// With Secrets, peers outside the stock networks must prove that they have one of the secrets. The target closes a connection
	// without a proof after HandshakeTimeout. nil: no proof is demanded.
	Secrets *auth.PeerSecrets

	Log *slog.Logger // refused and broken connections, at debug; default none
}

// Target serves reads and writes of its Table to peers. It never closes an idle data connection: a C++ engine at the other end would
// fail its next transfer.
type Target struct {
	opt   TargetOptions // immutable after Listen
	table *Table
	name  string // "host:port" of the handshake listener
	hs    net.Listener
	data  net.Listener
	slots chan struct{} // one token per handshake in progress
	log   *slog.Logger
	stats targetStats
	wg    sync.WaitGroup

	mu struct {
		sync.Mutex
		closed bool
		conns  map[net.Conn]*inbound // of both ports
		nData  int
		silent []*silentConn // handshakes whose request has not come yet, oldest first
	}
}

// TargetStats are counters since Listen, except DataConns, the current number.
type TargetStats struct {
	DataConns       int64 // open now
	Handshakes      int64
	Writes          int64 // completed
	Reads           int64
	BytesIn         int64
	BytesOut        int64
	RejectedAddress int64 // requests for an address that is not registered, 0, or wrapping, or that the callback refused
	RejectedFence   int64 // writes into ranges that are closed by a fence
	Unproven        int64 // connections whose peer did not prove that it has a secret
	RefusedConns    int64 // connections cut because of MaxConns: new ones, or old ones without a request
	Broken          int64 // connections that ended inside a frame, or stalled
}

type targetStats struct {
	handshakes, writes, reads, in, out         atomic.Int64
	rejectedAddr, rejectedFence, refused, torn atomic.Int64
	unproven                                   atomic.Int64
}

// Listen starts a target that serves table on both ports.
func Listen(o TargetOptions, table *Table) (*Target, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Host = cmp.Or(o.Host, "127.0.0.1")
	o.Bind = cmp.Or(o.Bind, o.Host)
	o.ProgressTimeout = cmp.Or(o.ProgressTimeout, 30*time.Second)
	o.HandshakeTimeout = cmp.Or(o.HandshakeTimeout, 5*time.Second)
	o.MaxConns = cmp.Or(o.MaxConns, 16384)
	o.MaxHandshakes = cmp.Or(o.MaxHandshakes, 256)
	if o.Boot == "" {
		var b [8]byte
		rand.Read(b[:]) // never fails
		o.Boot = hex.EncodeToString(b[:])
	}
	hs, err := net.Listen("tcp", net.JoinHostPort(o.Bind, strconv.Itoa(o.HandshakePort)))
	if err != nil {
		return nil, fmt.Errorf("handshake port: %w", err)
	}
	data, err := net.Listen("tcp", net.JoinHostPort(o.Bind, strconv.Itoa(o.DataPort)))
	if err != nil {
		hs.Close()
		return nil, fmt.Errorf("data port: %w", err)
	}
	t := &Target{
		opt: o, table: table, hs: o.Networks.Listener(hs), data: o.Networks.Listener(data),
		name:  net.JoinHostPort(o.Host, strconv.Itoa(port(hs))),
		slots: make(chan struct{}, o.MaxHandshakes),
		log:   cmp.Or(o.Log, slog.New(slog.DiscardHandler)),
	}
	t.mu.conns = make(map[net.Conn]*inbound)
	t.wg.Go(t.acceptHandshakes)
	t.wg.Go(t.acceptData)
	return t, nil
}

func port(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }

// Name is the segment name that peers dial: "host:port".
func (t *Target) Name() string { return t.name }

// Table returns the regions that the target serves.
func (t *Target) Table() *Table { return t.table }

// Descriptor returns what the target publishes now.
func (t *Target) Descriptor() *Descriptor {
	return &Descriptor{
		Buffers: t.table.buffers(t.name), Boot: t.opt.Boot, Keeps: true, Name: t.name,
		Protocol: protocols{"tcp"}, RDMAServerName: new(string),
		DataHost: t.opt.Host, DataPort: port(t.data), ProtoVersion: 2,
		Timestamp: timestamp(time.Now()),
	}
}

// Stats returns the counters.
func (t *Target) Stats() TargetStats {
	t.mu.Lock()
	open := int64(t.mu.nData)
	t.mu.Unlock()
	return TargetStats{
		DataConns: open, Handshakes: t.stats.handshakes.Load(),
		Writes: t.stats.writes.Load(), Reads: t.stats.reads.Load(),
		BytesIn: t.stats.in.Load(), BytesOut: t.stats.out.Load(),
		RejectedAddress: t.stats.rejectedAddr.Load(), RejectedFence: t.stats.rejectedFence.Load(),
		Unproven: t.stats.unproven.Load(), RefusedConns: t.stats.refused.Load(), Broken: t.stats.torn.Load(),
	}
}

// Close stops listening, cuts all connections and waits until none touches a region.
func (t *Target) Close() error {
	t.mu.Lock()
	t.mu.closed = true
	conns := make([]net.Conn, 0, len(t.mu.conns))
	for c := range t.mu.conns {
		conns = append(conns, c)
	}
	t.mu.Unlock()
	err := errors.Join(t.hs.Close(), t.data.Close())
	for _, c := range conns {
		c.Close()
	}
	t.wg.Wait()
	if errors.Is(err, net.ErrClosed) { // closed before
		return nil
	}
	return err
}

// SelfDial dials the target at the address that it publishes. It fails unless this target answers at that address; peers would fail
// there, too.
func (t *Target) SelfDial(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, t.opt.HandshakeTimeout)
	defer cancel()
	d, err := fetchDescriptor(ctx, t.name, t.opt.Secrets)
	if err != nil {
		return fmt.Errorf("dial the published address %s: %w", t.name, err)
	}
	if d.Boot != t.opt.Boot {
		return fmt.Errorf("dial the published address %s: %w: another target answers", t.name, ErrProtocol)
	}
	addr, err := d.dataAddr(t.name)
	if err != nil {
		return err
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("dial the published data port: %w", err)
	}
	return c.Close()
}

// accept calls start for each connection that l accepts, until l is closed. start may block; meanwhile new connections wait in the
// kernel's backlog.
func (t *Target) accept(l net.Listener, start func(net.Conn)) {
	for delay := time.Duration(0); ; {
		c, err := l.Accept()
		if err == nil {
			delay = 0
			start(c)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		// The process has no file descriptors left, or a connection died in the backlog.
		delay = min(max(2*delay, 5*time.Millisecond), 500*time.Millisecond)
		t.log.Warn("transfer: no connection can be accepted", "port", l.Addr(), "err", err, "retry_in", delay)
		time.Sleep(delay)
	}
}

func (t *Target) acceptData() {
	t.accept(t.data, func(c net.Conn) {
		in := t.track(c, true)
		if in == nil {
			c.Close()
			return
		}
		t.wg.Go(func() {
			defer t.untrack(c, true)
			t.serveData(c.(*net.TCPConn), in)
		})
	})
}

func (t *Target) acceptHandshakes() {
	t.accept(t.hs, func(c net.Conn) {
		t.takeSlot()
		if t.track(c, false) == nil {
			c.Close()
			<-t.slots
			return
		}
		s := &silentConn{conn: c, since: time.Now()}
		t.mu.Lock()
		t.mu.silent = append(t.mu.silent, s)
		t.mu.Unlock()
		t.wg.Go(func() {
			defer func() { <-t.slots }()
			defer t.untrack(c, false)
			defer t.removeSilent(s)
			t.serveHandshake(c.(*net.TCPConn), s)
		})
	})
}

// silentConn is a connection to the handshake port on which no request has come yet.
type silentConn struct {
	conn  net.Conn
	since time.Time
}

// silentFor is how long a handshake may send nothing before another connection may take its slot.
const silentFor = 250 * time.Millisecond

// takeSlot waits for a slot among the handshakes. When all are taken, it cuts the handshake that has been silent for longest, if that
// is at least silentFor.
func (t *Target) takeSlot() {
	for {
		select {
		case t.slots <- struct{}{}:
			return
		default:
		}
		pause := time.NewTimer(t.cutSilent())
		select {
		case t.slots <- struct{}{}:
			pause.Stop()
			return
		case <-pause.C:
		}
	}
}

// cutSilent cuts the handshake that has been silent for longest, if that is at least silentFor. It returns how long to wait before the
// next call.
func (t *Target) cutSilent() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.silent) == 0 {
		return silentFor
	}
	s := t.mu.silent[0]
	if wait := silentFor - time.Since(s.since); wait > 0 {
		return wait
	}
	t.mu.silent = t.mu.silent[1:]
	s.conn.Close()
	return silentFor
}

// removeSilent records that a handshake is no longer silent: its request has come, or its connection has ended.
func (t *Target) removeSilent(s *silentConn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.mu.silent, s); i >= 0 {
		t.mu.silent = slices.Delete(t.mu.silent, i, i+1)
	}
}

// inbound is a connection from a peer.
type inbound struct {
	data  bool
	since time.Time
	asked atomic.Bool // at least a part of a request has come
}

// requestlessFor is how long a data connection may send no request before the target may cut it to make room. A connection that has
// sent a request stays: a C++ engine at the other end would fail its next transfer.
const requestlessFor = time.Second

// track registers a connection, so that Close can cut it. It returns nil if the target is closed or full.
func (t *Target) track(c net.Conn, data bool) *inbound {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil
	}
	in := &inbound{data: data, since: time.Now()}
	if data {
		if t.mu.nData >= t.opt.MaxConns && !t.cutRequestlessLocked() {
			t.stats.refused.Add(1)
			return nil
		}
		t.mu.nData++
	}
	t.mu.conns[c] = in
	return in
}

// cutRequestlessLocked cuts the oldest data connection that has sent no request for requestlessFor. It returns false if there is none.
func (t *Target) cutRequestlessLocked() bool {
	var oldest net.Conn
	for c, in := range t.mu.conns {
		if in.data && !in.asked.Load() && time.Since(in.since) > requestlessFor && (oldest == nil || in.since.Before(t.mu.conns[oldest].since)) {
			oldest = c
		}
	}
	if oldest == nil {
		return false
	}
	t.stats.refused.Add(1)
	delete(t.mu.conns, oldest)
	t.mu.nData--
	oldest.Close()
	return true
}

func (t *Target) isClosed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.closed
}

func (t *Target) untrack(c net.Conn, data bool) {
	c.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.conns[c] == nil {
		return // the target has cut the connection
	}
	delete(t.mu.conns, c)
	if data {
		t.mu.nData--
	}
}
