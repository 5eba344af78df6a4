// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// bench is one Scheduler with blocks of 4 tokens and chunks of 8, and one request.
type bench struct {
	t  *testing.T
	tr *connector.Scheduler
	c  *fakeCache
	r  *connector.Request
}

func (b *bench) match(computed int) string {
	m, err := b.tr.Match(b.r, computed)
	if err != nil {
		return "error " + err.Error()
	}
	return fmt.Sprintf("%+v", m)
}

func (b *bench) alloc(external int, ids ...int) {
	b.t.Helper()
	if err := b.tr.Allocated(b.r, [][]int{ids}, external); err != nil {
		b.t.Error(err)
	}
}

func (b *bench) step(s connector.Step) string {
	b.t.Helper()
	ops, err := b.tr.Step(&s)
	if err != nil {
		return "error " + err.Error()
	}
	out := ""
	for _, op := range ops {
		out += fmt.Sprintf("%v %d-%d %v %s;", op.Direction, op.Start, op.End, op.Blocks[0], op.Salt)
	}
	return out
}

// first schedules the request for the first time, again a later time.
func (b *bench) first(computed, n int) string {
	return b.step(connector.Step{New: []connector.NewRequest{{ID: "r", Computed: computed}}, Scheduled: map[string]int{"r": n}})
}

func (b *bench) again(computed, n int) string {
	return b.step(connector.Step{Cached: []connector.CachedRequest{{ID: "r", Computed: computed}}, Scheduled: map[string]int{"r": n}})
}

func (b *bench) calls() string {
	out := fmt.Sprint(b.c.calls)
	b.c.calls = nil
	return out
}

// departs plays a script as both releases and as the zero Release.
func departs(t *testing.T, what string, play func(*bench) string, v018, v033, ours string) {
	t.Helper()
	for release, want := range map[connector.Release]string{connector.VLLM018: v018, connector.VLLM033: v033, 0: ours} {
		c := &fakeCache{results: map[string]int{}}
		tr, err := connector.NewScheduler(c, connector.SchedulerOptions{Release: release, BlockTokens: 4, ChunkTokens: 8})
		if err != nil {
			t.Fatal(err)
		}
		b := &bench{t, tr, c, &connector.Request{ID: "r", Tokens: make([]uint32, 18), Hashes: 4, Salt: "salt"}}
		if got := play(b); got != want {
			t.Errorf("%s, %v:\ngot  %s\nwant %s", what, release, got, want)
		}
	}
}

// Each departure that changes what is stored or loaded: what the releases do, and what
// is right.
func TestDeparturesOfOperations(t *testing.T) {
	f := func(what string, play func(*bench) string, v018, v033, ours string) {
		t.Helper()
		departs(t, what, play, v018, v033, ours)
	}
	f("a hit asked for twice", func(b *bench) string {
		b.c.results["r"] = 8
		b.match(0)
		b.match(0)
		i, _ := b.tr.Info("r")
		return fmt.Sprint(i.StoredBlocks)
	}, "4", "4", "2")

	f("sums of sums: 6 tokens, then one by one", func(b *bench) string {
		b.c.results["r"] = 0
		b.match(0)
		b.alloc(0, 1, 2, 3, 4, 5)
		return b.first(0, 6) + "|" + b.again(6, 1) + "|" + b.again(7, 1)
	}, "|STORE 0-8 [1 2] ;|STORE 8-16 [3 4] ;", "||STORE 0-8 [1 2] salt;", "||STORE 0-8 [1 2] salt;")

	f("a hit that is not loaded is not computed", func(b *bench) string {
		b.c.results["r"] = 8
		b.match(0)
		b.alloc(0, 1, 2, 3, 4, 5)
		return b.first(0, 8) + "|" + b.again(8, 8)
	}, "RETRIEVE 0-8 [1 2] ;|STORE 8-16 [3 4] ;", "STORE 8-16 [3 4] salt;|", "|STORE 8-16 [3 4] salt;")

	f("the engine's own hit without one in the cache", func(b *bench) string {
		b.c.results["r"] = 0
		b.match(8)
		b.alloc(0, 1, 2, 3, 4, 5)
		return b.first(8, 8)
	}, "STORE 0-8 [1 2] ;", "STORE 0-8 [1 2] salt;", "STORE 0-16 [1 2 3 4] salt;")

	f("a preempted request", func(b *bench) string {
		b.c.results["r"] = 16
		b.match(0)
		b.alloc(16, 1, 2, 3, 4, 5)
		b.first(16, 2)
		b.r.Preempted = true
		m := b.match(0)
		b.alloc(16, 11, 12, 13, 14, 15)
		return m + b.step(connector.Step{})
	}, "{Tokens:0 Pending:false Async:false}", "{Tokens:0 Pending:false Async:false}", "{Tokens:16 Pending:false Async:true}RETRIEVE 0-16 [11 12 13 14] salt;")

	f("a failed load", func(b *bench) string {
		b.c.results["r"] = 16
		b.match(0)
		b.alloc(16, 1, 2, 3, 4)
		b.step(connector.Step{})
		b.tr.LoadFailed("r")
		m := b.match(0)
		b.alloc(0, 11, 12, 13, 14, 15)
		return m + b.first(0, 18)
	}, "{Tokens:16 Pending:false Async:true}", "{Tokens:16 Pending:false Async:true}", "{Tokens:0 Pending:false Async:false}STORE 0-16 [11 12 13 14] salt;")

	f("a failed load that nobody tells", func(b *bench) string {
		b.c.results["r"] = 16
		b.match(0)
		b.alloc(16, 1, 2, 3, 4)
		b.step(connector.Step{})
		return b.match(0)
	}, "{Tokens:16 Pending:false Async:true}", "{Tokens:16 Pending:false Async:true}", "{Tokens:0 Pending:false Async:false}")
}

// A request whose load failed counts once, whether a worker reports it or the engine asks again, and also where it has run since.
func TestFailedLoadsCountOnce(t *testing.T) {
	f := func(what string, want uint64, play func(*bench)) {
		t.Helper()
		c := &fakeCache{results: map[string]int{"r": 16}}
		tr, err := connector.NewScheduler(c, connector.SchedulerOptions{BlockTokens: 4, ChunkTokens: 8})
		if err != nil {
			t.Fatal(err)
		}
		b := &bench{t, tr, c, &connector.Request{ID: "r", Tokens: make([]uint32, 18), Hashes: 4}}
		b.match(0)
		b.alloc(16, 1, 2, 3, 4)
		b.step(connector.Step{})
		play(b)
		if got := tr.Stats().FailedLoads; got != want {
			t.Errorf("%s: %d, want %d", what, got, want)
		}
	}
	f("none failed", 0, func(b *bench) { b.first(16, 2) })
	f("reported", 1, func(b *bench) { b.tr.LoadFailed("r") })
	f("reported, and asked again", 1, func(b *bench) { b.tr.LoadFailed("r"); b.match(0); b.match(0) })
	f("asked again", 1, func(b *bench) { b.match(0) })
	f("asked again three times", 1, func(b *bench) { b.match(0); b.match(0); b.match(0) })
	f("it has run since", 1, func(b *bench) { b.first(16, 2); b.tr.LoadFailed("r") })
	f("unknown", 0, func(b *bench) { b.tr.LoadFailed("other") })
}

// Each departure that changes the calls of the cache, and hits that do not fit.
func TestDeparturesOfCalls(t *testing.T) {
	f := func(what string, play func(*bench) string, v018, v033, ours string) {
		t.Helper()
		departs(t, what, play, v018, v033, ours)
	}
	f("no external tokens", func(b *bench) string {
		b.c.results["r"] = 16
		b.match(0)
		b.calls()
		b.alloc(0, 1, 2, 3, 4, 5)
		return b.calls() + b.step(connector.Step{})
	}, "[[cleanup r]]RETRIEVE 0-16 [1 2 3 4] ;", "[[cleanup r] [free_locks r 18 0 16]]", "[[cleanup r] [free_locks r 18 0 16 salt]]")
	f("salt of lookups", func(b *bench) string {
		b.match(0)
		return b.calls()
	}, "[[lookup r 18]]", "[[lookup r 18 salt]]", "[[lookup r 18 salt]]")

	f("an abort before the allocation", func(b *bench) string {
		b.c.results["r"] = 16
		b.match(0)
		b.calls()
		_, _ = b.tr.Finish(b.r)
		return b.calls()
	}, "[[end_session r]]", "[[end_session r]]", "[[cleanup r] [free_locks r 18 0 16 salt] [end_session r]]")

	f("an abort before the load", func(b *bench) string {
		b.c.results["r"] = 16
		b.match(12)
		b.alloc(4, 1, 2, 3, 4, 5)
		b.calls()
		_, _ = b.tr.Finish(b.r)
		return b.calls()
	}, "[[end_session r]]", "[[end_session r]]", "[[free_locks r 18 8 16 salt] [end_session r]]")

	f("blocks that changed", func(b *bench) string {
		b.c.results["r"] = 0
		b.match(0)
		b.alloc(0, 1, 2, 3, 4, 5)
		b.alloc(0, 11, 12, 13, 14, 15)
		return b.first(0, 18)
	}, "STORE 0-16 [1 2 3 4] ;", "STORE 0-16 [1 2 3 4] salt;", "STORE 0-16 [11 12 13 14] salt;")

	f("a hit of the whole prompt", func(b *bench) string {
		b.r.Tokens = b.r.Tokens[:16]
		b.c.results["r"] = 16
		return b.match(0)
	}, "{Tokens:16 Pending:false Async:true}", "{Tokens:16 Pending:false Async:true}", "{Tokens:15 Pending:false Async:true}")

	f("a hit that is no whole number of chunks", func(b *bench) string {
		b.c.results["r"] = 13
		return b.match(0)
	}, "error AssertionError", "error AssertionError", "{Tokens:8 Pending:false Async:true}")

	f("a hit beyond the prompt", func(b *bench) string {
		b.c.results["r"] = 800
		b.match(0)
		b.alloc(16, 1, 2, 3, 4, 5)
		return b.step(connector.Step{})
	}, "error "+connector.ErrHashes.Text, "error "+connector.ErrHashes.Text, "RETRIEVE 0-16 [1 2 3 4] salt;")
}

// The refusals, with the original's texts where it has one.
func TestRefusals(t *testing.T) {
	c := &fakeCache{results: map[string]int{"r": 16}}
	for _, o := range []connector.SchedulerOptions{{}, {BlockTokens: 16, ChunkTokens: 24}, {BlockTokens: -1, ChunkTokens: 8}, {BlockTokens: 1, ChunkTokens: 1 << 40}} {
		if _, err := connector.NewScheduler(c, o); err == nil {
			t.Errorf("New(%+v) succeeded", o)
		}
	}
	tr, err := connector.NewScheduler(c, connector.SchedulerOptions{BlockTokens: 4, ChunkTokens: 8})
	if err != nil {
		t.Fatal(err)
	}
	f := func(err, want error, text string) {
		t.Helper()
		if !errors.Is(err, want) || text != "" && err.Error() != text {
			t.Errorf("%v, want %q", err, text)
		}
	}
	r := &connector.Request{ID: "r", Tokens: make([]uint32, 18), Hashes: 4}
	f(tr.Allocated(r, nil, 0), connector.ErrUnknown, "Request tracker for request_id r not found. ")
	_, err = tr.Step(&connector.Step{New: []connector.NewRequest{{ID: "x"}}})
	f(err, connector.ErrUnknown, "Request tracker for request_id x not found. ")
	_, err = tr.Step(&connector.Step{Cached: []connector.CachedRequest{{ID: "y"}}})
	f(err, connector.ErrUnknown, "Request tracker for request_id y not found. ")
	if _, err := tr.Match(r, 0); err != nil {
		t.Fatal(err)
	}
	f(tr.Allocated(r, [][]int{{1}, {2}}, 16), connector.ErrGroups, "LMCacheMPConnector only works without hybrid kv cache manager. Please pass --disable-hybrid-kv-cache-manager when starting vllm")
	f(tr.Allocated(r, [][]int{{1, 2}}, 16), connector.ErrBlocks, "")
	f(tr.Allocated(r, [][]int{{1, 2, 3, 4, 5}}, 16), nil, "")
	_, err = tr.Step(&connector.Step{Cached: []connector.CachedRequest{{ID: "r", NewBlocks: [][]int{{1}, {2}}}}})
	f(err, connector.ErrGroups, "")
	r.CountExtraCached = true
	if got, err := tr.Finish(r); err != nil || !got.KeepBlocks || got.ExtraCachedTokens != 16 {
		t.Errorf("Finish = %+v, %v", got, err)
	}
	_, err = tr.Finish(r)
	f(err, connector.ErrUnknown, "")
	r.CountExtraCached = false
	_, err = tr.Finish(r)
	f(err, nil, "")
}
