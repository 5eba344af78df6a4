// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// WorkerOptions configures an Worker. A zero field means its default.
type WorkerOptions struct {
	Model       string
	Parallel    lmcache.Parallel // this worker's place in its engine
	Cache       *Paged           // the worker's KV
	Groups      []Group          // KV cache groups of the layers; default one of full attention with all. A single group with a window or states needs Segments
	ChunkTokens int              // the server's chunk size; default: OpenWorker asks the server
	ShmDir      string           // default shm.Dir

	// Segments are the names of the shared-memory segments of Cache's layers, one for each layer: the server then copies in and out of them
	// (lmcache_driven). None: the worker copies in and out of the server's pool (engine_driven).
	Segments []string

	CallTimeout time.Duration // longest time of one operation; default 30 s
	Heartbeat   time.Duration // between pings; default 10 s
	NoHeartbeat bool          // the server counts as healthy until a call fails
	MaxQueue    int           // operations that wait; beyond it stores are dropped and loads fail; default 1024
	Concurrency int           // operations in progress; default 2
	MaxEvents   int           // KV events that wait for Events; beyond it the oldest are dropped; 0: no events
	Log         *slog.Logger  // nil discards
}

// Worker carries out the operations of an engine's scheduler on one worker's
// paged KV: the worker half of vLLM's LMCacheMPConnector. Its methods are safe
// for concurrent use and, but for Flush and Close, do not wait.
//
// While the server is unhealthy, stores are dropped and new loads fail at once. Operations in progress fail when their copy ends. If the
// server copies (Segments), only the server knows when that is, so they end with its answer or with the connection. The worker registers
// again when the server answers again, asks for it, or is reached over a new connection.
type Worker struct {
	client   *lmcache.Client // immutable
	w        registration    // immutable: pool or lent
	pool     *PoolClient
	lent     *lentClient
	grouped  *grouped // nil: one group of full attention, or lent
	bytes    uint64   // of a chunk
	o        WorkerOptions
	perChunk int // blocks
	health   *lmcache.Health
	ctx      context.Context
	stop     context.CancelFunc
	wg       sync.WaitGroup
	n        workerCounters

	mu struct {
		sync.Mutex
		wake    sync.Cond
		closed  bool
		queue   []*job
		running []*job
		ended   ledger
		events  []Event
		lost    int // events that were dropped since the last call of Events
	}
}

type job struct {
	lmcache.LoadStore
	parts int // number of operations that were merged into it
}

// OpenWorker registers a worker with the server of client, and starts the goroutines that Close ends. The caller closes client.
func OpenWorker(ctx context.Context, client *lmcache.Client, o WorkerOptions) (*Worker, error) {
	err := o.Validate()
	if err != nil {
		return nil, err
	}
	parallel, _ := o.Parallel.Check() // with its defaults
	if o.ChunkTokens == 0 {
		if o.ChunkTokens, err = client.ChunkTokens(ctx); err != nil {
			return nil, err
		}
	}
	layout, err := o.Cache.Layout(o.ChunkTokens)
	if err != nil {
		return nil, err
	}
	for i := range o.Groups {
		for _, l := range o.Groups[i].Layers {
			if l < 0 || l >= len(o.Cache.Layers) {
				return nil, fmt.Errorf("%w: group %d names layer %d, the cache has %d layers", ErrPaged, i, l, len(o.Cache.Layers))
			}
		}
	}
	o.Parallel = parallel
	o.CallTimeout = cmp.Or(o.CallTimeout, 30*time.Second)
	o.Heartbeat = cmp.Or(o.Heartbeat, 10*time.Second)
	o.MaxQueue = cmp.Or(o.MaxQueue, 1024)
	o.Concurrency = cmp.Or(o.Concurrency, 2)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	bytes, err := layout.Bytes()
	if err != nil {
		return nil, err
	}
	a := &Worker{client: client, o: o, perChunk: o.ChunkTokens / o.Cache.BlockTokens, bytes: uint64(bytes)}
	if len(o.Segments) > 0 {
		a.lent, err = openLentClient(ctx, client, &o)
		a.w = a.lent
	} else {
		po := PoolClientOptions{
			Model: o.Model, WorldSize: parallel.Shards(), Rank: parallel.Shard(), Layout: layout, BlockSize: o.Cache.BlockTokens, ShmDir: o.ShmDir,
		}
		if len(o.Groups) > 1 {
			a.grouped = newGrouped(&o)
			po.Groups, po.ChunkTokens = a.grouped.layouts, o.ChunkTokens
		}
		a.pool, err = OpenPoolClient(ctx, client, po)
		a.w = a.pool
	}
	if err != nil {
		return nil, err
	}
	a.mu.wake.L = &a.mu
	a.mu.ended.init()
	a.n.storeTimes, a.n.loadTimes = histogram.Times(), histogram.Times()
	a.ctx, a.stop = context.WithCancel(context.Background())
	a.health = lmcache.NewHealth(lmcache.HealthOptions{
		Interval: o.Heartbeat, Ping: a.ping, Recover: a.recover,
		Changed: func(healthy bool, why error) {
			o.Log.Warn("the cache server's health changed: worker", "instance", a.w.InstanceID(), "healthy", healthy, "err", why)
		},
	})
	if !o.NoHeartbeat {
		a.wg.Go(func() { a.health.Run(a.ctx) })
	}
	for range o.Concurrency {
		a.wg.Go(a.work)
	}
	return a, nil
}

// Healthy reports whether the worker takes the server for healthy: its pings succeed and it knows this worker.
func (a *Worker) Healthy() bool { return a.health.Healthy() }

// InstanceID returns the number under which the worker is registered.
func (a *Worker) InstanceID() int64 { return a.w.InstanceID() }

// ping pings the server. After a new connection it reports false, as if the server did not know the worker.
func (a *Worker) ping(ctx context.Context) (bool, error) {
	known, err := a.client.Ping(ctx, a.w.InstanceID())
	return known && !a.w.stale(), err
}

// recover registers again and withdraws all events so far with a Cleared event, because the server may be a new one with an empty cache.
func (a *Worker) recover(ctx context.Context) error {
	if err := a.w.Register(ctx); err != nil {
		return err
	}
	a.registered()
	return nil
}

func (a *Worker) registered() {
	a.n.registrations.Add(1)
	a.emit(Event{Kind: Cleared, Medium: medium, Model: a.o.Model})
}

// Load submits the Retrieves among ops, before the engine's step.
func (a *Worker) Load(ops []lmcache.LoadStore) { a.submit(ops, lmcache.Retrieve) }

// Save submits the Stores among ops, after the engine's step has computed their blocks. Of several workers with the same bytes only one
// stores.
func (a *Worker) Save(ops []lmcache.LoadStore) {
	if a.o.Parallel.Stores() {
		a.submit(ops, lmcache.Store)
	}
}

func (a *Worker) submit(ops []lmcache.LoadStore, d lmcache.Direction) {
	healthy := a.health.Healthy()
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range ops {
		if ops[i].Direction != d {
			continue
		}
		j := &job{LoadStore: ops[i], parts: 1}
		a.mu.ended.begin(&j.LoadStore)
		switch err := a.check(&j.LoadStore); {
		case err != nil:
			a.o.Log.Error("operation refused", "operation", d.String(), "request", j.RequestID, "err", err)
			a.failLocked(j)
		case !healthy || a.mu.closed:
			a.failLocked(j)
		case a.mergeLocked(j):
		case len(a.mu.queue) >= a.o.MaxQueue:
			a.failLocked(j)
		default:
			a.mu.queue = append(a.mu.queue, j)
		}
	}
	a.mu.wake.Broadcast()
}

// check returns an error for an operation that would touch memory outside its blocks or tokens.
func (a *Worker) check(op *lmcache.LoadStore) error {
	c := a.o.ChunkTokens
	if op.Start < 0 || op.Start%c != 0 || op.End%c != 0 || op.End <= op.Start || op.End > len(op.Tokens) || op.SkipFirst < 0 {
		return fmt.Errorf("%w: tokens [%d, %d) of %d, skipping %d, are not whole chunks of %d tokens", ErrPaged, op.Start, op.End, len(op.Tokens), op.SkipFirst, c)
	}
	if groups := max(1, len(a.o.Groups)); len(op.Blocks) != groups {
		return fmt.Errorf("%w: block ids of %d KV cache groups, the worker has %d", ErrPaged, len(op.Blocks), groups)
	}
	for _, ids := range op.Blocks {
		if n := (op.End - op.Start) / a.o.Cache.BlockTokens; len(ids) != n {
			return fmt.Errorf("%w: %d block ids, the tokens fill %d blocks", ErrPaged, len(ids), n)
		}
		if err := a.o.Cache.CheckIDs(ids); err != nil {
			return err
		}
	}
	return nil
}

// mergeLocked adds a store to an earlier one of the same request, if that still waits and ends where this one begins. Both then need only
// one prepare and one commit.
func (a *Worker) mergeLocked(j *job) bool {
	if j.Direction != lmcache.Store {
		return false
	}
	for i := len(a.mu.queue) - 1; i >= 0; i-- {
		q := a.mu.queue[i]
		if q.RequestID != j.RequestID {
			continue
		}
		if q.Direction != lmcache.Store || q.End != j.Start || q.Salt != j.Salt || !slices.Equal(q.Tokens[:q.End], j.Tokens[:q.End]) {
			return false
		}
		q.Tokens, q.End, q.parts = j.Tokens, j.End, q.parts+1
		blocks := make([][]int, len(q.Blocks)) // other ranks use the same lists, so they are not changed
		for g := range blocks {
			blocks[g] = slices.Concat(q.Blocks[g], j.Blocks[g])
		}
		q.Blocks = blocks
		a.n.merged.Add(1)
		return true
	}
	return false
}

func (a *Worker) failLocked(j *job) {
	if j.Direction == lmcache.Store {
		a.n.storesDropped.Add(1)
	} else {
		a.n.loadsFailed.Add(1)
	}
	a.mu.ended.end(j, false, a.o.Cache.BlockTokens)
}

// work carries out operations until Close.
func (a *Worker) work() {
	for {
		j := a.next()
		if j == nil {
			return
		}
		ok := a.do(j)
		a.mu.Lock()
		if i := slices.Index(a.mu.running, j); i >= 0 {
			a.mu.running = slices.Delete(a.mu.running, i, i+1)
		}
		a.mu.ended.end(j, ok, a.o.Cache.BlockTokens)
		a.mu.wake.Broadcast()
		a.mu.Unlock()
	}
}

// next waits for an operation that may run at the same time as those in progress. It returns nil after Close.
func (a *Worker) next() *job {
	a.mu.Lock()
	defer a.mu.Unlock()
	for {
		if a.mu.closed {
			return nil
		}
		for i, j := range a.mu.queue {
			if a.conflictsLocked(j) {
				continue
			}
			a.mu.queue = slices.Delete(a.mu.queue, i, i+1)
			a.mu.running = append(a.mu.running, j)
			return j
		}
		a.mu.wake.Wait()
	}
}

// conflictsLocked reports whether an operation in progress is of the same request or has the same key as j. A server pairs a prepare with
// its commit by instance and key, and the key does not name the request.
func (a *Worker) conflictsLocked(j *job) bool {
	for _, r := range a.mu.running {
		if r.RequestID == j.RequestID {
			return true
		}
		if r.Start == j.Start && r.End == j.End && r.Salt == j.Salt && r.Direction == j.Direction && slices.Equal(r.Tokens[:r.End], j.Tokens[:j.End]) {
			return true
		}
	}
	return false
}

// do carries out one operation and reports whether its bytes were copied. If the server does not answer, its health is checked at once.
func (a *Worker) do(j *job) bool {
	ctx, cancel := context.WithTimeout(a.health.Context(), a.o.CallTimeout)
	defer cancel()
	defer context.AfterFunc(a.ctx, cancel)()
	start := time.Now()
	err := ctx.Err()
	if err == nil {
		err = a.ensureRegistered(ctx)
	}
	if a.lent != nil {
		ctx = a.ctx // the server copies: the call ends with its answer or the connection, not before
	}
	ok := false
	if err == nil && j.Direction == lmcache.Store {
		ok, err = a.store(ctx, j)
	} else if err == nil {
		ok, err = a.load(ctx, j)
	}
	a.n.observe(j, ok, time.Since(start))
	if !ok || err != nil {
		a.o.Log.Debug("operation failed", "operation", j.Direction.String(), "request", j.RequestID, "err", err)
	}
	if errors.Is(err, lmcache.ErrDisconnected) || errors.Is(err, context.DeadlineExceeded) {
		a.health.Poke()
	}
	return ok && err == nil
}

func (a *Worker) ensureRegistered(ctx context.Context) error {
	again, err := a.w.EnsureRegistered(ctx)
	if again {
		a.registered()
	}
	return err
}

func (a *Worker) key(j *job) lmcache.Key {
	return lmcache.Key{
		Tokens: j.Tokens, Start: j.Start, End: j.End, RequestID: j.RequestID, Salt: j.Salt, Readers: a.o.Parallel.Readers(),
	}
}

// blocks returns the block ids of chunk i of the operation, for a model with one group.
func (a *Worker) blocks(j *job, i int) []int {
	return j.Blocks[0][i*a.perChunk : (i+1)*a.perChunk]
}

func (a *Worker) store(ctx context.Context, j *job) (bool, error) {
	if a.lent != nil {
		ok, err := a.lent.store(ctx, a.key(j), j.Blocks)
		if ok && err == nil {
			all := make([]int, (j.End-j.Start)/a.o.ChunkTokens)
			for i := range all {
				all[i] = i
			}
			a.n.storedBytes.Add(uint64(len(all)) * a.bytes)
			a.emitStored(j, all)
		}
		return ok, err
	}
	if a.grouped != nil {
		return a.storeGroups(ctx, j)
	}
	var kept []int
	n, err := a.pool.Store(ctx, a.key(j), a.o.ChunkTokens, func(i int, b []byte) {
		a.o.Cache.Gather(a.blocks(j, i), b)
		kept = append(kept, i)
	})
	if err != nil {
		return false, err
	}
	if n > 0 {
		a.n.storedBytes.Add(uint64(n) * a.bytes)
		a.emitStored(j, kept)
	}
	return n > 0 || len(kept) == 0, nil // slots that were not committed: the store was refused
}

func (a *Worker) load(ctx context.Context, j *job) (ok bool, err error) {
	if a.grouped != nil {
		return a.loadGroups(ctx, j)
	}
	if a.lent != nil {
		ok, err = a.lent.load(ctx, a.key(j), j.Blocks, j.SkipFirst)
	} else {
		ok, err = a.retrieve(ctx, j)
	}
	if ok && err == nil {
		a.n.loadedBytes.Add(uint64((j.End-j.Start)/a.o.ChunkTokens) * a.bytes)
	}
	return ok, err
}

func (a *Worker) retrieve(ctx context.Context, j *job) (bool, error) {
	return a.pool.Retrieve(ctx, a.key(j), a.o.ChunkTokens, func(i int, b []byte) {
		a.o.Cache.Scatter(a.blocks(j, i), b, max(0, j.SkipFirst-i*a.o.ChunkTokens))
	})
}

// Flush waits until no store waits or runs, or ctx ends. An engine must call it before the first step that reuses blocks which a preemption
// freed, or which left the window of a running request. A store in progress would otherwise store the new content of these blocks under the
// old key.
func (a *Worker) Flush(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.mu.wake.Broadcast()
	})()
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.storesLocked() && !a.mu.closed {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		a.mu.wake.Wait()
	}
	return nil
}

func (a *Worker) storesLocked() bool {
	store := func(j *job) bool { return j.Direction == lmcache.Store }
	return slices.ContainsFunc(a.mu.queue, store) || slices.ContainsFunc(a.mu.running, store)
}

// Close drops the operations that wait, lets those in progress end, unregisters the worker, and returns after the last goroutine. The
// client stays open.
func (a *Worker) Close(ctx context.Context) error {
	a.mu.Lock()
	a.mu.closed = true
	for _, j := range a.mu.queue {
		a.failLocked(j)
	}
	a.mu.queue = nil
	a.mu.wake.Broadcast()
	a.mu.Unlock()
	a.stop()
	a.wg.Wait()
	return a.w.Close(ctx)
}

// Begin informs the worker that a request of this id begins. If an earlier request of the same id has ended, Finished then also reports the
// end of the new one, even if no operation of it was submitted.
func (a *Worker) Begin(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.ended.forget(id)
}

// LoadErrors has the requests and blocks of failed loads.
type LoadErrors struct {
	Requests []string // sorted
	Blocks   []int    // sorted; all that a failed load may have written. Blocks that the load had to skip are intact
}

// LoadErrors returns the failed loads since the last call. A load that failed may have written some of its blocks: their content must not
// be used.
//
// vLLM: get_block_ids_with_load_errors.
func (a *Worker) LoadErrors() LoadErrors {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.ended.takeErrors()
}

// Finished has the requests whose loads or stores ended since the last call of Worker.Finished.
type Finished struct {
	Received []string // requests whose load ended, also a failed one; sorted
	Sent     []string // requests that the engine ended and whose blocks are free now; sorted
}

// Finished returns the requests whose loads have ended, and the requests that the engine ended, now (`ended`) or earlier, whose operations
// have all ended. Each end is reported once, even if the engine names a request repeatedly. A request that ended during its load is only in
// Received, which also frees its blocks.
//
// vLLM: get_finished.
func (a *Worker) Finished(ended []string) Finished {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.ended.take(ended)
}
