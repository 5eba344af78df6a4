// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
)

const (
	provideStep       = 8 << 20          // bytes provided in one step
	maxProvided       = 256 << 20        // bytes provided for one request; the background continues
	provideRetryDelay = 10 * time.Second // time until the next try after the file system had no more
)

// Sparse is a pool whose memory Memory provides. Its methods are safe for concurrent use.
type Sparse interface {
	Bytes() int64     // its size
	FreeBytes() int64 // bytes of it that no chunk takes
	Provided() int64  // bytes from its start that have memory already

	// Populate makes the kernel provide n bytes from the offset `from` on. With mapped it also maps them into this process. Error:
	// shm.ErrNoPopulate if the kernel cannot do this.
	Populate(from, n int64, mapped bool) error
	NoteProvided(to int64) // records this for a later server

	// Limit prevents that Reserve takes anything above that many bytes. Slots above that are in use already stay. An error means that there
	// is no memory for the index of that many bytes.
	Limit(bytes int64) error
}

// Memory provides the memory of a sparse pool ahead of its use. /dev/shm promises no memory for a file: a worker that touches a page which
// the file system cannot provide is killed (SIGBUS). So slots are given out only in memory that was provided: in the background, from the
// lowest offset up, and ahead of a request that needs more. Its methods are safe for concurrent use.
type Memory struct {
	pool     Sparse
	rate     int64 // bytes per second; 0: nothing is provided, and all of the pool is given out
	log      *slog.Logger
	provided atomic.Int64 // bytes from the pool's start that were provided
	trouble  atomic.Pointer[error]
	filling  sync.Mutex    // held during a step, so that one is made at a time
	mapped   chan struct{} // closed by the first call of MapAhead
	mapOnce  sync.Once
}

// NewMemory finds out how much of p has memory already, and limits p to that.
func NewMemory(p Sparse, rate int64, log *slog.Logger) *Memory {
	m := &Memory{pool: p, rate: rate, log: log, mapped: make(chan struct{})}
	if rate <= 0 {
		return m
	}
	m.provided.Store(p.Provided())
	if err := p.Limit(m.provided.Load()); err != nil {
		m.noteExhausted(m.provided.Load(), err)
	}
	return m
}

// noteExhausted records that the file system has memory only for the first `from` bytes of the pool.
func (m *Memory) noteExhausted(from int64, err error) {
	why := fmt.Errorf("/dev/shm has no memory for the whole pool: %s of %s can be used (%w)",
		kv.FormatBytes(from), kv.FormatBytes(m.pool.Bytes()), err)
	if m.trouble.Swap(&why) == nil {
		m.log.Error("the pool's file system has no memory for the whole pool: free some, or make the pool smaller",
			"usable_bytes", from, "pool_bytes", m.pool.Bytes(), "err", err)
	}
}

// Trouble returns why not all of the pool can be used, or nil.
func (m *Memory) Trouble() error {
	if err := m.trouble.Load(); err != nil {
		return *err
	}
	return nil
}

// Provided returns how many bytes from the pool's start were provided.
func (m *Memory) Provided() int64 { return m.provided.Load() }

// Usable returns how many bytes of the pool may be given out.
func (m *Memory) Usable() int64 {
	if m.rate <= 0 {
		return m.pool.Bytes()
	}
	return m.provided.Load()
}

// MapAhead makes Run also map the pool into this process. Call it if this process will copy into the pool and out of it: that is several
// times faster then.
func (m *Memory) MapAhead() { m.mapOnce.Do(func() { close(m.mapped) }) }

func (m *Memory) mapsAhead() bool {
	select {
	case <-m.mapped:
		return true
	default:
		return false
	}
}

// Whole reports whether all of the pool may be given out.
func (m *Memory) Whole() bool { return m.Usable() >= m.pool.Bytes() }

// Prepare provides memory for `bytes` more bytes, as far as there is any. Otherwise these bytes would evict other chunks while most of the
// pool is unused.
func (m *Memory) Prepare(bytes int64) {
	total := m.pool.Bytes()
	for left := int64(maxProvided); left > 0; left -= provideStep {
		usable := m.Usable()
		if usable >= total || m.trouble.Load() != nil {
			return
		}
		if free := m.pool.FreeBytes() - (total - usable); free >= bytes {
			return
		}
		if m.step(usable) != nil {
			return
		}
	}
}

// More provides one more step of the pool's memory now, as Run does in the background. It is for a caller that knows that there is memory
// again. An error says that there is none.
func (m *Memory) More() error { return m.step(m.Usable()) }

// step provides one step of memory from the offset `from` on, unless another goroutine has just done so.
func (m *Memory) step(from int64) error {
	m.filling.Lock()
	defer m.filling.Unlock()
	if m.provided.Load() != from {
		return nil
	}
	to := min(from+provideStep, m.pool.Bytes())
	err := m.pool.Populate(from, to-from, m.mapsAhead())
	if err == nil {
		m.pool.NoteProvided(to)
	}
	if errors.Is(err, shm.ErrNoPopulate) {
		m.log.Warn("pool memory cannot be provided ahead of use on this system: a /dev/shm that fills up later ends engines", "err", err)
		to, err = m.pool.Bytes(), nil
	}
	if err == nil {
		err = m.pool.Limit(to)
	}
	if err != nil {
		m.noteExhausted(from, err)
		return err
	}
	m.provided.Store(to)
	if m.trouble.Swap(nil) != nil {
		m.log.Info("the pool's file system has memory again", "usable_bytes", to, "pool_bytes", m.pool.Bytes())
	}
	return nil
}

// Run provides the whole pool until ctx ends, in the order in which slots are given out. A worker also copies several times faster into
// memory that was touched before. After MapAhead Run also maps that memory.
func (m *Memory) Run(ctx context.Context) {
	if m.rate <= 0 {
		return
	}
	total := m.pool.Bytes()
	tick := time.NewTicker(providePause(m.rate))
	defer tick.Stop()
	for m.Usable() < total {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if m.More() == nil {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(provideRetryDelay):
		}
	}
	select {
	case <-ctx.Done():
		return
	case <-m.mapped:
	}
	tick.Reset(providePause(4 * m.rate)) // the pages have memory and need only be mapped
	for off := int64(0); off < total; off += provideStep {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := m.pool.Populate(off, provideStep, true); err != nil {
			m.log.Warn("mapping pool memory stopped; first copies into the rest are slower", "mapped_bytes", off, "pool_bytes", total, "err", err)
			return
		}
	}
}

// providePause is the time between two steps at a rate.
func providePause(rate int64) time.Duration {
	return max(time.Duration(float64(provideStep)/float64(rate)*float64(time.Second)), time.Millisecond)
}
