package mooncake

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/kvasir-kv/kvasir/transfer"
)

// A window is one publication of D's memory: the same bytes as in any other, at
// addresses of its own, which come once in the life of the transfer table and differ
// from those of an earlier life. Addresses on the wire are names, so D may have many.
//
// That is how late writes are kept out of reused blocks. When a pull fails, P may
// still be writing, now or in an hour, and D cannot tell its writes from those of
// the next pull into the same blocks: both carry only an address. So D closes the
// blocks' ranges in this window for good (transfer.Table.Fence), retires the
// window, and publishes the next pull under a new one. Pulls in progress finish in
// the old window; with the last of them it is closed.
type window struct {
	id      uint64   // layout id: odd, random, as vLLM's are
	regions []Region // as published
	handles []*transfer.Region

	users   int  // requests that use it; guarded by windows.mu
	retired bool // guarded by windows.mu
}

// windows makes and retires the windows of one Receiver.
type windows struct {
	cache *Cache          // immutable
	table *transfer.Table // immutable

	mu struct { // a leaf but for Table.mu
		sync.Mutex
		current *window
		live    map[*window]struct{}
	}
}

const windowAlign = 2 << 20

// windowBytes is the address space of a storage: a gap follows, so that no run of
// blocks reaches over.
func windowBytes(mem []byte) uint64 {
	return (uint64(len(mem)) + 2*windowAlign) &^ (windowAlign - 1)
}

func newWindows(c *Cache, t *transfer.Table) *windows {
	w := &windows{cache: c, table: t}
	w.mu.live = make(map[*window]struct{})
	return w
}

// use returns the current window with n more users.
func (ws *windows) use(n int) (*window, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.mu.current == nil {
		w, err := ws.openLocked()
		if err != nil {
			return nil, fmt.Errorf("mooncake: publish the KV cache: %w", err)
		}
		ws.mu.current = w
		ws.mu.live[w] = struct{}{}
	}
	ws.mu.current.users += n
	return ws.mu.current, nil
}

// openLocked registers all storages again, at new addresses.
func (ws *windows) openLocked() (*window, error) {
	var b [8]byte
	rand.Read(b[:]) // never fails
	w := &window{id: binary.LittleEndian.Uint64(b[:])>>1 | 1}
	mems := make([][]byte, len(ws.cache.Storages))
	for i, s := range ws.cache.Storages {
		mems[i] = s.Mem
	}
	var err error
	if w.handles, err = ws.table.Publish(mems...); err != nil {
		return nil, err
	}
	w.regions = make([]Region, len(ws.cache.Regions))
	for i, r := range ws.cache.Regions {
		s := ws.cache.home(i)
		r.Base = w.handles[s].Range().Addr + (r.Base - ws.cache.Storages[s].Addr)
		w.regions[i] = r
	}
	return w, nil
}

// fence closes blocks to all later writes in w and waits for those in progress,
// until ctx ends; then their connections are cut. w takes no new users.
func (ws *windows) fence(ctx context.Context, w *window, blocks [][]int) (cut int) {
	ws.mu.Lock()
	w.retired = true
	if ws.mu.current == w {
		ws.mu.current = nil
	}
	ws.mu.Unlock()
	return ws.table.Fence(ctx, ws.ranges(w, blocks)...)
}

// ranges returns what a push into the blocks may touch.
func (ws *windows) ranges(w *window, blocks [][]int) []transfer.Range {
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
		ids, err := regionBlocks(expanded, r)
		if err != nil {
			continue // no such group in this pull: nothing of the region is written
		}
		n := r.Payload
		if r.RowOffset == 0 {
			n = r.Stride // P may have widened it to the row
		}
		for _, id := range ids {
			list = append(list, transfer.Range{Addr: r.Base + uint64(id)*r.Stride, Len: n})
		}
	}
	return list
}

// release gives a use back; the last one of a retired window closes it, which
// waits for writes in progress until ctx ends.
func (ws *windows) release(ctx context.Context, w *window) {
	ws.mu.Lock()
	w.users--
	last := w.retired && w.users == 0
	if last {
		delete(ws.mu.live, w)
	}
	ws.mu.Unlock()
	if last {
		ws.table.Withdraw(ctx, w.handles...)
	}
}

// close takes every window back. No pull may run.
func (ws *windows) close(ctx context.Context) {
	ws.mu.Lock()
	live := ws.mu.live
	ws.mu.live = make(map[*window]struct{})
	ws.mu.current = nil
	ws.mu.Unlock()
	for w := range live {
		ws.table.Withdraw(ctx, w.handles...)
	}
}

func (ws *windows) count() int {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	return len(ws.mu.live)
}
