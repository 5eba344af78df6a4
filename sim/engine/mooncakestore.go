// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/store/connector"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// storeConn is vLLM's MooncakeStoreConnector: one scheduler, and one worker per rank.
//
// Loads go directly into the request's blocks, which belong to the request until poll has reported the end of the load. The connector
// copies the blocks that it will store when they are computed, because the engine may give them to other requests before they are
// stored.
type storeConn struct {
	e       *Engine
	o       *kvconfig.MooncakeStore
	sched   *connector.Scheduler
	workers []*connector.Worker
	master  *store.Master
	te      *transfer.Client
	n       storeCounters
	loads   []chan struct{} // one per rank; capacity: loads at a time

	ctx   context.Context
	stop  context.CancelFunc
	going sync.WaitGroup

	requests map[string]*storeRequest // owned by the loop

	mu struct {
		sync.Mutex
		arrived, failed []string
	}
	saves   chan save      // closed at the end
	saving  sync.WaitGroup // the goroutine that stores saves
	waiting atomic.Int64   // bytes of the saves that wait
}

// storeRequest is the connector's state of a request. The loop owns it, except hit.
type storeRequest struct {
	prompt connector.Prompt
	saved  int // tokens about which it is decided whether to store them
	end    int // number of tokens at which the prefill ends
	lookup *lookup
	cancel context.CancelFunc // cancels its load; nil: it is not loading
	failed bool               // a load failed: the store is not asked again, because it would find the same objects
}

// lookup is a question to the store, in progress or answered.
type lookup struct {
	tokens  int
	done    chan struct{} // closed when the answer is there
	hit     int
	expires time.Time // when the lease of the objects found ends
}

// save is a copy of computed blocks that wait to be stored.
type save struct {
	prompt connector.Prompt
	blocks []connector.Block
	parts  [][][][]byte // by rank, then by block
	bytes  int64
}

const (
	lookupTimeout = 20 * time.Second
	loadTimeout   = 30 * time.Second
	saveTimeout   = 30 * time.Second

	// A hit whose request has got no blocks after this time is looked up again: leases end after 5 s or 10 s.
	hitLife = 3 * time.Second

	// maxSaves bounds the bytes that wait to be stored; blocks beyond that are not stored.
	maxSaves = 256 << 20
)

type storeCounters struct{ lookups, asked, batches, hitTokens, errors, skipped, queued atomic.Int64 }

// storeStats are the figures of the scheduler's side.
type storeStats struct {
	Lookups   int64 `counter:"kvasir_store_connector_lookups_total" help:"Prompts that Mooncake Store was asked for."`
	Keys      int64 `counter:"kvasir_store_connector_lookup_keys_total" help:"Keys that it was asked for."`
	Batches   int64 `counter:"kvasir_store_connector_lookup_batches_total" help:"Questions that it was asked them in."`
	HitTokens int64 `counter:"kvasir_store_connector_hit_tokens_total" help:"Tokens of the longest prefixes that every group can load."`
	Errors    int64 `counter:"kvasir_store_connector_lookup_errors_total" help:"Lookups that the store did not answer whole: the hit is what was known by then."`
	Skipped   int64 `counter:"kvasir_store_connector_skipped_total" help:"Blocks that were not stored because too much waited."`
	Queued    int64 `gauge:"kvasir_store_connector_loads_waiting" help:"Loads of a rank that wait for others to end. For long above 0: raise VLLM_MOONCAKE_LOAD_RECV_THREADS."`
	Waiting   int64 `gauge:"kvasir_store_connector_waiting_bytes" help:"Bytes that wait to be stored."`
}

func newStore(e *Engine, c *kvconfig.Config) (_ *storeConn, err error) {
	o, err := c.MooncakeStore(e.o.Getenv)
	if err != nil {
		return nil, err
	}
	g := &e.o.KV
	layout := coordinator.Layout{Scheduler: g.BlockTokens, HashUnit: g.BlockTokens}
	if e.o.Retention != nil {
		layout.Retention, layout.HasRetention = *e.o.Retention, true
	}
	var bytes []int64
	for _, group := range e.o.Groups {
		c := coordinator.Group{Kind: coordinator.Full, Block: g.BlockTokens}
		switch {
		case group.State:
			c.Kind = coordinator.Mamba
		case group.Window > 0:
			c.Kind, c.Window = coordinator.SlidingWindow, group.Window
		}
		layout.Groups = append(layout.Groups, c)
		bytes = append(bytes, int64(g.Layers*g.BlockBytes()))
	}
	k := &storeConn{e: e, o: o, requests: make(map[string]*storeRequest), saves: make(chan save, 1024)}
	k.ctx, k.stop = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, k.close(context.Background()))
		}
	}()
	if k.sched, err = connector.NewScheduler(connector.Options{
		Layout: layout, Release: e.o.StoreRelease, Model: e.o.Model, Prefix: o.Prefix, Ranks: g.TPSize, ObjectBytes: bytes,
	}); err != nil {
		return nil, err
	}
	if k.master, err = store.NewMaster(store.MasterOptions{Addresses: o.Masters, Tenant: o.Tenant}); err != nil {
		return nil, err
	}
	k.te = transfer.New(transfer.Options{Secrets: e.o.Secrets})
	client := store.NewClient(k.master, k.te, store.ClientOptions{Put: store.PutOptions{Segment: o.Segment}})
	for rank := range g.TPSize {
		k.workers = append(k.workers, connector.NewWorker(k.sched, rank, client, k.master))
		k.loads = append(k.loads, make(chan struct{}, o.Loads))
	}
	if len(o.Moot) > 0 {
		e.log.Info("these variables change nothing: the engine lends the store no memory and no disk", "variables", o.Moot)
	}
	k.saving.Go(k.save)
	return k, nil
}

func (k *storeConn) begin(q *request) {
	k.requests[q.r.ID] = &storeRequest{end: len(q.r.Tokens)}
}

// see gives the connector the current tokens of a request.
func (k *storeConn) see(q *request) *storeRequest {
	r := k.requests[q.r.ID]
	r.prompt.Tokens, r.prompt.Size = len(q.tokens), len(sched.Hash{})
	for i := r.prompt.Units(); i < len(q.tokens)/q.block; i++ {
		h := q.hash(i)
		r.prompt.Digests = append(r.prompt.Digests, h[:]...)
	}
	return r
}

func (k *storeConn) match(q *request, local int) (external int, async, ok bool) {
	if !k.o.Lookup { // a producer also looks up, as in vLLM
		return 0, false, true
	}
	r := k.see(q)
	if r.failed {
		return 0, false, true
	}
	if l := r.lookup; l == nil || l.tokens != len(q.tokens) || l.answered() && time.Now().After(l.expires) {
		r.lookup = k.look(r, len(q.tokens))
	}
	if !r.lookup.answered() {
		return 0, false, false
	}
	return max(0, r.lookup.hit-local), true, true
}

func (l *lookup) answered() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

// look begins to ask the store how long a prefix of the request it has; the result's `done` is closed when the answer is there, or after an
// error, which is counted and logged.
func (k *storeConn) look(r *storeRequest, tokens int) *lookup {
	l := &lookup{tokens: tokens, done: make(chan struct{})}
	prompt := r.prompt
	k.going.Go(func() {
		defer k.e.poke()
		defer close(l.done)
		began := time.Now()
		ctx, cancel := context.WithTimeout(k.ctx, lookupTimeout)
		defer cancel()
		hit, err := k.sched.Lookup(ctx, k.master, &prompt, tokens-1)
		l.hit, l.expires = hit.Tokens, began.Add(hitLife)
		k.n.lookups.Add(1)
		k.n.asked.Add(int64(hit.Keys))
		k.n.batches.Add(int64(hit.Batches))
		k.n.hitTokens.Add(int64(hit.Tokens))
		if err != nil && k.ctx.Err() == nil {
			k.n.errors.Add(1)
			k.e.log.Warn("the store did not answer a lookup", "err", err)
		}
	})
	return l
}

func (k *storeConn) allocated(q *request, external int) {
	r := k.see(q)
	l := r.lookup
	r.lookup = nil
	if external == 0 || l == nil {
		return
	}
	blocks, err := k.sched.Loads(nil, &r.prompt, q.local, q.local+external)
	if err != nil {
		k.e.log.Error("a load cannot be planned", "request", q.r.ID, "err", err)
	}
	parts := make([][][][]byte, len(k.workers))
	tables := q.s.Tables()
	blocks = slices.DeleteFunc(blocks, func(b connector.Block) bool { return tables[b.Group][b.Index] == 0 }) // block 0 is the null block
	for rank := range parts {
		for _, b := range blocks {
			parts[rank] = append(parts[rank], k.memory(rank, tables[b.Group][b.Index]))
		}
	}
	ctx, cancel := context.WithCancel(k.ctx)
	r.cancel = cancel
	id, prompt := q.r.ID, r.prompt
	failed := err
	k.going.Go(func() {
		defer k.e.poke()
		defer cancel()
		var wg sync.WaitGroup
		errs := make([]error, len(k.workers))
		for rank := range k.workers {
			wg.Go(func() { errs[rank] = k.load(ctx, rank, &prompt, blocks, parts[rank]) })
		}
		wg.Wait()
		failed = errors.Join(append(errs, failed)...)
		k.mu.Lock()
		defer k.mu.Unlock()
		k.mu.arrived = append(k.mu.arrived, id)
		if failed != nil {
			k.mu.failed = append(k.mu.failed, id)
			if k.ctx.Err() == nil && ctx.Err() == nil {
				k.e.log.Warn("KV could not be loaded from the store", "request", id, "err", failed)
			}
		}
	})
}

// load reads blocks of one rank. First it waits until fewer loads run on that rank.
func (k *storeConn) load(ctx context.Context, rank int, prompt *connector.Prompt, blocks []connector.Block, parts [][][]byte) error {
	k.n.queued.Add(1)
	select {
	case k.loads[rank] <- struct{}{}:
		k.n.queued.Add(-1)
	case <-ctx.Done():
		k.n.queued.Add(-1)
		return ctx.Err()
	}
	defer func() { <-k.loads[rank] }()
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	return errors.Join(k.workers[rank].Load(ctx, prompt, blocks, parts)...)
}

// memory returns the pieces of memory of a block of one rank, layer after layer.
func (k *storeConn) memory(rank int, b sched.BlockID) [][]byte {
	var parts [][]byte
	for _, layer := range k.e.mem.RankLayers(rank) {
		parts = k.e.o.KV.BlockParts(parts, layer, int(b))
	}
	return parts
}

// settle does nothing: blocks to be stored were copied, and loads have blocks of their own.
func (k *storeConn) settle(*sched.Step) error { return nil }

func (k *storeConn) build(*sched.Step) error { return nil }

// computed copies the prompt blocks that the step has completed, and those that came from the prefix cache.
func (k *storeConn) computed(step *sched.Step) {
	if k.o.Role == wire.Consumer && !k.o.SaveDecode {
		return
	}
	for i := range step.Rows {
		row := &step.Rows[i]
		q := of(row.Request)
		if k.requests[q.r.ID] == nil {
			continue // it ended because of wrong bytes
		}
		r := k.see(q)
		if row.Kind != sched.RowRunning { // it begins, or begins again
			r.saved, r.end = 0, row.Request.Tokens()
		}
		end := r.end
		if k.o.SaveDecode {
			end = len(q.tokens)
		}
		blocks, upto, err := k.sched.Stores(nil, r.saved, row.Before+row.Tokens, end)
		if err != nil {
			k.e.log.Error("a store cannot be planned", "request", q.r.ID, "err", err)
			continue
		}
		r.saved = upto
		tables := row.Request.Tables()
		blocks = slices.DeleteFunc(blocks, func(b connector.Block) bool { return tables[b.Group][b.Index] == 0 })
		if len(blocks) > 0 {
			k.offer(r, tables, blocks)
		}
	}
}

// offer queues a copy of blocks to be stored. If more than maxSaves bytes would wait, or the queue is full, it counts them as skipped.
func (k *storeConn) offer(r *storeRequest, tables [][]sched.BlockID, blocks []connector.Block) {
	g := &k.e.o.KV
	n := int64(len(blocks) * len(k.workers) * g.Layers * g.BlockBytes())
	if k.waiting.Load()+n > maxSaves {
		k.n.skipped.Add(int64(len(blocks)))
		return
	}
	s := save{prompt: r.prompt, blocks: blocks, parts: make([][][][]byte, len(k.workers)), bytes: n}
	for rank := range s.parts {
		for _, b := range blocks {
			s.parts[rank] = append(s.parts[rank], [][]byte{slices.Concat(k.memory(rank, tables[b.Group][b.Index])...)})
		}
	}
	k.waiting.Add(n)
	select {
	case k.saves <- s:
	default:
		k.waiting.Add(-n)
		k.n.skipped.Add(int64(len(blocks)))
	}
}

// save stores the queued blocks, until the connector is closed and the queue is empty.
func (k *storeConn) save() {
	for {
		select {
		case <-k.ctx.Done():
			return
		case s, ok := <-k.saves:
			if !ok {
				return
			}
			ctx, cancel := context.WithTimeout(k.ctx, saveTimeout)
			var failed error
			for rank, w := range k.workers {
				failed = errors.Join(append(w.Save(ctx, &s.prompt, s.blocks, s.parts[rank]), failed)...)
			}
			cancel()
			k.waiting.Add(-s.bytes)
			if failed != nil && k.ctx.Err() == nil {
				k.e.log.Warn("KV was not stored", "err", failed)
			}
		}
	}
}

func (k *storeConn) finish(q *request, _ sched.Reason) bool {
	if r := k.requests[q.r.ID]; r != nil && r.cancel != nil {
		r.cancel()
	}
	delete(k.requests, q.r.ID)
	return false
}

func (k *storeConn) poll([]string) (out sched.Output) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out.Arrived = k.mu.arrived
	out.Failed = slices.DeleteFunc(k.mu.failed, func(id string) bool { return k.requests[id] == nil }) // those requests have ended
	k.mu.arrived, k.mu.failed = nil, nil
	for _, id := range out.Failed {
		k.requests[id].failed = true
	}
	return out
}

func (k *storeConn) stats() storeStats {
	n := &k.n
	return storeStats{
		Lookups: n.lookups.Load(), Keys: n.asked.Load(), Batches: n.batches.Load(), HitTokens: n.hitTokens.Load(), Errors: n.errors.Load(),
		Skipped: n.skipped.Load(), Queued: n.queued.Load(), Waiting: k.waiting.Load(),
	}
}

func (k *storeConn) collect(reg *metrics.Registry, labels map[string]string) {
	metrics.AddWith(reg, labels, k.stats)
	metrics.AddWith(reg, labels, k.sched.Stats)
	for rank, w := range k.workers {
		metrics.AddWith(reg, withLabel(labels, "tp_rank", rank), w.Stats)
	}
}

// close ends the connector. Before that, it waits at most endTimeout until the computed blocks are stored.
func (k *storeConn) close(ctx context.Context) error {
	close(k.saves)
	storing, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	late := context.AfterFunc(storing, k.stop)
	k.saving.Wait()
	if !late() {
		k.e.log.Warn("the engine ends before all KV is stored", "err", context.Cause(storing))
	}
	k.stop()
	k.going.Wait()
	if k.te != nil {
		k.te.Close()
	}
	if k.master != nil {
		return k.master.Close()
	}
	return nil
}
