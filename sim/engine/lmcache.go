// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// lmcacheConn is lmcache's LMCacheMPConnector: one scheduler, and a worker for each rank.
type lmcacheConn struct {
	e        *Engine
	client   *lmcache.Client
	cache    *connector.ServerCache
	sched    *connector.Scheduler
	workers  []*connector.Worker
	requests map[string]*connector.Request
	ops      []lmcache.LoadStore // of the step
	leaves   bool                // blocks of requests that go on are given up: they leave a window
	arrived  map[string]int      // ranks whose load has ended
	freed    map[string][]bool   // of requests that have ended: ranks that need the blocks no more
}

// lmcacheDriven is the mode in which the server copies.
const lmcacheDriven = "lmcache_driven"

// startTimeout bounds the calls with which an engine begins.
const startTimeout = 30 * time.Second

func newLMCache(e *Engine, c *kvconfig.Config) (_ *lmcacheConn, err error) {
	o, err := c.LMCache()
	if err != nil {
		return nil, err
	}
	if len(o.Servers) > 1 {
		return nil, fmt.Errorf("engine: lmcache.mp.server_urls names %d servers; one is supported", len(o.Servers))
	}
	groups := make([]connector.Group, len(e.o.Groups))
	sparse := false
	for i, g := range e.o.Groups {
		groups[i] = connector.Group{Window: g.Window, State: g.State}
		sparse = sparse || g != (sched.Group{})
	}
	if (len(groups) > 1 || sparse) && o.Mode != lmcacheDriven {
		return nil, fmt.Errorf("engine: LMCacheMPConnector: %s copies one group of full attention, as LMCache's own workers do: hybrid models need \"lmcache.mp.mp_transfer_mode\":%q", o.Mode, lmcacheDriven)
	}
	k := &lmcacheConn{e: e, leaves: sparse, requests: make(map[string]*connector.Request), arrived: make(map[string]int), freed: make(map[string][]bool)}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.close(context.Background()))
		}
	}()
	if k.client, err = lmcache.NewClient(o.Servers[0]); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(e.ctx, startTimeout)
	defer cancel()
	chunk, err := k.client.Negotiate(ctx, e.o.KV.BlockTokens)
	for said := false; errors.Is(err, lmcache.ErrDisconnected) && ctx.Err() == nil; said = true {
		if !said {
			e.log.Info("waiting for the cache server", "server", o.Servers[0], "at_most", startTimeout)
		}
		select {
		case <-time.After(100 * time.Millisecond):
			chunk, err = k.client.Negotiate(ctx, e.o.KV.BlockTokens)
		case <-ctx.Done():
		}
	}
	if err != nil {
		return nil, fmt.Errorf("engine: the cache server at %s: %w", o.Servers[0], err)
	}
	g := &e.o.KV
	parallel := lmcache.Parallel{World: g.TPSize, TP: g.TPSize}
	so := connector.SchedulerOptions{BlockTokens: g.BlockTokens, ChunkTokens: chunk, Groups: groups}
	k.cache, err = connector.NewServerCache(k.client, connector.ServerCacheOptions{
		Model: e.o.Model, Parallel: parallel, ChunkTokens: chunk, CallTimeout: o.Timeout, Heartbeat: o.Heartbeat, Log: e.log,
	})
	if err != nil {
		return nil, err
	}
	if k.sched, err = connector.NewScheduler(k.cache, so); err != nil {
		return nil, err
	}
	for rank := range g.TPSize {
		parallel.Rank = rank
		var segments []string
		if o.Mode == lmcacheDriven {
			segments = e.segments[rank]
		}
		w, err := connector.OpenWorker(ctx, k.client, connector.WorkerOptions{
			Model: e.o.Model, Parallel: parallel, ChunkTokens: chunk, ShmDir: e.o.ShmDir, CallTimeout: o.Timeout, Heartbeat: o.Heartbeat,
			Cache: &connector.Paged{
				Form: paged.FusedHND, Layers: e.mem.RankLayers(rank), Blocks: g.Blocks, BlockTokens: g.BlockTokens,
				Heads: g.RankHeads(), HeadSize: g.HeadBytes, DType: "uint8",
			},
			Groups: groups, Segments: segments, Log: e.log,
		})
		if err != nil {
			return nil, fmt.Errorf("engine: register rank %d at %s: %w", rank, o.Servers[0], err)
		}
		k.workers = append(k.workers, w)
	}
	return k, nil
}

func (k *lmcacheConn) begin(q *request) {
	k.requests[q.r.ID] = &connector.Request{ID: q.r.ID, Tokens: q.tokens, Salt: q.r.Salt}
	for _, w := range k.workers {
		w.Begin(q.r.ID)
	}
}

// update shows the connector what is known of a request.
func (k *lmcacheConn) update(q *request) *connector.Request {
	r := k.requests[q.r.ID]
	r.Tokens, r.Hashes = q.tokens, len(q.tokens)/q.block
	r.Preempted = q.s.Status() == sched.Preempted
	return r
}

func (k *lmcacheConn) match(q *request, local int) (external int, async, ok bool) {
	m, err := k.sched.Match(k.update(q), local)
	if err != nil {
		k.e.log.Warn("the cache is not asked", "request", q.r.ID, "err", err)
		return 0, false, true
	}
	return m.Tokens, m.Async, !m.Pending
}

func (k *lmcacheConn) allocated(q *request, external int) {
	if err := k.sched.Allocated(k.update(q), ids(q.s.Tables(), 0), external); err != nil {
		k.e.log.Warn("the request goes on without the cache", "request", q.r.ID, "err", err)
	}
}

func (k *lmcacheConn) settle(step *sched.Step) error {
	if !k.leaves && len(step.Preempted)+len(step.Reset) == 0 {
		return nil
	}
	for _, w := range k.workers { // each store ends by its own timeout
		if err := w.Flush(k.e.ctx); err != nil {
			return err
		}
	}
	return nil
}

func (k *lmcacheConn) build(step *sched.Step) error {
	s := connector.Step{Scheduled: make(map[string]int, len(step.Rows))}
	for i := range step.Rows {
		row := &step.Rows[i]
		q := of(row.Request)
		if k.requests[q.r.ID] == nil {
			continue
		}
		k.update(q)
		s.Scheduled[q.r.ID] = row.Tokens
		switch row.Kind {
		case sched.RowNew:
			s.New = append(s.New, connector.NewRequest{ID: q.r.ID, Computed: row.Before})
		case sched.RowResumed:
			s.Cached = append(s.Cached, connector.CachedRequest{ID: q.r.ID, Resumed: true, Computed: row.Before})
		default:
			c := connector.CachedRequest{ID: q.r.ID, Computed: row.Before}
			if len(row.Blocks[0]) > 0 { // every group gets as many
				c.NewBlocks = ids(row.Blocks, 0)
			}
			s.Cached = append(s.Cached, c)
		}
	}
	var err error
	if k.ops, err = k.sched.Step(&s); err != nil {
		k.ops = nil
		return err
	}
	for _, w := range k.workers {
		w.Load(k.ops)
	}
	return nil
}

func (k *lmcacheConn) computed(*sched.Step) {
	ops := slices.DeleteFunc(k.ops, func(op lmcache.LoadStore) bool { return k.requests[op.RequestID] == nil }) // ended by wrong bytes
	for _, w := range k.workers {
		w.Save(ops)
	}
	k.ops = nil
}

func (k *lmcacheConn) finish(q *request, _ sched.Reason) bool {
	r := k.requests[q.r.ID]
	if r == nil {
		return false
	}
	delete(k.requests, q.r.ID)
	f, err := k.sched.Finish(r)
	if err != nil {
		k.e.log.Warn("the end of a request", "request", q.r.ID, "err", err)
	}
	return f.KeepBlocks
}

func (k *lmcacheConn) poll(ended []string) (out sched.Output) {
	failed := make(map[string]bool)
	for rank, w := range k.workers {
		f := w.Finished(ended)
		for _, id := range w.LoadErrors().Requests {
			if !failed[id] {
				failed[id] = true
				out.Failed = append(out.Failed, id)
				k.sched.LoadFailed(id)
				k.e.log.Warn("KV could not be loaded from the cache", "request", id)
			}
		}
		for _, id := range f.Received {
			if k.arrived[id]++; k.arrived[id] == len(k.workers) {
				delete(k.arrived, id)
				out.Arrived = append(out.Arrived, id)
			}
			if k.requests[id] == nil { // it ended during its load: this rank says no more of it
				out.Sent = k.free(id, rank, out.Sent)
			}
		}
		for _, id := range f.Sent {
			out.Sent = k.free(id, rank, out.Sent)
		}
	}
	return out
}

// free notes that a rank needs an ended request's blocks no more; it appends the id to list when
// none does.
func (k *lmcacheConn) free(id string, rank int, list []string) []string {
	if k.freed[id] == nil {
		k.freed[id] = make([]bool, len(k.workers))
	}
	k.freed[id][rank] = true
	if slices.Contains(k.freed[id], false) {
		return list
	}
	delete(k.freed, id)
	return append(list, id)
}

func (k *lmcacheConn) collect(reg *metrics.Registry, labels map[string]string) {
	metrics.AddWith(reg, labels, k.sched.Stats)
	metrics.AddWith(reg, labels, k.cache.Stats)
	for rank, w := range k.workers {
		metrics.AddWith(reg, with(labels, "tp_rank", rank), w.Stats)
	}
}

func (k *lmcacheConn) close(ctx context.Context) error {
	var errs []error
	for _, w := range k.workers {
		if err := w.Close(ctx); err != nil {
			k.e.log.Warn("the cache server did not learn of the end", "err", err)
		}
	}
	if k.cache != nil {
		_ = k.cache.Flush(ctx) // ends of sessions; a server that is gone needs none
		k.cache.Close()
	}
	if k.client != nil {
		errs = append(errs, k.client.Close())
	}
	return errors.Join(errs...)
}
