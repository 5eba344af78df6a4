// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Pusher pushes blocks from the memory of one P worker to workers of D. It bounds the pushes to each worker of D separately, so that a
// slow or dead worker delays no other.
type Pusher struct {
	cache   *Cache
	client  *transfer.Client
	metrics *Metrics
	log     *slog.Logger
	perPeer int // pushes at a time

	mu struct { // a leaf: no other lock is taken under it
		sync.Mutex
		peers map[string]*pushPeer // D workers with pushes that run or wait
	}

	pushed, bytes, descriptors, failed, planning, pushing atomic.Int64
}

// NewPusher returns a Pusher of the memory c. Of o it uses only Transfer, Workers, Metrics and Log.
func NewPusher(c *Cache, o SenderOptions) *Pusher {
	w := &Pusher{cache: c, client: o.Transfer, metrics: o.Metrics, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler)), perPeer: o.Workers}
	w.mu.peers = make(map[string]*pushPeer)
	return w
}

// pushPeer is a D worker with pushes that run or wait.
type pushPeer struct {
	slots chan struct{}

	// Guarded by Pusher.mu.
	users   int
	stalled chan struct{} // closed, and replaced, when a push makes no progress
}

var errStalledPeer = errors.New("mooncake: another push to this worker of D stalled, so this one was not begun")

// enter waits for a free slot among the pushes to the D worker at segment. When a running push to that worker stalls, all pushes that
// wait for a slot fail at once, so that they need not stall one after the other.
func (w *Pusher) enter(ctx context.Context, segment string) (p *pushPeer, err error) {
	w.mu.Lock()
	if p = w.mu.peers[segment]; p == nil {
		p = &pushPeer{slots: make(chan struct{}, w.perPeer), stalled: make(chan struct{})}
		w.mu.peers[segment] = p
	}
	p.users++
	stalled := p.stalled
	w.mu.Unlock()
	select {
	case p.slots <- struct{}{}:
		return p, nil
	case <-stalled:
		err = errStalledPeer
	case <-ctx.Done():
		err = ctx.Err()
	}
	w.forget(segment, p)
	return nil, err
}

func (w *Pusher) leave(segment string, p *pushPeer, err error) {
	if errors.Is(err, transfer.ErrStalled) {
		w.mu.Lock()
		close(p.stalled)
		p.stalled = make(chan struct{})
		w.mu.Unlock()
	}
	<-p.slots
	w.forget(segment, p)
}

func (w *Pusher) forget(segment string, p *pushPeer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.users--; p.users == 0 {
		delete(w.mu.peers, segment)
	}
}

// Write pushes a batch to the transfer engine at segment. errs has one result per descriptor; a non-nil err means that nothing was
// sent. planned is the time already spent on planning; the statistics count it.
func (w *Pusher) Write(ctx context.Context, segment string, batch []Descriptor, planned time.Duration) (errs []error, err error) {
	place, err := w.enter(ctx, segment)
	if err != nil {
		w.fail()
		return nil, err
	}
	var sent error
	defer func() { w.leave(segment, place, sent) }()
	start := time.Now()
	entries := make([]transfer.Entry, len(batch))
	total := int64(0)
	for i, d := range batch {
		mem := w.cache.Bytes(d.Src, d.Len)
		if mem == nil {
			w.fail()
			return nil, wire.Refusef(wire.CodeRange, "%d bytes at %#x are not in the KV cache", d.Len, d.Src)
		}
		entries[i] = transfer.Entry{Local: mem, Remote: d.Dst}
		total += int64(len(mem))
	}
	w.planning.Add(int64(planned + time.Since(start)))
	w.log.Debug("Sending kv_caches", "to", segment, "descriptors", len(batch), "bytes", total)
	start = time.Now()
	err = w.client.Write(ctx, segment, entries)
	sent = err
	took := time.Since(start)
	w.pushing.Add(int64(took))
	w.log.Debug("Sending kv_caches done", "to", segment, "took", took, "err", err)
	if err == nil {
		w.pushed.Add(1)
		w.bytes.Add(total)
		w.descriptors.Add(int64(len(batch)))
		w.metrics.Pushed(took, total, len(batch))
		return make([]error, len(batch)), nil
	}
	w.fail()
	if be, ok := errors.AsType[*transfer.BatchError](err); ok {
		return be.Errs, nil
	}
	return nil, err
}

func (w *Pusher) fail() {
	w.failed.Add(1)
	w.metrics.failPush()
}

// Count adds this Pusher's counters to s.
func (w *Pusher) Count(s *SenderStats) {
	s.Pushed, s.Bytes, s.Descriptors = w.pushed.Load(), w.bytes.Load(), w.descriptors.Load()
	s.FailedPushes, s.PlanningNanos, s.PushingNanos = w.failed.Load(), w.planning.Load(), w.pushing.Load()
}
