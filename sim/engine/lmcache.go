// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// lmcacheConn is lmcache's LMCacheMPConnector: one scheduler, and one worker per rank. Several servers share the workers equally, in
// the order of ranks.
type lmcacheConn struct {
	e        *Engine
	clients  []*lmcache.Client        // one per server
	caches   []*connector.ServerCache // one per server
	all      *connector.Servers
	sched    *connector.Scheduler
	workers  []*connector.Worker
	requests map[string]*connector.Request
	ops      []lmcache.LoadStore // loads and stores of the current step
	leaves   bool                // running requests give up blocks that leave a window
	chunks   chunkEvents
	arrived  map[string]int    // number of ranks whose load has ended
	freed    map[string][]bool // for ended requests: the ranks that need the blocks no more
}

// lmcacheDriven is the mode in which the server copies the bytes.
const lmcacheDriven = "lmcache_driven"

// startTimeout limits the calls to servers while an engine starts. It is the default of lmcache's mq_timeout; a longer mq_timeout extends it.
const startTimeout = 300 * time.Second

// noticeAfter is how long an engine waits for a server before it logs that it waits. A start with a server before 0.5.7
// takes half as long, because that server does not answer the negotiation.
const noticeAfter = 5 * time.Second

func newLMCache(e *Engine, c *kvconfig.Config) (_ *lmcacheConn, err error) {
	o, err := c.LMCache()
	if err != nil {
		return nil, err
	}
	groups := make([]connector.Group, len(e.o.Groups))
	sparse := false
	for i, g := range e.o.Groups {
		groups[i] = connector.Group{Window: g.Window, State: g.State}
		sparse = sparse || g != (sched.Group{})
	}
	if len(groups) == 1 && sparse && o.Mode != lmcacheDriven {
		return nil, fmt.Errorf("engine: LMCacheMPConnector: %s copies a single group as full attention, as LMCache's own workers do: a model of windows or states alone needs \"lmcache.mp.mp_transfer_mode\":%q", o.Mode, lmcacheDriven)
	}
	k := &lmcacheConn{e: e, leaves: sparse, requests: make(map[string]*connector.Request), arrived: make(map[string]int), freed: make(map[string][]bool)}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.close(context.Background()))
		}
	}()
	timeout := max(startTimeout, o.Timeout)
	ctx, cancel := context.WithTimeout(e.ctx, timeout)
	defer cancel()
	chunk, err := k.dial(ctx, o.Servers, timeout)
	if err != nil {
		return nil, err
	}
	for i, client := range k.clients {
		if len(groups) > 1 && o.Mode != lmcacheDriven && !client.Enveloped() {
			return nil, fmt.Errorf("engine: the cache server at %s is of a release before 0.5.7, or its chunk size was not negotiated: there %s copies one group of full attention; hybrid models need \"lmcache.mp.mp_transfer_mode\":%q", o.Servers[i], o.Mode, lmcacheDriven)
		}
	}
	g := &e.o.KV
	parallel := lmcache.Parallel{
		World: g.TPSize * e.o.PPSize, TP: g.TPSize, Servers: len(o.Servers), MLA: g.Layout == kvmem.MLA,
	}
	if _, err := parallel.Check(); err != nil {
		return nil, fmt.Errorf("engine: LMCacheMPConnector: %w", err)
	}
	for _, client := range k.clients {
		cache, err := connector.NewServerCache(client, connector.ServerCacheOptions{
			Model: e.o.Model, Parallel: parallel, ChunkTokens: chunk, CallTimeout: o.Timeout, Heartbeat: o.Heartbeat, Log: e.log,
		})
		if err != nil {
			return nil, err
		}
		k.caches = append(k.caches, cache)
	}
	k.all = connector.NewServers(k.caches...)
	so := connector.SchedulerOptions{BlockTokens: g.BlockTokens, ChunkTokens: chunk, Groups: groups, Log: e.log}
	if k.sched, err = connector.NewScheduler(k.all, so); err != nil {
		return nil, err
	}
	for rank := range parallel.World {
		parallel.Rank = rank
		server := rank / (parallel.World / len(o.Servers))
		stage, tp := rank/g.TPSize, rank%g.TPSize
		from, to := stage*g.Layers/e.o.PPSize, (stage+1)*g.Layers/e.o.PPSize
		var segments []string
		if o.Mode == lmcacheDriven {
			segments = e.segments[tp][from:to]
		}
		w, err := connector.OpenWorker(ctx, k.clients[server], connector.WorkerOptions{
			Model: e.o.Model, Parallel: parallel, ChunkTokens: chunk, ShmDir: e.o.ShmDir, CallTimeout: o.Timeout, Heartbeat: o.Heartbeat,
			Cache: &connector.Paged{
				Form: g.Layout.Form(), Layers: e.mem.RankLayers(tp)[from:to], Blocks: g.Blocks, BlockTokens: g.BlockTokens,
				Heads: g.RankHeads(), HeadSize: g.Row(), DType: "uint8",
			},
			Groups: groups, Segments: segments, MaxEvents: e.maxEvents(), Log: e.log,
		})
		if err != nil {
			return nil, fmt.Errorf("engine: register rank %d at %s: %w", rank, o.Servers[server], err)
		}
		e.log.Debug("the worker is registered", "rank", rank, "server", o.Servers[server], "instance", w.InstanceID())
		k.workers = append(k.workers, w)
		if parallel.Stores() {
			k.chunks.of++
		}
	}
	k.chunks.stored = make(map[kv.Hash]int)
	return k, nil
}

// dial connects to the servers, and returns the size of their chunks in tokens. The log names timeout, which is that of ctx.
func (k *lmcacheConn) dial(ctx context.Context, servers []string, timeout time.Duration) (chunk int, err error) {
	for i, url := range servers {
		client, err := lmcache.OpenClient(url, k.e.o.Cache)
		if err != nil {
			return 0, err
		}
		k.clients = append(k.clients, client)
		notice := time.AfterFunc(noticeAfter, func() {
			k.e.log.Info("waiting for the cache server", "server", url, "at_most", timeout)
		})
		n, err := k.chunkTokens(ctx, client)
		for errors.Is(err, lmcache.ErrDisconnected) && ctx.Err() == nil {
			select {
			case <-time.After(100 * time.Millisecond):
				n, err = k.chunkTokens(ctx, client)
			case <-ctx.Done():
			}
		}
		notice.Stop()
		if err != nil {
			return 0, fmt.Errorf("engine: the cache server at %s: %w", url, err)
		}
		if i > 0 && n != chunk {
			return 0, fmt.Errorf("engine: the cache server at %s has chunks of %d tokens, the one at %s of %d: give them one --chunk-size", url, n, servers[0], chunk)
		}
		chunk = n
	}
	return chunk, nil
}

// chunkTokens asks a server for the size of its chunks, which must be a multiple of the engine's block size.
func (k *lmcacheConn) chunkTokens(ctx context.Context, client *lmcache.Client) (int, error) {
	if k.e.o.Unnegotiated {
		return client.ChunkTokens(ctx)
	}
	return client.Negotiate(ctx, k.e.o.KV.BlockTokens)
}

func (k *lmcacheConn) begin(q *request) {
	k.requests[q.r.ID] = &connector.Request{ID: q.r.ID, Tokens: q.tokens, Salt: q.r.Salt}
	for _, w := range k.workers {
		w.Begin(q.r.ID)
	}
}

// update gives the connector the current state of a request.
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
	for _, w := range k.workers { // each store ends after its own timeout
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
			if len(row.Blocks[0]) > 0 { // every group gets the same number
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
	ops := slices.DeleteFunc(k.ops, func(op lmcache.LoadStore) bool { return k.requests[op.RequestID] == nil }) // they ended because of wrong bytes
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
		k.e.log.Warn("the cache was not told of the end of a request", "request", q.r.ID, "err", err)
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
			if k.requests[id] == nil { // it ended during its load, about which this rank reports no more
				out.Sent = k.free(id, rank, out.Sent)
			}
		}
		for _, id := range f.Sent {
			out.Sent = k.free(id, rank, out.Sent)
		}
	}
	return out
}

// free records that a rank no longer needs the blocks of an ended request. If no rank needs them any more, it appends the id to list.
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
	for i, cache := range k.caches {
		of := labels
		if len(k.caches) > 1 {
			of = withLabel(labels, "server", i)
		}
		metrics.AddWith(reg, of, cache.Stats)
	}
	for rank, w := range k.workers {
		of := withLabel(labels, "tp_rank", rank%k.e.o.KV.TPSize)
		if k.e.o.PPSize > 1 {
			of = withLabel(of, "pp_rank", rank/k.e.o.KV.TPSize)
		}
		metrics.AddWith(reg, of, w.Stats)
	}
}

// close ends the connector. Before that, it waits at most endTimeout until the computed blocks are stored.
func (k *lmcacheConn) close(ctx context.Context) error {
	var errs []error
	storing, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	for _, w := range k.workers {
		if err := w.Flush(storing); err != nil {
			k.e.log.Warn("the engine ends before all KV is stored", "err", err)
		}
	}
	for _, w := range k.workers {
		if err := w.Close(ctx); err != nil {
			k.e.log.Warn("the cache server did not learn of the end", "err", err)
		}
	}
	if k.sched != nil {
		k.e.log.Debug("the connector's scheduler ends", "requests", k.sched.Len())
	}
	if k.all != nil {
		_ = k.all.Flush(ctx) // it ends sessions; a server that is gone needs that not
	}
	for _, cache := range k.caches {
		cache.Close()
	}
	for _, client := range k.clients {
		errs = append(errs, client.Close())
	}
	return errors.Join(errs...)
}
