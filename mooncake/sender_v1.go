package mooncake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// SidePort returns the port of a V1 P worker's side channel.
func SidePort(base, dpRank, tpSize, tpRank int) int { return base + dpRank*tpSize + tpRank }

// SenderV1 is the worker of a prefill engine in the dialect of vLLM 0.13 to 0.15: D
// finds it by host and port, and one answer ends a pull. Its methods are safe for
// concurrent use.
//
// It departs from the original where that serves wrong bytes or leaks: a pull of a
// request that P does not know is answered as failed, and what a failed pull held
// expires like the rest.
type SenderV1 struct {
	o      SenderOptions // Engine, Listen, Host, Transfer, AbortTimeout, Workers, MaxPulls, Metrics, Log
	cache  *Cache
	own    OwnV1
	log    *slog.Logger
	router *zmtp.Router
	addr   string
	ctx    context.Context
	cancel context.CancelFunc
	push   *pusher
	gate   *Gate
	conns  *Conns
	warn   LogLimit // of what D may cause
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		sends    *SendsV1
		changed  chan struct{} // closed and renewed when a request may have become ready
		finished []string
	}
	failedPulls, expired, refused, disconnected atomic.Int64
}

// NewSenderV1 returns a SenderV1 that does not listen yet. All regions must have
// blocks of one size: V1 does not send theirs.
func NewSenderV1(cache *Cache, o SenderOptions) (*SenderV1, error) {
	if err := cache.check(); err != nil {
		return nil, err
	}
	own := OwnV1{BlockBytes: cache.Regions[0].Stride}
	for i := range cache.Regions {
		r := &cache.Regions[i]
		if r.Stride != own.BlockBytes || r.Payload != r.Stride {
			return nil, fmt.Errorf("%w: All kv cache tensors must have the same size: %d bytes per block in layer %q, %d in layer %q",
				ErrCache, own.BlockBytes, cache.Regions[0].Layer, r.Stride, r.Layer)
		}
		own.Bases = append(own.Bases, r.Base)
	}
	var err error
	if o.Engine, err = o.Engine.withDefaults(); err != nil {
		return nil, err
	}
	if o.Transfer == nil {
		return nil, errors.New("mooncake: a Sender needs a transfer client")
	}
	o.Listen = cmp.Or(o.Listen, "tcp://127.0.0.1:*")
	o.AbortTimeout = cmp.Or(o.AbortTimeout, 480*time.Second)
	o.Workers = cmp.Or(o.Workers, 10)
	o.MaxPulls = cmp.Or(o.MaxPulls, 4096)
	s := &SenderV1{
		o: o, cache: cache, own: own, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)),
		push: newPusher(cache, o), gate: NewGate(o.MaxPulls), conns: NewConns(2 * o.MaxPulls),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.mu.sends = NewSendsV1(o.AbortTimeout)
	s.mu.changed = make(chan struct{})
	return s, nil
}

// Start binds the side channel.
func (s *SenderV1) Start(ctx context.Context) error {
	var err error
	s.router, s.addr, err = bindSideChannel(ctx, s.handle, s.conns, &s.o)
	return err
}

// Addr is the side channel's address, tcp://host:port, after Start.
func (s *SenderV1) Addr() string { return s.addr }

// Close stops listening, ends the pulls in progress and waits for their pushes to
// stop. The engine's memory is not touched afterwards.
func (s *SenderV1) Close() error {
	s.cancel()
	if s.router == nil {
		return nil
	}
	err := s.router.Close()
	s.wg.Wait()
	return err
}

// Apply takes in what the scheduler has decided in one step.
func (s *SenderV1) Apply(m *Metadata) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range m.Sends {
		if e.Blocks == nil {
			s.mu.sends.Announce(e.RequestID)
			continue
		}
		var ids []int
		if len(e.Blocks) > 0 {
			ids = e.Blocks[0]
		}
		s.mu.sends.Ready(e.RequestID, ids, time.Now())
	}
	for _, id := range m.NotProcessed {
		s.mu.sends.Drop(id)
	}
	close(s.mu.changed)
	s.mu.changed = make(chan struct{})
}

// Finished returns P's requests whose blocks are free to be reused, each once.
func (s *SenderV1) Finished() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := s.mu.sends.Expire(time.Now())
	for _, id := range late {
		s.expired.Add(1)
		s.o.Metrics.expire()
		s.log.Warn("mooncake: nobody pulled in time, blocks freed", "request", id, "timeout", s.o.AbortTimeout)
	}
	list := append(s.mu.finished, late...)
	s.mu.finished = nil
	return list
}

// Stats returns the counters that V1 has.
func (s *SenderV1) Stats() SenderStats {
	s.mu.Lock()
	n := int64(s.mu.sends.Len())
	s.mu.Unlock()
	return SenderStats{
		Transfers: n, Pulls: int64(s.gate.Len()),
		Pushed: s.push.pushed.Load(), Bytes: s.push.bytes.Load(), Descriptors: s.push.descriptors.Load(),
		FailedPushes: s.push.failed.Load(), PlanningNanos: s.push.planning.Load(), PushingNanos: s.push.pushing.Load(),
		FailedPulls: s.failedPulls.Load(), Expired: s.expired.Load(), Refused: s.refused.Load(), Disconnected: s.disconnected.Load(),
	}
}

// handle takes one message: an empty frame and a pull.
func (s *SenderV1) handle(peer *zmtp.Peer, m zmtp.Message) {
	err := fmt.Errorf("%w: %d frames instead of an empty one and a pull", ErrMessage, len(m))
	if len(m) == 2 && len(m[0]) == 0 {
		if err = s.take(peer, m[1]); err == nil {
			return
		}
	}
	s.refused.Add(1)
	s.warn.Warn(s.log, "mooncake: pull refused", "from", peer.RemoteAddr(), "err", err)
	s.reply(peer, replyV1Failed)
}

// take starts the answer to a pull.
func (s *SenderV1) take(peer *zmtp.Peer, message []byte) error {
	p, err := DecodePullV1(message)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	ticket, err := s.gate.Enter(PeerKey(peer, p.Host, p.Port), len(message), cancel)
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

func (s *SenderV1) reply(peer *zmtp.Peer, text string) {
	if peer.Send(nil, []byte(text)) == nil {
		peer.Flush()
	}
}

func (s *SenderV1) serve(ctx context.Context, peer *zmtp.Peer, p *PullV1) {
	ctx, cancel := context.WithTimeout(ctx, s.o.AbortTimeout)
	defer cancel()
	s.wg.Go(func() {
		select {
		case <-peer.Done():
			cancel() // what D asked for is no longer D's to receive
		case <-ctx.Done():
		}
	})
	if err := s.answer(ctx, p); err != nil {
		s.failedPulls.Add(1)
		s.warn.Warn(s.log, "mooncake: pull failed", "from", peer.RemoteAddr(), "requests", some(p.Requests), "err", err)
		s.reply(peer, replyV1Failed)
		return
	}
	s.reply(peer, replyV1Done)
}

// answer waits until all requests of the pull are ready and pushes them in one
// batch.
func (s *SenderV1) answer(ctx context.Context, p *PullV1) error {
	s.mu.Lock()
	held, err := s.mu.sends.Hold(p.Requests)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	sent := false
	defer func() {
		s.mu.Lock()
		s.mu.finished = append(s.mu.finished, held.End(sent, time.Now())...)
		s.mu.Unlock()
	}()
	for {
		s.mu.Lock()
		waiting, err := held.Waiting()
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
	batch, err := s.own.Plan(nil, p, held.Blocks())
	if err != nil {
		return err
	}
	if len(batch) > 0 {
		errs, err := s.push.write(ctx, net.JoinHostPort(p.Host, strconv.Itoa(p.Port)), batch, time.Since(start))
		if err = cmp.Or(err, firstError(errs, 0, len(errs))); err != nil {
			return err
		}
	}
	sent = true
	return nil
}
