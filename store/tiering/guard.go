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

// maxSlow is how many slow calls mean that a tier does not answer.
const maxSlow = 8

// Guard calls a tier that may hang, panic or give wrong bytes. It counts the calls that take too long, so that callers do
// without the tier while many of them go on. Its methods are safe for concurrent use.
type Guard struct {
	of      tier.Tier
	after   time.Duration
	maxHeld int64
	log     *slog.Logger
	slow    atomic.Int32 // calls that have taken longer than after and go on
	held    atomic.Int64 // bytes that they may write to
	failed  failures
}

// NewGuard guards a tier. Calls are slow after so long; 8 of them, or slow ones that may write
// to maxHeld bytes, mean that it does not answer.
func NewGuard(of tier.Tier, after time.Duration, maxHeld int64, log *slog.Logger) *Guard {
	return &Guard{of: of, after: after, maxHeld: maxHeld, log: log}
}

// Answers reports whether the tier may be asked. It is false while slow calls go on.
func (t *Guard) Answers() bool { return t.slow.Load() < maxSlow && t.held.Load() < t.maxHeld }

// ErrPanic means that a call of the tier met a bug of it. It costs that call.
var ErrPanic = errors.New("tiering: a call panicked, which is a bug of the tier")

// Stat is that of the tier, with metas of its own. What could not be read a moment ago is
// not there: else the next lookup would try again at once, and so on.
func (t *Guard) Stat(ctx context.Context, keys []kv.Key) (metas []tier.Meta, err error) {
	metas = make([]tier.Meta, len(keys))
	t.timed(0, func() {
		err = t.contain(func() error { return t.of.Stat(ctx, keys, metas) })
	})
	t.failed.hide(keys, metas)
	return metas, err
}

// Ask is Stat for a caller that waits no longer than until ctx ends, whatever the tier
// does. start starts a goroutine, or reports false.
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

// Hottest is that of the tier.
func (t *Guard) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	return t.contain(func() error { return tier.Hottest(ctx, t.of, n, f) })
}

// Read fills dst, which may be memory that goes away, and returns the checksum of the bytes
// read. Errors: those of the tier, *tier.CorruptError also when the tier's checksum differs
// (then Read deletes the tier's object), ErrPanic, faults of dst.
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
		_ = t.contain(func() error { return t.of.Delete(ctx, []kv.Key{k}) }) // else no store would replace it
	}
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		t.failed.add(k)
	}
	return sum, err
}

// Write keeps src, which may be memory that goes away, under k, and returns its checksum, which m has unless NoSum is set.
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

// timed calls f, which fills bytes bytes, and counts it as slow while it takes
// too long.
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

// contain makes an error of the tier's panics. Builds with -tags invariants let panics go on;
// faults of mapped memory are left to shm.Guard.
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
