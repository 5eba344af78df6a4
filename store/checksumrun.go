// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"log/slog"
	"time"
)

// checksumWork has the functions that runChecksums calls.
type checksumWork struct {
	next    func() int64         // processes one object and returns the bytes read; 0 when there is nothing to do yet
	idle    func() time.Duration // how long to wait until there may be work
	corrupt func() uint64        // how many objects have differed from their checksums so far
}

// runChecksums calls work.next until ctx ends, several times in a row for small objects. It reads no more than rate bytes per second.
func runChecksums(ctx context.Context, rate int64, work checksumWork, log *slog.Logger) {
	const burst = 16 << 20
	differed := uint64(0)
	for ctx.Err() == nil {
		read, more := int64(0), true
		for more && read < burst {
			n := work.next()
			read, more = read+n, n > 0
		}
		if got := work.corrupt(); got != differed {
			differed = got
			log.Error("chunks of the earlier server differed from their checksums and were dropped: "+
				"something wrote into the pool, or memory is faulty", "chunks", got)
		}
		wait := time.Duration(float64(read) / float64(rate) * float64(time.Second))
		if !more {
			wait = max(wait, work.idle())
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}
