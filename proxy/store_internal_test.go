package proxy

import (
	"sync/atomic"
	"testing"
)

// What was noted of a cache server counts while it lives, was not cleared and has not evicted as many
// chunks as it holds; two servers' words do not mix.
func TestStoreIDs(t *testing.T) {
	var lives atomic.Uint32
	type word struct {
		pid, resident   int
		evicted, clears uint64
		tiers           int
		sick            bool
	}
	s, other := store{lives: &lives}, store{lives: &lives}
	say := func(s *store, w word) [2]uint32 {
		st := &storeStatus{Healthy: !w.sick, PID: w.pid, Started: "then", Clears: w.clears}
		st.Pool.Resident, st.Pool.Evicted, st.Below.Tiers = w.resident, w.evicted, make([]struct{}, w.tiers)
		s.heard(st)
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
	s.heard(nil)
	if got := s.ids(); got != [2]uint32{} {
		t.Errorf("silent: %v", got)
	}
	if got := say(&s, word{pid: 2}); got[0] == 0 {
		t.Errorf("well again: %v", got)
	}
}
