// SPDX-License-Identifier: Apache-2.0

package tiering

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

const (
	warmReads       = 4                // reads that run at once
	warmRetryDelay  = time.Second      // time until a tier that does not answer is tried again
	warmLogInterval = 10 * time.Second // time between two lines in the log
	maxWarmObjects  = 1 << 16          // objects at most, about 10 MiB of names
)

// WarmOptions says how much Warm reads.
type WarmOptions struct {
	Bytes   int64         // most bytes that are read in all
	Time    time.Duration // longest time that Warm reads
	Longest int64         // bytes of an object; longer ones are left out
	Log     *slog.Logger
}

// Warmer names the objects to read, and stores them.
type Warmer interface {
	// Hottest calls f for n objects at most, the hottest first, until f returns false.
	Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error
	// Usable reports whether the tier answers.
	Usable() bool
	// Warm reads an object into the pool, unless the pool has it. If wait is not nil, other reads go first: the caller waits for it and
	// tries again. room is false if the pool has no room. It ends soon after ctx.
	Warm(ctx context.Context, k kv.Key, bytes int64) (wait chan struct{}, room bool)
	// Warmed returns how much was read so far.
	Warmed() (objects, bytes uint64)
}

// Warm reads the hottest objects of a tier before a lookup asks for them. It ends when o.Bytes are read, o.Time
// has passed, all objects are read, the pool has no room, or ctx ends.
func Warm(ctx context.Context, r Warmer, o WarmOptions) {
	ctx, cancel := context.WithTimeout(ctx, o.Time)
	defer cancel()
	began := time.Now()
	args := func() []any {
		objects, bytes := r.Warmed()
		return []any{"chunks", objects, "bytes", bytes, "took", time.Since(began).Round(time.Millisecond)}
	}
	o.Log.Info("warming: reading the most used objects of the tiers", "bytes_at_most", o.Bytes, "time_at_most", o.Time)
	todo := make(chan warmObject)
	var full atomic.Bool
	var readers sync.WaitGroup
	for range warmReads {
		readers.Go(func() {
			for x := range todo {
				if !readWarm(ctx, r, x) {
					full.Store(true)
				}
			}
		})
	}
	why, left, said := "all was read", o.Bytes, began
	err := hottest(ctx, r, o.Log, func(k kv.Key, m tier.Meta) bool {
		switch {
		case full.Load():
			why = "the pool is full"
			return false
		case m.NoSum || m.Len > o.Longest: // it cannot be verified, or is longer than any object of this server
			return true
		case m.Len > left:
			why = "enough was read"
			return false
		}
		left -= m.Len
		if time.Since(said) >= warmLogInterval {
			said = time.Now()
			o.Log.Info("warming goes on", args()...)
		}
		select {
		case todo <- warmObject{k, m.Len}:
			return true
		case <-ctx.Done():
			return false
		}
	})
	close(todo)
	readers.Wait()
	switch {
	case ctx.Err() != nil:
		o.Log.Info("warming has ended", append(args(), "ended", "the time is over")...)
	case err != nil:
		o.Log.Warn("warming is impossible: the tiers cannot list their most used objects", append(args(), "err", err)...)
	default:
		o.Log.Info("warming has ended", append(args(), "ended", why)...)
	}
}

// hottest calls r.Hottest, and again while the tier does not answer.
func hottest(ctx context.Context, r Warmer, log *slog.Logger, f func(kv.Key, tier.Meta) bool) error {
	for said := false; ; said = true {
		named := false
		err := r.Hottest(ctx, maxWarmObjects, func(k kv.Key, m tier.Meta) bool {
			named = true
			return f(k, m)
		})
		if err == nil || named || errors.Is(err, tier.ErrNoList) {
			return err
		}
		if !said {
			log.Warn("the tiers cannot list their most used objects; retrying until the warming time is over", "err", err)
		}
		select {
		case <-time.After(warmRetryDelay):
		case <-ctx.Done():
			return err
		}
	}
}

// warmObject is an object that is to be read.
type warmObject struct {
	key   kv.Key
	bytes int64
}

// readWarm waits until the object may be read, and reads it. It reports false if the pool has no room.
func readWarm(ctx context.Context, r Warmer, x warmObject) (room bool) {
	for ctx.Err() == nil {
		if !r.Usable() {
			select {
			case <-time.After(warmRetryDelay):
			case <-ctx.Done():
			}
			continue
		}
		wait, room := r.Warm(ctx, x.key, x.bytes)
		if wait == nil {
			return room
		}
		select {
		case <-wait:
		case <-ctx.Done():
		}
	}
	return true
}
