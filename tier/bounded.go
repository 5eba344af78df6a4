// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv"
)

// Limits bound the use of a Tier. A zero field means its default.
type Limits struct {
	Calls   int           // number of calls that run at once; at most half of them are writes; default 64
	Bytes   int64         // sum of the reads and writes that run at once; one that runs alone may be larger; default 1 GiB
	Timeout time.Duration // of one call; default 30 s

	// After Failures calls in a row that failed or exceeded Timeout, the tier rests for Pause: all lookups miss, and writes return
	// ErrResting. Then one call is let through as a trial.
	Failures int           // default 8
	Pause    time.Duration // default 5 s
}

// Validate reports every field that cannot be used, as options.Errors.
func (l Limits) Validate() error {
	var c options.Checks
	options.Within(&c, "Calls", l.Calls, 0, 1<<16)
	options.Within(&c, "Bytes", l.Bytes, 0, 1<<50)
	options.Within(&c, "Timeout", l.Timeout, 0, 24*time.Hour)
	options.Within(&c, "Failures", l.Failures, 0, 1<<20)
	options.Within(&c, "Pause", l.Pause, 0, 24*time.Hour)
	return c.Err()
}

// Bounding is a Tier that bounds the use of another one.
type Bounding struct {
	of     Tier
	limits Limits
	onCall func(write bool, err error) // is called with the end of each call of the tier; nil: not called; set before the first call

	mu struct {
		sync.Mutex
		calls, writes int
		bytes         int64
		freed         chan struct{} // closed when a call ends; nil without waiters
		failures      int           // failed calls in a row
		restUntil     time.Time     // end of the Pause; means something only while failures is at its limit
		trying        bool          // a call that tests whether the tier works again is running
	}
}

// Bounded bounds the use of t.
func Bounded(t Tier, l Limits) *Bounding {
	l.Calls, l.Bytes, l.Timeout = cmp.Or(l.Calls, 64), cmp.Or(l.Bytes, 1<<30), cmp.Or(l.Timeout, 30*time.Second)
	l.Failures, l.Pause = cmp.Or(l.Failures, 8), cmp.Or(l.Pause, 5*time.Second)
	return &Bounding{of: t, limits: l}
}

// Resting reports whether the tier rests: Failures calls in a row failed, and no trial has succeeded since.
func (b *Bounding) Resting() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.failures >= b.limits.Failures
}

// do calls f, which moves `bytes` bytes and is a write or not, once the limits leave room for it, and counts how it ends. While the tier
// rests it returns ErrResting and does not call f.
func (b *Bounding) do(ctx context.Context, bytes int64, write bool, f func(context.Context) error) error {
	trial, err := b.admit()
	if err != nil {
		return err
	}
	if err := b.enter(ctx, bytes, write); err != nil {
		b.settle(unknown, trial)
		return err
	}
	defer b.leave(bytes, write)
	limited, cancel := context.WithTimeout(ctx, b.limits.Timeout)
	defer cancel()
	var settled atomic.Bool
	settle := func(o outcome) {
		if settled.CompareAndSwap(false, true) {
			b.settle(o, trial)
		}
	}
	// A call that exceeds Timeout counts as failed at that moment, not when it ends.
	timer := time.AfterFunc(b.limits.Timeout, func() { settle(failed) })
	defer timer.Stop()
	returned := false
	defer func() {
		if !returned { // it panicked
			settle(failed)
		}
	}()
	err = f(limited)
	returned = true
	settle(b.judge(ctx, err))
	return err
}

type outcome uint8

const (
	worked outcome = iota
	failed
	unknown // the caller gave up, or the tier rested
)

// judge returns what the error of a call says about the tier.
func (b *Bounding) judge(ctx context.Context, err error) outcome {
	_, corrupt := errors.AsType[*CorruptError](err)
	switch {
	case err == nil, corrupt, errors.Is(err, ErrMissing), errors.Is(err, ErrNotKept):
		return worked
	case errors.Is(err, ErrResting):
		return unknown
	case errors.Is(ctx.Err(), context.Canceled):
		return unknown
	}
	return failed
}

// enter waits until a call that moves `bytes` bytes fits the limits, and counts that call as running.
func (b *Bounding) enter(ctx context.Context, bytes int64, write bool) error {
	for {
		wait := b.tryEnter(bytes, write)
		if wait == nil {
			return nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tryEnter counts a call as running if the limits allow it. Otherwise it returns a channel that is closed when another call ends.
func (b *Bounding) tryEnter(bytes int64, write bool) (wait chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	room := b.mu.calls < b.limits.Calls && (bytes == 0 || b.mu.bytes == 0 || b.mu.bytes+bytes <= b.limits.Bytes)
	if write {
		room = room && b.mu.writes < max(1, b.limits.Calls/2)
	}
	if !room {
		if b.mu.freed == nil {
			b.mu.freed = make(chan struct{})
		}
		return b.mu.freed
	}
	b.mu.calls++
	b.mu.bytes += bytes
	if write {
		b.mu.writes++
	}
	return nil
}

func (b *Bounding) leave(bytes int64, write bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.calls--
	b.mu.bytes -= bytes
	if write {
		b.mu.writes--
	}
	if b.mu.freed != nil {
		close(b.mu.freed)
		b.mu.freed = nil
	}
}

// admit returns ErrResting while the tier rests. After the Pause it admits one call as a trial (trial is true), and refuses others until
// settle has counted that one.
func (b *Bounding) admit() (trial bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mu.failures < b.limits.Failures:
		return false, nil
	case b.mu.trying || time.Now().Before(b.mu.restUntil):
		return false, ErrResting
	}
	b.mu.trying = true
	return true, nil
}

// settle counts how a call ended. trial is the value that admit returned for the call.
func (b *Bounding) settle(o outcome, trial bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if trial {
		b.mu.trying = false
	}
	switch {
	case o == worked && (trial || b.mu.failures < b.limits.Failures): // the success of a call that began before the rest does not end the rest
		b.mu.failures = 0
	case o == failed:
		b.mu.failures = min(b.mu.failures+1, b.limits.Failures)
		if b.mu.failures == b.limits.Failures {
			b.mu.restUntil = time.Now().Add(b.limits.Pause)
		}
	}
}

// Stat implements Tier. While the tier rests every object is missing.
func (b *Bounding) Stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	err := b.stat(ctx, keys, metas)
	if errors.Is(err, ErrResting) {
		clear(metas[:len(keys)])
		return nil
	}
	return err
}

// stat is Stat, but returns ErrResting while the tier rests, so that the caller does not take this for a miss.
func (b *Bounding) stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	return b.do(ctx, 0, false, func(ctx context.Context) error { return b.seen(false, b.of.Stat(ctx, keys, metas)) })
}

// observe sets f as the function that is called with the end of each lookup, read and write of the tier itself.
func (b *Bounding) observe(f func(write bool, err error)) { b.onCall = f }

// seen reports the end of a call to b.onCall. If the tier itself rests, as a Redis tier does after failures, the
// observer sees its error, although the caller sees a miss.
func (b *Bounding) seen(write bool, err error) error {
	if b.onCall != nil {
		b.onCall(write, err)
	}
	return err
}

// Read implements Tier. While the tier rests every object is missing.
func (b *Bounding) Read(ctx context.Context, k kv.Key, dst []byte) (m Meta, err error) {
	err = b.read(ctx, len(dst), func(ctx context.Context) (err error) {
		m, err = b.of.Read(ctx, k, dst)
		return b.seen(false, err)
	})
	return m, err
}

// ReadSummed implements Summing. While the tier rests every object is missing.
func (b *Bounding) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (m Meta, sum uint64, err error) {
	err = b.read(ctx, len(dst), func(ctx context.Context) (err error) {
		m, sum, err = ReadSummed(ctx, b.of, k, dst)
		return b.seen(false, err)
	})
	return m, sum, err
}

func (b *Bounding) read(ctx context.Context, bytes int, f func(context.Context) error) error {
	err := b.do(ctx, int64(bytes), false, f)
	if errors.Is(err, ErrResting) {
		return ErrMissing
	}
	return err
}

// Write implements Tier. While the tier rests it returns ErrResting, and so does the call
// whose failure begins or prolongs the rest. The caller should offer the object again.
func (b *Bounding) Write(ctx context.Context, k kv.Key, m Meta, src []byte) error {
	err := b.do(ctx, int64(len(src)), true, func(ctx context.Context) error { return b.seen(true, b.of.Write(ctx, k, m, src)) })
	if b.judge(ctx, err) == failed && b.Resting() {
		return fmt.Errorf("%w: %w", ErrResting, err)
	}
	return err
}

// Delete implements Tier.
func (b *Bounding) Delete(ctx context.Context, keys []kv.Key) error {
	return b.do(ctx, 0, false, func(ctx context.Context) error { return b.of.Delete(ctx, keys) })
}

// List implements Lister.
func (b *Bounding) List(ctx context.Context, f func(kv.Key, Meta) bool) error {
	return list(ctx, b.of, f)
}

// Space implements Sized.
func (b *Bounding) Space() Space { return spaceOf(b.of) }

// Close implements Tier.
func (b *Bounding) Close() error { return b.of.Close() }
