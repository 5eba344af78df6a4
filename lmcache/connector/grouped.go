// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"slices"

	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// grouped describes the KV of a hybrid model whose worker copies it itself (engine_driven, since lmcache 0.5.7). Each chunk has one object
// for each group. For a group with states, or with a window smaller than a chunk, the object has only the last blocks of its chunk.
type grouped struct {
	layouts []lmcache.GroupLayout
	memory  []*paged.Group
	bytes   []int64 // of one object of each group
}

// newGrouped returns the grouped of a worker's groups, for chunks of o.ChunkTokens tokens.
func newGrouped(o *WorkerOptions) *grouped {
	p, x := o.Cache, &grouped{}
	all := p.group()
	for _, g := range o.Groups {
		m := &paged.Group{PerChunk: o.ChunkTokens / p.BlockTokens, Sparse: g.sparse()}
		m.Keep = m.PerChunk
		l := lmcache.GroupLayout{Hidden: p.Heads * p.HeadSize, DType: p.DType, TokensPerBlock: p.BlockTokens, Planes: all.Layers[0].View.Planes, Recurrent: g.State}
		switch {
		case g.State:
			m.Keep, l.WindowChunks = 1, 1
		case g.Window > 0:
			m.Keep = min(m.PerChunk, (g.Window+p.BlockTokens-1)/p.BlockTokens)
			l.WindowChunks = (g.Window + o.ChunkTokens - 1) / o.ChunkTokens
		}
		l.WindowTokens = m.Keep * p.BlockTokens
		m.Layers = all.Layers
		if len(g.Layers) > 0 {
			m.Layers = nil
			for _, i := range g.Layers {
				m.Layers = append(m.Layers, all.Layers[i])
			}
		}
		l.Layers = len(m.Layers)
		x.layouts, x.memory, x.bytes = append(x.layouts, l), append(x.memory, m), append(x.bytes, m.Bytes())
	}
	return x
}

// blocks returns the ids of the blocks in the object of a group and of chunk i of an operation.
func (x *grouped) blocks(j *job, group, i int) []int {
	m := x.memory[group]
	end := (i + 1) * m.PerChunk
	return j.Blocks[group][end-m.Keep : end]
}

// absent returns, for each group, the chunks of an operation of n chunks that lack a block because the engine has freed it.
func (x *grouped) absent(j *job, n int) [][]int {
	out := make([][]int, len(x.memory))
	for g, m := range x.memory {
		out[g] = []int{}
		for i := range n {
			if m.Sparse && slices.Contains(x.blocks(j, g, i), 0) {
				out[g] = append(out[g], i)
			}
		}
	}
	return out
}

// storeGroups carries out a store of a hybrid model.
func (a *Worker) storeGroups(ctx context.Context, j *job) (bool, error) {
	x, chunks := a.grouped, (j.End-j.Start)/a.o.ChunkTokens
	written, bytes := 0, int64(0)
	n, err := a.pool.StoreGroups(ctx, a.key(j), a.o.ChunkTokens, x.absent(j, chunks), func(group, i int, b []byte) {
		x.memory[group].Gather(b, x.blocks(j, group, i))
		written, bytes = written+1, bytes+x.bytes[group]
	})
	if err != nil {
		return false, err
	}
	if n > 0 {
		a.n.storedBytes.Add(uint64(bytes))
		all := make([]int, chunks)
		for i := range all {
			all[i] = i
		}
		a.emitStored(j, all)
	}
	return n > 0 || written == 0, nil // slots that were not committed: the store was refused
}

// loadGroups carries out a load of a hybrid model.
func (a *Worker) loadGroups(ctx context.Context, j *job) (bool, error) {
	x, bytes := a.grouped, int64(0)
	ok, err := a.pool.RetrieveGroups(ctx, a.key(j), a.o.ChunkTokens, func(group, i int, b []byte) {
		m := x.memory[group]
		before := i*a.o.ChunkTokens + (m.PerChunk-m.Keep)*a.o.Cache.BlockTokens // tokens of the range that come before those of the object
		m.Scatter(b, x.blocks(j, group, i), max(0, j.SkipFirst-before))
		bytes += x.bytes[group]
	})
	if ok && err == nil {
		a.n.loadedBytes.Add(uint64(bytes))
	}
	return ok, err
}
