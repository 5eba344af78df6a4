// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/binary"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// Benchmarks of what holds the store's lock longest. They report the longest hold in
// microseconds of this thread's work, without the time in which the machine ran
// something else.

// longestHold measures f.
func longestHold(f func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	work := func() time.Duration {
		var ts unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
		return time.Duration(ts.Nano())
	}
	var since, worst time.Duration
	watch = func(begin bool) {
		if begin {
			since = work()
		} else {
			worst = max(worst, work()-since)
		}
	}
	defer func() { watch = nil }()
	f()
	return worst
}

func scaleStore(b *testing.B, chunks int) *Store {
	b.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvasir-scale")
	if err != nil {
		b.Fatal(err)
	}
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: int64(chunks) * 64, Align: 64, Dir: dir})
	if err != nil {
		b.Fatal(err)
	}
	s := New(p, Options{WorkerShare: 1, PeerShare: 1})
	b.Cleanup(func() {
		if err := s.Close(); err != nil {
			b.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	return s
}

func scaleHashes(n int) []kv.Hash {
	out := make([]kv.Hash, n)
	for i := range out {
		binary.LittleEndian.PutUint64(out[i][:], uint64(i)*0x9e3779b97f4a7c15+1)
		binary.LittleEndian.PutUint64(out[i][8:], uint64(i)*0xd6e8feb86659fd93)
	}
	return out
}

// fill stores all chunks of one shard of world.
func (s *Store) fill(b *testing.B, hashes []kv.Hash, world, shard int) {
	b.Helper()
	for from := 0; from < len(hashes); from += maxTransfer {
		some := hashes[from:min(from+maxTransfer, len(hashes))]
		t := hold.Transfer{Instance: 1, Shard: object.Shard{Namespace: kv.Namespace{1}, World: world, Index: shard, Groups: object.FullAttention(1, 64)}, To: len(some), Last: some[len(some)-1]}
		var p Transfer
		if got, err := s.BeginStore(t, []byte("r"), some, &p); err != nil || got.NoRoom > 0 {
			b.Fatal(got, err)
		}
		if got := s.CommitStore(t, []byte("r"), some, true); got.Chunks != len(some) {
			b.Fatal(got)
		}
	}
}

func report(b *testing.B, name string, d time.Duration) {
	b.ReportMetric(float64(d.Nanoseconds())/1000, name+"-us")
}

// A 128k-token prompt over 64 shards: 32,768 objects.
func BenchmarkHoldLookup64Shards(b *testing.B) {
	const world, chunks = 64, 512
	s := scaleStore(b, world*chunks)
	hashes := scaleHashes(chunks)
	for shard := range world {
		s.fill(b, hashes, world, shard)
	}
	sh := object.Shard{Namespace: kv.Namespace{1}, World: world, Groups: object.FullAttention(1, 64)}
	var lookup, end time.Duration
	for b.Loop() {
		lookup = max(lookup, longestHold(func() {
			if got := s.Lookup([]byte("r"), sh, Hashed(hashes), 1); got.Hit != chunks {
				b.Fatal(got)
			}
		}))
		end = max(end, longestHold(func() { s.EndSession([]byte("r"), lease.Owner{}) }))
	}
	report(b, "lookup-hold", lookup)
	report(b, "end-hold", end)
}

// A million chunks: stored, which grows every table, and cleared.
func BenchmarkHoldMillionChunks(b *testing.B) {
	const chunks = 1 << 20
	hashes := scaleHashes(chunks)
	var grow, drop time.Duration
	for b.Loop() {
		s := scaleStore(b, chunks)
		grow = max(grow, longestHold(func() { s.fill(b, hashes, 1, 0) }))
		drop = max(drop, longestHold(func() {
			if n := s.Clear(false); n != chunks {
				b.Fatal(n)
			}
		}))
	}
	report(b, "grow-hold", grow)
	report(b, "clear-hold", drop)
}

// A worker that leaves with many chunks staged, its quarantine, and a forced clear keep
// others from the lock for a moment only.
func BenchmarkHoldDetached(b *testing.B) {
	const chunks = 1 << 18
	hashes := scaleHashes(chunks)
	var detach, end, drop time.Duration
	stage := func(s *Store) {
		for from := 0; from < chunks*7/8; from += maxTransfer {
			some := hashes[from:min(from+maxTransfer, chunks*7/8)]
			t := hold.Transfer{Instance: 1, Shard: object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: object.FullAttention(1, 64)}, To: len(some), Last: some[len(some)-1]}
			var p Transfer
			if got, err := s.BeginStore(t, []byte("r"), some, &p); err != nil || got.NoRoom > 0 {
				b.Fatal(got, err)
			}
		}
	}
	for b.Loop() {
		s := scaleStore(b, chunks)
		stage(s)
		drop = max(drop, longestHold(func() {
			if n := s.Clear(true); n != chunks*7/8 {
				b.Fatal(n)
			}
		}))
		s.Detach(1)
		s.EndQuarantine(1)
		stage(s)
		detach = max(detach, longestHold(func() { s.Detach(1) }))
		end = max(end, longestHold(func() { s.EndQuarantine(1) }))
		if got := s.Stats(); got.FreeBytes != got.Bytes {
			b.Fatal(got)
		}
	}
	report(b, "clear-hold", drop)
	report(b, "detach-hold", detach)
	report(b, "quarantine-hold", end)
}
