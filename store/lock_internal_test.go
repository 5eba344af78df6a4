// SPDX-License-Identifier: Apache-2.0

package store

import (
	"strings"
	"testing"

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
