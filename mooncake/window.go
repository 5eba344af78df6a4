// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// A window is one publication of D's memory for one P. Every window shows the same bytes at addresses of its own. No address is used
// twice in the life of the transfer table, and addresses differ from those of earlier processes. Addresses on the wire are only names,
// so one memory may have many.
//
// Windows keep late writes out of reused blocks. When a pull fails, P may still write, now or in an hour. A write carries only an
// address, so D could not distinguish it from a write of the next pull into the same blocks. D therefore closes the blocks' ranges in
// this window for good (transfer.Table.Fence). The window goes on serving pulls into other blocks. The first pull from this P that
// wants a closed block opens the next window. When the last pull of a window with closed blocks ends, D withdraws the window.
type window struct {
	id      uint64        // layout id: odd, random, as vLLM's are
	owner   Source        // P
	regions []wire.Region // as published to P
	handles []*transfer.Region

	// Guarded by windows.mu.
	users   map[*receiving]struct{}
	closed  map[int]struct{} // ids of blocks, of all groups, into which no write of this window goes any more
	filled  bool             // at least one of its pulls had blocks
	retired bool             // takes no new users
	ended   bool             // the requests that used it were cancelled
	used    int64            // last use, in windows.mu.clock
}

// windows makes and retires the windows of one Receiver. Each P has windows of its own, so that a failure of one P does not disturb
// pulls from others.
type windows struct {
	cache *Cache          // immutable
	table *transfer.Table // immutable
	max   int             // most windows at a time

	progress *transfer.Progress // counts the bytes that P engines write; nil: nothing is counted; immutable

	watched bool // D counts the bytes that arrive, because P's answer proves nothing; immutable

	patience time.Duration   // how long a write in progress may go on when its window is withdrawn
	wg       *sync.WaitGroup // of withdrawals

	mu struct { // no other lock than Table.mu is taken under it
		sync.Mutex
		current map[Source]*window
		live    map[*window]struct{} // current ones and retired ones
		clock   int64
		changed chan struct{} // closed when a window goes; nil without waiters
	}
}

// maxWindows bounds the windows of one Receiver. With many storages the bound is lower, so that all windows together take at most a
// quarter of the table's entries.
const maxWindows = 64

const windowAlign = 2 << 20

// windowBytes returns the size of the address range of a storage. The range ends with a gap that no run of blocks spans.
func windowBytes(mem []byte) uint64 {
	return (uint64(len(mem)) + 2*windowAlign) &^ (windowAlign - 1)
}

func newWindows(c *Cache, t *transfer.Table, patience time.Duration, wg *sync.WaitGroup) *windows {
	w := &windows{cache: c, table: t, patience: patience, wg: wg, max: min(maxWindows, max(2, transfer.MaxRegions/4/len(c.Storages)))}
	w.mu.live = make(map[*window]struct{})
	w.mu.current = make(map[Source]*window)
	return w
}

// acquire returns a window of the P `from` for the requests of a pull. At the limit of windows it withdraws an idle window. If none is
// idle, it cancels the requests of the oldest window of the P with the most windows. Then it waits until a window is gone, or ctx ends.
func (ws *windows) acquire(ctx context.Context, from Source, list []*receiving) (*window, error) {
	for {
		w, gone, wait, err := ws.tryAcquire(from, list)
		for _, old := range gone {
			ws.wg.Go(func() { ws.withdraw(old) })
		}
		if w != nil || err != nil {
			return w, err
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// tryAcquire does what acquire does for the P `from`, without waiting. It returns a window, or a channel that closes when it is worth trying
// again. `gone` are windows that it has removed to make room; the caller must withdraw them.
func (ws *windows) tryAcquire(from Source, list []*receiving) (w *window, gone []*window, wait <-chan struct{}, err error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	w = ws.mu.current[from]
	if w != nil && w.wantsClosed(list) {
		if ws.retireLocked(w) {
			gone = append(gone, w)
		}
		w = nil
	}
	if w == nil {
		if len(ws.mu.live) >= ws.max {
			idle := ws.makeRoomLocked()
			if idle == nil {
				return nil, gone, ws.changedLocked(), nil
			}
			gone = append(gone, idle)
		}
		w, err = ws.open(from)
		if errors.Is(err, transfer.ErrRegions) && len(ws.mu.live) > 0 {
			if idle := ws.makeRoomLocked(); idle != nil {
				gone = append(gone, idle)
			}
			return nil, gone, ws.changedLocked(), nil // others took the table's room
		}
		if err != nil {
			return nil, gone, nil, fmt.Errorf("mooncake: publish the KV cache: %w", err)
		}
		ws.mu.current[from] = w
		ws.mu.live[w] = struct{}{}
	}
	for _, q := range list {
		w.users[q] = struct{}{}
		w.filled = w.filled || !empty(q.want.Blocks)
	}
	ws.mu.clock++
	w.used = ws.mu.clock
	return w, gone, nil, nil
}

// wantsClosed reports whether a request of list names a block that is closed in w.
func (w *window) wantsClosed(list []*receiving) bool {
	if len(w.closed) == 0 {
		return false
	}
	return slices.ContainsFunc(list, func(q *receiving) bool {
		return slices.ContainsFunc(q.want.Blocks, func(group []int) bool {
			return slices.ContainsFunc(group, func(id int) bool { _, ok := w.closed[id]; return ok })
		})
	})
}

// retireLocked lets w take no new users. If w has no users, retireLocked also removes it from the live windows and returns true; the
// caller must then withdraw it.
func (ws *windows) retireLocked(w *window) bool {
	w.retired = true
	if ws.mu.current[w.owner] == w {
		delete(ws.mu.current, w.owner)
	}
	return len(w.users) == 0 && ws.forgetLocked(w)
}

// forgetLocked removes w from the live windows. It returns false if w was removed before.
func (ws *windows) forgetLocked(w *window) bool {
	if _, ok := ws.mu.live[w]; !ok {
		return false
	}
	delete(ws.mu.live, w)
	if ws.mu.changed != nil {
		close(ws.mu.changed)
		ws.mu.changed = nil
	}
	return true
}

func (ws *windows) changedLocked() <-chan struct{} {
	if ws.mu.changed == nil {
		ws.mu.changed = make(chan struct{})
	}
	return ws.mu.changed
}

var errWindowEnded = errors.New("mooncake: too many failed pulls from this P: its oldest ones are given up")

// makeRoomLocked removes the least recently used idle window and returns it. If none is idle, it cancels the requests of the oldest
// window of the P with the most windows, if that P has more than one, and returns nil.
func (ws *windows) makeRoomLocked() (idle *window) {
	count := make(map[Source]int)
	var most *window // the oldest one of the P with most
	for w := range ws.mu.live {
		count[w.owner]++
		if len(w.users) == 0 && (idle == nil || w.used < idle.used) {
			idle = w
		}
	}
	if idle != nil {
		ws.retireLocked(idle)
		return idle
	}
	for w := range ws.mu.live {
		n := count[w.owner]
		if n > 1 && (most == nil || n > count[most.owner] || n == count[most.owner] && w.used < most.used) {
			most = w
		}
	}
	if most != nil && !most.ended {
		most.ended = true
		ws.retireLocked(most)
		for q := range most.users {
			q.giveUp(errWindowEnded)
		}
	}
	return nil
}

// open makes a window: it publishes all storages once more, at new addresses.
func (ws *windows) open(from Source) (*window, error) {
	var b [8]byte
	rand.Read(b[:]) // never fails
	w := &window{
		id: binary.LittleEndian.Uint64(b[:])>>1 | 1, owner: from,
		users: make(map[*receiving]struct{}), closed: make(map[int]struct{}),
	}
	mems := make([][]byte, len(ws.cache.Storages))
	for i, s := range ws.cache.Storages {
		mems[i] = s.Mem
	}
	var err error
	if w.handles, err = ws.table.Publish(mems...); err != nil {
		return nil, err
	}
	for _, h := range w.handles { // before P can know the addresses
		if ws.watched {
			h.Watch()
		}
		if ws.progress != nil {
			h.Count(ws.progress)
		}
	}
	w.regions = make([]wire.Region, len(ws.cache.Regions))
	for i, r := range ws.cache.Regions {
		s := ws.cache.home(i)
		r.Base = w.handles[s].Range().Addr + (r.Base - ws.cache.Storages[s].Addr)
		w.regions[i] = r
	}
	return w, nil
}

// fence closes blocks to all later writes in w and waits until the writes in progress end. When ctx ends first, it cuts the connections
// of these writes. cut is how many it cut.
func (ws *windows) fence(ctx context.Context, w *window, blocks [][]int) (cut int) {
	ws.mu.Lock()
	for g, ids := range blocks {
		for _, id := range ids {
			if id != 0 || g >= len(ws.cache.Kinds) || ws.cache.Kinds[g] != Mamba { // 0 is Mamba's placeholder
				w.closed[id] = struct{}{}
			}
		}
	}
	ws.mu.Unlock()
	return ws.table.Fence(ctx, ws.ranges(w, blocks)...)
}

// ranges returns the ranges of w that a push into the blocks may touch.
func (ws *windows) ranges(w *window, blocks [][]int) []transfer.Range {
	return ws.blockRanges(w, blocks, func(r *wire.Region, _, _ int) uint64 {
		if r.RowOffset == 0 {
			return r.Stride // P may have widened it to the row
		}
		return r.Payload
	})
}

// blockRanges returns one range for each region of w and each of the region's blocks. size returns the range's length in bytes; 0
// leaves the range out.
func (ws *windows) blockRanges(w *window, blocks [][]int, size func(r *wire.Region, group, id int) uint64) []transfer.Range {
	expanded := make([][]int, len(blocks))
	for g, ids := range blocks {
		if g < len(ws.cache.Kinds) && ws.cache.Kinds[g] != Mamba {
			ids = expand(ids, max(ws.cache.KernelBlocks, 1))
		}
		expanded[g] = ids
	}
	var list []transfer.Range
	for i := range w.regions {
		r := &w.regions[i]
		groups := r.Shared
		if r.Group != wire.SharedGroup {
			groups = []int{r.Group}
		}
		for _, g := range groups {
			if g < 0 || g >= len(expanded) {
				continue // no such group in this pull: nothing of the region is written
			}
			for _, id := range expanded[g] {
				if n := size(r, g, id); n > 0 {
					list = append(list, transfer.Range{Addr: r.Base + uint64(id)*r.Stride, Len: n})
				}
			}
		}
	}
	return list
}

// retire retires the current window of the P `from`, because that P may be gone.
func (ws *windows) retire(from Source) {
	ws.mu.Lock()
	w := ws.mu.current[from]
	gone := w != nil && ws.retireLocked(w)
	ws.mu.Unlock()
	if gone {
		ws.wg.Go(func() { ws.withdraw(w) })
	}
}

// release records that q does not use w any more. If q was the last user, and w is retired, has closed blocks, or never served a pull
// with blocks, release withdraws w.
func (ws *windows) release(w *window, q *receiving) {
	ws.mu.Lock()
	delete(w.users, q)
	last := len(w.users) == 0 && (w.retired || len(w.closed) > 0 || !w.filled) && ws.retireLocked(w)
	ws.mu.Unlock()
	if last {
		ws.withdraw(w)
	}
}

// withdraw removes a window from the table. Writes in progress may go on for ws.patience.
func (ws *windows) withdraw(w *window) {
	ctx, cancel := context.WithTimeout(context.Background(), ws.patience)
	defer cancel()
	ws.table.Withdraw(ctx, w.handles...)
}

// close withdraws every window. No pull may run at that time.
func (ws *windows) close() {
	ws.mu.Lock()
	live := ws.mu.live
	ws.mu.live = make(map[*window]struct{})
	clear(ws.mu.current)
	ws.mu.Unlock()
	for w := range live {
		ws.withdraw(w)
	}
}

func (ws *windows) count() int {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return len(ws.mu.live)
}
