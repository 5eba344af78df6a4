// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// SenderOptions configures a Sender. A zero field means its default.
type SenderOptions struct {
	Engine Engine
	Self   Peer // this worker's place; TPSize 0 means 1
	DPRank int
	PPRank int

	// Listen is the address at which the side channel listens; default tcp://127.0.0.1:*. If its host is a wildcard, Host must be set:
	// the host name that D dials.
	Listen string
	Host   string
	// Bootstrap is where the worker registers; nil means nowhere.
	Bootstrap *bootstrap.Client
	// Lease is the time after which the registration expires unless the Sender renews it. The Sender renews it. Default: it never
	// expires, as with stock workers. vLLM's own bootstrap server ignores Lease.
	Lease time.Duration

	// Transfer pushes the blocks. The Sender does not close it.
	Transfer *transfer.Client

	// AbortTimeout is how long computed blocks wait for a pull, and a pull for blocks; default 480 s
	// (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT).
	AbortTimeout time.Duration
	// RetryTimeout is how long blocks stay after the pull of a Kvasir D failed or its connection ended, so that D may pull again;
	// default 10 s.
	RetryTimeout time.Duration

	Workers      int // pushes at a time to one D worker; default 10 (num_workers)
	MaxPulls     int // pulls that wait or run; more are refused; default 4096
	MaxTransfers int // transfers that D pulls and P does not know yet; a pull that would add more is refused; default 65536

	Networks *auth.Networks // networks from which D may reach the side channel; nil: any

	Metrics *Metrics     // default none
	Log     *slog.Logger // default none
}

// Engine names an engine and how its transfers are carried.
type Engine struct {
	ID       string // default random
	InitMode string // default and only choice P2PHANDSHAKE
	Protocol string // default and only choice tcp
	Device   string // of RDMA; must be empty
}

// WithDefaults sets empty fields to their defaults and refuses unsupported values.
func (e Engine) WithDefaults() (Engine, error) {
	e.ID = cmp.Or(e.ID, strings.ToLower(rand.Text()))
	e.InitMode = cmp.Or(e.InitMode, "P2PHANDSHAKE")
	e.Protocol = cmp.Or(e.Protocol, "tcp")
	switch {
	case e.InitMode != "P2PHANDSHAKE":
		return e, fmt.Errorf("mooncake: init mode %q: only P2PHANDSHAKE, without a metadata server, is supported", e.InitMode)
	case e.Protocol != "tcp":
		return e, fmt.Errorf("mooncake: protocol %q: only tcp is supported; give the peer mooncake_protocol=tcp", e.Protocol)
	case e.Device != "":
		return e, fmt.Errorf("mooncake: device name %q: protocol tcp uses none", e.Device)
	}
	return e, nil
}

// Sender is the worker of a prefill engine: it answers the pulls of D workers and pushes blocks into their memory. Its methods are safe
// for concurrent use. Only Start and Close wait for other processes.
type Sender struct {
	o      SenderOptions // immutable after Start
	cache  *Cache
	log    *slog.Logger
	router *zmtp.Router
	addr   string
	ctx    context.Context // of the work in the background
	cancel context.CancelFunc
	push   *Pusher
	gate   *Gate
	conns  *Conns
	wg     sync.WaitGroup

	layouts layoutCache
	warn    LogLimit // of log lines that D may cause

	mu struct { // holders may not lock layouts
		sync.Mutex
		transfers map[string]*offer // by transfer id
		unknown   int               // transfers that only D has named
		finished  []string          // P's request ids that Finished returns next
		done      doneTransfers
	}
	stats senderStats
}

// offer is one transfer that P offers or D waits for. Guarded by Sender.mu.
type offer struct {
	id      string
	request string               // P's id; "" while only D knows the transfer
	blocks  [][]int              // valid when ready
	ready   bool                 // P has computed them
	expires time.Time            // zero until ready
	need    int                  // workers of D that must have the blocks; 0 until the first pull
	sent    map[dWorker]delivery // workers of D that have them
	busy    int                  // pushes in progress
	gone    bool                 // out of the table; if busy, reported when the pushes end
	short   bool                 // a pull of a Kvasir D failed: RetryTimeout applies
	waiting map[*pullAnswer]struct{}
}

// NewSender returns a Sender over the engine's memory. It listens only after Start.
func NewSender(cache *Cache, o SenderOptions) (*Sender, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if err := cache.Check(); err != nil {
		return nil, err
	}
	var err error
	if o.Engine, err = o.Engine.WithDefaults(); err != nil {
		return nil, err
	}
	if o.Transfer == nil {
		return nil, errors.New("mooncake: a Sender needs a transfer client")
	}
	o.Self.TPSize, o.Self.PPSize = max(o.Self.TPSize, 1), max(o.Self.PPSize, 1)
	o.Listen = cmp.Or(o.Listen, "tcp://127.0.0.1:*")
	o.AbortTimeout = cmp.Or(o.AbortTimeout, 480*time.Second)
	o.RetryTimeout = cmp.Or(o.RetryTimeout, 10*time.Second)
	o.Workers = cmp.Or(o.Workers, 10)
	o.MaxPulls = cmp.Or(o.MaxPulls, 4096)
	o.MaxTransfers = cmp.Or(o.MaxTransfers, 1<<16)
	s := &Sender{
		o: o, cache: cache, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)),
		push: NewPusher(cache, o), gate: NewGate(o.MaxPulls), conns: NewConns(2 * o.MaxPulls),
	}
	cache.LogStart(s.log, o.Engine)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.mu.transfers = make(map[string]*offer)
	return s, nil
}

// Start binds the side channel and registers the worker. If it returns an error, the Sender does not listen.
func (s *Sender) Start(ctx context.Context) error {
	var err error
	if s.router, s.addr, err = BindSideChannel(ctx, s.handle, s.conns, &s.o); err != nil {
		return err
	}
	if s.o.Bootstrap == nil {
		return nil
	}
	if err := s.register(ctx); err != nil {
		_ = s.router.Close()
		return err
	}
	if s.o.Lease > 0 {
		s.wg.Go(s.renew)
	}
	return nil
}

// BindSideChannel listens for pulls and gives each message to handle. addr is the address that D dials.
func BindSideChannel(ctx context.Context, handle zmtp.Handler, conns *Conns, o *SenderOptions) (r *zmtp.Router, addr string, err error) {
	r = zmtp.NewRouter(handle, conns.Options(zmtp.RouterOptions{
		MaxFrameBytes: MaxPullBytes, MaxMessageBytes: MaxPullBytes, Networks: o.Networks, Log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)),
	}))
	bound, err := r.Listen(ctx, o.Listen)
	if err != nil {
		return nil, "", fmt.Errorf("mooncake: bind the side channel: %w", err)
	}
	if addr, err = advertised(o.Listen, o.Host, bound); err != nil {
		_ = r.Close() // the first error is enough
		return nil, "", err
	}
	return r, addr, nil
}

// advertised returns the address that D dials: host, if set, else the host at which the listener is bound.
func advertised(listen, host string, bound net.Addr) (string, error) {
	own, port, err := net.SplitHostPort(bound.String())
	if err != nil {
		return "", fmt.Errorf("mooncake: the side channel must be on TCP, not %q", listen)
	}
	if ip := net.ParseIP(own); host == "" && (ip == nil || ip.IsUnspecified()) {
		return "", fmt.Errorf("mooncake: side channel on %q: Host must name the address that D dials", listen)
	}
	return "tcp://" + net.JoinHostPort(cmp.Or(host, own), port), nil
}

func (s *Sender) registration() bootstrap.Registration {
	return bootstrap.Registration{
		EngineID: s.o.Engine.ID, DPRank: s.o.DPRank, TPRank: s.o.Self.TPRank, PPRank: s.o.PPRank, Addr: s.addr,
		TPSize: s.o.Self.TPSize, PPSize: s.o.Self.PPSize, Lease: s.o.Lease,
	}
}

func (s *Sender) register(ctx context.Context) error {
	if err := s.o.Bootstrap.Register(ctx, s.registration()); err != nil {
		return fmt.Errorf("mooncake: register engine %s at %s: %w", s.o.Engine.ID, s.o.Bootstrap.Base(), err)
	}
	return nil
}

// renew repeats the registration every third of Lease until Close.
func (s *Sender) renew() {
	t := time.NewTicker(s.o.Lease / 3)
	defer t.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		}
		if err := s.register(s.ctx); err != nil && s.ctx.Err() == nil {
			s.log.Warn("mooncake: the registration cannot be renewed", "err", err)
		}
	}
}

// Addr is the side channel's address, tcp://host:port, after Start.
func (s *Sender) Addr() string { return s.addr }

// EngineID returns the id under which the bootstrap server lists the engine.
func (s *Sender) EngineID() string { return s.o.Engine.ID }

// Close stops listening, ends the pulls in progress, waits until their pushes have stopped, and unregisters the worker if the bootstrap
// server supports that. The Sender does not touch the engine's memory after Close.
func (s *Sender) Close() error {
	s.cancel()
	if s.router == nil {
		return nil
	}
	err := s.router.Close()
	s.wg.Wait()
	if s.o.Bootstrap != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if _, e := s.o.Bootstrap.Unregister(ctx, s.o.Engine.ID, s.o.DPRank, s.o.Self.TPRank, s.o.PPRank); e != nil {
			s.log.Debug("mooncake: unregister", "err", e) // vLLM's server has no such request
		}
	}
	return err
}

// Apply carries out what the scheduler has decided in one step.
func (s *Sender) Apply(m *wire.Metadata) {
	for _, e := range m.Sends {
		if e.Blocks == nil {
			s.Expect(e.RequestID, e.TransferID)
		} else {
			s.Offer(e.RequestID, e.TransferID, e.Blocks)
		}
	}
	for _, id := range m.NotProcessed {
		s.Abort(id)
	}
}

// Expect announces a request that P has begun to compute. If a Kvasir D waits for its transfer, the Sender tells D that P knows the
// transfer.
func (s *Sender) Expect(request, transferID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claimLocked(request, transferID)
}

// Offer announces that P has computed the request's blocks: one list of block ids per transferred group. P must not change or reuse
// these blocks until Finished names the request.
func (s *Sender) Offer(request, transferID string, blocks [][]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.claimLocked(request, transferID)
	e.blocks, e.ready = blocks, true
	e.expires = time.Now().Add(s.o.AbortTimeout)
	if e.short {
		e.expires = time.Now().Add(s.o.RetryTimeout)
	}
	e.wakeLocked()
}

// claimLocked returns the transfer transferID, which belongs to P's request from now on; it creates the transfer if there is none. If
// the transfer belongs to another request, claimLocked aborts that one first.
func (s *Sender) claimLocked(request, transferID string) *offer {
	e := s.mu.transfers[transferID]
	if e != nil && e.request != "" && e.request != request {
		s.log.Warn("mooncake: a new request has the transfer id of an earlier one, which is aborted", "transfer", transferID, "request", request, "taken_from", e.request)
		s.abortLocked(e)
		e = nil
	}
	s.mu.done.forget(transferID)
	if e == nil {
		e = &offer{id: transferID}
		s.mu.transfers[transferID] = e
	} else if e.request == "" {
		s.mu.unknown--
		e.wakeLocked()
	}
	e.request = request
	return e
}

func (e *offer) wakeLocked() {
	for p := range e.waiting {
		p.wakeUp()
	}
}

// Abort withdraws a transfer whose request P did not process or aborted; it ignores an
// unknown one. Pulls that wait for it fail. Blocks being pushed stay in use until the
// push ends. If the blocks were offered, Finished then names the request.
func (s *Sender) Abort(transferID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.mu.transfers[transferID]; e != nil {
		s.abortLocked(e)
	}
}

func (s *Sender) abortLocked(e *offer) {
	if e.request == "" {
		s.mu.unknown--
	}
	delete(s.mu.transfers, e.id)
	s.mu.done.add(e.id, nil)
	e.gone = true
	s.finishLocked(e)
	e.wakeLocked()
}

// finishLocked lists the request of a removed transfer for Finished, once no push reads its blocks any more.
func (s *Sender) finishLocked(e *offer) {
	if e.ready && e.busy == 0 {
		s.mu.finished = append(s.mu.finished, e.request)
	}
}

// Finished returns P's requests whose blocks may be reused, each once: every worker of D has the blocks, the request was aborted after
// Offer, or no pull came in time. An engine must call it after every step.
func (s *Sender) Finished() []string {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, e := range s.mu.transfers {
		if e.ready && e.busy == 0 && now.After(e.expires) {
			delete(s.mu.transfers, id)
			s.mu.done.add(id, nil)
			e.gone = true
			s.finishLocked(e)
			s.stats.expired.Add(1)
			s.o.Metrics.Expire()
			s.log.Warn("mooncake: no D pulled in time, blocks freed", "request", e.request, "transfer", id,
				"timeout", s.o.AbortTimeout)
		}
	}
	list := s.mu.finished
	s.mu.finished = nil
	return list
}
