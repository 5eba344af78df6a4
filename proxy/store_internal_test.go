// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/proxy/blocks"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

// The proxy's notes about a cache server count while the server runs, was not cleared, and has not evicted as many chunks as it
// holds. Its id changes after half as many, and the former id counts for the other half. Two servers have different ids.
func TestStoreIDs(t *testing.T) {
	var lives atomic.Uint32
	type word struct {
		pid, resident   int
		evicted, clears uint64
		tiers           int
		sick            bool
	}
	s, other := store{instanceIDs: &lives}, store{instanceIDs: &lives}
	say := func(s *store, w word) [2]uint32 {
		st := &storeStatus{Healthy: !w.sick, PID: w.pid, Started: "then", Clears: w.clears}
		st.Pool.Resident, st.Pool.Evicted, st.Below.Tiers = w.resident, w.evicted, make([]struct{}, w.tiers)
		s.update(st)
		return s.ids()
	}
	if s.ids() != [2]uint32{} {
		t.Error("a server that nobody has heard of has something")
	}
	first := say(&s, word{pid: 1, resident: 0})
	if got := say(&other, word{pid: 1}); got[0] == first[0] || got[0] == 0 {
		t.Errorf("two servers: %v, %v", first, got)
	}
	f := func(what string, w word, stays, before bool) {
		t.Helper()
		old := s.ids()
		got := say(&s, w)
		if got[0] == 0 || (got[0] == old[0]) != stays || !stays && (got[1] == old[0]) != before || stays && got[1] != old[1] {
			t.Errorf("%s: %v, then %v", what, old, got)
		}
	}
	f("it fills", word{pid: 1, resident: 100}, true, false)
	f("some go", word{pid: 1, resident: 100, evicted: 50}, true, false)
	f("more than half", word{pid: 1, resident: 100, evicted: 51}, false, true)
	f("more than half again", word{pid: 1, resident: 100, evicted: 110}, false, true)
	f("all between two looks", word{pid: 1, resident: 100, evicted: 1000}, false, false)
	f("with a tier below", word{pid: 1, resident: 100, evicted: 5000, tiers: 1}, true, false)
	f("cleared", word{pid: 1, resident: 0, evicted: 1000, clears: 1}, false, false)
	f("another process", word{pid: 2}, false, false)
	if got := say(&s, word{pid: 2, sick: true}); got != [2]uint32{} {
		t.Errorf("sick: %v", got)
	}
	s.update(nil)
	if got := s.ids(); got != [2]uint32{} {
		t.Errorf("silent: %v", got)
	}
	if got := say(&s, word{pid: 2}); got[0] == 0 {
		t.Errorf("well again: %v", got)
	}
}

// The server's events reduce the guess only where the proxy got all of its events, the server has no tier below its memory, and the
// events reach as far as the guess. A silent server changes no guess.
func TestServerReportsCorrectTheGuess(t *testing.T) {
	for _, c := range []struct {
		stored      stored
		guess, want int
	}{
		{stored{}, 700, 700},
		{stored{bytes: 900, reach: 1000}, 700, 900},
		{stored{bytes: 500, reach: 1000}, 700, 700},
		{stored{bytes: 500, reach: 1000, all: true}, 700, 500},
		{stored{bytes: 500, reach: 600, all: true}, 700, 700},
		{stored{reach: 1000, all: true}, 700, 0},
	} {
		if got := c.stored.correct(c.guess); got != c.want {
			t.Errorf("%+v instead of %d: %d, want %d", c.stored, c.guess, got, c.want)
		}
	}
	events := &blocks.Follower{Held: blocks.NewCacheHeld(100)} // it follows no publisher
	s := &store{events: events, known: blocks.NewPrompts(100)}
	const text = "a prompt of which each byte is one token"
	tokens := make([]int64, 0, len(text))
	for _, c := range []byte(text) {
		tokens = append(tokens, int64(c))
	}
	marks := []prefix.Mark{{Hash: 1, End: len(text)}}
	s.known.Learn(marks, blocks.Scope("m", ""), 8, tokens)
	events.Apply(&event.Batch{Events: []event.Event{
		{Kind: event.Cleared},
		{Kind: event.Stored, Hashes: [][]byte{{1}, {2}, {3}, {4}, {5}}, Tokens: tokens, BlockTokens: 8, Medium: event.CPU},
	}}, "m")
	for _, c := range []struct {
		well, below bool
		want        stored
	}{
		{false, false, stored{}},
		{true, false, stored{len(text), len(text), true}},
		{true, true, stored{len(text), len(text), false}},
	} {
		s.well.Store(c.well)
		s.below.Store(c.below)
		if got := s.has(marks); got != c.want {
			t.Errorf("well %v, below %v: %+v, want %+v", c.well, c.below, got, c.want)
		}
	}
	// The server comes back with longer chunks: its events do not count for prompts that the proxy knows in the former chunk size.
	events.Apply(&event.Batch{Events: []event.Event{
		{Kind: event.Cleared},
		{Kind: event.Stored, Hashes: [][]byte{{6}}, Tokens: tokens[:16], BlockTokens: 16, Medium: event.CPU},
	}}, "m")
	s.below.Store(false)
	if got := s.has(marks); got.reach != 0 || got.correct(700) != 700 {
		t.Errorf("chunks of another size: %+v", got)
	}
}
