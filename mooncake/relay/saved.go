// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// savedKey names the part of a transfer that one D worker needs, in one life of P. D workers with other ranks, layers or payloads need
// other bytes.
type savedKey struct {
	engine       string // P's engine id; "" with Options.KeepAcrossRestarts
	life         int64
	transfer     string
	tpRank, size int
	pp           int
	layout       uint64
}

// savedTransfer is the KV of one transfer for one kind of D worker, in the relay's memory.
type savedTransfer struct {
	key    savedKey
	peer   string // the D worker that pulled it first
	cache  *mooncake.Cache
	blocks [][]int // ids in cache, by group; until done is closed, only the load may use it
	wants  []int   // number of blocks that D wants, by group; immutable
	off, n int64   // where it lies in the relay's memory; immutable
	whole  bool    // it has the prompt's first block; valid when done is closed
	// watched means that the relay was connected to all workers of P when the load began, so these were the processes of the key's
	// life. Immutable.
	watched bool
	// prefixed means that the first blocks are copies from another transfer.
	prefixed bool

	arrived transfer.Progress // counts the bytes that the load has received

	ctx    context.Context // ends when the load is cancelled
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when loaded or failed
	err    error         // valid when done is closed

	// Guarded by Relay.mu.
	users int
	used  int64 // number of the last use, from Relay.mu.order
	freed bool  // its memory was released
}

var errNotKept = errors.New("relay: the transfer is not in memory any more")

var errMemory = errors.New("relay: not enough memory")

// layoutOf returns a hash of all in D's regions that determines the bytes of a block: workers with equal hashes need the same bytes.
func layoutOf(regions []wire.Region) uint64 {
	var h xxh3.Hasher
	var b []byte
	for i := range regions {
		r := &regions[i]
		b = append(b[:0], r.Layer...)
		for _, v := range []int{len(r.Layer), r.Index, r.Group, len(r.Shared)} {
			b = binary.LittleEndian.AppendUint64(b, uint64(v))
		}
		for _, g := range r.Shared {
			b = binary.LittleEndian.AppendUint64(b, uint64(g))
		}
		b = binary.LittleEndian.AppendUint64(b, r.Payload)
		_, _ = h.Write(b) // never fails
	}
	return h.Sum64()
}

// keyLocked returns the key of a transfer for the D worker that sent pull, in P's current life.
func (e *engine) keyLocked(pull *wire.Pull, transfer string) savedKey {
	key := savedKey{e.id, e.life, transfer, pull.TPRank, pull.TPSize, pull.PPSize, layoutOf(pull.Regions)}
	if e.r.o.KeepAcrossRestarts {
		key.engine, key.life = "", 0
	}
	return key
}

func (r *Relay) useLocked(k *savedTransfer) {
	k.users++
	delete(r.mu.free, k)
	r.mu.order++
	k.used = r.mu.order
}

// release ends one use of k. If k is a load for which no request waits any more, release cancels it. If k failed or was dropped,
// release frees its memory with the last use.
func (r *Relay) release(k *savedTransfer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k.users--
	switch {
	case k.users == 1 && !isDone(k.done): // the load itself
		k.cancel(errNoWaiters)
	case k.users > 0:
	case k.err != nil || r.mu.saved[k.key] != k:
		r.freeLocked(k)
	default:
		r.mu.free[k] = struct{}{}
		r.notifyFreedLocked()
	}
}

// notifyFreedLocked wakes the loads that wait for memory.
func (r *Relay) notifyFreedLocked() {
	if r.mu.freed != nil {
		close(r.mu.freed)
		r.mu.freed = nil
	}
}

var errNoWaiters = errors.New("relay: no request waits for the load")

// transferKey names a transfer of one P, for all D workers together.
type transferKey struct{ engine, transfer string }

func (k *savedTransfer) transfer() transferKey { return transferKey{k.key.engine, k.key.transfer} }

// keepLocked enters k into the table of kept transfers, where requests find it.
func (r *Relay) keepLocked(k *savedTransfer) {
	r.mu.saved[k.key] = k
	r.mu.transfers[k.transfer()]++
}

// forgetLocked removes k from the table of kept transfers. Requests that use k keep it.
func (r *Relay) forgetLocked(k *savedTransfer) {
	if r.mu.saved[k.key] != k {
		return
	}
	delete(r.mu.saved, k.key)
	if r.mu.transfers[k.transfer()]--; r.mu.transfers[k.transfer()] == 0 {
		delete(r.mu.transfers, k.transfer())
	}
}

// hasTransfer reports whether the KV of a transfer is in memory, or is being loaded, for any D worker. shown is the engine id that D
// knows.
func (r *Relay) hasTransfer(shown, transfer string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.mu.engines {
		if e.shown != shown {
			continue
		}
		key := transferKey{e.id, transfer}
		if r.o.KeepAcrossRestarts {
			key.engine = ""
		}
		return r.mu.transfers[key] > 0
	}
	return false
}

// dropLocked removes k from the table. Its memory is freed with its last use.
func (r *Relay) dropLocked(k *savedTransfer) {
	r.forgetLocked(k)
	if k.users == 0 {
		r.freeLocked(k)
	}
}

func (r *Relay) freeLocked(k *savedTransfer) {
	r.forgetLocked(k)
	delete(r.mu.free, k)
	k.freed = true
	k.cache, k.blocks = nil, nil // ended requests may still point to k
	r.mu.arena.Release(k.off, k.n)
	r.notifyFreedLocked()
}

// mirror is a layout like that of D's regions, with room only for the blocks of one request. Its addresses begin at 0.
type mirror struct {
	cache  *mooncake.Cache
	blocks [][]int
	bytes  uint64
}

// newMirror lays out the blocks of one request in D's regions: each region's blocks lie one after the other, payload only. It fails if
// that takes more than limit bytes.
//
// The mirror's block ids of a group count from 1. If groups share a region, the ids count on through all groups, so that each block has
// its own memory there. Block id 0 is a placeholder in groups of recurrent state and a real block elsewhere. The pull does not say
// which, so 0 stays 0 and always gets memory.
func newMirror(regions []wire.Region, blocks [][]int, limit uint64) (*mirror, error) {
	m := &mirror{blocks: make([][]int, len(blocks))}
	c := &mooncake.Cache{Kinds: make([]mooncake.GroupKind, len(blocks)), In: make([]int, len(regions)), Regions: slices.Clone(regions)}
	m.cache = c
	for i := range c.Regions {
		if c.Regions[i].Group != wire.Unsent {
			continue
		}
		if len(blocks) != 1 {
			return nil, fmt.Errorf("relay: D does not say which of %d groups a region is of: it needs vLLM 0.25 or later", len(blocks))
		}
		c.Regions[i].Group = 0
	}
	shared := slices.ContainsFunc(c.Regions, func(m wire.Region) bool { return m.Group == wire.SharedGroup })
	first, end := make([]int, len(blocks)), make([]int, len(blocks)) // range of ids in use, per group
	next := 1
	for g, ids := range blocks {
		if !shared {
			next = 1
		}
		first[g] = next
		for _, id := range ids {
			if id == 0 {
				m.blocks[g] = append(m.blocks[g], 0)
				first[g] = 0
				continue
			}
			m.blocks[g] = append(m.blocks[g], next)
			next++
		}
		end[g] = next
	}
	for i := range c.Regions {
		g := &c.Regions[i]
		lo, hi := math.MaxInt, 0
		groups := g.Shared
		if g.Group != wire.SharedGroup {
			groups = []int{g.Group}
		}
		for _, k := range groups {
			if k < 0 || k >= len(blocks) {
				return nil, fmt.Errorf("relay: layer %.64q is of group %d, the request has %d groups", g.Layer, k, len(blocks))
			}
			if len(blocks[k]) > 0 {
				lo, hi = min(lo, first[k]), max(hi, end[k])
			}
		}
		g.Stride, g.RowOffset = g.Payload, wire.NoRow
		g.Base = m.bytes
		if lo < hi {
			n := uint64(hi - lo)
			g.Base -= uint64(lo) * g.Payload // before the storage, since the first ids are not used
			if g.Payload > limit || n > (limit-m.bytes)/g.Payload {
				return nil, fmt.Errorf("%w: the transfer's blocks do not fit into %d bytes", errMemory, limit)
			}
			m.bytes += n * g.Payload
		}
	}
	return m, nil
}

// maxLoading is the largest number of loads at a time, because each takes at least one region of the transfer table. One more load waits
// or fails as if memory were short; see newKept.
const maxLoading = transfer.MaxRegions / 2

// storageBase is the address of the relay's memory in its caches. The addresses below it are room for unused block ids, which lie
// before a storage.
const storageBase = 1 << 50

// newKept allocates memory for the blocks of one request of the D worker peer. The result has two users: the caller and the load. When
// memory is short, newKept first evicts unused transfers, least recently used first. Then it cancels the newest load of the D worker whose
// loads take the most memory; if no other D worker takes more than peer, it cancels a push to the D worker whose pushes hold the most. It
// waits until that memory is free, or ctx ends. If there is nothing to cancel, it returns errMemory.
func (r *Relay) newKept(ctx context.Context, peer string, regions []wire.Region, blocks [][]int) (*savedTransfer, error) {
	m, err := newMirror(regions, blocks, uint64(r.o.MemoryBytes))
	if err != nil {
		return nil, err
	}
	size := r.mu.arena.Round(max(int64(m.bytes), 1)) // the arena's size never changes, so no lock
	for {
		r.mu.Lock()
		off, ok := int64(0), false
		if len(r.mu.loading) < maxLoading {
			off, ok = r.allocLocked(size)
		}
		if ok {
			k := &savedTransfer{peer: peer, cache: m.cache, blocks: m.blocks, off: off, n: size, done: make(chan struct{})}
			k.ctx, k.cancel = context.WithCancelCause(r.ctx)
			addr := uint64(storageBase) + uint64(off)
			for i := range k.cache.Regions {
				k.cache.Regions[i].Base += addr
			}
			k.cache.Storages = []mooncake.Storage{{Addr: addr, Mem: r.memory.Bytes(off, int64(max(m.bytes, 1)))}}
			r.useLocked(k)
			r.useLocked(k)
			r.mu.loading[k] = struct{}{}
			r.mu.pending[peer] += size
			r.mu.Unlock()
			return k, nil
		}
		victim, free := r.victimLocked(peer), r.mu.arena.Free()
		slow, n := (*request)(nil), len(r.mu.loading)
		if victim == nil {
			slow = r.slowLocked(peer)
		}
		if victim == nil && slow == nil {
			r.mu.Unlock()
			return nil, fmt.Errorf("%w: %d bytes are needed, %d are free, the rest is in use, %d loads are in progress", errMemory, size, free, n)
		}
		if r.mu.freed == nil {
			r.mu.freed = make(chan struct{})
		}
		freed := r.mu.freed
		if victim != nil {
			delete(r.mu.loading, victim) // so that it is chosen only once
			r.mu.pending[victim.peer] -= victim.n
			victim.cancel(errMadeRoom)
		} else {
			slow.cancel()
		}
		r.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

var errMadeRoom = fmt.Errorf("%w: dropped in favour of another D's transfer", errMemory)

// allocLocked allocates memory. It evicts unused transfers, least recently used first, until size bytes fit or none is left.
func (r *Relay) allocLocked(size int64) (off int64, ok bool) {
	for {
		if off, ok := r.mu.arena.Alloc(size); ok {
			return off, true
		}
		var oldest *savedTransfer
		for k := range r.mu.free {
			if oldest == nil || k.used < oldest.used {
				oldest = k
			}
		}
		if oldest == nil {
			return 0, false
		}
		r.freeLocked(oldest)
		r.stats.evicted.Add(1)
	}
}

// slowLocked returns a request of the D worker whose pushes hold the most memory, if that is more than peer's pushes hold; else nil.
// Such a D receives its bytes too slowly, or not at all.
func (r *Relay) slowLocked(peer string) (slow *request) {
	held := make(map[string]int64)
	for _, a := range r.mu.requests {
		if a.using != nil {
			held[a.peer] += a.using.n
		}
	}
	for _, a := range r.mu.requests {
		if a.using == nil || a.peer == peer || held[a.peer] <= held[peer] || a.ctx.Err() != nil {
			continue
		}
		if slow == nil || held[a.peer] > held[slow.peer] {
			slow = a
		}
	}
	return slow
}

// victimLocked returns the newest load of the D worker whose loads take the most memory, if that is more than peer's loads take; else
// nil.
func (r *Relay) victimLocked(peer string) (victim *savedTransfer) {
	for k := range r.mu.loading {
		if k.peer == peer || r.mu.pending[k.peer] <= r.mu.pending[peer] {
			continue
		}
		if victim == nil || r.mu.pending[k.peer] > r.mu.pending[victim.peer] || k.peer == victim.peer && k.used > victim.used {
			victim = k
		}
	}
	return victim
}
