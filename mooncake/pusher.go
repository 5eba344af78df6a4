package mooncake

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/transfer"
)

// pusher writes batches from one worker's memory, a bounded number at a time.
type pusher struct {
	cache   *Cache
	client  *transfer.Client
	metrics *Metrics
	slots   chan struct{}

	pushed, bytes, descriptors, failed, planning, pushing atomic.Int64
}

func newPusher(c *Cache, o SenderOptions) *pusher {
	return &pusher{cache: c, client: o.Transfer, metrics: o.Metrics, slots: make(chan struct{}, o.Workers)}
}

// write writes a batch to a transfer engine. errs has one result per descriptor; err
// means that nothing was sent. planned is the time that the batch has cost already.
func (w *pusher) write(ctx context.Context, segment string, batch []Descriptor, planned time.Duration) (errs []error, err error) {
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
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
