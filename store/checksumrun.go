// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"log/slog"
	"time"
)

// runChecksums has checksums computed and compared until ctx ends, at no more than rate bytes per second, several small ones at
// a time. next does one object and returns the bytes read, 0 when there is nothing to do yet; corrupt is how many
// differed so far.
func runChecksums(ctx context.Context, rate int64, next func() int64, corrupt func() uint64, log *slog.Logger) {
	const (
		burst = 16 << 20
		idle  = 250 * time.Millisecond // between two looks when there is nothing to do
	)
	rest := time.NewTimer(0)
	defer rest.Stop()
	differed := uint64(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-rest.C:
		}
		read, more := int64(0), true
		for more && read < burst {
			n := next()
			read, more = read+n, n > 0
		}
		if got := corrupt(); got != differed {
			differed = got
			log.Error("chunks of the earlier server differed from their checksums and were dropped: "+
				"something wrote into the pool, or memory is faulty", "chunks", got)
		}
		wait := time.Duration(float64(read) / float64(rate) * float64(time.Second))
		if !more {
			wait = max(wait, idle)
		}
		rest.Reset(wait)
	}
}
