// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// registration is a worker that is registered with a server.
type registration interface {
	Register(ctx context.Context) error
	EnsureRegistered(ctx context.Context) (again bool, err error)
	InstanceID() int64
	Close(ctx context.Context) error
	stale() bool
}

// lentClient is one registered worker that lends its KV: the server copies in and out of the worker's memory (lmcache_driven). Its methods
// are safe for concurrent use.
type lentClient struct {
	client   *lmcache.Client
	reg      lmcache.KVCache // immutable
	rank     int
	instance int64

	registering sync.Mutex // one registration at a time

	mu struct {
		sync.Mutex
		connection uint64 // number of the client's connection at the last registration
	}
}

// layoutName returns LMCache's name, HND or NHD, for the order of dimensions in a form.
func layoutName(f paged.Form) string {
	switch f {
	case paged.PlanesHND, paged.BlocksHND, paged.FusedHND:
		return "HND"
	}
	return "NHD"
}

// openLentClient registers a worker each of whose layers lies in a shared-memory segment of its own.
func openLentClient(ctx context.Context, client *lmcache.Client, o *WorkerOptions) (*lentClient, error) {
	p := o.Cache
	if len(o.Segments) != len(p.Layers) {
		return nil, fmt.Errorf("%w: %d segments for %d layers", ErrPaged, len(o.Segments), len(p.Layers))
	}
	shape, err := p.shape()
	if err != nil {
		return nil, err
	}
	stride := make([]int64, len(shape))
	n := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		stride[i] = n
		n *= shape[i]
	}
	w := &lentClient{client: client, rank: o.Parallel.Shard(), instance: rand.Int64()}
	w.reg = lmcache.KVCache{
		InstanceID: w.instance, Model: o.Model, WorldSize: o.Parallel.Shards(), EngineType: "vllm", KVLayout: layoutName(p.Form),
	}
	describe := func(i int) int {
		w.reg.Descriptors = append(w.reg.Descriptors, lmcache.Descriptor{
			Type: "cpu_shm", ShmName: "/" + o.Segments[i], Bytes: int64(len(p.Layers[i])), DType: p.DType, Shape: shape, Stride: stride, Device: "cpu",
		})
		return len(w.reg.Descriptors) - 1
	}
	all := make([]int, len(p.Layers))
	for i := range all {
		all[i] = i
	}
	for i, g := range defaultGroups(o.Groups) {
		info := lmcache.EngineGroup{ID: i, TokensPerBlock: p.BlockTokens, WindowTokens: -1, Recurrent: g.State}
		switch {
		case g.State:
			info.WindowTokens = p.BlockTokens // only the last block is needed
		case g.Window > 0:
			info.WindowTokens = g.Window
		}
		layers := g.Layers
		if len(layers) == 0 {
			layers = all
		}
		for _, l := range layers {
			info.Layers = append(info.Layers, describe(l)) // a layer that several groups share has a descriptor in each group
		}
		if hybrid(o.Groups) {
			w.reg.Groups = append(w.reg.Groups, info)
		}
	}
	return w, w.Register(ctx)
}

// shape returns the shape of a layer, in elements.
func (p *Paged) shape() ([]int64, error) {
	blocks, slots, heads, size := int64(p.Blocks), int64(p.BlockTokens), int64(p.Heads), int64(p.HeadSize)
	switch p.Form {
	case paged.PlanesNHD:
		return []int64{2, blocks, slots, heads, size}, nil
	case paged.BlocksNHD:
		return []int64{blocks, 2, slots, heads, size}, nil
	case paged.FusedNHD:
		return []int64{blocks, slots, heads, size}, nil
	case paged.PlanesHND:
		return []int64{2, blocks, heads, slots, size}, nil
	case paged.BlocksHND:
		return []int64{blocks, 2, heads, slots, size}, nil
	case paged.FusedHND:
		return []int64{blocks, heads, slots, size}, nil
	case paged.MLA:
		return []int64{blocks, slots, heads * size}, nil
	}
	return nil, fmt.Errorf("%w: the server cannot copy KV of form %v", ErrPaged, p.Form)
}

// InstanceID returns the random number under which the worker is registered.
func (w *lentClient) InstanceID() int64 { return w.instance }

func (w *lentClient) stale() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.client.Connections() != w.mu.connection
}

// Register registers the worker, also if it was registered before.
func (w *lentClient) Register(ctx context.Context) error {
	w.registering.Lock()
	defer w.registering.Unlock()
	return w.register(ctx)
}

// EnsureRegistered is as PoolClient.EnsureRegistered.
func (w *lentClient) EnsureRegistered(ctx context.Context) (again bool, err error) {
	return ensure(&w.registering, w.stale, func() error { return w.register(ctx) })
}

func (w *lentClient) register(ctx context.Context) error {
	connection := w.client.Connections()
	if err := w.client.RegisterKVCache(ctx, &w.reg); err != nil {
		return err
	}
	if connection == 0 { // this call made the first connection
		connection = w.client.Connections()
	}
	w.mu.Lock()
	w.mu.connection = connection
	w.mu.Unlock()
	return nil
}

// Close unregisters the worker. The server does not touch the worker's memory afterwards.
func (w *lentClient) Close(ctx context.Context) error {
	return w.client.UnregisterKVCache(ctx, w.instance)
}

func (w *lentClient) key(k lmcache.Key) *lmcache.Key {
	k.Model, k.WorldSize, k.Worker = w.reg.Model, w.reg.WorldSize, w.rank
	k.Readers = max(k.Readers, 1)
	return &k
}

// store asks the server to copy blocks out of the worker's memory. blocks has, for each group, the ids of the blocks of k's tokens [Start,
// End).
func (w *lentClient) store(ctx context.Context, k lmcache.Key, blocks [][]int) (bool, error) {
	c, err := w.client.StoreBlocks(ctx, w.key(k), w.instance, blocks)
	return c.OK, err
}

// load asks the server to copy k's range into blocks, except for the first `skip` tokens.
func (w *lentClient) load(ctx context.Context, k lmcache.Key, blocks [][]int, skip int) (bool, error) {
	c, err := w.client.RetrieveBlocks(ctx, w.key(k), w.instance, blocks, skip)
	return c.OK, err
}
