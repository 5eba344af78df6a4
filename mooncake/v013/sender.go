// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// SidePort returns the port of a worker's side channel. base is VLLM_MOONCAKE_BOOTSTRAP_PORT, 8998 by default.
func SidePort(base, dpRank, tpSize, tpRank int) int { return base + dpRank*tpSize + tpRank }

// Sender is the worker of a prefill engine by the protocol of vLLM 0.13: D finds it by host and port, and one answer ends a pull. Its
// methods are safe for concurrent use.
//
// It differs from vLLM where vLLM delivers wrong bytes or leaks memory: it fails a pull of a request that P does not know, and the
// requests of a failed pull expire like others.
type Sender struct {
	o      mooncake.SenderOptions // it uses Engine, Listen, Host, Transfer, AbortTimeout, Workers, MaxPulls, Metrics, Log
	cache  *mooncake.Cache
	own    memory
	log    *slog.Logger
	router *zmtp.Router
	addr   string
	ctx    context.Context
	cancel context.CancelFunc
	push   *mooncake.Pusher
	gate   *mooncake.Gate
	conns  *mooncake.Conns
	warn   mooncake.LogLimit // of log lines that D may cause
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		sends    *sendTable
		changed  chan struct{} // closed and renewed when a request may have become ready
		finished []string
	}
	failedPulls, expired, refused, disconnected atomic.Int64
}

// NewSender returns a Sender that does not listen yet. All regions must have blocks of one size, because pulls do not carry the size of
// D's blocks.
func NewSender(cache *mooncake.Cache, o mooncake.SenderOptions) (*Sender, error) {
	if err := cache.Check(); err != nil {
		return nil, err
	}
	own := memory{BlockBytes: cache.Regions[0].Stride}
	for i := range cache.Regions {
		r := &cache.Regions[i]
		if r.Stride != own.BlockBytes || r.Payload != r.Stride {
			return nil, fmt.Errorf("%w: All kv cache tensors must have the same size: %d bytes per block in layer %q, %d in layer %q",
				mooncake.ErrCache, own.BlockBytes, cache.Regions[0].Layer, r.Stride, r.Layer)
		}
		own.Bases = append(own.Bases, r.Base)
	}
	var err error
	if o.Engine, err = o.Engine.WithDefaults(); err != nil {
		return nil, err
	}
	if o.Transfer == nil {
		return nil, errors.New("mooncake: a Sender needs a transfer client")
	}
	o.Listen = cmp.Or(o.Listen, "tcp://127.0.0.1:*")
	o.AbortTimeout = cmp.Or(o.AbortTimeout, 480*time.Second)
	o.Workers = cmp.Or(o.Workers, 10)
	o.MaxPulls = cmp.Or(o.MaxPulls, 4096)
	s := &Sender{
		o: o, cache: cache, own: own, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)),
		push: mooncake.NewPusher(cache, o), gate: mooncake.NewGate(o.MaxPulls), conns: mooncake.NewConns(2 * o.MaxPulls),
	}
	cache.LogStart(s.log, o.Engine)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.mu.sends = newSendTable(o.AbortTimeout)
	s.mu.changed = make(chan struct{})
	return s, nil
}

// Start binds the side channel.
func (s *Sender) Start(ctx context.Context) error {
	var err error
	s.router, s.addr, err = mooncake.BindSideChannel(ctx, s.handle, s.conns, &s.o)
	return err
}

// Addr is the side channel's address, tcp://host:port, after Start.
func (s *Sender) Addr() string { return s.addr }

// Close stops listening, ends the pulls in progress and waits until their pushes have stopped. The Sender does not touch the engine's
// memory after Close.
func (s *Sender) Close() error {
	s.cancel()
	if s.router == nil {
		return nil
	}
	err := s.router.Close()
	s.wg.Wait()
	return err
}

// Apply carries out what the scheduler has decided in one step.
func (s *Sender) Apply(m *wire.Metadata) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range m.Sends {
		if e.Blocks == nil {
			s.mu.sends.announce(e.RequestID)
			continue
		}
		var ids []int
		if len(e.Blocks) > 0 {
			ids = e.Blocks[0]
		}
		s.mu.sends.ready(e.RequestID, ids, time.Now())
	}
	for _, id := range m.NotProcessed {
		s.mu.sends.drop(id)
	}
	close(s.mu.changed)
	s.mu.changed = make(chan struct{})
}

// Finished returns P's requests whose blocks may be reused, each once.
func (s *Sender) Finished() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := s.mu.sends.expire(time.Now())
	for _, id := range late {
		s.expired.Add(1)
		s.o.Metrics.Expire()
		s.log.Warn("mooncake: no D pulled in time, blocks freed", "request", id, "timeout", s.o.AbortTimeout)
	}
	list := append(s.mu.finished, late...)
	s.mu.finished = nil
	return list
}

// Stats returns the counters; those of functions that 0.13 lacks are 0.
func (s *Sender) Stats() mooncake.SenderStats {
	s.mu.Lock()
	n := int64(s.mu.sends.size())
	s.mu.Unlock()
	out := mooncake.SenderStats{
		Transfers: n, Pulls: int64(s.gate.Len()), FailedPulls: s.failedPulls.Load(), Expired: s.expired.Load(),
		Refused: s.refused.Load(), Disconnected: s.disconnected.Load(),
	}
	s.push.Count(&out)
	return out
}

// handle receives one message of D: an empty frame and a pull.
func (s *Sender) handle(peer *zmtp.Peer, m zmtp.Message) {
	err := fmt.Errorf("%w: %d frames instead of an empty one and a pull", wire.ErrMessage, len(m))
	if len(m) == 2 && len(m[0]) == 0 {
		if err = s.take(peer, m[1]); err == nil {
			return
		}
	}
	s.refused.Add(1)
	s.warn.Warn(s.log, "mooncake: pull refused", "from", peer.RemoteAddr(), "err", err)
	s.reply(peer, wire.Reply013Failed)
}

// take decodes a pull and starts to answer it.
func (s *Sender) take(peer *zmtp.Peer, message []byte) error {
	p, err := wire.DecodePull013(message)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	ticket, err := s.gate.Enter(mooncake.PeerKey(peer, p.Host, p.Port), len(message), cancel)
	if err != nil {
		cancel(nil)
		return err
	}
	end := s.conns.Begin(peer)
	s.wg.Go(func() {
		defer end()
		defer ticket.Leave()
		defer cancel(nil)
		s.serve(ctx, peer, p)
	})
	return nil
}

func (s *Sender) reply(peer *zmtp.Peer, text string) {
	if peer.Send(nil, []byte(text)) == nil {
		peer.Flush()
	}
}

func (s *Sender) serve(ctx context.Context, peer *zmtp.Peer, p *wire.Pull013) {
	ctx, cancel := context.WithTimeout(ctx, s.o.AbortTimeout)
	defer cancel()
	s.wg.Go(func() {
		select {
		case <-peer.Done():
			cancel() // D may give the memory to other requests
		case <-ctx.Done():
		}
	})
	if err := s.answer(ctx, p); err != nil {
		s.failedPulls.Add(1)
		s.warn.Warn(s.log, "mooncake: pull failed", "from", peer.RemoteAddr(), "requests", mooncake.SomeNames(p.Requests), "err", err)
		s.reply(peer, wire.Reply013Failed)
		return
	}
	s.reply(peer, wire.Reply013Done)
}

// answer waits until all requests of the pull are ready, and pushes them in one batch.
func (s *Sender) answer(ctx context.Context, p *wire.Pull013) error {
	s.mu.Lock()
	held, err := s.mu.sends.hold(p.Requests)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	sent := false
	defer func() {
		s.mu.Lock()
		s.mu.finished = append(s.mu.finished, held.end(sent, time.Now())...)
		s.mu.Unlock()
	}()
	for {
		s.mu.Lock()
		waiting, err := held.waiting()
		changed := s.mu.changed
		s.mu.Unlock()
		if err != nil {
			return err
		}
		if !waiting {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for P side: %w", ctx.Err())
		}
	}
	start := time.Now()
	batch, err := s.own.plan(nil, p, held.blocks())
	if err != nil {
		return err
	}
	if len(batch) > 0 {
		errs, err := s.push.Write(ctx, sessionOf(p), batch, time.Since(start))
		for _, e := range errs {
			err = cmp.Or(err, e)
		}
		if err != nil {
			return fmt.Errorf("push to %s: Error in batch_transfer_sync_write: -1: %w", sessionOf(p), err)
		}
	}
	sent = true
	return nil
}
