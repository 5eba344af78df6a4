// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

var (
	// ErrNoPool means that the server offers no shared memory, or refused the
	// registration.
	ErrNoPool = errors.New("connector: the server offers no shared-memory pool")
	// ErrSlot means that the server named a slot that does not fit the worker's
	// layout or the pool.
	ErrSlot = errors.New("connector: bad slot from the server")
	// ErrOneGroup means that the server is of a release before 0.5.7. In these releases a worker that copies its own KV can have only one
	// group of full attention.
	ErrOneGroup = errors.New("connector: the server is of a release before 0.5.7, in which hybrid models need lmcache_driven")
)

// PoolClientOptions configures a PoolClient.
type PoolClientOptions struct {
	Model     string
	WorldSize int // default 1
	Rank      int
	Layout    kv.Layout // of one chunk
	BlockSize int       // tokens per engine block; default 16
	ShmDir    string    // default shm.Dir

	// Groups are the object groups of a hybrid model, two or more, for chunks of ChunkTokens tokens; nil: one group of full attention. Only
	// servers of 0.5.7 accept several groups.
	Groups      []lmcache.GroupLayout
	ChunkTokens int
}

// PoolClient is one worker that is registered with a server. Its methods are safe for concurrent use.
type PoolClient struct {
	client   *lmcache.Client
	opts     PoolClientOptions
	layouts  []kv.Layout // layout of a chunk's object, by object group
	sizes    []int64     // bytes of a chunk's object, by object group
	instance int64

	registering sync.Mutex // one registration at a time

	mu struct {
		sync.RWMutex // held for reading while a transfer uses the mapping
		pool         *shm.Segment
		inline       bool   // the server offers no pool: objects are sent in messages
		epoch        uint64 // number of registrations so far
		connection   uint64 // number of the client's connection at the last registration
		closed       bool
	}
}

// OpenPoolClient registers a worker with the server of client, and maps the server's pool. The caller keeps client, and closes it.
func OpenPoolClient(ctx context.Context, client *lmcache.Client, o PoolClientOptions) (*PoolClient, error) {
	if o.WorldSize == 0 {
		o.WorldSize = 1
	}
	if o.BlockSize == 0 {
		o.BlockSize = 16
	}
	w := &PoolClient{client: client, opts: o, layouts: []kv.Layout{o.Layout}, instance: rand.Int64()}
	if len(o.Groups) > 1 {
		var err error
		if w.layouts, err = (&lmcache.EngineDriven{Groups: o.Groups, SinglePlane: o.Layout.SinglePlane}).Layouts(o.ChunkTokens); err != nil {
			return nil, err
		}
	}
	for _, l := range w.layouts {
		bytes, err := l.Bytes()
		if err != nil {
			return nil, err
		}
		w.sizes = append(w.sizes, bytes)
	}
	if err := w.Register(ctx); err != nil {
		return nil, err
	}
	return w, nil
}

// InstanceID returns the random number under which the worker is registered.
func (w *PoolClient) InstanceID() int64 { return w.instance }

// Register registers the worker, also if it was registered before, and maps the pool that the server names.
func (w *PoolClient) Register(ctx context.Context) error {
	w.registering.Lock()
	defer w.registering.Unlock()
	return w.register(ctx)
}

// EnsureRegistered registers again if the client has another connection than at the last registration, because the server may have
// forgotten the worker. again reports whether it did.
func (w *PoolClient) EnsureRegistered(ctx context.Context) (again bool, err error) {
	return ensure(&w.registering, w.stale, func() error { return w.register(ctx) })
}

// ensure calls register when stale reports true. Callers that wait at the same time share one
// registration.
func ensure(registering *sync.Mutex, stale func() bool, register func() error) (again bool, err error) {
	if !stale() {
		return false, nil
	}
	registering.Lock()
	defer registering.Unlock()
	if !stale() {
		return false, nil
	}
	err = register()
	return err == nil, err
}

func (w *PoolClient) stale() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.client.Connections() != w.mu.connection
}

func (w *PoolClient) epoch() uint64 {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.mu.epoch
}

// register does the work of Register, under w.registering.
func (w *PoolClient) register(ctx context.Context) error {
	l := w.opts.Layout
	if len(w.opts.Groups) > 1 && !w.client.Enveloped() {
		return fmt.Errorf("%w: %d object groups are registered", ErrOneGroup, len(w.opts.Groups))
	}
	connection := w.client.Connections()
	pool, err := w.client.RegisterEngineDriven(ctx, &lmcache.EngineDriven{
		InstanceID: w.instance, Model: w.opts.Model, WorldSize: w.opts.WorldSize, BlockSize: w.opts.BlockSize,
		Layers: l.Layers, Hidden: l.Hidden, DType: l.DType, SinglePlane: l.SinglePlane, PhysicalSlots: l.Slots, Groups: w.opts.Groups,
	})
	if err != nil {
		return err
	}
	var seg *shm.Segment
	inline := pool.ShmName == "" && w.client.Enveloped()
	if !inline {
		if seg, err = w.attach(pool); err != nil {
			return err
		}
	}
	if connection == 0 { // this call made the first connection
		connection = w.client.Connections()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	old := w.mu.pool
	w.mu.pool, w.mu.inline = seg, inline
	w.mu.epoch++
	w.mu.connection = connection
	if w.mu.closed {
		old, w.mu.pool = seg, nil
	}
	if old != nil {
		return old.Close()
	}
	return nil
}

// attach maps the pool that the server names.
func (w *PoolClient) attach(p lmcache.Pool) (*shm.Segment, error) {
	if p.ShmName == "" || p.Bytes <= 0 {
		return nil, ErrNoPool
	}
	path, err := shm.Path(w.opts.ShmDir, p.ShmName)
	if err != nil {
		return nil, err
	}
	seg, err := shm.Attach(path)
	if err != nil {
		return nil, fmt.Errorf("map the server's pool (same host, same user, same /dev/shm?): %w", err)
	}
	return seg, nil
}

// inline reports whether objects are sent in messages.
func (w *PoolClient) inline() bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.mu.inline
}

// Close waits for the transfers in progress, then unregisters the worker and unmaps the pool.
func (w *PoolClient) Close(ctx context.Context) error {
	err := w.client.UnregisterEngineDriven(ctx, w.instance)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.closed = true
	if w.mu.pool != nil {
		err = errors.Join(err, w.mu.pool.Close())
		w.mu.pool = nil
	}
	return err
}

// Beat pings the server, and registers again if the server does not know the worker.
func (w *PoolClient) Beat(ctx context.Context) error {
	ok, err := w.client.Ping(ctx, w.instance)
	if err != nil || ok {
		return err
	}
	return w.Register(ctx)
}

// key completes k with the fields that are the same in all keys of this worker.
func (w *PoolClient) key(k lmcache.Key) *lmcache.Key {
	k.Model, k.WorldSize, k.Worker = w.opts.Model, w.opts.WorldSize, w.opts.Rank
	k.Readers = max(k.Readers, 1)
	return &k
}

// Store writes the chunks of k's tokens [Start, End) to the server. It calls fill for each chunk that the server lacks: fill must write
// chunk i of the range into b, exactly one chunk of the pool, which is valid until fill returns. Store returns the number of chunks
// written: 0 without an error if there was nothing to store or the server has no room.
func (w *PoolClient) Store(ctx context.Context, k lmcache.Key, chunkTokens int, fill func(i int, b []byte)) (int, error) {
	return w.StoreGroups(ctx, k, chunkTokens, nil, func(_, i int, b []byte) { fill(i, b) })
}

// StoreGroups is Store for the objects of several groups: fill writes the object of chunk i and a group. skip has for each group, in
// ascending order, the positions in the range whose objects are not stored. StoreGroups returns the number of objects written.
func (w *PoolClient) StoreGroups(ctx context.Context, k lmcache.Key, chunkTokens int, skip [][]int, fill func(group, i int, b []byte)) (int, error) {
	key, epoch := w.key(k), w.epoch()
	n := (k.End - k.Start) / chunkTokens
	p, err := w.client.PrepareStore(ctx, key, w.instance, skip)
	if err == nil && w.inline() {
		return w.send(ctx, key, n, skip, fill)
	}
	if err != nil || len(p.Slots) == 0 {
		return 0, err
	}
	err = w.with(epoch, p.Slots, p.Groups, func(at, group int, b []byte) error {
		i := p.Indices[at]
		if i < 0 || i >= n || skips(skip, group, i) {
			return fmt.Errorf("%w: chunk %d of group %d is not one of the %d to store", ErrSlot, i, group, n)
		}
		fill(group, i, b)
		return nil
	})
	if err != nil {
		return 0, err // no commit is sent: the server discards the slots
	}
	ok, err := w.client.CommitStore(ctx, key, w.instance)
	if err != nil || !ok {
		return 0, err
	}
	return len(p.Slots), nil
}

func skips(skip [][]int, group, chunk int) bool {
	return group < len(skip) && slices.Contains(skip[group], chunk)
}

// send stores the objects of n chunks in one message. The message also has objects that the server may have already.
func (w *PoolClient) send(ctx context.Context, key *lmcache.Key, n int, skip [][]int, fill func(group, i int, b []byte)) (int, error) {
	e, objects := lmcache.Envelope{Groups: make([]lmcache.EnvelopeGroup, len(w.layouts))}, 0
	for g := range e.Groups {
		for i := range n {
			if skips(skip, g, i) {
				continue
			}
			b := make([]byte, w.sizes[g])
			fill(g, i, b)
			e.Groups[g].Chunks, e.Groups[g].Data = append(e.Groups[g].Chunks, i), append(e.Groups[g].Data, b)
			objects++
		}
	}
	if objects == 0 {
		return 0, nil
	}
	ok, err := w.client.CommitEnvelope(ctx, key, w.instance, w.layouts, &e)
	if err != nil || !ok {
		return 0, err
	}
	return objects, nil
}

// Retrieve loads the chunks of k's tokens [Start, End), which a lookup of the same request must have found. It calls `take` for each chunk
// i of the range; `take` must read b before it returns. Retrieve reports false for a miss.
func (w *PoolClient) Retrieve(ctx context.Context, k lmcache.Key, chunkTokens int, take func(i int, b []byte)) (bool, error) {
	return w.RetrieveGroups(ctx, k, chunkTokens, func(_, i int, b []byte) { take(i, b) })
}

// RetrieveGroups is Retrieve for the objects of several groups: `take` reads the object of chunk i and a group. For a group with a window
// `take` is called only for the last chunks of the range.
func (w *PoolClient) RetrieveGroups(ctx context.Context, k lmcache.Key, chunkTokens int, take func(group, i int, b []byte)) (bool, error) {
	key, epoch := w.key(k), w.epoch()
	p, err := w.client.PrepareRetrieve(ctx, key, w.instance)
	if p.Success {
		if n := (k.End - k.Start) / chunkTokens; len(p.Data) > 0 {
			err = w.unpack(p.Data, n, take)
		} else if err = w.expect(&p, n); err == nil {
			err = w.with(epoch, p.Slots, p.Groups, func(at, group int, b []byte) error {
				i := at
				if p.Groups != nil {
					i = p.Indices[at]
				}
				take(group, i, b)
				return nil
			})
		}
	}
	// A commit must also follow a refusal, and an answer that did not come in time. It informs the server that this worker does not touch the
	// slots any more.
	if err != nil || ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), lateCommit)
		defer cancel()
	}
	_, cerr := w.client.CommitRetrieve(ctx, key, w.instance)
	return p.Success && err == nil, errors.Join(err, cerr)
}

// needs returns how many of the last chunks a hit of n chunks needs of a group.
func (w *PoolClient) needs(group, n int) int {
	if len(w.layouts) == 1 || w.opts.Groups[group].WindowChunks == 0 {
		return n
	}
	return min(n, w.opts.Groups[group].WindowChunks)
}

// expect checks that the slots of a hit of n chunks are exactly the objects that the hit needs, each once.
func (w *PoolClient) expect(p *lmcache.PrepareRetrieve, n int) error {
	want := 0
	for g := range w.layouts {
		want += w.needs(g, n)
	}
	switch {
	case len(p.Slots) != want:
		return fmt.Errorf("%w: the hit needs %d slots, the server sent %d", ErrSlot, want, len(p.Slots))
	case p.Groups != nil && len(w.layouts) <= 1:
		return fmt.Errorf("%w: the server named KV groups for the slots, but the model has a single group", ErrSlot)
	case p.Groups == nil && len(w.layouts) > 1:
		return fmt.Errorf("%w: the server named no KV groups for the slots, but the model has %d groups", ErrSlot, len(w.layouts))
	}
	seen := make(map[[2]int]bool)
	for at, g := range p.Groups {
		i := p.Indices[at]
		if g < 0 || g >= len(w.layouts) || i < n-w.needs(g, n) || i >= n || seen[[2]int{g, i}] {
			return fmt.Errorf("%w: the hit of %d chunks does not need chunk %d of group %d, or it is there twice", ErrSlot, n, i, g)
		}
		seen[[2]int{g, i}] = true
	}
	return nil
}

// unpack calls `take` for each object of n chunks in a message.
func (w *PoolClient) unpack(data []byte, n int, take func(group, i int, b []byte)) error {
	e, err := lmcache.DecodeEnvelope(data, w.layouts, n)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrSlot, err)
	}
	for g := range e.Groups {
		need := w.needs(g, n)
		if got := e.Groups[g].Chunks; len(got) != need || need > 0 && got[0] != n-need { // the positions are ascending
			return fmt.Errorf("%w: the server sent chunks %v of group %d, the last %d of %d are needed", ErrSlot, got, g, need, n)
		}
	}
	for g := range e.Groups {
		for at, b := range e.Groups[g].Data {
			take(g, e.Groups[g].Chunks[at], b)
		}
	}
	return nil
}

// lateCommit bounds the time of the commit after a load that failed or exceeded its time.
const lateCommit = 500 * time.Millisecond

// with checks all slots, then calls f with the bytes and the group of each. It refuses slots of an earlier registration (epoch), because
// they are places in another pool.
func (w *PoolClient) with(epoch uint64, slots []lmcache.SlotAt, groups []int, f func(at, group int, b []byte) error) error {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if w.mu.pool == nil {
		return ErrNoPool
	}
	if w.mu.epoch != epoch {
		return fmt.Errorf("%w: the worker registered again after the server had named the slot", ErrSlot)
	}
	groupOf := func(at int) int {
		if groups == nil {
			return 0
		}
		return groups[at]
	}
	for at, s := range slots {
		g := groupOf(at)
		if g < 0 || g >= len(w.layouts) {
			return fmt.Errorf("%w: it is of group %d, the model has %d groups", ErrSlot, g, len(w.layouts))
		}
		if s.Length != w.sizes[g] || !slices.Equal(s.Shape, w.layouts[g].Shape()) || s.DType != w.layouts[g].DType {
			return fmt.Errorf("%w: it has %d bytes of %v %s, the layout has %d bytes of %s", ErrSlot, s.Length, s.Shape, s.DType, w.sizes[g], w.layouts[g].Fingerprint())
		}
		if s.Offset < 0 || s.Offset > w.mu.pool.Len()-s.Length {
			return fmt.Errorf("%w: %d bytes at offset %d lie outside the pool of %d bytes", ErrSlot, s.Length, s.Offset, w.mu.pool.Len())
		}
	}
	for at, s := range slots {
		if err := f(at, groupOf(at), w.mu.pool.Bytes(s.Offset, s.Length)); err != nil {
			return err
		}
	}
	return nil
}

// Lookup returns how many leading chunks of k's tokens all shards have, and pins them for k's request.
func (w *PoolClient) Lookup(ctx context.Context, k lmcache.Key) (chunks int, err error) {
	key := w.key(k)
	key.Worker = lmcache.AllWorkers
	return w.client.Lookup(ctx, key)
}

// FreeLookupLocks releases the pins of k's range.
func (w *PoolClient) FreeLookupLocks(ctx context.Context, k lmcache.Key) error {
	key := w.key(k)
	key.Worker = lmcache.AllWorkers
	return w.client.FreeLookupLocks(ctx, key)
}
