// SPDX-License-Identifier: Apache-2.0

package load

import (
	"testing"
	"testing/synctest"
)

// Waiting turns are bounded in their number and in their names of blocks. One turn alone may have any number of names.
func TestWaitingTurnsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := waiting{most: 3, mostBlocks: 10}
		added := 0
		f := func(blocks, want int, room func()) {
			t.Helper()
			go func() {
				w.add(blocks)
				added++
			}()
			if synctest.Wait(); added != want {
				t.Errorf("%d were added, want %d", added, want)
			}
			room()
			if synctest.Wait(); added != want && room != nil && added != want+1 {
				t.Errorf("%d were added", added)
			}
		}
		nothing := func() {}
		f(50, 1, nothing)
		f(1, 1, func() { w.remove(50) })
		f(5, 3, nothing)
		f(5, 3, func() { w.remove(1) })
		f(0, 5, nothing)
		f(0, 5, w.end)
		if added != 6 {
			t.Errorf("%d were added after the end", added)
		}
	})
}

// A turn gets the channel of the turn before it in its conversation. Turns that have ended share one channel.
func TestTurnsOfConversations(t *testing.T) {
	var all turns
	var first []chan struct{}
	for i := range 5000 {
		before, after := all.next(i)
		if before != nil {
			t.Fatalf("conversation %d begins behind a turn", i)
		}
		if first = append(first, after); i%2 == 0 {
			close(after)
		}
	}
	shared := 0
	for i := range 5000 {
		before, _ := all.next(i)
		switch {
		case i%2 == 1 && before != first[i]:
			t.Fatalf("conversation %d does not wait for its turn", i)
		case before == closedChannel:
			shared++
		case before != first[i]:
			t.Fatalf("conversation %d has another turn", i)
		}
		select {
		case <-before:
		default:
			if i%2 == 0 {
				t.Fatalf("conversation %d waits", i)
			}
		}
	}
	if shared < 2000 {
		t.Errorf("%d turns share a channel", shared)
	}
}
