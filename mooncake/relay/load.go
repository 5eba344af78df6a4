// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// The sources of a request's KV, for the log.
const (
	fromP      = "P"
	fromMemory = "memory"
	fromBoth   = "prefix and P"
)

// findOrLoad returns the KV of a request, from memory or from P, and its source for the log. The caller must release the KV. `before` is
// the KV that the relay pushed for an earlier pull of the same request, or nil: it is used again if P does not give the KV once more. `seen`
// is the log entry of the request.
func (e *engine) findOrLoad(ctx context.Context, pull *wire.Pull, id transferID, blocks [][]int, before *savedTransfer, seen *transferlog.Entry) (k *savedTransfer, source string, err error) {
	r := e.r
	r.mu.Lock()
	key := e.keyLocked(pull, id.base)
	if before != nil && (before.freed || before.key != key) {
		before = nil
	}
	other := r.mu.saved[key]
	k, few := other.servesLocked(id, blocks)
	if k != nil {
		r.useLocked(k)
		r.mu.Unlock()
		return e.await(ctx, k, fromMemory, seen)
	}
	if few != nil && id.only { // this D wants more blocks than are kept. The proxy learns that nothing is kept, and sends the next request to P
		r.dropLocked(other)
	}
	if before != nil {
		r.useLocked(before)
	}
	gone := !e.gone.IsZero()
	r.mu.Unlock()
	switch {
	case id.only:
		err = fmt.Errorf("%w: %.64q", errNotKept, id.base)
	case gone:
		err = errGone
	default:
		if k, source, err = e.load(ctx, pull, id, blocks, other); err == nil {
			k, source, err = e.await(ctx, k, source, seen)
		}
	}
	if before != nil {
		if err != nil && ctx.Err() == nil { // D lost the reply and pulls again, but P has freed the blocks since
			return before, fromMemory, nil
		}
		r.release(before)
	}
	if err != nil {
		return nil, "", errors.Join(few, err)
	}
	if k.prefixed {
		source = fromBoth
	}
	return k, source, nil
}

// servesLocked returns k if its blocks can answer a request for `blocks`, else nil. The error means that k has too few blocks. k may be
// nil, which means that nothing is kept.
func (k *savedTransfer) servesLocked(id transferID, blocks [][]int) (*savedTransfer, error) {
	if k == nil || k.endingLocked() { // a cancelled load
		return nil, nil
	}
	loaded, holds := isDone(k.done), k.holds(blocks)
	switch {
	case loaded && id.repeat && !holds:
		return nil, fmt.Errorf("relay: P num blocks less than D in what is kept of transfer %.64q", id.base)
	case loaded && !id.repeat, !loaded && !holds:
		return nil, nil // the transfer id demands P's own answer, or the load has too few blocks
	}
	return k, nil
}

// await waits until k is loaded, or ctx ends, and records the progress in the log entry `seen`. On failure it releases k.
func (e *engine) await(ctx context.Context, k *savedTransfer, source string, seen *transferlog.Entry) (*savedTransfer, string, error) {
	err := error(nil)
	if source == fromP || !isDone(k.done) { // when source is fromP, P may have sent all of it already
		seen.Receiving("P sends", func() (time.Time, uint64) { return k.arrived.First(), k.arrived.Bytes() })
	}
	select {
	case <-k.done:
		err = k.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		e.r.release(k)
		return nil, "", err
	}
	return k, source, nil
}

// endingLocked reports whether k is a load that was cancelled but has not ended yet. Its error matters only to requests that waited for
// it when it was cancelled.
func (k *savedTransfer) endingLocked() bool { return !isDone(k.done) && k.ctx.Err() != nil }

// holds reports whether k has, or will have, at least as many blocks as `blocks` in each group.
func (k *savedTransfer) holds(blocks [][]int) bool {
	return slices.EqualFunc(k.wants, blocks, func(n int, ids []int) bool { return n >= len(ids) })
}

// load begins to pull a transfer from P into memory, as k. k replaces `other`, the kept KV of the same transfer, which may be nil. k counts
// one use for the caller, who must await and release it. Other requests may wait for the same load; it is cancelled when none waits any
// more. If another request has begun a suitable load meanwhile, load returns the KV of that load.
func (e *engine) load(ctx context.Context, pull *wire.Pull, id transferID, blocks [][]int, other *savedTransfer) (k *savedTransfer, source string, err error) {
	r := e.r
	probe := r.o.Prefixes && len(blocks) == 1 && !slices.ContainsFunc(pull.Regions, func(m wire.Region) bool { return m.Group == wire.SharedGroup })
	room := blocks
	if probe { // one block more, in front
		room = [][]int{append([]int{1}, blocks[0]...)}
	}
	k, err = r.newKept(ctx, net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), pull.Regions, room)
	if err != nil {
		return nil, "", fmt.Errorf("transfer %.64q: %w", id.base, err)
	}
	k.wants = make([]int, len(blocks))
	for g := range blocks {
		k.wants[g] = len(blocks[g])
	}
	r.mu.Lock()
	k.key = e.keyLocked(pull, id.base)
	if old := r.mu.saved[k.key]; old != nil {
		if old != other && !old.endingLocked() && old.holds(blocks) && (id.repeat || !isDone(old.done)) {
			r.useLocked(old)
			r.mu.Unlock()
			r.loadEnded(k, errNoWaiters)
			r.release(k)
			return old, fromMemory, nil
		}
		r.dropLocked(old)
	}
	k.watched = e.watchedLocked() || r.o.KeepAcrossRestarts
	r.keepLocked(k)
	now, life := e.now, e.life
	var prefix *savedTransfer
	if probe && id.prefix != "" && id.blocks > 0 && id.blocks < len(blocks[0]) {
		prefix = r.mu.saved[e.keyLocked(pull, id.prefix)]
		if prefix != nil && (!isDone(prefix.done) || prefix.err != nil || !prefix.whole || !prefix.watched || len(prefix.blocks[0]) < id.blocks) {
			prefix = nil
		}
		if prefix != nil {
			r.useLocked(prefix)
		}
	}
	r.mu.Unlock()
	r.wg.Go(func() {
		l := loading{e: e, k: k, pull: pull, id: id, now: now, life: life}
		err := l.run(probe, prefix)
		if prefix != nil {
			r.release(prefix)
		}
		r.loadEnded(k, err)
		e.releaseUnasked(pull, id.base, err)
	})
	return k, fromP, nil
}

// maxReleases is the largest number of releases at P at a time that no D asked for. The relay sends no further ones: then P frees the
// blocks after its own timeout.
const maxReleases = 64

// releaseUnasked tells P to free the blocks of a transfer whose load ended with err, if the relay itself gave the load up. D is told
// that P failed, so D does not release these blocks. While maxReleases other releases run, releaseUnasked does nothing.
func (e *engine) releaseUnasked(pull *wire.Pull, transfer string, err error) {
	if !errors.Is(err, mooncake.ErrTimeout) && !errors.Is(err, errMadeRoom) {
		return
	}
	r := e.r
	select {
	case r.releases <- struct{}{}:
		defer func() { <-r.releases }()
	default:
		return
	}
	ctx, cancel := context.WithTimeout(r.ctx, r.o.Timeout)
	defer cancel()
	if err := e.releaseAtP(ctx, pull, transferID{base: transfer}); err != nil {
		r.log.Debug("relay: release at P", "transfer", transfer, "err", err)
	}
}

// loadEnded records that the load of k has ended, wakes the requests that wait for it, and ends the load's own use of k. After an error, k
// is removed from the table, so that the next request pulls from P again.
func (r *Relay) loadEnded(k *savedTransfer, err error) {
	if err == nil {
		r.stats.pulled.Add(1)
	}
	r.mu.Lock()
	k.err = err
	if err != nil { // so that the next request pulls from P again
		r.forgetLocked(k)
	}
	if _, ok := r.mu.loading[k]; ok {
		delete(r.mu.loading, k)
		r.mu.pending[k.peer] -= k.n
	}
	if r.mu.pending[k.peer] == 0 {
		delete(r.mu.pending, k.peer)
	}
	close(k.done)
	r.mu.Unlock()
	k.cancel(nil)
	r.release(k)
}

// loading is one load in progress.
type loading struct {
	e    *engine
	k    *savedTransfer
	pull *wire.Pull
	id   transferID
	now  bootstrap.Engine // P's workers
	life int64            // P's life at the start, or anyLife
}

// anyLife is the life of a load that has received nothing from P yet.
const anyLife = -1

func (l *loading) run(probe bool, prefix *savedTransfer) error {
	r, k := l.e.r, l.k
	err := r.memory.Populate(k.off, k.n, true)            // so that a full /dev/shm gives an error and no SIGBUS
	if err != nil && !errors.Is(err, shm.ErrNoPopulate) { // an old kernel: it maps memory at the first touch
		return err
	}
	if !probe {
		return l.pullBlocks(k.blocks)
	}
	// The pull names one block more than D wants. If P has that many blocks, P sends its last ones: D wants only the end of the prompt,
	// and all of that has come. If P refuses, D wants the whole prompt.
	err = l.pullBlocks(k.blocks)
	if err == nil || !strings.Contains(err.Error(), "P num blocks less than D") {
		return err
	}
	own := k.blocks[0][1:]
	if prefix != nil && l.sameLife() != nil {
		prefix = nil
		r.mu.Lock()
		l.now, l.life = l.e.now, anyLife // nothing has come yet, so all blocks may come from P's new life
		r.mu.Unlock()
	}
	if prefix == nil {
		if err := l.pullBlocks([][]int{own}); err != nil {
			return err
		}
	} else {
		if err := l.pullBlocks([][]int{own[l.id.blocks:]}); err != nil {
			return err
		}
		if err := l.sameLife(); err != nil { // otherwise prefix and rest may come from different processes
			return err
		}
		n, err := copyBlocks(k.cache, own[:l.id.blocks], prefix.cache, prefix.blocks[0][:l.id.blocks])
		if err != nil {
			return err
		}
		r.stats.prefixBytes.Add(n)
		k.prefixed = true
	}
	k.blocks, k.whole = [][]int{own}, true // k.wants has the number of these blocks
	return nil
}

// sameLife returns nil if P's processes are still those of the load's life, or if Options.KeepAcrossRestarts allows any life.
func (l *loading) sameLife() error {
	if l.e.r.o.KeepAcrossRestarts {
		return nil
	}
	return l.e.confirmLife(l.k.ctx, l.life)
}

// pullBlocks pulls KV from P into the given blocks of l.k, and waits until it is there.
func (l *loading) pullBlocks(blocks [][]int) error {
	err := l.e.pullUpstream(l.k.ctx, l.k.cache, &l.k.arrived, l.pull, l.now, l.life, map[string]wire.Wanted{l.id.base: {TransferID: l.id.base, Blocks: blocks}})
	if err == nil {
		l.e.r.stats.pulledBytes.Add(bytesOf(l.k.cache.Regions, blocks))
	}
	return err
}

// bytesOf returns the total payload of blocks in bytes.
func bytesOf(regions []wire.Region, blocks [][]int) (n int64) {
	for i := range regions {
		g := &regions[i]
		groups := g.Shared
		switch g.Group {
		case wire.SharedGroup:
		case wire.Unsent: // such a D sends one region
			groups = []int{0}
		default:
			groups = []int{g.Group}
		}
		for _, k := range groups {
			if k >= 0 && k < len(blocks) {
				n += int64(len(blocks[k])) * int64(g.Payload)
			}
		}
	}
	return n
}

// copyBlocks copies the blocks `from` of src to the blocks `to` of dst, region by region. Both have the same layout and lie in the
// relay's memory. n is the number of bytes.
func copyBlocks(dst *mooncake.Cache, to []int, src *mooncake.Cache, from []int) (n int64, err error) {
	for i := range dst.Regions {
		d, s := &dst.Regions[i], &src.Regions[i]
		for j := range to {
			a := dst.Bytes(d.Base+uint64(to[j])*d.Stride, d.Payload)
			b := src.Bytes(s.Base+uint64(from[j])*s.Stride, s.Payload)
			if a == nil || b == nil {
				return n, fmt.Errorf("relay: block %d of the prefix is not in memory any more", j)
			}
			n += int64(copy(a, b))
		}
	}
	return n, nil
}

// pullUpstream pulls the requests in `wanted` from the P engine `now` into c, with the ranks of the D worker that sent pull; arrived counts
// the bytes. If P's life is not `life` any more, it fails at once. It also fails a pull that had to be repeated if P's life ended meanwhile.
func (e *engine) pullUpstream(ctx context.Context, c *mooncake.Cache, arrived *transfer.Progress, pull *wire.Pull, now bootstrap.Engine, life int64, wanted map[string]wire.Wanted) error {
	r := e.r
	rc, err := mooncake.NewReceiver(c, mooncake.ReceiverOptions{
		Self:     mooncake.Peer{TPRank: pull.TPRank, TPSize: pull.TPSize, PPSize: pull.PPSize},
		Target:   r.target,
		Release:  min(pull.Release, 32), // the relay uses a layout once, so P need not keep it
		Timeout:  r.o.Timeout,
		Sockets:  r.sockets,
		Progress: arrived,
		KeepAtP:  true, // a D that loses its connection may come back; releaseAtP tells P to free the blocks
		Metrics:  r.o.Metrics,
		Log:      r.log,
		Find: func(context.Context, mooncake.Source) (bootstrap.Engine, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if e.life != life && life != anyLife && !r.o.KeepAcrossRestarts {
				return bootstrap.Engine{}, errOtherLife
			}
			return now, nil
		},
	})
	if err != nil {
		return err
	}
	failed, err := rc.Pull(ctx, mooncake.Source{EngineID: e.id, Bootstrap: r.o.Upstream}, wanted)
	if why := context.Cause(ctx); why != nil && (err != nil || len(failed) > 0) {
		err = why
	}
	if e := rc.Close(); err == nil {
		err = e
	}
	for _, why := range failed {
		err = errors.Join(err, why)
	}
	return err
}

// releaseAtP forwards D's pull without blocks to P, so that P frees its blocks. The relay keeps its own KV. P does not know a transfer
// id like T#2, so a release of such an id is not forwarded. releaseAtP first waits until a load of the transfer has ended: if P pushed
// the blocks, P has freed them; if not, P still waits for a D.
func (e *engine) releaseAtP(ctx context.Context, pull *wire.Pull, id transferID) error {
	r := e.r
	if id.repeat {
		return nil
	}
	r.mu.Lock()
	k := r.mu.saved[e.keyLocked(pull, id.base)]
	r.mu.Unlock()
	if k != nil {
		select {
		case <-k.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if k.err == nil {
			return nil
		}
	}
	r.mu.Lock()
	now, life, gone := e.now, e.life, !e.gone.IsZero()
	r.mu.Unlock()
	if gone {
		return errGone
	}
	c := &mooncake.Cache{
		Kinds:   []mooncake.GroupKind{mooncake.Attention},
		Regions: slices.Clone(pull.Regions), In: make([]int, len(pull.Regions)),
		Storages: []mooncake.Storage{{Addr: storageBase, Mem: make([]byte, 1)}},
	}
	for i := range c.Regions {
		m := &c.Regions[i]
		if m.Group == wire.Unsent {
			m.Group = 0
		}
		for len(c.Kinds) <= max(m.Group, 0) || slices.ContainsFunc(m.Shared, func(g int) bool { return g >= len(c.Kinds) }) {
			if len(c.Kinds) > 1<<10 {
				return fmt.Errorf("%w: a region of group %d, at most %d groups are possible", wire.ErrMessage, m.Group, 1<<10)
			}
			c.Kinds = append(c.Kinds, mooncake.Attention)
		}
	}
	return e.pullUpstream(ctx, c, nil, pull, now, life, map[string]wire.Wanted{id.base: {TransferID: id.base}})
}

// entries returns the writes that fill D's blocks from kept KV, and their total bytes.
func (k *savedTransfer) entries(pull *wire.Pull, blocks [][]int) (entries []transfer.Entry, total int64, err error) {
	self := mooncake.Peer{TPRank: pull.TPRank, TPSize: pull.TPSize, PPSize: pull.PPSize} // D gets what a D worker of the same ranks would have
	plan, err := mooncake.PlanPush(k.cache, self, self, pull.Regions)
	if err != nil {
		return nil, 0, err
	}
	list, err := plan.Append(nil, k.blocks, blocks)
	if err != nil {
		return nil, 0, err
	}
	entries = make([]transfer.Entry, len(list))
	for i, d := range list {
		mem := k.cache.Bytes(d.Src, d.Len)
		if mem == nil {
			return nil, 0, fmt.Errorf("relay: %d bytes at %#x are not in the memory of the transfer", d.Len, d.Src)
		}
		entries[i] = transfer.Entry{Local: mem, Remote: d.Dst}
		total += int64(len(mem))
	}
	return entries, total, nil
}

// push writes kept KV into D's blocks and returns the number of bytes. Meanwhile `sent` counts the bytes that D has confirmed.
func (r *Relay) push(ctx context.Context, pull *wire.Pull, k *savedTransfer, blocks [][]int, sent *transfer.Progress) (int64, error) {
	entries, total, err := k.entries(pull, blocks)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if err := r.client.WriteCounting(ctx, net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), entries, sent); err != nil {
		return 0, fmt.Errorf("relay: push to D: %w", err)
	}
	r.o.Metrics.Pushed(time.Since(start), total, len(entries))
	r.stats.pushed.Add(total)
	return total, nil
}
