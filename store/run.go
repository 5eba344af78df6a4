// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"sync"
	"time"
)

// Run does the store's background work until ctx ends. It ends expired sessions and holds, provides pool memory ahead of its use, and
// computes the checksums of chunks. It compares chunks of an earlier server with their checksums, and looks for them in the tier below.
// Without Run a pending lookup gets no object that it waits for.
func (s *Store) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.memory.Run(ctx) })
	if s.opts.ChecksumRate > 0 {
		wg.Go(func() {
			runChecksums(ctx, s.opts.ChecksumRate, checksumWork{s.sumNext, s.sumsIdle, s.corruptChunks}, s.log)
		})
	}
	wg.Go(func() { s.flyers.Run(ctx, readers(), s.flyNext) }) // compares the objects that lookups wait for
	if s.curves != nil {
		wg.Go(func() { s.curves.Run(ctx) })
	}
	if s.outbox != nil {
		wg.Go(func() { s.outbox.Run(ctx, writers, s.nextLanding, s.beginWriting) })
		wg.Go(func() { s.runRechecks(ctx) })
	}
	if s.below != nil && s.opts.WarmBytes > 0 {
		wg.Go(func() { s.warm(ctx) })
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.Expire()
		}
	}
}
