// SPDX-License-Identifier: Apache-2.0

package tiering

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/invariant"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// maxSlow is the number of slow calls from which on a tier counts as not answering.
const maxSlow = 8

// Guard calls a tier that may hang, panic or return wrong bytes. It counts the calls that take too long, so that callers do without the
// tier while many of them run. Its methods are safe for concurrent use.
type Guard struct {
	of      tier.Tier
	after   time.Duration
	maxHeld int64
	log     *slog.Logger
	slow    atomic.Int32 // running calls that have taken longer than `after`
	held    atomic.Int64 // bytes that these calls may write to
	failed  failures
}

// NewGuard returns a Guard of the tier `of`. A call is slow when it takes longer than `after`. While 8 calls are slow, or slow calls may
// write to maxHeld bytes, the tier counts as not answering.
func NewGuard(of tier.Tier, after time.Duration, maxHeld int64, log *slog.Logger) *Guard {
	return &Guard{of: of, after: after, maxHeld: maxHeld, log: log}
}

// Answers reports whether the tier may be asked. It is false while too many slow calls run.
func (t *Guard) Answers() bool { return t.slow.Load() < maxSlow && t.held.Load() < t.maxHeld }

// ErrPanic means that a bug made a call of the tier panic. Only that call failed.
var ErrPanic = errors.New("tiering: a call panicked, which is a bug of the tier")

// Stat returns the tier's metas of keys in a slice of its own. An object that could not be read a moment ago counts as missing; otherwise
// each lookup would try it again at once.
func (t *Guard) Stat(ctx context.Context, keys []kv.Key) (metas []tier.Meta, err error) {
	metas = make([]tier.Meta, len(keys))
	t.timed(0, func() {
		err = t.contain(func() error { return t.of.Stat(ctx, keys, metas) })
	})
	t.failed.hide(keys, metas)
	return metas, err
}

// Ask is Stat for a caller that must not wait longer than until ctx ends, whatever the tier does. start starts a goroutine, or reports
// false.
func (t *Guard) Ask(ctx context.Context, keys []kv.Key, start func(func()) bool) ([]tier.Meta, error) {
	type answer struct {
		metas []tier.Meta
		err   error
	}
	answered := make(chan answer, 1)
	if !start(func() {
		metas, err := t.Stat(ctx, keys)
		answered <- answer{metas, err}
	}) {
		return nil, context.Canceled
	}
	select {
	case a := <-answered:
		return a.metas, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Hottest calls tier.Hottest for the tier.
func (t *Guard) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	return t.contain(func() error { return tier.Hottest(ctx, t.of, n, f) })
}

// Read fills dst and returns the checksum of the bytes read. The memory of dst may go away meanwhile. Errors: those of the tier;
// *tier.CorruptError also if the tier's checksum differs (Read then deletes the tier's object); ErrPanic; faults of dst.
func (t *Guard) Read(ctx context.Context, k kv.Key, dst []byte) (sum uint64, err error) {
	var meta tier.Meta
	t.timed(int64(len(dst)), func() {
		fault := shm.Guard(func() {
			err = t.contain(func() (err error) {
				meta, sum, err = tier.ReadSummed(ctx, t.of, k, dst)
				return err
			})
		})
		err = errors.Join(err, fault)
	})
	if err == nil && !meta.NoSum && meta.Sum != sum {
		err = &tier.CorruptError{Key: k, Want: meta, Got: tier.Meta{Len: meta.Len, Sum: sum}}
		_ = t.contain(func() error { return t.of.Delete(ctx, []kv.Key{k}) }) // otherwise no store would replace it
	}
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		t.failed.add(k)
	}
	return sum, err
}

// Write stores src in the tier under k and returns its checksum, which m has unless NoSum is set. The memory of src may go away meanwhile.
// Errors: those of the tier, ErrPanic, faults of src.
func (t *Guard) Write(ctx context.Context, k kv.Key, src []byte, m tier.Meta) (sum uint64, err error) {
	fault := shm.Guard(func() {
		if m.NoSum {
			m.Sum = xxh3.Hash(src)
		}
		m.Len, m.NoSum = int64(len(src)), false
		err = t.contain(func() error { return t.of.Write(ctx, k, m, src) })
	})
	sum = m.Sum
	if err = errors.Join(err, fault); err == nil {
		t.failed.forget(k)
	}
	return sum, err
}

// Close closes the tier.
func (t *Guard) Close() error { return t.of.Close() }

// timed calls f, which fills `bytes` bytes, and counts it as slow while it takes longer than t.after.
func (t *Guard) timed(bytes int64, f func()) {
	count := func(by int32) {
		t.slow.Add(by)
		t.held.Add(int64(by) * bytes)
	}
	timer := time.AfterFunc(t.after, func() { count(1) })
	defer func() {
		if !timer.Stop() {
			count(-1)
		}
	}()
	f()
}

// contain turns a panic of the tier into ErrPanic. Builds with -tags invariants do not catch panics. Faults of mapped memory are left to
// shm.Guard.
func (t *Guard) contain(f func() error) (err error) {
	if invariant.Enabled {
		return f()
	}
	defer func() {
		switch v := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			panic(v)
		default:
			t.log.Error("a call of the tier below met a bug of it; please report it", "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			err = ErrPanic
		}
	}()
	return f()
}
