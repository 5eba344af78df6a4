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

// savedKey names the part of a transfer that one D worker needs, in one life of P.
// Workers of other ranks, or with other layers or payloads, need other bytes.
type savedKey struct {
	engine       string // P's; "" with Options.KeepAcrossRestarts
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
	blocks [][]int // ids in cache, by group; owned by the load until done
	wants  []int   // number of blocks that D wants, by group; immutable
	off, n int64   // in memory; immutable
	whole  bool    // it has the prompt's first block; valid when done
	// watched says that the relay was connected to all workers of P when the load began: they
	// were the processes of the key's life. Immutable.
	watched bool
	// prefixed says that the first blocks are copies from another transfer.
	prefixed bool

	arrived transfer.Progress // of the load

	ctx    context.Context // of the load
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when loaded or failed
	err    error         // valid when done

	// Guarded by Relay.mu.
	users int
	used  int64 // when, in Relay.mu.order
	freed bool  // its memory was released
}

var errNotKept = errors.New("relay: the transfer is not in memory any more")

var errMemory = errors.New("relay: not enough memory")

// layoutOf hashes what determines the bytes of a worker's blocks.
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

// keyLocked returns the key of a transfer for the D worker of a pull, in P's current life.
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

// release ends one use. It cancels a load that has lost its last waiter, and frees KV
// that failed or was dropped with its last user.
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

// notifyFreedLocked wakes those that wait for memory.
func (r *Relay) notifyFreedLocked() {
	if r.mu.freed != nil {
		close(r.mu.freed)
		r.mu.freed = nil
	}
}

var errNoWaiters = errors.New("relay: no request waits for the load")

// transferKey names a transfer of one P, whichever D workers it is kept for.
type transferKey struct{ engine, transfer string }

func (k *savedTransfer) transfer() transferKey { return transferKey{k.key.engine, k.key.transfer} }

// keepLocked lets requests find k.
func (r *Relay) keepLocked(k *savedTransfer) {
	r.mu.saved[k.key] = k
	r.mu.transfers[k.transfer()]++
}

// forgetLocked lets no further request find k.
func (r *Relay) forgetLocked(k *savedTransfer) {
	if r.mu.saved[k.key] != k {
		return
	}
	delete(r.mu.saved, k.key)
	if r.mu.transfers[k.transfer()]--; r.mu.transfers[k.transfer()] == 0 {
		delete(r.mu.transfers, k.transfer())
	}
}

// hasTransfer reports whether a transfer of an engine, by the name that D knows, is in memory for any D
// worker, or about to be.
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

// dropLocked removes k from r.mu.saved. Its memory is released with its last user.
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

// mirror is a copy of D's regions for the blocks of one request, at addresses from 0 on.
type mirror struct {
	cache  *mooncake.Cache
	blocks [][]int
	bytes  uint64
}

// newMirror lays D's regions out for the blocks of one request: each region's blocks
// lie one after the other, payload only. It takes at most limit bytes.
//
// The ids of a group count from 1. If groups share a region, the ids count through all
// groups, so that each block has memory there. Block id 0 is a placeholder in groups of recurrent
// state and a real block elsewhere. The pull does not say which, so 0 is mirrored as 0
// and always gets memory.
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
	first, end := make([]int, len(blocks)), make([]int, len(blocks)) // of the ids in use, per group
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
			g.Base -= uint64(lo) * g.Payload // before the storage, for ids that are not used
			if g.Payload > limit || n > (limit-m.bytes)/g.Payload {
				return nil, fmt.Errorf("%w: the blocks do not fit %d bytes", errMemory, limit)
			}
			m.bytes += n * g.Payload
		}
	}
	return m, nil
}

// maxLoading bounds the loads at a time: each takes a region of the transfer table.
const maxLoading = transfer.MaxRegions / 2

// storageBase is the address of the relay's memory in its caches. The distance from 0
// leaves addresses for unused block ids, which lie before a storage.
const storageBase = 1 << 50

// newKept allocates memory for the blocks of one request. The result has two users: the
// caller and the load. When memory is short, newKept first evicts unused transfers,
// least recently used first. Then it cancels the newest load of the D worker whose loads
// take most memory, then a push to the D worker whose pushes hold most. It waits for
// that memory until ctx ends.
func (r *Relay) newKept(ctx context.Context, peer string, regions []wire.Region, blocks [][]int) (*savedTransfer, error) {
	m, err := newMirror(regions, blocks, uint64(r.o.MemoryBytes))
	if err != nil {
		return nil, err
	}
	size := r.mu.arena.Round(max(int64(m.bytes), 1)) // arena's size never changes
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
			return nil, fmt.Errorf("%w: %d bytes wanted, %d free, the rest in use, %d loads", errMemory, size, free, n)
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

// allocLocked allocates memory, evicting least recently used transfers as needed.
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

// slowLocked returns a request of the D worker whose pushes hold most memory, or nil if
// that is not more than peer's hold. Such a D takes its bytes too slowly, or not at all.
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

// victimLocked returns the newest load of the D worker whose loads take most memory, or
// nil if that is not more than peer's take.
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
