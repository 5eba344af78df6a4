// SPDX-License-Identifier: Apache-2.0

package store

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// A panic while the books change ends the process, also under a caller that
// recovers; the lock is not given to anybody else before.
func TestPanicUnderTheLockIsFatal(t *testing.T) {
	p, err := pool.Open(pool.Options{Dir: t.TempDir(), Name: "p", Bytes: 1 << 20, ChunkTokens: 4})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, Options{})
	defer func(f func(string)) { exit = f }(exit)
	ended := ""
	exit = func(why string) {
		ended = why
		if s.mu.TryLock() {
			t.Error("the lock was free before the process ended")
		}
	}
	func() {
		defer func() { _ = recover() }()
		s.lock()
		defer s.unlock()
		panic("books half written")
	}()
	if !strings.Contains(ended, "books half written") {
		t.Fatalf("ended with %q", ended)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// The kernel provides memory only while the store's lock is free: of the segment ahead of its
// use, and of the index, also for many small chunks. A lookup never waits for that.
func TestMemoryIsProvidedWithoutTheLock(t *testing.T) {
	locked, provided := false, 0
	watch = func(begin bool) { locked = begin }
	defer func() { watch = nil }()
	const chunks = 3000
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: chunks * 64, Align: 64, Dir: t.TempDir(), Providing: func() {
		provided++
		if locked {
			t.Error("the kernel is asked for memory under the lock")
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, Options{WorkerShare: 1, PeerShare: 1, PopulateRate: 1 << 30})
	defer s.Close()
	for from := 0; from < chunks; from += 1000 {
		hashes := scaleHashes(from + 1000)[from:]
		transfer := hold.Transfer{Instance: 1, Shard: object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: object.FullAttention(1, 64)}, To: 1000, Last: hashes[999]}
		if got, err := s.BeginStore(transfer, []byte("r"), hashes, &Transfer{}); err != nil || got.NoRoom > 0 {
			t.Fatal(got, err)
		}
		if got := s.CommitStore(transfer, []byte("r"), hashes, true); got.Chunks != 1000 {
			t.Fatal(got)
		}
	}
	if provided < 3 { // the segment, the index for its bytes, and the index for more chunks
		t.Errorf("memory was provided %d times", provided)
	}
}
