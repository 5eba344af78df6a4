// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// recordAborted ends the requests that D aborted. A stock P may push the blocks of several requests together, so that one fenced block
// fails them all: with a stock P, recordAborted ends requests only when all that are left were aborted. If `asks` is true, the caller is
// about to send the pull, which would name the aborted requests again: then recordAborted ends them in any case.
func (t *pullConn) recordAborted(asks bool) {
	if !t.kvasir && !asks {
		for _, q := range t.left {
			if q.gaveUp() == nil {
				return
			}
		}
	}
	for id, q := range t.left {
		if why := q.gaveUp(); why != nil {
			t.recordResult(id, why)
		}
	}
}

// recordResult records this P worker's result of a request; a nil err means that the blocks are filled. The last worker's result
// settles the request.
func (t *pullConn) recordResult(id string, err error) {
	q := t.left[id]
	if q == nil {
		return // it has a result, or was not in the pull
	}
	delete(t.left, id)
	delete(t.unknown, id)
	r := t.r
	r.mu.Lock()
	if err != nil && q.err == nil {
		q.err = err
	}
	// After a failure P may go on writing. So may a P that read the pull over an
	// earlier connection.
	q.suspect = q.suspect || t.sent && (err != nil || t.resent)
	if t.resent && r.o.Dialect == nil {
		q.resent = append(q.resent, t.addr)
	}
	q.left--
	last := q.left == 0
	if last {
		q.settled, q.filled = true, q.err == nil
		if why := q.gaveUp(); why != nil && q.err == nil {
			q.err = why
		}
	}
	filled := last && q.err == nil
	r.mu.Unlock()
	if !last {
		return
	}
	if doubt := filled && r.needsArrivalCheck(q); doubt || filled && len(q.resent) > 0 {
		r.wg.Go(func() {
			r.confirmLife(q)
			if doubt && q.err == nil {
				r.awaitArrival(q)
			}
			r.settle(q)
			r.sendRelease(q)
		})
		return
	}
	if q.suspect { // a fence may take long: handle other replies meanwhile
		r.wg.Go(func() {
			r.settle(q)
			r.sendRelease(q)
		})
		return
	}
	r.settle(q)
	r.sendRelease(q)
}

// confirmLife checks a request that a P worker reported as filled only after the side channel broke. Another process may have the
// worker's address now, and may know a transfer of the same id. Every P registers before it answers pulls, so confirmLife fails the
// request unless the registry still lists that worker for the engine.
func (r *Receiver) confirmLife(q *receiving) {
	if len(q.resent) == 0 || empty(q.want.Blocks) {
		return
	}
	r.mu.Lock()
	delete(r.mu.engines, q.from) // so that workers queries the directory
	r.mu.Unlock()
	ctx, stop := context.WithTimeout(r.ctx, r.o.ConnectTimeout)
	defer stop()
	defer context.AfterFunc(q.ctx, stop)()
	now, err := r.workers(ctx, q.from)
	if err == nil && !now.sameShape(q.workers) {
		err = fmt.Errorf("%w: engine %s at %s has other ranks now", ErrNoEngine, q.from.EngineID, q.from.Bootstrap)
	}
	for _, addr := range q.resent {
		if err == nil && !slices.Contains(now.addrs, addr) {
			err = fmt.Errorf("%w: engine %s at %s has another worker than %s now", ErrNoEngine, q.from.EngineID, q.from.Bootstrap, addr)
		}
	}
	if err == nil {
		return
	}
	r.forgetEngine(q.from)
	r.mu.Lock()
	defer r.mu.Unlock()
	if q.err == nil {
		q.err = fmt.Errorf("the side channel broke, and P is not known to be the same: %w", err)
	}
}

// sendRelease pulls an aborted request once more, without blocks. That makes P, which may still be computing the request, free its
// blocks.
func (r *Receiver) sendRelease(q *receiving) {
	if r.o.KeepAtP || empty(q.want.Blocks) || q.filled || !errors.Is(q.err, ErrAborted) && !errors.Is(q.err, ErrTimeout) && !errors.Is(q.err, errWindowEnded) {
		return
	}
	_, _ = r.start(q.from, map[string]wire.Wanted{q.id: {TransferID: q.want.TransferID}}, releaseSuffix) // best effort
}

// releaseSuffix is appended to the key of a release, to distinguish it from the request's own pull.
const releaseSuffix = "#release"

func empty(blocks [][]int) bool {
	return !slices.ContainsFunc(blocks, func(g []int) bool { return len(g) > 0 })
}

// settle fences the request's blocks if a P may still write, and reports the result.
func (r *Receiver) settle(q *receiving) {
	nothing := empty(q.want.Blocks)
	if q.window != nil {
		if q.suspect && !nothing {
			ctx, cancel := context.WithTimeout(context.Background(), r.o.FenceTimeout)
			r.stats.fenced.Add(1)
			r.stats.cut.Add(int64(r.windows.fence(ctx, q.window, q.want.Blocks)))
			cancel()
		}
		r.windows.release(q.window, q)
	}
	switch {
	case q.err != nil:
		if !q.counted {
			r.stats.failed.Add(1)
		}
		r.o.Metrics.failRecv()
		r.warn.Warn(r.log, "mooncake: pull failed", "request", q.id, "transfer", q.want.TransferID, "err", q.err)
	case nothing:
		r.stats.released.Add(1)
	default:
		r.stats.received.Add(1)
		r.o.Target.Table().Observe()
	}
	r.mu.Lock()
	delete(r.mu.active, q.key)
	if !nothing {
		r.reportLocked(q)
	}
	q.group.left--
	last := q.group.left == 0
	r.mu.Unlock()
	close(q.done)
	q.giveUp(nil)
	if last {
		q.group.cancel()
	}
}

func (r *Receiver) reportLocked(q *receiving) {
	res := &r.mu.results
	res.Received = append(res.Received, q.id)
	if q.err == nil {
		return
	}
	if res.Failed == nil {
		res.Failed = make(map[string]error)
	}
	res.Failed[q.id] = q.err
	if len(r.cache.Kinds) == 1 {
		res.FailedBlocks = append(res.FailedBlocks, q.want.Blocks[0]...)
	}
}
