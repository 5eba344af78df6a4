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
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/shm"
)

// keptKey names what one D worker needs of a transfer. Workers of other ranks, or
// with other layers or payloads, need other bytes.
type keptKey struct {
	transfer     string
	tpRank, size int
	pp           int
	layout       uint64
}

// kept is the KV of one transfer for one kind of D worker, in the relay's memory.
type kept struct {
	key    keptKey
	cache  *mooncake.Cache
	blocks [][]int // ids in cache, by group
	off, n int64   // in memory; immutable once loading began

	done chan struct{} // closed when loaded or failed
	err  error         // valid when done

	users int   // guarded by Relay.mu
	used  int64 // guarded by Relay.mu: when, in Relay.mu.order
}

var errMemory = errors.New("relay: not enough memory")

// layoutOf hashes what decides the bytes of a worker's blocks.
func layoutOf(regions []mooncake.Region) uint64 {
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

// keep returns the transfer's KV with one more user; loaded says that this call
// pulled it from P. The caller releases it.
func (f *front) keep(ctx context.Context, pull *mooncake.Pull, transferID string, blocks [][]int) (k *kept, loaded bool, err error) {
	r := f.r
	key := keptKey{transferID, pull.TPRank, pull.TPSize, pull.PPSize, layoutOf(pull.Regions)}
	r.mu.Lock()
	if k = r.mu.kept[key]; k != nil {
		r.useLocked(k)
	} else if k, err = r.newKeptLocked(key, pull.Regions, blocks); err == nil {
		loaded = true
		// Others may wait for it: it goes on when this D goes away, and k, a result,
		// is then nil.
		mine := k
		r.wg.Go(func() { f.load(mine, pull) })
	}
	r.mu.Unlock()
	if err != nil {
		return nil, false, err
	}
	select {
	case <-k.done:
		err = k.err
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		r.release(k)
		return nil, false, err
	}
	return k, loaded, nil
}

func (r *Relay) useLocked(k *kept) {
	k.users++
	delete(r.mu.free, k)
	r.mu.order++
	k.used = r.mu.order
}

// release gives a use back; what failed is forgotten with its last user.
func (r *Relay) release(k *kept) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k.users--
	if k.users > 0 {
		return
	}
	if k.err != nil {
		r.forgetLocked(k)
		return
	}
	r.mu.free[k] = struct{}{}
}

func (r *Relay) forgetLocked(k *kept) {
	if r.mu.kept[k.key] == k {
		delete(r.mu.kept, k.key)
	}
	delete(r.mu.free, k)
	r.mu.arena.Release(k.off, k.n)
}

// newKeptLocked mirrors D's regions for the blocks of one request: each region's
// blocks lie one after the other, payload only. It has two users: the caller, and
// the load.
//
// The ids of a group count from 1; through all groups if a region is shared, so that
// it has a place for each block. 0 stays 0, with a place of its own: to P it is no
// block if the group is recurrent state, which the messages do not say, and a block
// like any other if it is not.
func (r *Relay) newKeptLocked(key keptKey, regions []mooncake.Region, blocks [][]int) (*kept, error) {
	k := &kept{key: key, done: make(chan struct{}), blocks: make([][]int, len(blocks))}
	shared := slices.ContainsFunc(regions, func(m mooncake.Region) bool { return m.Group == mooncake.SharedGroup })
	first, end := make([]int, len(blocks)), make([]int, len(blocks)) // of the ids in use, per group
	next := 1
	for g, ids := range blocks {
		if !shared {
			next = 1
		}
		first[g] = next
		for _, id := range ids {
			if id == 0 {
				k.blocks[g] = append(k.blocks[g], 0)
				first[g] = 0
				continue
			}
			k.blocks[g] = append(k.blocks[g], next)
			next++
		}
		end[g] = next
	}
	c := &mooncake.Cache{Kinds: make([]mooncake.GroupKind, len(blocks)), In: make([]int, len(regions)), Regions: slices.Clone(regions)}
	total := uint64(0)
	for i := range c.Regions {
		m := &c.Regions[i]
		lo, hi := math.MaxInt, 0
		groups := m.Shared
		if m.Group != mooncake.SharedGroup {
			groups = []int{m.Group}
		}
		for _, g := range groups {
			if g < 0 || g >= len(blocks) {
				return nil, fmt.Errorf("relay: layer %q is of group %d, the request has %d groups", m.Layer, g, len(blocks))
			}
			if len(blocks[g]) > 0 {
				lo, hi = min(lo, first[g]), max(hi, end[g])
			}
		}
		m.Stride, m.RowOffset = m.Payload, mooncake.NoRow
		m.Base = total
		if lo < hi {
			n := uint64(hi - lo)
			m.Base -= uint64(lo) * m.Payload // before the storage, for ids that are not used
			if m.Payload > uint64(r.o.MemoryBytes) || n > (uint64(r.o.MemoryBytes)-total)/m.Payload {
				return nil, fmt.Errorf("%w: the blocks of transfer %.64q do not fit %d bytes", errMemory, key.transfer, r.o.MemoryBytes)
			}
			total += n * m.Payload
		}
	}
	off, n, err := r.allocLocked(int64(total))
	if err != nil {
		return nil, fmt.Errorf("%w for transfer %.64q", err, key.transfer)
	}
	k.off, k.n = off, n
	addr := uint64(storageBase) + uint64(off)
	for i := range c.Regions {
		c.Regions[i].Base += addr
	}
	c.Storages = []mooncake.Storage{{Addr: addr, Mem: r.memory.Bytes(off, int64(max(total, 1)))}}
	k.cache = c
	r.mu.kept[key] = k
	r.useLocked(k)
	r.useLocked(k)
	return k, nil
}

// storageBase is where the relay's memory begins in its caches: far enough from 0
// for the blocks that lie before a storage.
const storageBase = 1 << 50

// allocLocked finds room, evicting what was used longest ago.
func (r *Relay) allocLocked(n int64) (off, size int64, err error) {
	size = r.mu.arena.Round(max(n, 1))
	for {
		if off, ok := r.mu.arena.Alloc(size); ok {
			return off, size, nil
		}
		var oldest *kept
		for k := range r.mu.free {
			if oldest == nil || k.used < oldest.used {
				oldest = k
			}
		}
		if oldest == nil {
			return 0, 0, fmt.Errorf("%w: %d bytes wanted, %d free, the rest in use", errMemory, size, r.mu.arena.Free())
		}
		r.forgetLocked(oldest)
		r.stats.evicted.Add(1)
		r.log.Info("relay: evicted", "transfer", oldest.key.transfer, "bytes", oldest.n)
	}
}

// load pulls the transfer from P into k.
func (f *front) load(k *kept, pull *mooncake.Pull) {
	r := f.r
	err := r.memory.Populate(k.off, k.n, true) // a full /dev/shm fails here, and not with SIGBUS
	if errors.Is(err, shm.ErrNoPopulate) {
		err = nil // it comes with the first touch
	}
	if err == nil {
		err = f.loadFrom(k, pull)
	}
	if err == nil {
		r.stats.pulled.Add(1)
		r.stats.pulledBytes.Add(int64(len(k.cache.Storages[0].Mem)))
	}
	k.err = err
	if err != nil { // the next one asks P again
		r.mu.Lock()
		if r.mu.kept[k.key] == k {
			delete(r.mu.kept, k.key)
		}
		r.mu.Unlock()
	}
	close(k.done)
	r.release(k)
}

func (f *front) loadFrom(k *kept, pull *mooncake.Pull) error {
	return f.pullUpstream(f.r.ctx, k.cache, pull, map[string]mooncake.Wanted{
		k.key.transfer: {TransferID: k.key.transfer, Blocks: k.blocks},
	})
}

// pullUpstream pulls from P as the D worker of the pull would.
func (f *front) pullUpstream(ctx context.Context, c *mooncake.Cache, pull *mooncake.Pull, wanted map[string]mooncake.Wanted) error {
	rc, err := mooncake.NewReceiver(c, mooncake.ReceiverOptions{
		Self:    mooncake.Peer{TPRank: pull.TPRank, TPSize: pull.TPSize, PPSize: pull.PPSize},
		Target:  f.r.target,
		Timeout: f.r.o.Timeout,
		Metrics: f.r.o.Metrics,
		Log:     f.r.log,
		Find:    func(context.Context, mooncake.Source) (bootstrap.Engine, error) { return f.engine, nil },
	})
	if err != nil {
		return err
	}
	failed, err := rc.Pull(ctx, mooncake.Source{EngineID: f.engine.ID, Bootstrap: f.r.o.Upstream}, wanted)
	if e := rc.Close(); err == nil {
		err = e
	}
	for _, why := range failed {
		err = errors.Join(err, why)
	}
	return err
}

// letGo passes on that D wants nothing of a transfer, so that P frees its blocks.
// What the relay keeps stays.
func (f *front) letGo(ctx context.Context, pull *mooncake.Pull, transferID string) error {
	key := keptKey{transferID, pull.TPRank, pull.TPSize, pull.PPSize, layoutOf(pull.Regions)}
	f.r.mu.Lock()
	k := f.r.mu.kept[key]
	f.r.mu.Unlock()
	if k != nil {
		return nil // P has pushed it, or is about to
	}
	mirror := mooncake.Cache{
		Kinds:   []mooncake.GroupKind{mooncake.Attention},
		Regions: slices.Clone(pull.Regions), In: make([]int, len(pull.Regions)),
		Storages: []mooncake.Storage{{Addr: storageBase, Mem: make([]byte, 1)}},
	}
	for _, m := range pull.Regions {
		for len(mirror.Kinds) <= max(m.Group, 0) || slices.ContainsFunc(m.Shared, func(g int) bool { return g >= len(mirror.Kinds) }) {
			if len(mirror.Kinds) > 1<<10 {
				return fmt.Errorf("%w: group %d", mooncake.ErrMessage, m.Group)
			}
			mirror.Kinds = append(mirror.Kinds, mooncake.Attention)
		}
	}
	return f.pullUpstream(ctx, &mirror, pull, map[string]mooncake.Wanted{transferID: {TransferID: transferID}})
}
