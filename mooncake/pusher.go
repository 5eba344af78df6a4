package mooncake

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/transfer"
)

// pusher writes batches from one worker's memory, a bounded number at a time to each
// worker of D: one that is slow or dead holds up nobody else.
type pusher struct {
	cache   *Cache
	client  *transfer.Client
	metrics *Metrics
	perPeer int // pushes at a time

	mu struct { // a leaf
		sync.Mutex
		peers map[string]*pushPeer // those that are pushed to now
	}

	pushed, bytes, descriptors, failed, planning, pushing atomic.Int64
}

func newPusher(c *Cache, o SenderOptions) *pusher {
	w := &pusher{cache: c, client: o.Transfer, metrics: o.Metrics, perPeer: o.Workers}
	w.mu.peers = make(map[string]*pushPeer)
	return w
}

// pushPeer is a D worker that is pushed to, or waited for.
type pushPeer struct {
	slots chan struct{}

	// Guarded by pusher.mu.
	users   int
	stalled chan struct{} // closed when a push made no progress; then a new one
}

var errStalledPeer = errors.New("mooncake: D takes no bytes")

// enter waits for a place among the pushes to one D worker. Those that wait while a
// push stalls fail with it, instead of stalling one after the other.
func (w *pusher) enter(ctx context.Context, segment string) (p *pushPeer, err error) {
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

func (w *pusher) leave(segment string, p *pushPeer, err error) {
	if errors.Is(err, transfer.ErrStalled) {
		w.mu.Lock()
		close(p.stalled)
		p.stalled = make(chan struct{})
		w.mu.Unlock()
	}
	<-p.slots
	w.forget(segment, p)
}

func (w *pusher) forget(segment string, p *pushPeer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.users--; p.users == 0 {
		delete(w.mu.peers, segment)
	}
}

// write writes a batch to a transfer engine. errs has one result per descriptor; err
// means that nothing was sent. planned is the time that the batch has cost already.
func (w *pusher) write(ctx context.Context, segment string, batch []Descriptor, planned time.Duration) (errs []error, err error) {
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
			return nil, refusef(CodeRange, "%d bytes at %#x are not in the KV cache", d.Len, d.Src)
		}
		entries[i] = transfer.Entry{Local: mem, Remote: d.Dst}
		total += int64(len(mem))
	}
	w.planning.Add(int64(planned + time.Since(start)))
	start = time.Now()
	err = w.client.Write(ctx, segment, entries)
	sent = err
	w.pushing.Add(int64(time.Since(start)))
	if err == nil {
		w.pushed.Add(1)
		w.bytes.Add(total)
		w.descriptors.Add(int64(len(batch)))
		w.metrics.Pushed(time.Since(start), total, len(batch))
		return make([]error, len(batch)), nil
	}
	w.fail()
	if be, ok := errors.AsType[*transfer.BatchError](err); ok {
		return be.Errs, nil
	}
	return nil, err
}

func (w *pusher) fail() {
	w.failed.Add(1)
	w.metrics.failPush()
}
