// SPDX-License-Identifier: Apache-2.0

// Package offload serves engines of vLLM whose tiered offloading has a Kvasir tier: it answers the messages of package vllm over
// a store. The engine copies the rows itself, between its region and the pool's memory, whose descriptor it gets.
//
// What a lookup finds is lent to the engine until the engine releases it or its connection ends, however long that takes: an engine that
// was stopped must find the same bytes when it continues. The same holds for places that a store may write to. So only one sign shows that
// an engine no longer touches the memory: the engine's side of the connection ends. The kernel closes the socket of a killed process after
// the process's last thread is gone, and the module closes its own socket after its copies have ended. If the server ends first, places
// that were lent for writing stay held: the next server over the pool has them in quarantine, as after a kill.
package offload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// Options configures a Server. A zero field means its default.
type Options struct {
	Version string
	Dir     string       // directory of the regions; default /dev/shm
	Log     *slog.Logger // nil discards

	MaxEngines int     // most connected engines, further ones are refused; default 256
	Share      float64 // largest part of the pool's bytes that is lent to one engine; default 1/4
	MaxLent    int     // most lookups of one engine that are not released, further ones find nothing; default 4,096
	MaxStores  int     // most stores of one engine that are not committed, further ones get no places; default 1,024

	// Revisions has the revision of the weights, by model.
	Revisions map[string]string
	// Name is told the model, salt and layout of each namespace; nil for none.
	Name func(ns kv.Namespace, model, salt []byte, layout string)
	// Ended gets each lookup that was answered; nil for none.
	Ended func(*lookup.Outcome)
	// Loaded gets the number of rows that an engine loaded; nil for none.
	Loaded func(model string, salt []byte, engine int64, n int)
	// Announce gets rows that were stored, and with HasUnannounced those that were found; nil for none.
	Announce func(model, salt []byte, group int, sh *object.Shard, hashes []kv.Hash)
	// HasUnannounced reports whether the pool contains rows that were not announced; nil for never.
	HasUnannounced func() bool
	// Draining reports whether stores and lookups are declined; nil for never.
	Draining func() bool
	// Patience is the longest time that a lookup waits for the tier below; default 1.5 s, since the module waits for 1.8 s.
	Patience time.Duration
	// HelloTime is the time in which a peer must send its Hello; default 10 s.
	HelloTime time.Duration
	// Grace is the time that engines get to end their copies when the server ends; default 1 s.
	Grace time.Duration
	// Identify says who a peer is; tests have their own.
	Identify func(c net.Conn, number uint64) (access.Caller, bool)
}

// Server serves engines on UNIX sockets. Its methods are safe for concurrent use.
type Server struct {
	opts  Options
	store *store.Store
	log   *slog.Logger
	n     counters
	wg    sync.WaitGroup
	life  context.Context // ends with Close
	end   context.CancelFunc

	sweep sync.Mutex // held while regions are removed; taken before mu
	looks int        // calls of Tick; guarded by sweep
	mu    struct {
		sync.Mutex // a leaf
		closed     bool
		last       uint64
		listeners  []net.Listener
		conns      map[net.Conn]struct{}
		engines    map[uint64]*engine // by the number of their connection
		left       []Region           // regions of engines that are gone, until they are removed
		strangers  []Region           // regions of engines that this server never knew
	}
}

type counters struct {
	engines, refused, malformed           atomic.Uint64
	lookups, asked, hits, releases, loads atomic.Uint64
	stores, rows, aborted                 atomic.Uint64
	loadedBytes, writtenBytes             atomic.Uint64
	regionsRemoved                        atomic.Uint64
}

// New returns a Server over st.
func New(st *store.Store, o Options) *Server {
	o.MaxEngines = cmp.Or(o.MaxEngines, 256)
	o.Share = cmp.Or(o.Share, 0.25)
	o.MaxLent = cmp.Or(o.MaxLent, 4096)
	o.MaxStores = cmp.Or(o.MaxStores, 1024)
	o.Patience = cmp.Or(o.Patience, 1500*time.Millisecond)
	o.HelloTime = cmp.Or(o.HelloTime, 10*time.Second)
	o.Grace = cmp.Or(o.Grace, time.Second)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Draining == nil {
		o.Draining = func() bool { return false }
	}
	if o.Announce == nil {
		o.Announce = func(_, _ []byte, _ int, _ *object.Shard, _ []kv.Hash) {}
	}
	if o.HasUnannounced == nil {
		o.HasUnannounced = func() bool { return false }
	}
	if o.Identify == nil {
		o.Identify = func(c net.Conn, number uint64) (access.Caller, bool) {
			who := access.New(peercred.Of(c), nil, number)
			return who, who.MayOpen() == nil
		}
	}
	s := &Server{opts: o, store: st, log: o.Log}
	s.life, s.end = context.WithCancel(context.Background())
	s.mu.conns, s.mu.engines = make(map[net.Conn]struct{}), make(map[uint64]*engine)
	return s
}

// Listen serves a UNIX socket of mode 0600 until Close.
func (s *Server) Listen(ctx context.Context, path string) error {
	var l net.Listener
	err := takeover.ListenAgain(ctx, func(ctx context.Context) (err error) {
		removeStale(ctx, path)
		l, err = new(net.ListenConfig).Listen(ctx, "unix", path)
		return err
	})
	if err != nil {
		return err
	}
	if err := os.Chmod(path, 0o600); err != nil { // whatever the umask is
		return errors.Join(err, l.Close())
	}
	if !s.addListener(l) {
		return errors.Join(net.ErrClosed, l.Close())
	}
	s.store.Memory().MapAhead()
	s.wg.Go(func() { s.accept(l) })
	return nil
}

func (s *Server) addListener(l net.Listener) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.mu.closed {
		s.mu.listeners = append(s.mu.listeners, l)
	}
	return !s.mu.closed
}

// removeStale removes the socket file that a killed server left: one without a listener.
func removeStale(ctx context.Context, path string) {
	st, err := os.Lstat(path)
	if err != nil || st.Mode()&os.ModeSocket == 0 {
		return
	}
	c, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err == nil {
		_ = c.Close() // a server runs there: Listen returns the error
		return
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		_ = os.Remove(path) // if it fails, Listen returns the error
	}
}

// accept serves the connections to l.
func (s *Server) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // too many files are open
			s.log.Warn("an engine cannot connect", "err", err)
			select {
			case <-time.After(100 * time.Millisecond):
				continue
			case <-s.life.Done():
				return
			}
		}
		number, ok := s.addConn(c)
		if !ok {
			_ = c.Close() // the server ends
			return
		}
		s.wg.Go(func() {
			defer s.removeConn(c)
			s.serve(c.(*net.UnixConn), number)
		})
	}
}

func (s *Server) addConn(c net.Conn) (number uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return 0, false
	}
	s.mu.last++
	s.mu.conns[c] = struct{}{}
	return s.mu.last, true
}

func (s *Server) removeConn(c net.Conn) {
	_ = c.Close() // it may be closed already
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.conns, c)
}

// serve serves one connection until it ends.
func (s *Server) serve(c *net.UnixConn, number uint64) {
	conn := vllm.NewConn(c)
	e, err := s.greet(c, conn, number)
	if err != nil {
		s.n.refused.Add(1)
		if !errors.Is(err, io.EOF) {
			s.log.Warn("an engine is refused", "err", err)
			_ = c.SetWriteDeadline(time.Now().Add(time.Second))
			_ = conn.Write(vllm.TypeRefused, func(dst []byte) []byte { return append(dst, err.Error()...) }) // it may be gone
		}
		return
	}
	s.log.Info("an engine connected", "engine_id", e.hello.EngineID, "model", e.hello.Model, "vllm", e.hello.VLLM, "pid", e.caller.Peer.PID,
		"row_bytes", e.hello.RowBytes, "rows", e.hello.Rows)
	err = e.run()
	if errors.Is(err, vllm.ErrMalformed) {
		s.n.malformed.Add(1)
		s.log.Error("an engine sent a frame that cannot be read: its connection ends", "engine_id", e.hello.EngineID, "err", err)
	}
	// Nothing may be lent again before the engine can see that the connection has ended: it counts no row that it copied after that.
	_ = c.CloseWrite() // it may have ended
	ended := peerEnded(c)
	_ = c.Close()
	e.leave(ended)
	s.removeEngine(e)
	s.log.Info("an engine left", "engine_id", e.hello.EngineID, "model", e.hello.Model)
	s.sweepAfter(e)
}

// peerEnded waits until the peer has closed its side; an engine does so after its last copy. It reports false if this server ended and the
// peer did not close its side in time, perhaps because it is stopped: it may still copy later.
func peerEnded(c *net.UnixConn) bool {
	_, err := io.Copy(io.Discard, c)
	return !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrDeadlineExceeded)
}

// sweepAfter removes the region that an engine left, once its process has ended. That is a moment after the end of its socket, or never.
func (s *Server) sweepAfter(e *engine) {
	for wait := 5 * time.Millisecond; wait < time.Second && !e.region.process.Gone(); wait *= 2 {
		select {
		case <-time.After(wait):
		case <-s.life.Done():
			return
		}
	}
	s.Tick()
}

// errUser means that the peer may not map the pool.
var errUser = errors.New("this socket serves the server's own user alone")

// greet reads a peer's Hello and answers it.
func (s *Server) greet(c *net.UnixConn, conn *vllm.Conn, number uint64) (*engine, error) {
	_ = c.SetReadDeadline(time.Now().Add(s.opts.HelloTime))
	if s.life.Err() != nil {
		return nil, io.EOF
	}
	kind, body, file, err := conn.ReadFirst()
	if file != nil {
		defer file.Close()
	}
	if err == nil && kind != vllm.TypeHello {
		err = fmt.Errorf("%w: the first frame has type %d, it must be a Hello", vllm.ErrMalformed, kind)
	}
	if err != nil {
		return nil, err
	}
	_ = c.SetReadDeadline(time.Time{})
	if s.life.Err() != nil { // Close may have set a deadline, which was just removed
		return nil, io.EOF
	}
	caller, ok := s.opts.Identify(c, number) // only now: if Close left unread bytes here, the peer could not read the refusal
	if !ok {
		return nil, fmt.Errorf("%w: the peer is %s, the server uid %d", errUser, caller.String(), os.Geteuid())
	}
	hello, err := vllm.DecodeHello(body)
	if err != nil {
		return nil, err
	}
	region, err := s.region(&hello, file, &caller)
	if err != nil {
		return nil, err
	}
	if most := s.store.Files().Bytes(); hello.RowBytes > most {
		return nil, fmt.Errorf("%w: a row has %s, the pool %s", vllm.ErrHello, kv.FormatBytes(hello.RowBytes), kv.FormatBytes(most))
	}
	e := newEngine(s, conn, caller, hello, region)
	if err := s.addEngine(e); err != nil {
		return nil, err
	}
	if err := s.welcome(conn); err != nil {
		s.removeEngine(e)
		return nil, err
	}
	s.n.engines.Add(1)
	return e, nil
}

// welcome sends the pool's descriptor.
func (s *Server) welcome(conn *vllm.Conn) error {
	f, err := os.OpenFile(s.store.Files().Path(), os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the pool for an engine: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil && st.Sys().(*syscall.Stat_t).Ino != s.store.Files().Inode() {
		err = errors.New("another file has the pool's name: restart the server")
	}
	if err != nil {
		return fmt.Errorf("open the pool for an engine: %w", err)
	}
	w := vllm.Welcome{Protocol: vllm.Protocol, Version: s.opts.Version, PoolBytes: s.store.Files().Bytes()}
	return conn.WriteFile(vllm.TypeWelcome, w.Append, f)
}

// addEngine adds an engine. If its region is one that an earlier connection left, the region is in use again.
func (s *Server) addEngine(e *engine) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.engines) >= s.opts.MaxEngines {
		return fmt.Errorf("%w: %d engines are connected, the most at once", vllm.ErrHello, len(s.mu.engines))
	}
	s.mu.engines[e.caller.Number] = e
	s.mu.left = slices.DeleteFunc(s.mu.left, func(r Region) bool { return r.Name == e.region.Name && r.inode == e.region.inode })
	return nil
}

// removeEngine forgets an engine, and remembers its region: an engine that was killed leaves it behind.
func (s *Server) removeEngine(e *engine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.engines, e.caller.Number)
	for _, other := range s.mu.engines {
		if other.region.Name == e.region.Name && other.region.inode == e.region.inode {
			return // it is still used
		}
	}
	if e.region.inode != 0 && len(s.mu.left) < maxLeft {
		s.mu.left = append(s.mu.left, e.region)
	}
}

// Close ends all connections and all that they have lent, and waits for their goroutines. What an engine was writing stays held unless the
// engine closes its side, too. A running engine does so at once.
func (s *Server) Close() error {
	err := s.beginClose()
	s.wg.Wait()
	return err
}

func (s *Server) beginClose() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil
	}
	s.mu.closed = true
	s.end()
	for _, l := range s.mu.listeners {
		err = errors.Join(err, l.Close())
	}
	for c := range s.mu.conns {
		_ = c.(*net.UnixConn).CloseWrite()              // it may have ended by itself
		_ = c.SetDeadline(time.Now().Add(s.opts.Grace)) // also ends a write to a peer that reads nothing, which CloseWrite does not
	}
	return err
}
