// SPDX-License-Identifier: Apache-2.0

// Package relay stands between a prefill engine and decode engines: towards D it is a P with a bootstrap directory and side channels of
// its own, towards P it is a D. It keeps the KV that passes, so that D can get it again without P.
//
//	D ── GET /query ──> Relay ── GET /query ──> P's bootstrap server
//	D ── pull T ──> side channel ── pull T, D's layout ──> P
//	                   memory <══════ push ═══════════════ P
//	D <════ push ═══ memory
//	D ── pull T#2 ─> side channel             (P is not asked)
//
// A pull makes the relay mirror D's regions (layers, groups, payloads) in its own
// memory and pull the same transfer from the real P under D's rank, so that P sends
// exactly what it would have sent to D. Then the relay pushes to D.
//
// A pull of a transfer id T always goes to P. Only T# followed by digits is served from memory, and only with KV of the current life of
// P. A life ends when one of P's side channels breaks or moves, or when P leaves the registry. The relay then drops the KV it kept of
// that life, unless Options.KeepAcrossRestarts is set.
//
// The relay speaks only the protocol of package mooncake: both neighbours may be
// unmodified vLLM engines (0.16 and later).
package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/arena"
	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// Options configures a Relay. A zero field means its default.
type Options struct {
	Upstream string // P's bootstrap server, http://host:port
	Host     string // host name that P and D dial; default 127.0.0.1

	// MemoryPath is a file on a memory file system. Open makes it, maps it and removes
	// its name at once. MemoryBytes is its size; default 1 GiB.
	MemoryPath  string
	MemoryBytes int64

	Timeout        time.Duration // for a pull from P; default 120 s
	RefreshTimeout time.Duration // for a query of Upstream; default 5 s
	RefreshEvery   time.Duration // how old the relay's copy of Upstream's directory may be; default 1 s
	MaxPulls       int           // most pulls of D at a time; default 1024

	// KeepAcrossRestarts says that the relay also serves KV of earlier lives of P, under any of P's engines, and also while P is down.
	// Set it only if no transfer id is ever used twice and P's weights never change.
	KeepAcrossRestarts bool

	// BlockBytes is the block size of engines before vLLM 0.19, whose pulls do not carry it: the bytes of one layer's keys or values in
	// a block, or of both where they lie together. 0 refuses such engines. A wrong size makes their requests fail.
	BlockBytes uint64

	// Prefixes allows transfer ids of the form T^PREFIX:n; see docs/how/mooncake.md. The relay then first pulls one block more than D
	// wants, to learn whether D wants the whole prompt.
	Prefixes bool

	Registry   bootstrap.ClientOptions // for Upstream: Token and TLS
	Networks   *auth.Networks          // networks from which P and D may reach the side channels and the transfer ports; nil: any
	Secrets    *auth.PeerSecrets       // secrets of which P and D must prove one on the transfer ports; nil: no proof is demanded
	AllowHosts []string                // host names, besides IP addresses, under which D may reach ServeHTTP

	Metrics *mooncake.Metrics // default none
	Log     *slog.Logger      // default none
}

// Relay is a KV relay for the engines of one bootstrap server. Its methods are safe
// for concurrent use.
type Relay struct {
	o       Options // immutable
	log     *slog.Logger
	up      *bootstrap.Client
	target  *transfer.Target  // P pushes to it
	client  *transfer.Client  // pushes to D
	sockets *mooncake.Sockets // connections to P
	memory  *shm.Segment
	gate    *mooncake.Gate  // bounds D's pulls
	conns   *mooncake.Conns // bounds D's connections
	web     http.Handler
	warn    mooncake.LogLimit // of log lines that peers may cause
	sglang  sync.Once         // of the warning about SGLang
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	last    transferlog.Log
	refresh chan struct{} // one token; only its holder queries Upstream

	releases chan struct{} // one token for each running release that no D asked for

	mu struct {
		sync.Mutex
		closed    bool
		asked     time.Time                   // when Upstream last answered
		failing   bool                        // the last query of Upstream failed
		engines   map[string]*engine          // by P's engine id
		text      []byte                      // the directory for D, encoded
		arena     *arena.Arena                // allocator of memory
		saved     map[savedKey]*savedTransfer // loading or loaded
		transfers map[transferKey]int         // how many entries of saved each transfer has
		order     int64                       // number of the last use, for the order of eviction
		free      map[*savedTransfer]struct{} // loaded and not in use: may be evicted
		loading   map[*savedTransfer]struct{}
		pending   map[string]int64 // bytes of running loads, by the D worker that pulled first
		freed     chan struct{}    // closed when memory becomes free or evictable; nil without waiters
		requests  map[requestKey]*request
	}
	stats stats
}

// Stats are counters since Open, except Engines, Kept and KeptBytes, which are current values.
type Stats struct {
	Engines   int64 `gauge:"kvasir_relay_engines" help:"Engines of P that are registered and relayed."`
	Kept      int64 `gauge:"kvasir_relay_kept_transfers" help:"Transfers whose KV is in memory."`
	KeptBytes int64 `gauge:"kvasir_relay_kept_bytes" help:"Memory that kept transfers take."`

	Pulled      int64            `counter:"kvasir_relay_pulled_total" help:"Transfers pulled from P."`
	PulledBytes int64            `counter:"kvasir_relay_pulled_bytes_total" help:"Bytes of KV pulled from P."`
	PrefixBytes int64            `counter:"kvasir_relay_prefix_bytes_total" help:"Bytes of KV copied from a prefix in memory instead of pulled."`
	Served      int64            // requests of D that were served
	FromMemory  int64            // requests of Served that needed no pull from P
	ServedFrom  map[string]int64 `counter:"kvasir_relay_served_total" label:"from" help:"Requests of D that were served, by where their KV came from."`
	PushedBytes int64            `counter:"kvasir_relay_pushed_bytes_total" help:"Bytes of KV pushed to D."`
	Failed      int64            `counter:"kvasir_relay_failed_total" help:"Requests of D that failed; D computes the prompt."`
	Evicted     int64            `counter:"kvasir_relay_evicted_total" help:"Transfers dropped to make room for others."`
	Dropped     int64            `counter:"kvasir_relay_dropped_total" help:"Transfers dropped because their P restarted or left."`
}

type stats struct {
	pulled, pulledBytes, prefixBytes, served, fromMemory, pushed, failed, evicted, dropped atomic.Int64
}

// Open creates the memory and opens the transfer ports. It does not wait for Upstream.
func Open(o Options) (*Relay, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Host = cmp.Or(o.Host, "127.0.0.1")
	o.MemoryBytes = cmp.Or(o.MemoryBytes, 1<<30)
	o.Timeout = cmp.Or(o.Timeout, 120*time.Second)
	o.RefreshTimeout = cmp.Or(o.RefreshTimeout, 5*time.Second)
	o.RefreshEvery = cmp.Or(o.RefreshEvery, time.Second)
	o.MaxPulls = cmp.Or(o.MaxPulls, 1024)
	r := &Relay{
		o: o, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), refresh: make(chan struct{}, 1), releases: make(chan struct{}, maxReleases),
		gate: mooncake.NewGate(o.MaxPulls), conns: mooncake.NewConns(4 * o.MaxPulls),
	}
	r.web = httpserver.Guard{AllowHosts: append([]string{o.Host}, o.AllowHosts...)}.Handler(http.HandlerFunc(r.serveHTTP))
	var err error
	if r.up, err = bootstrap.NewClient(o.Upstream, bootstrap.ClientOptions{Attempts: 1, Timeout: o.RefreshTimeout, Token: o.Registry.Token, TLS: o.Registry.TLS}); err != nil {
		return nil, err
	}
	if r.memory, err = shm.Create(o.MemoryPath, o.MemoryBytes); err != nil {
		return nil, fmt.Errorf("relay: prepare its memory: %w", err)
	}
	if err := r.memory.Unlink(); err != nil { // the mapping stays; so a killed relay leaves no file
		return nil, errors.Join(fmt.Errorf("relay: prepare its memory: %w", err), r.memory.Close())
	}
	if r.target, err = transfer.Listen(transfer.TargetOptions{Host: o.Host, Networks: o.Networks, Secrets: o.Secrets, Log: r.log}, transfer.NewTable()); err != nil {
		return nil, errors.Join(fmt.Errorf("relay: %w", err), r.memory.Close())
	}
	r.client = transfer.New(transfer.Options{Secrets: o.Secrets})
	r.sockets = mooncake.NewSockets(8)
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.mu.engines = make(map[string]*engine)
	r.mu.saved = make(map[savedKey]*savedTransfer)
	r.mu.transfers = make(map[transferKey]int)
	r.mu.free = make(map[*savedTransfer]struct{})
	r.mu.loading = make(map[*savedTransfer]struct{})
	r.mu.pending = make(map[string]int64)
	r.mu.requests = make(map[requestKey]*request)
	r.mu.arena = arena.New(o.MemoryBytes, memoryAlign)
	r.mu.text = []byte("{}")
	r.wg.Go(r.refreshLoop)
	return r, nil
}

// memoryAlign is the size of a page, so that no two transfers share a page.
const memoryAlign = 4096

var errClosed = errors.New("relay: closed")

// Close ends all pulls, waits until the pushes have stopped, and frees the memory.
func (r *Relay) Close() error {
	r.mu.Lock()
	r.mu.closed = true
	engines := r.mu.engines
	r.mu.engines = make(map[string]*engine)
	r.mu.Unlock()
	r.cancel()
	for _, e := range engines {
		e.close()
	}
	r.wg.Wait()
	r.sockets.Close()
	r.client.Close()
	err := errors.Join(r.target.Close(), r.up.Close())
	return errors.Join(err, r.memory.Close())
}

// Stats returns the counters.
func (r *Relay) Stats() Stats {
	r.mu.Lock()
	s := Stats{Kept: int64(len(r.mu.saved)), KeptBytes: r.mu.arena.Size() - r.mu.arena.Free()}
	for _, e := range r.mu.engines {
		if e.gone.IsZero() {
			s.Engines++
		}
	}
	r.mu.Unlock()
	c := &r.stats
	s.Pulled, s.PulledBytes, s.PrefixBytes = c.pulled.Load(), c.pulledBytes.Load(), c.prefixBytes.Load()
	s.Served, s.FromMemory, s.PushedBytes = c.served.Load(), c.fromMemory.Load(), c.pushed.Load()
	s.ServedFrom = map[string]int64{"memory": s.FromMemory, "p": s.Served - s.FromMemory}
	s.Failed, s.Evicted, s.Dropped = c.failed.Load(), c.evicted.Load(), c.dropped.Load()
	return s
}
