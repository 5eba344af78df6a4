// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// The keeper unlinks only as many bytes as the file system lacks, also if roots share it and many goroutines unlink.
func TestNoMoreGoesThanIsMissing(t *testing.T) {
	const files, missing = 200, 100
	x, y := newTier(t, 1000), newTier(t, 1000)
	for i := range files {
		x.store(i)
		y.store(i)
	}
	left := func() int64 {
		m, _ := x.there()
		n, _ := y.there()
		return int64(m + n)
	}
	var looks atomic.Int64
	free := func(*rootDir) (int64, error) {
		defer looks.Add(1)
		return 1_000_000 - missing*1000 + (2*files-left())*1000, nil
	}
	k := open(t, Options{Roots: []string{x.root, y.root}, MinFree: 1_000_000, Watch: WatchLook, free: free})
	defer closed(t, k)
	testkit.Eventually(t, "there is room", func() bool { return left() <= 2*files-missing })
	from := looks.Load()
	testkit.Eventually(t, "it has looked again", func() bool { return looks.Load() >= from+4 })
	if n := left(); n != 2*files-missing {
		t.Errorf("%d files went, %d were missing", 2*files-n, missing)
	}
}

// If a file system shows unlinked bytes as free only later, the keeper waits for that, for a limited time.
func TestRoomThatShowsLater(t *testing.T) {
	const files, missing = 200, 40
	x := newTier(t, 1000)
	for i := range files {
		x.store(i)
	}
	var looks atomic.Int64
	free := func(*rootDir) (int64, error) {
		looks.Add(1)
		return 1_000_000 - missing*1000, nil
	}
	clock := &clock{at: time.Now()}
	k := open(t, Options{Roots: []string{x.root}, MinFree: 1_000_000, Watch: WatchLook, free: free, now: clock.now})
	defer closed(t, k)
	for round := 1; round <= 2; round++ {
		testkit.Eventually(t, "what was missing is gone", func() bool { n, _ := x.there(); return n <= files-round*missing })
		from := looks.Load()
		testkit.Eventually(t, "it has looked again", func() bool { return looks.Load() >= from+4 })
		if n, _ := x.there(); n != files-round*missing {
			t.Errorf("%d files went, %d were missing", files-n, missing)
		}
		clock.mu.Lock()
		clock.at = clock.at.Add(2 * freeLag)
		clock.mu.Unlock()
	}
}

// The free room holds while engines write more than once within freeLag: the keeper does not take their writes for unlinked bytes that show
// later.
func TestRoomUnderWriters(t *testing.T) {
	const files, burst, bursts = 200, 10, 16
	x := newTier(t, 1000)
	for i := range files {
		x.store(i)
	}
	var next, worst atomic.Int64
	next.Store(files)
	var last time.Time
	free := func(*rootDir) (int64, error) { // of a file system that shows unlinked bytes at once; one goroutine at a time asks
		if at := next.Load(); at < files+burst*bursts && time.Since(last) >= 50*time.Millisecond {
			last = time.Now()
			for i := range int64(burst) {
				x.store(int(at + i))
			}
			next.Add(burst)
		}
		n, _ := x.there()
		worst.Store(max(worst.Load(), int64(n-files)))
		return 1_000_000 + int64(files-n)*1000, nil
	}
	k := open(t, Options{Roots: []string{x.root}, MinFree: 1_000_000, Watch: WatchInotify, free: free})
	defer closed(t, k)
	testkit.Eventually(t, "all was written", func() bool { return next.Load() >= files+burst*bursts })
	testkit.Eventually(t, "there is room", func() bool { n, _ := x.there(); return n <= files })
	if got := worst.Load(); got > 7*burst {
		t.Errorf("%d files too many lay there at one time; %d came at a time", got, burst)
	}
}
