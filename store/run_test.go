// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/store"
)

// Run does by itself what time asks for: holds and sessions end, chunks get checksums
// at the rate that is allowed, and it returns when it is told to.
func TestRunOwnsTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const chunks = 8
		b := &sumBench{bench: newBench(t, t.TempDir(), chunks, store.Options{ChecksumRate: chunkBytes, SumAfter: time.Second, SessionIdle: time.Minute})}
		defer func() { b.stop() }()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.store.Run(ctx)
		}()
		h := prompt(1, 4)
		b.put(t, h)
		if got := b.store.Lookup([]byte("r"), one, store.Hashed(h), 1); got.Hit != 4 {
			t.Fatal(got)
		}
		late := prompt(2, 1)
		if _, err := b.store.BeginStore(transfer(8, late, 0, 1, false), []byte("never committed"), late, &store.Transfer{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if got := b.store.Stats(); got.SummedChunks != 4 || got.Sessions != 1 || got.Transfers != 1 {
			t.Errorf("after 10 s: %+v", got)
		}
		time.Sleep(2 * time.Minute)
		if got := b.store.Stats(); got.Sessions != 0 || got.Transfers != 0 || got.EvictableObjs != 4 || got.HoldsExpired != 1 {
			t.Errorf("after two minutes: %+v", got)
		}
		cancel()
		<-ended
	})
}

// Checksums keep to their rate: what was read at once is waited for, and no longer.
func TestChecksumsKeepToTheirRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &sumBench{bench: newBench(t, t.TempDir(), 8, store.Options{ChecksumRate: chunkBytes, SumAfter: time.Second})}
		defer func() { b.stop() }()
		defer b.run()()
		summed := func(after time.Duration, want uint64) {
			t.Helper()
			time.Sleep(after)
			if got := b.store.Stats(); got.SummedChunks != want {
				t.Errorf("%d chunks have a checksum, want %d", got.SummedChunks, want)
			}
		}
		b.put(t, prompt(1, 4))
		summed(2500*time.Millisecond, 4) // and four seconds of rest from then
		b.put(t, prompt(2, 2))
		summed(2*time.Second, 4)
		summed(6*time.Second, 6)
	})
}
