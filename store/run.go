package store

import (
	"context"
	"sync"
	"time"
)

// Run does the store's background work until ctx ends: sessions and holds expire,
// pool memory is provided ahead of use, chunks get checksums, and those of an earlier
// server are compared with theirs, and looked for in the tier below. Without it what a lookup waits for does not come.
func (s *Store) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.memory.Run(ctx) })
	if s.opts.ChecksumRate > 0 {
		wg.Go(func() { s.checksums(ctx) })
	}
	wg.Go(func() { s.flyers.Run(ctx, readers(), s.flyNext) }) // what lookups wait for
	if s.outbox != nil {
		wg.Go(func() { s.outbox.Run(ctx, writers, s.nextLanding, s.beginWriting) })
		wg.Go(func() { s.recheck(ctx) })
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

// checksums computes and compares checksums in the background, at no more than
// ChecksumRate bytes per second, several small ones at a time.
func (s *Store) checksums(ctx context.Context) {
	const burst = 16 << 20
	rest := time.NewTimer(0)
	defer rest.Stop()
	corrupt := uint64(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-rest.C:
		}
		read, more := int64(0), true
		for more && read < burst {
			n := s.sumNext()
			read, more = read+n, n > 0
		}
		if got := s.Stats().CorruptChunks; got != corrupt {
			corrupt = got
			s.log.Error("chunks of the earlier server differed from their checksums and were dropped: "+
				"something wrote into the pool, or memory is faulty", "chunks", got)
		}
		wait := time.Duration(float64(read) / float64(s.opts.ChecksumRate) * float64(time.Second))
		if !more {
			wait = max(wait, time.Second)
		}
		rest.Reset(wait)
	}
}
